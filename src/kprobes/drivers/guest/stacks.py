"""Who is inside a range of code: every vCPU, and every stack of every task and interrupt.

Stack words are compared one by one. On the stack of a CPU that runs, a word that merely looks like
an address into the range counts too, which errs on the side of waiting. A task that sleeps can only
have been interrupted there, and preempted: around its calls a probe holds preemption off. What
calls have left in holes of its frames says nothing, and may stay for as long as it sleeps. Below a
stack pointer nothing is alive.

    struct task_struct { ... void *stack; struct list_head tasks; struct signal_struct *signal;
                         struct list_head thread_node; ... struct thread_struct thread; };
    struct signal_struct { ... struct list_head thread_head; ... };
    struct thread_struct { ... unsigned long sp; ... };   // of a task that is not running
"""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import numpy as np
from numpy.typing import NDArray

from kprobes.drivers.guest.guest import Guest
from kprobes.drivers.guest.layout import first_of, per_cpu_bases, task_abi, types_of
from kprobes.drivers.guest.memory import GuestMemory, remembering
from kprobes.errors import MemoryFault, TargetError
from kprobes.model.kernel import Kernel
from kprobes.ports import Text
from kprobes.units import U64, Addr

_Words = NDArray[np.uint64]

_MAX_TASKS = 200_000
_PAGE, _WORD = 4096, 8
_KERNEL_HALF = 1 << 63
_LEAVE_S = 5.0
_LEAVE_STEP_S = 0.002


_MEMBERS = (
    *(("task_struct", name) for name in ("stack", "thread.sp", "tasks", "thread_node", "signal")),
    ("signal_struct", "thread_head"),
)


def check_types(kernel: Kernel) -> None:
    """Check that ``is_anyone_inside`` will be able to tell.

    Raises:
        TargetError: the kernel's types do not say where stacks are.
    """
    for struct, member in _MEMBERS:
        types_of(kernel).offset(struct, member)


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
        with guest.stub.paused():
            if also() and not (ranges and is_anyone_inside(guest, ranges)):
                yield
                return
        if time.monotonic() > deadline:
            raise TargetError(f"a task of the guest stays inside some code: {otherwise}")
        time.sleep(_LEAVE_STEP_S)


def is_anyone_inside(guest: Guest, ranges: Sequence[Text]) -> bool:
    """Whether a stopped guest runs in, or will return into, some ranges of addresses.

    Args:
        guest: stopped.
        ranges: [start, stop) each; none overlaps another.

    Raises:
        TargetError: the guest's task list has no end.
    """
    vcpus = _vcpus(guest)
    starts, stops = np.array(sorted(ranges), np.uint64).reshape(-1, 2).T
    if np.any(_inside(np.array([found["rip"] for found in vcpus], np.uint64), starts, stops)):
        return True
    memory = remembering(guest.memory)
    code_segment = guest.arch.constants["cs"]
    for first, last, is_running in _live(guest, memory, _pointers(vcpus)):
        words = np.frombuffer(read_mapped(memory, first, last), np.uint64)
        names = _inside(words, starts, stops)
        if is_running and np.any(names):
            return True
        # struct pt_regs: what was interrupted is followed by its segment, in the low 16 bits.
        if np.any(names[:-1] & ((words[1:] & np.uint64(0xFFFF)) == code_segment)):
            return True
    return False


def live_stacks(guest: Guest, memory: GuestMemory) -> list[Text]:
    """Return the part in use, [start, stop), of every kernel stack of a stopped guest.

    Raises:
        TargetError: the guest's task list has no end.
    """
    pointers = _pointers(_vcpus(guest))
    return [(Addr(first), Addr(last)) for first, last, _ in _live(guest, memory, pointers)]


def _vcpus(guest: Guest) -> list[Mapping[str, int]]:
    return [guest.stub.registers(cpu) for cpu in guest.stub.ids()]


def _pointers(vcpus: Sequence[Mapping[str, int]]) -> list[int]:
    # In user mode a task's kernel stack is empty.
    return [found["rsp"] for found in vcpus if found["rip"] >= _KERNEL_HALF]


def _inside(words: _Words, starts: _Words, stops: _Words) -> NDArray[np.bool_]:
    at = np.searchsorted(starts, words, side="right")
    return (at > 0) & (words < stops[at - 1])


def _live(
    guest: Guest, memory: GuestMemory, pointers: Sequence[int]
) -> Iterator[tuple[int, int, bool]]:
    # [start, stop) of every stack that is in use, and whether a CPU runs on it.
    size = guest.arch.thread_size
    types = types_of(guest.kernel)
    stack, saved = (types.offset("task_struct", path) for path in ("stack", "thread.sp"))
    running = set(_running(memory, guest.kernel))
    bases = {t: memory.u64(t + stack) for t in {*_tasks(memory, guest.kernel), *running}}
    standing = {pointer & -size for pointer in pointers}
    for pointer in pointers:
        # An interrupt's stack need not be aligned to its size. Behind a task's is something else:
        # behind the first one's the kernel's data, which knows where modules, and so we, lie.
        base = pointer & -size
        yield pointer, (base if base in bases.values() else pointer) + size, True
    # A CPU in an interrupt, on another stack, has left its task's somewhere in the middle.
    left = running if standing - set(bases.values()) else set[int]()
    for task, base in bases.items():
        sp = memory.u64(task + saved)
        if base not in standing:
            is_running = task in left
            first = sp if not is_running and base <= sp < base + size else base
            yield first, base + size, is_running


def read_mapped(memory: GuestMemory, start: int, stop: int) -> bytes:
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


def _running(memory: GuestMemory, kernel: Kernel) -> Iterator[int]:
    # Idle tasks but the first are in no list, nor is a task that is about to end; a vCPU in an
    # interrupt stands on another stack than the task that it interrupted.
    current = task_abi(kernel).current
    for base in per_cpu_bases(memory, kernel):
        task = memory.u64((base + current) & U64)
        if task:
            yield task


def _tasks(memory: GuestMemory, kernel: Kernel) -> Iterator[int]:
    types = types_of(kernel)
    tasks, node = types.offset("task_struct", "tasks"), types.offset("task_struct", "thread_node")
    signal = types.offset("task_struct", "signal")
    threads = types.offset("signal_struct", "thread_head")
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
