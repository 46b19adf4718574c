"""The parts of a kernel that move between releases: the running task, its members, the readers.

Where no register has the running task: up to 6.1 ``current_task`` and ``__preempt_count`` are
per-CPU symbols, in 6.12 members of ``pcpu_hot``, in 7.2 symbols again.
"""

from collections.abc import Callable, Iterator
from functools import cached_property, partial

from kprobes.arch.registry import machine
from kprobes.errors import MemoryFault, TargetError, UnknownTypeError
from kprobes.guest.guest import Guest, GuestMemory
from kprobes.image.system_calls import system_call_names
from kprobes.model.abi import WALK_STACK, WALK_USER_STACK, Readers, TaskAbi
from kprobes.model.kernel import Kernel, Types, place_of
from kprobes.sinks.names import TraceSource
from kprobes.units import U64, Addr

_MAX_CPUS = 1024
_KASAN = ("__asan_load8_noabort", "__hwasan_load8_noabort")
"""Of its generic mode, and by software tags; that by hardware's has stacks as usual."""
_READERS = {
    "copy_kernel": ("copy_from_kernel_nofault", "probe_kernel_read"),
    "copy_user": ("copy_from_user_nofault", "probe_user_read"),
    "string_kernel": ("strncpy_from_kernel_nofault", "strncpy_from_unsafe"),
    "string_user": ("strncpy_from_user_nofault", "strncpy_from_unsafe_user"),
}


def task_abi(kernel: Kernel) -> TaskAbi:
    """Find the running task's facts in a kernel.

    Raises:
        TargetError: a symbol or type that every kernel has is missing.
    """
    info, offset = machine(kernel.arch).task, partial(kernel.offset, "task_struct")
    if info.register is None:
        current = _per_cpu(kernel, "current_task")
        preempt_count = _per_cpu(kernel, "__preempt_count", "preempt_count")
    else:
        current, preempt_count = 0, offset(info.preempt_count)
    return TaskAbi(
        current=current,
        preempt_count=preempt_count,
        pid=offset("pid"),
        tgid=offset("tgid"),
        exec_id=offset("self_exec_id"),
        comm=offset("comm"),
        flags=offset("thread_info.flags"),
        migration_disabled=_migration_disabled(kernel.types),
        resched_mask=info.resched_mask(kernel.version),
    )


def readers(kernel: Kernel) -> Readers:
    """Find the guest's fault-safe readers, or raise TargetError."""
    walkers = {"walk_stack": WALK_STACK, "walk_user_stack": WALK_USER_STACK}
    found = {role: kernel.symbols.find(name) for role, name in walkers.items()}
    return Readers(
        **{role: first_of(kernel, *names) for role, names in _READERS.items()},
        **{role: each.addr for role, each in found.items() if each is not None},
    )


def first_of(kernel: Kernel, *names: str) -> Addr:
    """Return the address of the first symbol that the kernel has.

    Raises:
        TargetError: it has none of them.
    """
    for name in names:
        symbol = kernel.symbols.find(name)
        if symbol is not None:
            return symbol.addr
    raise TargetError(f"kernel {kernel.release} has no {' or '.join(names)}")


def thread_size(memory: GuestMemory, kernel: Kernel, usual: int) -> int:
    """Return the bytes of a kernel stack.

    Source: MIN_THREAD_SHIFT in arch/arm64/include/asm/memory.h, THREAD_SIZE_ORDER in
    arch/x86/include/asm/page_64_types.h.

    Args:
        memory: of the guest.
        kernel: that runs there.
        usual: what it is on this architecture, unless KASAN checks each access.
    """
    is_checked = any(kernel.symbols.find(name) is not None for name in _KASAN)
    return max(usual << is_checked, machine(kernel.arch).inject_ops.page_size(memory))


def per_cpu_bases(memory: GuestMemory, kernel: Kernel) -> tuple[int, ...]:
    """Return where the per-CPU memory of each possible CPU begins.

    Raises:
        TargetError: the guest's count of CPUs makes no sense.
    """
    offsets = first_of(kernel, "__per_cpu_offset")
    count = int.from_bytes(memory.read(first_of(kernel, "nr_cpu_ids"), 4), "little")
    if not 0 < count <= _MAX_CPUS:
        raise TargetError(f"the guest says that it has {count} CPUs; its memory is corrupted")
    return tuple(memory.u64(offsets + 8 * cpu) for cpu in range(count))


def possible_cpus(memory: GuestMemory, kernel: Kernel) -> int | None:
    """Return how many CPUs a guest can have, or None where it does not tell."""
    try:
        return len(per_cpu_bases(memory, kernel))
    except (TargetError, MemoryFault):
        return None


def irq_stacks(memory: GuestMemory, kernel: Kernel) -> Iterator[int]:
    """Yield where each CPU's interrupt stack begins, from above; none where that is not known.

    On x86-64 it is eight bytes below: irq_init_percpu_vars() of arch/x86/kernel/irq_64.c.
    """
    try:
        place = _per_cpu(kernel, "hardirq_stack_ptr")
    except (TargetError, UnknownTypeError):
        return
    for base in per_cpu_bases(memory, kernel):
        top = memory.u64((base + place) & U64)
        if top:
            yield top + 8


def _per_cpu(kernel: Kernel, symbol: str, member: str | None = None) -> int:
    found = kernel.symbols.find(symbol)
    if found is not None:
        return found.addr
    hot = kernel.symbols.find("pcpu_hot")
    if hot is None:
        raise TargetError(f"kernel {kernel.release} has neither {symbol} nor pcpu_hot")
    return hot.addr + kernel.offset("pcpu_hot", member or symbol)


def _migration_disabled(types: Types | None) -> tuple[int, int] | None:
    # Since af449901b84c ("sched: Add migrate_disable()") (v5.11).
    if types is None:
        return None
    try:
        place = types.offset("task_struct", "migration_disabled")
        return place, types.member_size("task_struct", "migration_disabled")
    except UnknownTypeError:
        return None


class _SystemCalls:
    # Read when the first name is asked for.
    def __init__(self, guest: Guest) -> None:
        self._guest = guest

    def __call__(self, number: int) -> str:
        return self._names.get(number, "")

    @cached_property
    def _names(self) -> dict[int, str]:
        with self._guest.readable():
            return system_call_names(self._guest.memory, self._guest.kernel)


def trace_source(
    guest: Guest, cpus: int, program_at: Callable[[int, int], bytes | None], *, has_ns: bool
) -> TraceSource:
    """Return what sinks need to know of a guest's kernel.

    Args:
        guest: whose kernel.
        cpus: how many it may have.
        program_at: as of ``TraceSource``.
        has_ns: whether time stamps are nanoseconds.
    """
    kernel = guest.kernel
    return TraceSource(
        version=kernel.version,
        cpus=cpus,
        symbol_at=partial(place_of, kernel.symbols),
        program_at=program_at,
        system_call=_SystemCalls(guest),
        trampoline=kretprobe_trampoline(kernel),
        has_ns=has_ns,
        release=kernel.release,
        arch=kernel.arch,
    )


def kretprobe_trampoline(kernel: Kernel) -> Addr | None:
    """Return where functions return to that the guest's own return probes have taken over.

    None where its trace file shows that address by its symbol: before adf8a61a940c ("kprobes:
    treewide: Make it harder to refer kretprobe_trampoline directly") (v5.16).
    """
    names = ("arch_rethook_trampoline", "__kretprobe_trampoline")
    found = (kernel.symbols.find(name) for name in names)
    return next((symbol.addr for symbol in found if symbol is not None), None)
