"""Tasks inside a range of code: every vCPU, and every stack of every task and interrupt.

Stack words are compared one by one. On the stack of a CPU that runs, a word that merely looks like
an address into the range counts too, which errs on the side of waiting. A task that sleeps can only
have been interrupted there, and preempted: around its calls a probe holds preemption off. Who was
preempted is still queued to run. What calls and interrupts have left in holes of its stack frames
says nothing, and may stay for as long as it sleeps. Below a stack pointer nothing is alive.

    struct task_struct { ... void *stack; ... int on_rq; ... struct list_head tasks;
                         struct signal_struct *signal;
                         struct list_head thread_node; ... struct thread_struct thread; };
    struct signal_struct { ... struct list_head thread_head; ... };
    struct thread_struct { ... unsigned long sp; ... };   // of a task that is not running

Where a register has the running task it is read from there; in user mode that is the user's own,
and nothing of the kernel's runs.

Calls in progress, from outside: their return addresses given back, and dead ones' instances freed.

A call that a return probe has taken over returns to a trampoline of ours; its instance, drawn in
``model.plan``, knows where it came from. Giving the address back does not free the instance: who
has just returned to the trampoline still looks for it.
"""

import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kprobes.arch.registry import machine
from kprobes.errors import MemoryFault, TargetError, UnknownTypeError
from kprobes.guest.guest import Guest, GuestMemory, remembering
from kprobes.guest.kernel_abi import first_of, irq_stacks, per_cpu_bases, task_abi
from kprobes.model.kernel import Kernel
from kprobes.model.plan import (
    INSTANCE_CALLER,
    INSTANCE_MULTIPLIER,
    INSTANCE_ORIGIN,
    INSTANCE_SLOT,
    InstanceTable,
)
from kprobes.ports import Text
from kprobes.units import U64, Addr

_Words = NDArray[np.uint64]

_MAX_TASKS = 200_000
_PAGE, _WORD = 4096, 8
_KERNEL_HALF = 1 << 63
_INT = 4
_LEAVE_S = 5.0
_LEAVE_STEP_S = 0.002
_LEAVE_SHARE = 2
_HIT_S = 1.0
"""How long a hit on its way is waited for."""


_MEMBERS = (
    *(("task_struct", name) for name in ("stack", "tasks", "thread_node", "signal")),
    ("signal_struct", "thread_head"),
)
_Ranges = Sequence[Text] | NDArray[np.uint64]
_Vcpus = Sequence[Mapping[str, int]]


class _Stack(NamedTuple):
    """The part of a stack in use; a CPU runs on it, or its task is queued for one, or neither."""

    start: int
    stop: int
    is_running: bool
    is_queued: bool = False


def check_types(kernel: Kernel) -> None:
    """Check that ``is_anyone_inside`` will be able to tell.

    Raises:
        TargetError: the kernel's types do not say where stacks are.
    """
    saved = ("task_struct", machine(kernel.arch).task.saved_sp)
    for struct, member in (*_MEMBERS, saved):
        kernel.offset(struct, member)


@contextmanager
def stopped_outside(
    guest: Guest,
    ranges: Sequence[Text],
    *,
    otherwise: str,
    also: Callable[[], bool] = lambda: True,
) -> Generator[None]:
    """Have the guest stopped at a time when nobody is inside some ranges of code.

    ``also`` is another thing that must be so; it is asked first, each time that the guest stands.

    Raises:
        TargetError: somebody stays for seconds; ``otherwise`` says what cannot be done then.
    """
    deadline = time.monotonic() + _LEAVE_S
    while True:
        began = time.monotonic()
        with guest.stub.paused():
            if also() and not (ranges and is_anyone_inside(guest, ranges)):
                yield
                return
        now = time.monotonic()
        if now > deadline:
            raise TargetError(f"a task of the guest stays inside some code: {otherwise}")
        # Who is to leave must run: a look at many tasks takes longer than a step.
        time.sleep(max(_LEAVE_STEP_S, _LEAVE_SHARE * (now - began)))


def is_anyone_inside(guest: Guest, ranges: Sequence[Text]) -> bool:
    """Whether a stopped guest runs in, or will return into, some ranges; see ``are_inside``."""
    return bool(are_inside(guest, ranges).any())


class Leaving:
    """vCPUs that are still in code which nothing leads to any more: hits on their way."""

    def __init__(self, guest: Guest, ranges: Sequence[Text]) -> None:
        """Look at nothing yet; ``ranges`` as for ``are_inside``."""
        self._guest = guest
        # Of tens of thousands, before the guest stands still.
        self._ranges = _pairs(ranges)
        self._is_anyone = False

    def find(self) -> None:
        """Find out, in a stopped guest, whether there are any."""
        self._is_anyone = False
        with suppress(MemoryFault):
            self._is_anyone = bool(are_inside(self._guest, self._ranges, are_running=True).any())

    def wait(self) -> None:
        """Have them leave, if there are any, unless somebody else has stopped the guest."""
        deadline, stub = time.monotonic() + _HIT_S, self._guest.stub
        while self._is_anyone and not stub.is_held and time.monotonic() < deadline:
            time.sleep(_LEAVE_STEP_S)
            with stub.paused():
                self.find()


def _pairs(ranges: _Ranges) -> NDArray[np.uint64]:
    return np.asarray(ranges, np.uint64).reshape(-1, 2)


def are_inside(guest: Guest, ranges: _Ranges, *, are_running: bool = False) -> NDArray[np.bool_]:
    """Return for each of some ranges of addresses whether a stopped guest is in it, or will be.

    Args:
        guest: stopped.
        ranges: [start, stop) each, also as an array of shape (n, 2); none overlaps another.
        are_running: look at what runs only, which takes a part of the time.

    Returns:
        A new array of shape (len(ranges),).

    Raises:
        TargetError: the guest's task list has no end.
    """
    found = np.zeros(len(ranges), np.bool_)
    if not len(ranges):
        return found
    vcpus = _vcpus(guest)
    pairs = _pairs(ranges)
    order = np.argsort(pairs[:, 0], kind="stable")
    starts, stops = pairs[order].T

    def note(words: _Words) -> None:
        at = np.searchsorted(starts, words, side="right")
        at = at[(at > 0) & (words < stops[at - 1])]
        found[order[at - 1]] = True

    signature = np.uint64(guest.arch.machine.paging.signature(guest.tables))
    note(np.array([*_held(guest, vcpus)], np.uint64) | signature)
    # To read tables in bulk pays for many tasks only.
    memory = guest.memory if are_running else remembering(guest.memory)
    for stack in _live(guest, memory, vcpus, are_running=are_running):
        if not (stack.is_running or stack.is_queued):
            continue
        words = np.frombuffer(_read_mapped(memory, stack.start, stack.stop), np.uint64)
        if stack.is_running:
            note(words | signature)
        # struct pt_regs has what was interrupted as it is, not signed.
        note(words[:-1][_follow(guest, words[1:])])
    return found


def live_stacks(guest: Guest, memory: GuestMemory) -> list[Text]:
    """Return the part in use, [start, stop), of every kernel stack of a stopped guest.

    Raises:
        TargetError: the guest's task list has no end.
    """
    live = _live(guest, memory, _vcpus(guest))
    return [(Addr(stack.start), Addr(stack.stop)) for stack in live]


def _vcpus(guest: Guest) -> _Vcpus:
    info = guest.arch.machine.task
    names = [info.register, info.excepted[0] if info.excepted else None]
    more = [name for name in names if name is not None]
    stub = guest.stub
    found: list[dict[str, int]] = []
    for cpu in stub.ids():
        values = stub.registers(cpu)
        values |= {name: stub.register(cpu, name) for name in more}
        found.append(values)
    return found


def _held(guest: Guest, vcpus: _Vcpus) -> Iterator[int]:
    # Addresses that vCPUs run at, or will go to, by their registers alone.
    info = guest.arch.machine.task
    for found in vcpus:
        yield found[info.pc]
        yield from (found[name] for name in info.returns)
        if info.excepted is not None:
            register, first, last = info.excepted
            start, stop = (first_of(guest.kernel, name) for name in (first, last))
            if start <= found[info.pc] < stop:
                yield found[register]


def _follow(guest: Guest, words: _Words) -> NDArray[np.bool_]:
    # Whether words are what comes after an instruction pointer of the kernel's in pt_regs.
    mask, values = guest.arch.machine.task.interrupted
    return np.isin(words & np.uint64(mask), np.array(values, np.uint64))


def _pointers(guest: Guest, vcpus: _Vcpus) -> list[int]:
    # In user mode a task's kernel stack is empty.
    info = guest.arch.machine.task
    return [found[info.sp] for found in vcpus if found[info.pc] >= _KERNEL_HALF]


def _live(
    guest: Guest, memory: GuestMemory, vcpus: _Vcpus, *, are_running: bool = False
) -> Iterator[_Stack]:
    size, pointers = guest.arch.thread_size, _pointers(guest, vcpus)
    info, offset = guest.arch.machine.task, partial(guest.kernel.offset, "task_struct")
    stack, saved, is_queued = offset("stack"), offset(info.saved_sp), _queue(memory, guest.kernel)
    running = set(_running(guest, memory, vcpus))
    tasks = running if are_running else {*each_task(memory, guest.kernel), *running}
    bases = {task: memory.u64(task + stack) for task in tasks}
    standing = {pointer & -size for pointer in pointers}
    for pointer in pointers:
        # An interrupt's stack need not be aligned to its size. After a task's is something else:
        # after the first one's the kernel's data, which knows where modules, and so we, lie.
        base = pointer & -size
        yield _Stack(pointer, (base if base in bases.values() else pointer) + size, True)
    yield from _interrupted(guest, memory, [p for p in pointers if p & -size not in bases.values()])
    # A CPU in an interrupt, on another stack, has left its task's somewhere in the middle.
    left = running if standing - set(bases.values()) else set[int]()
    for task, base in bases.items():
        sp = memory.u64(task + saved)
        if base not in standing:
            is_running = task in left
            first = sp if not is_running and base <= sp < base + size else base
            yield _Stack(first, base + size, is_running, is_queued(task))


def _interrupted(guest: Guest, memory: GuestMemory, pointers: Sequence[int]) -> Iterator[_Stack]:
    # A CPU in an NMI, on a stack of its own, may have left an interrupt's somewhere.
    if not pointers or guest.arch.machine.task.register is not None:
        return
    stacks = [(top - guest.arch.thread_size, top) for top in irq_stacks(memory, guest.kernel)]
    if all(any(start <= each < stop for start, stop in stacks) for each in pointers):
        return
    yield from (_Stack(start, stop, True) for start, stop in stacks)


def _queue(memory: GuestMemory, kernel: Kernel) -> Callable[[int], bool]:
    # All may be, where it is not known.
    try:
        place = kernel.offset("task_struct", "on_rq")
    except UnknownTypeError:
        return bool
    # A byte in 7.2.
    size = _INT if kernel.types is None else kernel.types.member_size("task_struct", "on_rq")
    return lambda task: any(memory.read(task + place, size))


def _read_mapped(memory: GuestMemory, start: int, stop: int) -> bytes:
    """Return what is there of a stack's words.

    Exception stacks are smaller and lie between guard pages, a vCPU may be in user mode, a task may
    have given its stack back.
    """
    found: list[bytes] = []
    at = start & -_WORD
    while at < stop:
        step = min(_PAGE - at % _PAGE, stop - at)
        with suppress(MemoryFault):
            found.append(memory.read(at, step & -_WORD))
        at += step
    return b"".join(found)


def _running(guest: Guest, memory: GuestMemory, vcpus: _Vcpus) -> Iterator[int]:
    # Idle tasks but the first are in no list, nor is a task that is about to end; a vCPU in an
    # interrupt stands on another stack than the task that it interrupted.
    register, kernel = guest.arch.machine.task.register, guest.kernel
    if register is not None:
        yield from (found[register] for found in vcpus if _has_task(guest, memory, found))
        return
    current = task_abi(kernel).current
    for base in per_cpu_bases(memory, kernel):
        task = memory.u64((base + current) & U64)
        if task:
            yield task


def _has_task(guest: Guest, memory: GuestMemory, vcpu: Mapping[str, int]) -> bool:
    # Coming from user mode it is whatever the user had there.
    info = guest.arch.machine.task
    register = info.register or ""
    if vcpu[info.pc] < _KERNEL_HALF or vcpu[register] < _KERNEL_HALF:
        return False
    try:
        memory.u64(vcpu[register] + guest.kernel.offset("task_struct", "stack"))
    except MemoryFault:
        return False
    return True


def each_task(memory: GuestMemory, kernel: Kernel) -> Iterator[int]:
    """Yield the address of every task of a stopped guest but the idle ones of later CPUs.

    Raises:
        TargetError: the guest's task list has no end.
    """
    tasks, node, signal = (
        kernel.offset("task_struct", path) for path in ("tasks", "thread_node", "signal")
    )
    threads = kernel.offset("signal_struct", "thread_head")
    head = first_of(kernel, "init_task") + tasks
    yield head - tasks
    # All lists together: a node that comes twice leads round for ever.
    seen: set[int] = set()
    for leader in _list(memory, head, seen):
        group = memory.u64(leader - tasks + signal) + threads
        for thread in _list(memory, group, seen):
            yield thread - node


def _list(memory: GuestMemory, head: int, seen: set[int]) -> Iterator[int]:
    at = memory.u64(head)
    while at != head:
        if at in seen or len(seen) == _MAX_TASKS:
            raise TargetError("the guest's task list has no end; its memory is corrupted")
        seen.add(at)
        yield at
        at = memory.u64(at)


_SLOT_SIZE = 8
_GUESTS_OWN = (
    "arch_rethook_trampoline",
    "__kretprobe_trampoline",
    "kretprobe_trampoline",
    "return_to_handler",
)
"""What the kernel's own return probes and its function graph tracer put into slots."""


def restore_callers(
    memory: GuestMemory, tables: Sequence[InstanceTable], kept: Collection[int] = ()
) -> int:
    """Have every call in progress return to its caller, not to us.

    Args:
        memory: of a guest that stands still.
        tables: of the calls; a return address may have been taken over several times.
        kept: trampolines of other tables, to which calls go on returning.

    Returns:
        How many return addresses were put back.
    """
    now = remembering(memory)
    origins: dict[int, Mapping[int, int]]
    origins = {
        instances.trampoline: _origins(now, instances, kept)
        for instances in tables
        if instances.trampoline
    }
    slots = {slot for found in origins.values() for slot in found}
    return sum(_restore(now, slot, origins) for slot in slots)


def awaited(guest: Guest, tables: Sequence[InstanceTable]) -> list[InstanceTable]:
    """Return the tables with calls in progress that will still return to us.

    A return probe of the guest's own on a call of ours keeps our trampoline's address where only
    the kernel looks, and goes there when it has run. Where return addresses cannot be given back
    every call is waited for whose instance says that it is in progress. What a call that has
    returned has left on a stack says nothing: without an instance there is nowhere to return to.
    """
    hooked = [instances for instances in tables if instances.trampoline]
    if not hooked:
        return []
    now = remembering(guest.memory)
    if not guest.arch.returns.comes_back:
        live = np.array(live_stacks(guest, now), np.uint64).reshape(-1, 2)
        return [instances for instances in hooked if _is_in_progress(now, instances, live)]
    theirs = _guests_own(guest)

    def is_held(instances: InstanceTable) -> bool:
        return any(_content(now, slot) in theirs for slot in _origins(now, instances))

    return [instances for instances in hooked if is_held(instances)]


def returned_to(
    guest: Guest, tables: Sequence[InstanceTable], others: Sequence[InstanceTable]
) -> list[InstanceTable]:
    """Return the tables whose trampolines calls in progress will still return to.

    Args:
        guest: that stands still.
        tables: of which nothing new is taken over.
        others: all others, whose calls may have been taken over after those.
    """
    if not guest.arch.returns.comes_back:
        return awaited(guest, tables)
    now, theirs = remembering(guest.memory), _guests_own(guest)
    callers = {caller for each in (*tables, *others) for caller in _callers(now, each)}

    def is_held(instances: InstanceTable) -> bool:
        held = {instances.trampoline, *theirs}
        return any(_content(now, slot) in held for slot in _origins(now, instances))

    hooked = [instances for instances in tables if instances.trampoline]
    return [each for each in hooked if each.trampoline in callers or is_held(each)]


def _guests_own(guest: Guest) -> set[int]:
    found = (guest.kernel.symbols.find(name) for name in _GUESTS_OWN)
    return {symbol.addr for symbol in found if symbol is not None}


def _callers(memory: GuestMemory, instances: InstanceTable) -> set[int]:
    # Where calls in progress go from the trampoline.
    if not instances.trampoline:
        return set()
    table = _table(memory, instances)
    is_live = table[:, INSTANCE_SLOT // _SLOT_SIZE] != 0
    return set(table[is_live, INSTANCE_CALLER // _SLOT_SIZE].tolist())


def free_dead_calls(
    guest: Guest,
    tables: Sequence[InstanceTable],
    ranges: Sequence[Text],
    check: Callable[[], None],
) -> int:
    """Free the instances of calls that will never return: their tasks have died.

    Args:
        guest: that stands still.
        tables: all that the session has.
        ranges: of our code. While anybody is inside, nothing is freed: who has just returned to a
            trampoline stands above the slot that it is about to look for.
        check: is called right before anything is freed.

    Returns:
        How many instances were freed.

    Raises:
        GuestReplacedError: from ``check``.
    """
    if is_anyone_inside(guest, ranges):
        return 0
    now = remembering(guest.memory)
    live = np.array(live_stacks(guest, now), np.uint64).reshape(-1, 2)
    # To look at all stacks takes a while, in which a monitor may have put the guest back.
    check()
    return sum(_free(now, instances, live) for instances in tables)


def find_caller(
    memory: GuestMemory, tables: Sequence[InstanceTable], slot: Addr, held: Addr
) -> Addr:
    """Return where a call in progress came from, even if its return was taken over.

    Args:
        memory: of a guest, where whoever stands on that stack does not go on meanwhile.
        tables: all that the session has.
        slot: of the call; see ``model.plan``.
        held: what its return address is now.
    """
    return Addr(_callers_of(memory, tables, held).get(slot, held))


def caller_at(
    memory: GuestMemory, tables: Sequence[InstanceTable], place: Addr, held: Addr
) -> Addr:
    """Return what a return address stands for that is at a place of a stack, or in a register.

    Args:
        memory: as for ``find_caller``.
        tables: likewise.
        place: where it was saved; the stack pointer for one in a register.
        held: what it is. Of calls of that function the innermost above the place has saved it.
    """
    callers = _callers_of(memory, tables, held)
    above = [slot for slot in callers if slot >= place]
    return Addr(callers[min(above)]) if above else held


def _callers_of(
    memory: GuestMemory, tables: Sequence[InstanceTable], held: Addr
) -> Mapping[int, int]:
    # By slot, of the calls whose return address is now that; none where it is no trampoline.
    instances = next((each for each in tables if each.trampoline == held), None)
    return {} if instances is None else _origins(memory, instances)


def home(count: int, slot: int) -> int:
    """Return the number of the instance at which the search for a slot's begins."""
    return ((slot * INSTANCE_MULTIPLIER & U64) >> 32) * count >> 32


def _is_in_progress(
    memory: GuestMemory, instances: InstanceTable, live: NDArray[np.uint64]
) -> bool:
    slots = np.array([*_origins(memory, instances)], np.uint64)
    return bool(_is_live(slots, live).any())


def _is_live(slots: NDArray[np.uint64], live: NDArray[np.uint64]) -> NDArray[np.bool_]:
    # For each slot, whether it is in the used part of a stack.
    above, below = slots[:, np.newaxis] >= live[:, 0], slots[:, np.newaxis] < live[:, 1]
    return np.asarray((above & below).any(axis=1), np.bool_)


def _origins(
    memory: GuestMemory, instances: InstanceTable, kept: Collection[int] = ()
) -> dict[int, int]:
    # By slot: where its calls came from that were taken over, or a trampoline that is kept.
    table = _table(memory, instances)
    slots = table[:, INSTANCE_SLOT // _SLOT_SIZE]
    is_taken = (slots != 0) & (table[:, INSTANCE_CALLER // _SLOT_SIZE] != 0)
    found: dict[int, int] = {}
    for slot in np.unique(slots[is_taken]).tolist():
        # Of several the one that the guest itself comes to first is the newest.
        start = home(instances.count, slot)
        order = (np.flatnonzero(is_taken & (slots == slot)) - start) % instances.count
        newest = (int(order.min()) + start) % instances.count
        caller = int(table[newest, INSTANCE_CALLER // _SLOT_SIZE])
        origin = int(table[newest, INSTANCE_ORIGIN // _SLOT_SIZE])
        found[slot] = caller if caller in kept else origin
    return found


def _table(memory: GuestMemory, instances: InstanceTable) -> NDArray[np.uint64]:
    raw = memory.read(instances.addr, instances.size)
    return np.frombuffer(raw, np.uint64).reshape(instances.count, instances.stride // _SLOT_SIZE)


def _free(memory: GuestMemory, instances: InstanceTable, live: NDArray[np.uint64]) -> int:
    slots = _table(memory, instances)[:, INSTANCE_SLOT // _SLOT_SIZE]
    dead = np.flatnonzero((slots != 0) & ~_is_live(slots, live))
    for index in dead.tolist():
        memory.set_u64(Addr(instances.addr + index * instances.stride + INSTANCE_SLOT), 0)
    return len(dead)


def _content(memory: GuestMemory, slot: int) -> int | None:
    # A task that died has perhaps no stack any more.
    with suppress(MemoryFault):
        return memory.u64(slot)
    return None


def _restore(memory: GuestMemory, slot: int, origins: Mapping[int, Mapping[int, int]]) -> bool:
    held = _content(memory, slot)
    origin = origins.get(held, {}).get(slot) if held is not None else None
    if origin is None:
        return False
    memory.set_u64(slot, origin)
    return True
