"""Members of tasks that probing must know, found by their looks in a kernel without types.

    struct task_struct { struct thread_info thread_info; ... void *stack; ...
                         int on_rq; int prio; int static_prio; int normal_prio; ...
                         struct list_head tasks; ... pid_t pid; pid_t tgid;
                         unsigned long stack_canary; ...
                         struct list_head thread_node; ... u64 self_exec_id; ... char comm[16]; ...
                         struct signal_struct *signal; ... struct thread_struct thread; };
    struct thread_info { unsigned long flags; ... u64 preempt_count; ... };   // arm64's

All tasks of a guest lie side by side as rows of words; a member is the column in which each of them
has what only that member has: the stack ends in a magic number, the list comes back to the first
task, process 1 is first and kthreadd second. A column that is not the only one is none.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice, pairwise

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.arch.machine import Machine
from kprobes.errors import MemoryFault, TargetError
from kprobes.model.kernel import Kernel
from kprobes.ports import Memory
from kprobes.units import U64

_SIZE = 12 << 10
_MOST, _MAX_TASKS = 512, 100_000
_FEWEST = 4
_HEAD = 0x200
"""Room for what comes before a task's stack, or before a process's list of threads."""
_STACK_END_MAGIC = 0x57AC6E9D
"""include/uapi/linux/magic.h; set_task_stack_end_magic() writes it as a word."""
_FIRST_NAME = b"swapper"
_KERNEL_HALF = np.uint64(1 << 63)
_PRIORITIES = 100, 139
"""Of tasks that the fair scheduler has: MAX_RT_PRIO and MAX_PRIO - 1."""
_MOSTLY = 0.75
_EXEC = "begin_new_exec", "setup_new_exec"
_HOT = {"pcpu_hot.current_task": 0, "pcpu_hot.preempt_count": 8}
"""Since c063a217bc07 (x86/percpu: Move preempt_count next to current_task) (v6.2)."""
_NEED_RESCHED = 1 << 32
"""Upper half of arm64's preempt count while nothing is asked for: it is inverted."""
_Words = NDArray[np.uint64]
_Is = NDArray[np.bool_]


def task_members(
    memory: Memory, kernel: Kernel, machine: Machine, thread_size: int
) -> Mapping[str, int]:
    """Return the places of members, by ``struct.path``: what ``Kernel.offset`` is asked for.

    Args:
        memory: of a guest that stands still.
        kernel: that runs there.
        machine: what it runs on.
        thread_size: bytes of a kernel stack.

    Returns:
        Without ``on_rq``, ``stack_canary`` and ``self_exec_id`` where these are not found.

    Raises:
        TargetError: the members cannot be told from others.
    """
    init = kernel.symbols.find("init_task")
    if init is None:
        raise TargetError("no symbol says where the first task is")
    try:
        tasks = _Tasks.read(memory, init.addr)
        threads, head = _threads(memory, tasks)
        own = {
            **tasks.places,
            "thread_info.flags": 0,
            machine.task.saved_sp: _saved_sp(tasks, thread_size),
            **threads,
            **_numbers(tasks),
            **_queued(tasks),
            **_exec_id(memory, kernel, machine),
        }
        if machine.task.preempt_count:
            own[machine.task.preempt_count] = _preempt_count(tasks)
    except MemoryFault as error:
        raise TargetError(f"its tasks are not where they should be: {error}") from error
    found = {f"task_struct.{path}": place for path, place in own.items()}
    hot = {} if kernel.symbols.find("pcpu_hot") is None else _HOT
    return {"signal_struct.thread_head": head, **found, **hot}


class _Tasks(Struct, frozen=True, kw_only=True):
    """Processes' first tasks, the idle one before all others, as rows of words.

    Attributes:
        addrs: where each is.
        words: uint64 (tasks, words).
        stack, comm, tasks: places of these members.
    """

    addrs: Sequence[int]
    words: _Words
    stack: int
    comm: int
    tasks: int

    @classmethod
    def read(cls, memory: Memory, init: int) -> "_Tasks":
        first = _row(memory, init)
        stack = _only(
            (p for p in range(0, _HEAD, 8) if _is_stack(memory, int(first[p // 8]))), "stack"
        )
        comm = first.tobytes().find(_FIRST_NAME)
        if comm < 0:
            raise _unknown("comm")
        lists = ((p, _each(memory, init, p, stack)) for p in range(0, _SIZE - 16, 8))
        rings = [(place, addrs) for place, addrs in lists if len(addrs) >= _FEWEST]
        tasks = _only((place for place, _ in rings), "tasks")
        addrs = rings[0][1]
        # What comes after a task is often the next one.
        apart = min(after - before for before, after in pairwise(sorted(addrs)))
        words = np.array([_row(memory, addr)[: apart // 8] for addr in addrs])
        return cls(addrs=addrs, words=words, stack=stack, comm=comm, tasks=tasks)

    @property
    def places(self) -> Mapping[str, int]:
        """Where these members are, by name."""
        return {"stack": self.stack, "comm": self.comm, "tasks": self.tasks}

    @property
    def ints(self) -> NDArray[np.int32]:
        """The same as numbers of 4 bytes: int32 (tasks, 2 * words)."""
        return self.words.view("<i4")


def _places(is_it: _Is, size: int = 8) -> Iterator[int]:
    # Of the columns that are it.
    return (size * int(column) for column in np.flatnonzero(is_it))


def _all(is_it: _Is) -> _Is:
    return np.logical_and.reduce(is_it)


def _row(memory: Memory, addr: int) -> _Words:
    return np.frombuffer(memory.read(addr, _SIZE), "<u8")


def _u64(memory: Memory, addr: int) -> int:
    return int.from_bytes(memory.read(addr, 8), "little")


def _unknown(member: str) -> TargetError:
    return TargetError(f"where its tasks have their {member} cannot be told")


def _only(places: Iterator[int], member: str) -> int:
    found = list(islice(places, 2))
    if len(found) != 1:
        raise _unknown(member)
    return found[0]


def _has(memory: Memory, addr: int, value: int) -> bool:
    try:
        return addr >> 63 != 0 and _u64(memory, addr) == value
    except MemoryFault:
        return False


def _is_stack(memory: Memory, addr: int) -> bool:
    return _has(memory, addr, _STACK_END_MAGIC)


def _each(memory: Memory, init: int, place: int, stack: int) -> list[int]:
    # The first tasks that a list of such a place leads round, [] where it is none of tasks.
    found, at = [init], init
    try:
        for _ in range(_MAX_TASKS):
            node = _u64(memory, at + place)
            following = node - place & U64
            if _u64(memory, node + 8) != at + place:
                return []
            if following == init:
                return found
            # Who has ended has none until its parent has asked for it.
            own = _u64(memory, following + stack)
            if own and not _is_stack(memory, own):
                return []
            if own and len(found) < _MOST:
                found.append(following)
            at = following
    except MemoryFault:
        pass
    return []


def _numbers(tasks: _Tasks) -> Mapping[str, int]:
    # pid and tgid are neighbours and, of a process's first task, the same.
    ints = tasks.ints
    is_pid = _all(ints[:3] == np.array([[0], [1], [2]])) & _all(ints[3:] > 2)
    is_pair = is_pid[:-1] & is_pid[1:] & _all(ints[:, :-1] == ints[:, 1:])
    pid = _only(_places(is_pair, 4), "pid")
    canary = (pid + 8 + 7) & ~7
    return {"pid": pid, "tgid": pid + 4, **_canary(tasks, canary)}


def _canary(tasks: _Tasks, place: int) -> Mapping[str, int]:
    # Random, but for the byte that ends a string: CANARY_MASK. What follows where there is none
    # is a pointer to the parent, whom many have in common.
    words: list[int] = tasks.words[:, place // 8].tolist()
    is_it = all(word and not word & 0xFF for word in words) and len(set(words)) == len(words)
    return {"stack_canary": place} if is_it else {}


def _threads(memory: Memory, tasks: _Tasks) -> tuple[Mapping[str, int], int]:
    # A process of one task has that task alone in its list, whose head is in the signal_struct;
    # and where it is there.
    words = tasks.words
    heads, before = words[:, :-1], words[:, 1:]
    own = np.array(tasks.addrs, np.uint64)[:, None]
    is_away = (heads - own >= np.uint64(_SIZE)) & (heads >= _KERNEL_HALF)
    is_alone = (heads == before) & is_away
    rows = is_alone.sum(axis=0) >= max(_FEWEST, len(words) // 2)
    nodes = [
        place
        for place in _places(rows)
        if all(
            _is_node(memory, tasks.addrs[row], place)
            for row in np.flatnonzero(is_alone[:, place // 8]).tolist()
        )
    ]
    node = _only(iter(nodes), "thread_node")
    chosen = is_alone[:, node // 8]
    before_head = heads[chosen, node // 8][:, None] - words[chosen]
    first = before_head[0]
    is_signal = _all(before_head == first) & (first > 0) & (first < np.uint64(_HEAD))
    places = list(_places(is_signal))
    if not places:
        raise _unknown("signal")
    # Whatever else points there does as well: what is used is where the list begins.
    head = int(before_head[0, places[0] // 8])
    return {"thread_node": node, "signal": places[0]}, head


def _is_node(memory: Memory, task: int, place: int) -> bool:
    return _has(memory, _u64(memory, task + place), task + place)


def _saved_sp(tasks: _Tasks, thread_size: int) -> int:
    # The first task may never have been left. Where a frame pointer is kept too, it comes before.
    words = tasks.words[1:]
    base = words[:, tasks.stack // 8][:, None]
    is_inside = _all((words > base) & (words < base + np.uint64(thread_size)))
    found = list(_places(is_inside))
    if len(found) == 2 and found[1] - found[0] == 8:
        del found[0]
    return _only(iter(found), "stack pointer")


def _preempt_count(tasks: _Tasks) -> int:
    words = tasks.words[:, : tasks.stack // 8]
    # But for who runs, in an interrupt, or is asked to let another one run.
    is_count = (words >= _NEED_RESCHED) & (words <= _NEED_RESCHED + 0xFF)
    is_count = is_count.mean(axis=0) >= _MOSTLY
    return _only(_places(is_count), "preempt count")


def _queued(tasks: _Tasks) -> Mapping[str, int]:
    # It comes before the three priorities, which are the same but for who is boosted. The idle
    # task always counts as queued.
    ints = tasks.ints
    low, high = _PRIORITIES
    first = ints[:, 1:-2]
    is_fair = (first >= low) & (first <= high) & (first == ints[:, 2:-1]) & (first == ints[:, 3:])
    before = ints[:, :-3]
    is_it = (is_fair.mean(axis=0) >= _MOSTLY) & _all((before >= 0) & (before <= 2))
    is_it &= before[0] == 1
    found = list(_places(is_it, 4))
    return {"on_rq": found[0]} if len(found) == 1 else {}


def _exec_id(memory: Memory, kernel: Kernel, machine: Machine) -> Mapping[str, int]:
    symbol = next(filter(None, map(kernel.symbols.find, _EXEC)), None)
    if symbol is None:
        return {}
    counted = set(machine.text.counted(memory.read(symbol.addr, symbol.size)))
    return {"self_exec_id": counted.pop()} if len(counted) == 1 else {}
