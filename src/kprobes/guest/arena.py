"""The session's memory in the guest: code, counters, rings and a few per-CPU words.

Allocated once, by injected calls; arming afterwards is only memory writes.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from kprobes.arch.arch import PREAMBLE_SIZE
from kprobes.codegen.breakpoint import BLOCK_SIZE
from kprobes.errors import TargetError, UsageError
from kprobes.guest.allocations import Allocation, Kind
from kprobes.guest.guest import GuestMemory
from kprobes.guest.inject import CallInjector, Task, nothing_of
from kprobes.guest.kernel_abi import first_of, per_cpu_bases
from kprobes.guest.release import CodeMemory, allocate_code, allocate_module_code, free
from kprobes.model.abi import (
    CPU_SHIFT,
    LOAD_SIZE,
    MAX_STRING,
    PERCPU_GUARD,
    PERCPU_LIMIT,
    PERCPU_LOST,
    PERCPU_SIZE,
    PERCPU_WORD,
    SLACK,
    TEXT_SLOTS,
)
from kprobes.model.kernel import Kernel
from kprobes.model.override import MAX_OVERRIDES, OVERRIDE_SIZE
from kprobes.model.plan import LONGEST_PATCH
from kprobes.model.upcall import MailboxLayout
from kprobes.ports import Text
from kprobes.units import KIB, MIB, U64, Addr

_GFP_KERNEL = 0xCC0
MISSED_SIZE = 8 * (1 << 16)
"""Bytes of one kind of counters: one per event id."""
OVERRIDES_SIZE = OVERRIDE_SIZE * MAX_OVERRIDES
LOADS_SIZE = LOAD_SIZE * (1 << 16)
COUNTERS_SIZE = 2 * MISSED_SIZE + OVERRIDES_SIZE + LOADS_SIZE
"""Bytes of missed hits, of calls that no instance was free for, of what overrides count, and of
what hits take."""
NOTIFIER_SIZE = 256
"""Bytes for the code of the callback for breakpoints, and what its callers look at before it."""
LISTENERS, LISTENER_SIZE = 32, 16
"""Of functions that tracepoints call: how many, as a session's notes have no room for any number of
them; and bytes of one."""
HEAD_SIZE = NOTIFIER_SIZE + LISTENERS * LISTENER_SIZE
"""Bytes of code that are no probes': the callback's, and the functions that tracepoints call."""
NOTES_PAGE = 4096
UNDO_SIZE = 16 + 2 * LONGEST_PATCH
"""Of the session's notes: their beginning, and how one patch is undone; see ``guest.notes``."""
_LEAST_RING = 64 * KIB
_DEFAULT_RING = 16 * MIB


class ArenaSize(Struct, frozen=True, kw_only=True):
    """How much to allocate.

    Attributes:
        code: bytes for the code of all probes.
        instances: bytes for calls in progress.
        ring: bytes of each CPU's ring, a power of two; None for what fits the guest.
        patches: how many patches may be noted in the guest itself.
    """

    code: int = 1 * MIB
    ring: int | None = None
    instances: int = 0
    patches: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that no ring can have."""
        if self.ring is not None and (self.ring < _LEAST_RING or self.ring & (self.ring - 1)):
            raise UsageError(f"a ring of {self.ring} bytes: a power of two, 64 KiB at least")


class Arena(Struct, frozen=True, kw_only=True):
    """What was allocated, by kernel address.

    Attributes:
        notifier: where the code of the guest's callback for breakpoints is.
        code: executable memory for probes, within reach of the kernel's text.
        module_code: the same within reach of its modules; None where ``code`` is, or without any.
        data: the counters of missed hits, of calls that no instance was free for, of overrides and
            of what hits take, then the rings, room for filters' strings, the mailbox, and our place
            in the guest's chain of callbacks for exceptions.
        percpu: per-CPU offset of PERCPU_SIZE bytes.
        bases: where each CPU's per-CPU memory begins: ``percpu`` is added to it.
        ring_size: of each CPU's ring, slack not counted.
        instances, instances_size: where calls in progress are kept whose return is probed, in
            bytes.
        notes: where the session's notes are, after its data.
        patches: how many patches the notes have room for.
    """

    notifier: Addr
    code: CodeMemory
    data: Addr
    percpu: int
    bases: tuple[int, ...]
    ring_size: int
    instances: Addr
    notes: Addr
    instances_size: int = 0
    module_code: CodeMemory | None = None
    patches: int = 0

    @property
    def grown(self) -> tuple[Addr, ...]:
        """Where the memory begins that ``grow`` has taken."""
        far = () if self.module_code is None else (self.module_code.addr,)
        return self.code.addr, self.instances, *far

    @property
    def cpus(self) -> int:
        """How many CPUs have a ring."""
        return len(self.bases)

    @property
    def missed(self) -> Addr:
        """Where the missed counters are."""
        return self.data

    @property
    def nmissed(self) -> Addr:
        """Where the counters of calls are that no instance was free for."""
        return Addr(self.missed + MISSED_SIZE)

    @property
    def overrides(self) -> Addr:
        """Where overrides count, by their numbers."""
        return Addr(self.nmissed + MISSED_SIZE)

    @property
    def loads(self) -> Addr:
        """Where is counted what hits take."""
        return Addr(self.overrides + OVERRIDES_SIZE)

    @property
    def rings(self) -> Addr:
        """Where the first ring begins."""
        return Addr(self.loads + LOADS_SIZE)

    def ring(self, cpu: int) -> Addr:
        """Return where a CPU's ring begins."""
        return Addr(self.rings + cpu * (self.ring_size + SLACK))

    def words(self, cpu: int) -> int:
        """Return where a CPU's PERCPU_SIZE bytes are."""
        return (self.bases[cpu] + self.percpu) & U64

    @property
    def texts(self) -> Addr:
        """Where every CPU's room for the strings of filters is."""
        return self.ring(self.cpus)

    @property
    def mailbox(self) -> Addr:
        """Where vCPUs that wait for Python leave their words."""
        return Addr(self.texts + self.cpus * TEXT_SLOTS * MAX_STRING)

    @property
    def mailbox_layout(self) -> MailboxLayout:
        """What is where in it."""
        return MailboxLayout(cpus=self.cpus)

    def missed_upcall(self, number: int) -> Addr:
        """Return the counter of what was asked by a number and not answered."""
        return Addr(self.mailbox + self.mailbox_layout.missed + 8 * number)

    @property
    def block(self) -> Addr:
        """Where the guest's callback for breakpoints is described."""
        return Addr(self.mailbox + self.mailbox_layout.size)

    @property
    def lookup(self) -> Text:
        """The callback's code, which looks breakpoints up."""
        start = Addr(self.notifier - PREAMBLE_SIZE)
        return start, Addr(start + NOTIFIER_SIZE)

    @property
    def listeners(self) -> Addr:
        """Where the functions are that tracepoints call."""
        return self.lookup[1]

    @property
    def programs(self) -> tuple[Text, ...]:
        """Where the code of probes may be: first that near the kernel's text, with trampolines."""
        near = self.code.addr, self.code.stop
        if self.module_code is None:
            return (near,)
        return near, (self.module_code.addr, self.module_code.stop)


def data_size(cpus: int, ring_size: int, instances: int = 0) -> int:
    """Return the bytes of an arena's data for so many CPUs."""
    rings = cpus * (ring_size + SLACK + TEXT_SLOTS * MAX_STRING)
    return COUNTERS_SIZE + rings + MailboxLayout(cpus=cpus).size + BLOCK_SIZE + instances


def allocate(
    injector: CallInjector, kernel: Kernel, size: ArenaSize, *, note: Callable[[Addr, Addr], None]
) -> Arena:
    """Allocate an arena in a stopped guest, all or nothing; ``reset`` makes it ready.

    Args:
        injector: of tasks of the guest.
        kernel: that runs there.
        size: of the arena.
        note: writes the session's notes, with its mark; is given their address and the data's.

    Raises:
        TargetError: the guest has not enough memory, or no task could make the call.
    """
    memory = injector.memory
    bases = per_cpu_bases(memory, kernel)
    ring = size.ring or fitting_ring(sum(n for _, n in memory.ram.runs), len(bases))
    with injector.task() as task, ExitStack() as undo:
        undo.callback(free, task, kernel)
        before = _notes(data_size(len(bases), ring, size.instances))
        # First, with its mark.
        total = before + NOTES_PAGE + size.patches * UNDO_SIZE
        data = _allocate_data(task, kernel, total, "rings", partial(_note, note, before))
        code = allocate_code(task, kernel, size.code, like=data)
        module_code = allocate_module_code(task, kernel, size.code)
        percpu = _allocate_percpu(task, kernel)
        undo.pop_all()
    return Arena(
        notifier=Addr(code.addr + PREAMBLE_SIZE),
        code=CodeMemory(addr=Addr(code.addr + HEAD_SIZE), size=code.size - HEAD_SIZE),
        module_code=module_code,
        data=data,
        percpu=percpu,
        bases=bases,
        ring_size=ring,
        instances=Addr(data + data_size(len(bases), ring)),
        instances_size=size.instances,
        notes=Addr(data + before),
        patches=size.patches,
    )


def grow(injector: CallInjector, kernel: Kernel, arena: Arena, size: ArenaSize) -> Arena:
    """Return an arena with more memory for code and for calls; the guest is stopped.

    Args:
        injector: of tasks of the guest.
        kernel: that runs there.
        arena: whose rings and counters go on, as does its code.
        size: of what is new.

    Returns:
        The same, but for ``code``, ``module_code`` and ``instances``: these are the new memory.

    Raises:
        TargetError: as for ``allocate``; then nothing is new.
    """
    before = injector.allocations.live
    with injector.task() as task, ExitStack() as undo:

        def give_new_back() -> None:
            free(task, kernel, [each for each in task.allocations.live if each not in before])

        undo.callback(give_new_back)
        instances = Addr(0)
        if size.instances:
            instances = _allocate_data(task, kernel, size.instances, "instances")
        code = allocate_code(task, kernel, size.code, like=arena.data)
        module_code = allocate_module_code(task, kernel, size.code)
        undo.pop_all()
    return replace(
        arena,
        code=code,
        module_code=module_code,
        instances=instances,
        instances_size=size.instances,
    )


def allocate_table(injector: CallInjector, kernel: Kernel, size: int) -> Addr:
    """Return so many bytes, all zero, for tables; the guest is stopped.

    Raises:
        TargetError: as for ``allocate``.
    """
    with injector.task() as task:
        return _allocate_data(task, kernel, size, "tables")


def fitting_ring(ram: int, cpus: int) -> int:
    """Return the ring size for a guest with so many bytes of RAM: about a 16th for all CPUs."""
    # A 512 MiB guest has some KiB less, below 1 MiB, which must not halve its rings.
    share = max(ram // 15 // cpus, _LEAST_RING)
    return min(1 << (share.bit_length() - 1), _DEFAULT_RING)


def reset(arena: Arena, memory: GuestMemory) -> None:
    """Make every ring empty; no probe may be armed."""
    for cpu in range(arena.cpus):
        name, words = cpu << CPU_SHIFT, arena.words(cpu)
        memory.set_u64(words + PERCPU_LIMIT, name | arena.ring_size)
        memory.set_u64(words + PERCPU_LOST, 0)
        memory.set_u64(words + PERCPU_GUARD, 0)
        memory.set_u64(words + PERCPU_WORD, name)


def _note(note: Callable[[Addr, Addr], None], before: int, data: int) -> None:
    # A killed tracer's memory is given back only where its mark is found. So that is there before
    # anybody knows of the memory.
    if data:
        note(Addr(data + before), Addr(data))


def _notes(end: int) -> int:
    return -(-end // NOTES_PAGE) * NOTES_PAGE


def _allocate_data(
    task: Task,
    kernel: Kernel,
    size: int,
    what: str,
    mark: Callable[[int], None] = nothing_of,
) -> Addr:
    allocation = Allocation(kind=Kind.DATA, addr=0, size=size)
    function = first_of(kernel, "vzalloc_noprof", "vzalloc")
    return _checked(
        task.call(function, allocation.size, allocates=allocation, mark=mark),
        f"{-(-size // MIB)} MiB of {what}",
    )


def _allocate_percpu(task: Task, kernel: Kernel) -> int:
    symbol = kernel.symbols.find("pcpu_alloc_noprof")
    allocation = Allocation(kind=Kind.PER_CPU, addr=0, size=PERCPU_SIZE)
    if symbol is not None:
        args = (PERCPU_SIZE, PERCPU_SIZE, 0, _GFP_KERNEL)
        found = task.call(symbol.addr, *args, allocates=allocation)
    else:
        function = first_of(kernel, "__alloc_percpu")
        found = task.call(function, PERCPU_SIZE, PERCPU_SIZE, allocates=allocation)
    return _checked(found, "a few per-CPU words")


def _checked(found: int, what: str) -> Addr:
    if found == 0:
        raise TargetError(f"the guest has no memory left for {what}; try a smaller --buffer-size")
    return Addr(found)
