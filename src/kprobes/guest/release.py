"""Allocating and freeing memory of a guest by calls of its own functions.

Memory of the guest for the probes' code: executable, and never writable at the same time.

What allocates it is the architecture's to know. Memory arrives writable and not executable; on x86
from a cache of large pages, 2e45474ab14f ("execmem: add support for cache of large ROX pages")
(v6.13), executable and read-only. Our code is written from outside, through physical memory.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import assert_never

from msgspec import Struct

from kprobes.arch.machine import CodeRequest, FunctionCall
from kprobes.errors import FormatError, MemoryFault, TargetError, UnknownTypeError
from kprobes.guest.allocations import Allocation, AllocationLog, Kind
from kprobes.guest.boot import has_code_memory
from kprobes.guest.guest import Guest, GuestMemory
from kprobes.guest.inject import CallInjector, Task
from kprobes.guest.journal import Journal
from kprobes.guest.kernel_abi import first_of
from kprobes.guest.stacks import awaited, free_dead_calls, restore_callers, stopped_outside
from kprobes.model.kernel import Kernel
from kprobes.model.plan import InstanceTable
from kprobes.ports import Text
from kprobes.units import Addr

_POLL_S = 0.5
"""Between looks whether room for calls was missing."""
_INT = 0xFFFF_FFFF
_SET_ROX = ("set_memory_ro", "set_memory_x")
_SET_RW = ("set_memory_nx", "set_memory_rw")


class CodeMemory(Struct, frozen=True, kw_only=True):
    """Executable memory.

    Attributes:
        addr, size: where, in bytes.
    """

    addr: Addr
    size: int

    @property
    def stop(self) -> Addr:
        """The first address after it."""
        return Addr(self.addr + self.size)


def _check_ready(task: Task, kernel: Kernel) -> None:
    if not has_code_memory(task.memory, kernel):
        raise TargetError("the guest boots: its kernel cannot have memory for code yet")


def allocate_code(task: Task, kernel: Kernel, size: int, *, like: Addr) -> CodeMemory:
    """Allocate executable memory within reach of the kernel's text.

    Args:
        task: that allocates it.
        kernel: that runs there.
        size: bytes.
        like: memory that it has allocated for data.

    Raises:
        TargetError: the guest has none left, or refuses; ``allocations`` has what was allocated.
    """
    _check_ready(task, kernel)
    request = CodeRequest(size=size, like=like, caller=task.trap.place)
    found = _allocate(task, kernel, size, task.trap.info.code(task.memory, kernel, request))
    if found is None:
        raise TargetError("the guest has no memory left for the probes' code")
    return found


def allocate_module_code(task: Task, kernel: Kernel, size: int) -> CodeMemory | None:
    """Allocate executable memory within reach of modules.

    Returns:
        It, or None: where the other is in reach of them, without modules, and where none is left:
        most probes are not of modules.

    Raises:
        TargetError: the guest refuses to make it executable; it is in ``allocations``.
    """
    find = task.trap.info.module_code
    called = find(kernel, size) if find is not None else None
    return None if called is None else _allocate(task, kernel, size, called)


def set_rw(task: Task, kernel: Kernel, rox: Allocation) -> None:
    """Make the pages of code writable again and nothing more, as they arrived.

    They have another mapping, which was made read-only too: whoever gets them next would fault.
    """
    pages = rox.size // _page_size(task)
    task.call(first_of(kernel, _SET_RW[0]), rox.addr, pages)
    task.call(first_of(kernel, _SET_RW[1]), rox.addr, pages, returns=rox)


def free_code(task: Task, kernel: Kernel, code: Allocation) -> None:
    """Give unsealed code memory back. Nothing may run or return into it any more."""
    task.call(first_of(kernel, *task.trap.info.free_code), code.addr, returns=code)


def _allocate(task: Task, kernel: Kernel, size: int, called: FunctionCall) -> CodeMemory | None:
    allocation = Allocation(kind=Kind.CODE, addr=0, size=size)
    addr = Addr(task.call(called.function, *called.args, allocates=allocation))
    if addr == 0:
        return None
    (first, *_) = task.memory.tables.mapped_runs(addr, addr + _page_size(task))
    if first.is_writable or not first.is_executable:
        _set_rox(task, kernel, Allocation(kind=Kind.ROX, addr=addr, size=size))
    return CodeMemory(addr=addr, size=size)


def _set_rox(task: Task, kernel: Kernel, rox: Allocation) -> None:
    pages = rox.size // _page_size(task)
    # They return an int: the upper half of the register means nothing.
    read_only = task.call(first_of(kernel, _SET_ROX[0]), rox.addr, pages, allocates=rox) & _INT
    if read_only or task.call(first_of(kernel, _SET_ROX[1]), rox.addr, pages) & _INT:
        raise TargetError("the guest refused to make the probes' code executable")


def _page_size(task: Task) -> int:
    return task.trap.info.page_size(task.memory)


# struct tracepoint { ...; struct tracepoint_func *funcs; };     // up to one whose func is NULL
# struct tracepoint_func { void *func; void *data; int prio; };
_LISTENER, _MOST_LISTENERS = 24, 256
_PATIENCE_S = 2.0
_FOR_EXIT = "waiting until no task of the guest is inside the probes' code, which is freed then"
_FOR_TASK = (
    "the probes are gone; waiting for a task of the guest that can free their memory: does a CPU "
    "of the guest hang? A second Ctrl-C does not wait"
)


def _ignore(words: str) -> None:
    del words


def free_when_idle(
    guest: Guest, allocations: AllocationLog, warn: Callable[[str], None] = _ignore
) -> None:
    """Free all that was allocated in a guest, as soon as nothing runs in it.

    The guest may run, and runs on. No probe may be armed.

    Args:
        guest: that it is allocated in.
        allocations: what is allocated.
        warn: is told what is waited for, when it takes a while.

    Raises:
        TargetError: a task sleeps in the code, or none could make the call; ``allocations``
            has what is still allocated.
    """
    if allocations.is_empty:
        return
    otherwise = f"its memory ({allocations.memory // 1024:,} KiB) cannot be given back yet"
    if guest.stub.stands():
        help_ = "let it go on (`cont` in its monitor), then use `kprobe restore`"
        raise TargetError(f"the guest is paused: {otherwise}; {help_}")
    with reporting(warn, _FOR_EXIT):
        await_exit(guest, allocations, otherwise=otherwise)
    allocations.keep_instances(())
    injector = CallInjector(guest.stub, guest.memory, guest.kernel, allocations)
    with reporting(warn, _FOR_TASK), guest.stub.paused(), injector.task() as task:
        free(task, guest.kernel)


@contextmanager
def reporting(warn: Callable[[str], None], words: str) -> Generator[None]:
    """Report ``words`` once if the body takes longer than ``_PATIENCE_S``."""
    timer = threading.Timer(_PATIENCE_S, warn, [words])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def await_exit(guest: Guest, allocations: AllocationLog, *, otherwise: str) -> None:
    """Return when nobody is inside the probes' code, or will be led there.

    Neither by a breakpoint that was there, nor by a return address on a stack.

    The guest may run, and runs on. No probe may be armed.

    Raises:
        TargetError: somebody stays for seconds; ``otherwise`` says what cannot be done then.
    """

    def is_quiet() -> bool:
        allocations.check()
        # Who is in our code now may still lead a call to us: so each time anew.
        if guest.arch.returns.comes_back:
            restore_callers(guest.memory, allocations.instances)
        return not awaited(guest, allocations.instances)

    in_use = list(code_in_use(guest, allocations))
    with stopped_outside(guest, in_use, otherwise=otherwise, also=is_quiet):
        pass


def code_in_use(guest: Guest, allocations: AllocationLog) -> Iterator[Text]:
    """Yield the ranges of code that nobody may be inside when it is changed or given back."""
    # All at once: who is still on the way to our callback would be in the code a moment later.
    yield from allocations.code
    yield from trap_text(guest, allocations)


class DeadCalls:
    """Makes room for calls in progress, where tasks that have died left too little."""

    def __init__(self, journal: Journal) -> None:
        """Have looked at nothing yet; ``journal`` is the session's."""
        self._journal = journal
        self._checked_s = 0.0
        self._nmissed = 0

    def is_due(self) -> bool:
        """Whether it is time to look whether room was missing; then that is now."""
        now = time.monotonic()
        if now < self._checked_s + _POLL_S:
            return False
        self._checked_s = now
        return True

    def free(self, guest: Guest, tables: Sequence[InstanceTable], nmissed: int) -> None:
        """Free what dead tasks' calls have, if calls were missed since the last time.

        Args:
            guest: whose calls.
            tables: where they are.
            nmissed: calls that there was no room for so far.

        Raises:
            TargetError: as of ``free_dead_calls``.
        """
        before, self._nmissed = self._nmissed, nmissed
        if nmissed != before:
            with guest.stub.paused():
                self._journal.check()
                ranges = list(code_in_use(guest, self._journal.allocations))
                free_dead_calls(guest, tables, ranges, self._journal.check)


def trap_text(guest: Guest, allocations: AllocationLog) -> list[Text]:
    """Return the code in which who ran into a breakpoint of ours is on the way to our callback."""
    info = guest.arch.patch.trap
    trap = None if info is None else guest.kernel.symbols.find(info.symbol)
    # Who ran into a breakpoint before it went must still find who takes it for theirs.
    return [(trap.addr, Addr(trap.addr + trap.size))] if trap and allocations.has_notifier else []


def free(task: Task, kernel: Kernel, live: Iterable[Allocation] | None = None) -> None:
    """Free some allocations, or all of a task's log.

    The last first, whatever fails on the way.
    """
    # Interrupted in the middle of a call: what it allocates is freed, too.
    _come_back(task)
    found = list(task.allocations.live if live is None else live)
    points = [each for each in found if each.kind is Kind.TRACEPOINT]
    with ExitStack() as all_of_it:
        all_of_it.callback(_come_back, task)
        for allocation in found:
            if allocation.kind is not Kind.TRACEPOINT:
                all_of_it.callback(_free, task, kernel, allocation)
        # First, and all at once: to wait until nobody is on the way to our code takes a while.
        all_of_it.callback(_switch_off, task, kernel, points)


def _come_back(task: Task) -> None:
    if task.is_calling:
        task.finish(_PATIENCE_S)


def _switch_off(task: Task, kernel: Kernel, points: Sequence[Allocation]) -> None:
    try:
        _let_go(task, kernel, points)
    except KeyboardInterrupt:
        _come_back(task)
        _let_go(task, kernel, [each for each in points if each in task.allocations.live])
        raise


def _let_go(task: Task, kernel: Kernel, points: Sequence[Allocation]) -> None:
    # Nothing of ours is called any more then, and nobody is on the way there.
    if not points:
        return
    _come_back(task)
    for each in points:
        if _listens(task.memory, kernel, each):
            unregister = first_of(kernel, "tracepoint_probe_unregister")
            task.call(unregister, each.addr, each.size, each.size)
    # tracepoint_synchronize_unregister(), of all releases: each waits for other tracepoints.
    task.call(first_of(kernel, "synchronize_rcu"))
    srcu, wait = map(kernel.symbols.find, ("tracepoint_srcu", "synchronize_srcu"))
    if srcu is not None and wait is not None:
        task.call(wait.addr, srcu.addr)
    if (sleeping := kernel.symbols.find("synchronize_rcu_tasks_trace")) is not None:
        task.call(sleeping.addr)
    for each in points:
        task.allocations.drop(each)


def _listens(memory: GuestMemory, kernel: Kernel, point: Allocation) -> bool:
    # The kernel complains of one to unregister that is not there; where nothing tells, it is.
    with suppress(UnknownTypeError, FormatError, MemoryFault):
        if kernel.types is not None:
            at = memory.u64(point.addr + kernel.types.offset("tracepoint", "funcs"))
            for _ in range(_MOST_LISTENERS):
                found = memory.u64(at) if at else 0
                if found in (0, point.size):
                    return found != 0
                at += _LISTENER
    return True


def _free(task: Task, kernel: Kernel, allocation: Allocation) -> None:
    try:
        _free_once(task, kernel, allocation)
    except KeyboardInterrupt:
        # The rest follows, and with it what proves that this is still allocated.
        _come_back(task)
        if allocation in task.allocations.live:
            _free_once(task, kernel, allocation)
        raise


_FREE = {
    Kind.DATA: "vfree",
    Kind.NOTIFIER: "unregister_die_notifier",
    Kind.PER_CPU: "free_percpu",
}


def _free_once(task: Task, kernel: Kernel, allocation: Allocation) -> None:
    _come_back(task)
    match allocation.kind:
        case Kind.ROX:
            set_rw(task, kernel, allocation)
        case Kind.CODE:
            # Interrupted in the middle, it is still read-only; freed so, it would crash the guest.
            for rox in task.allocations.live:
                if rox.kind is Kind.ROX and rox.addr == allocation.addr:
                    set_rw(task, kernel, rox)
            free_code(task, kernel, allocation)
        case Kind.TRACEPOINT:
            _let_go(task, kernel, [allocation])
        case Kind.DATA | Kind.NOTIFIER | Kind.PER_CPU:
            function = first_of(kernel, _FREE[allocation.kind])
            task.call(function, allocation.addr, returns=allocation)
        case _:
            assert_never(allocation.kind)
