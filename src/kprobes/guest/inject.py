"""Calling functions of the guest: a task that may sleep is borrowed for a moment.

A breakpoint at a place that tasks pass with no lock held stops one. Its registers go into a
pt_regs frame on its own stack, with the kernel's interrupt return as return address, and it is
sent into the function instead. When the function returns, the kernel's own code puts the task
back where it was: a tracer killed in the middle harms nobody. What is where on that stack, and
which code of the kernel's it is, is written down in each architecture's ``borrowing``.
"""

import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from kprobes.arch.machine import BorrowFacts, Called, Entered, Way, address_of
from kprobes.arch.registry import machine
from kprobes.errors import TargetError
from kprobes.guest.allocations import Call, Ledger, Loan
from kprobes.guest.guest import GuestMemory
from kprobes.model.kernel import Kernel
from kprobes.transport.stub import Stub
from kprobes.units import Addr

_WORD = 8
_PAUSED = "the guest is paused, and must run for this: let it go on (`cont` in its monitor)"
_BUSY_WAIT_S = 0.03
_CALL_S = 10.0

_SLEEPABLE = ("vmstat_shepherd", "vmstat_update")
_SYSCALLS = (
    "read write openat close poll ppoll select nanosleep clock_nanosleep getpid getppid wait4 "
    "futex epoll_wait ioctl newfstat sendto recvfrom rt_sigaction rt_sigprocmask sched_yield"
)
_TIMER = "hrtimer_interrupt"


@dataclass(frozen=True, slots=True, kw_only=True)
class Back:
    """A task at the landing.

    Attributes:
        thread: the vCPU that it is on.
        number: of the call that it comes from.
        result: of that call.
    """

    thread: int
    number: int
    result: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """Where the calls of one borrowed task come back to.

    Attributes:
        debugger: of its guest, which is stopped before and after.
        place: the address that they return to; who waits has a breakpoint there.
        frame: of the task.
        facts: of the guest's architecture.
    """

    debugger: Stub
    place: Addr
    frame: int
    facts: BorrowFacts

    def look(self) -> Back | None:
        """Return the task if it stands at the landing."""
        threads = self.debugger.ids()
        found = (self._back(thread, self.debugger.registers(thread)) for thread in threads)
        return next((back for back in found if back is not None), None)

    def wait(self, number: int | None, timeout_s: float) -> Back:
        """Let the guest run until a call comes back, any one for None.

        Raises:
            TargetError: it did not come back in time.
        """
        deadline = time.monotonic() + timeout_s
        while (thread := run_until_stop(self.debugger, deadline)) is not None:
            registers = self.debugger.registers(thread)
            back = self._back(thread, registers)
            if back is not None and number in (None, back.number):
                return back
            if registers[self.facts.pc] == self.place:
                self._send_on(thread, registers)
        raise TargetError("a function that the guest was made to call did not return")

    def _back(self, thread: int, registers: Mapping[str, int]) -> Back | None:
        # Sleeping may have moved the task to another vCPU: its stack tells who it is.
        facts = self.facts
        if registers[facts.pc] != self.place or facts.home(registers) != self.frame:
            return None
        return Back(thread=thread, number=registers[facts.number], result=registers[facts.result])

    def _send_on(self, thread: int, registers: Mapping[str, int]) -> None:
        # A task that was borrowed before and has not run since: it would stop at the landing
        # again and again, and nobody else would ever run. What is done there is done for it.
        read = partial(self.debugger.read, cpu=thread)
        self.debugger.set_registers(thread, self.facts.send_on(read, registers))


@dataclass(slots=True, kw_only=True)
class Task:
    """A task of the guest that runs what we say.

    Attributes:
        landing: where its calls come back to.
        way: that it goes from there.
        memory: of its guest.
        ledger: where it notes what its calls lend and give back.
        thread: the vCPU that it is on.
        is_away: whether a call has not come back: nobody knows where the task is, and it can
            make no other. It goes its own way when the function returns.
    """

    landing: Landing
    way: Way
    memory: GuestMemory
    ledger: Ledger
    thread: int
    is_away: bool = False

    def call(
        self,
        function: Addr,
        *args: int,
        lends: Loan | None = None,
        returns: Loan | None = None,
    ) -> int:
        """Call a function of the guest with some numbers and return its result.

        Args:
            function: its address.
            args: for it.
            lends: what the guest lends by it, at address 0 when the result will tell where.
            returns: what the guest gets back by it.

        Raises:
            TargetError: it did not come back in time.
            GuestReplacedError: another guest runs there meanwhile; nothing was called.
        """
        self.ledger.check()
        if self.is_away:
            raise ValueError("the borrowed task has not come back from its last call")
        landing = self.landing
        called = Called(function=function, args=args)
        entered = landing.facts.enter(self.way, landing.frame, called)
        call = Call(
            frame=landing.frame,
            landing=landing.place,
            number=self.ledger.calls + 1,
            lends=lends,
            returns=returns,
        )
        self.memory.write(landing.frame, _bytes(entered))
        self.ledger.begin(call)
        self.is_away = True
        registers = {**entered.registers, landing.facts.number: self.ledger.calls}
        landing.debugger.set_registers(self.thread, registers)
        return self.finish(_CALL_S)

    def finish(self, timeout_s: float) -> int:
        """Wait for the call that is under way and return its result.

        Raises:
            TargetError: it did not come back in time.
            GuestReplacedError: nor will it, as another guest runs there.
        """
        self.ledger.check()
        try:
            back = self.landing.wait(self.ledger.calls, timeout_s)
        except TargetError:
            self.ledger.check()
            raise
        self.thread, self.is_away = back.thread, False
        self.ledger.end(back.result)
        return back.result


def _bytes(entered: Entered) -> bytes:
    return b"".join(word.to_bytes(_WORD, "little") for word in entered.words)


@contextmanager
def stopping_at(debugger: Stub, place: Addr) -> Generator[None]:
    """Have a breakpoint in a stopped guest."""
    with ExitStack() as undo:
        undo.callback(_forget, debugger, place)
        debugger.insert_breakpoint(place)
        yield


def _forget(debugger: Stub, place: Addr) -> None:
    # It runs when it could not be stopped: it is gone then, and this says so.
    with debugger.paused():
        debugger.remove_breakpoint(place)


def run_until_stop(debugger: Stub, deadline: float) -> int | None:
    """Let the guest run until a vCPU stops it; return that vCPU, or None at the deadline.

    The guest is stopped again in either case.

    Raises:
        TargetError: somebody else has stopped the guest.
    """
    debugger.resume()
    try:
        stopped = debugger.wait(max(deadline - time.monotonic(), 0))
    except BaseException:
        # Ctrl-C, too: whoever takes breakpoints away needs a stopped guest.
        debugger.stop()
        raise
    if stopped is None:
        debugger.stop()
    if debugger.is_held:
        raise TargetError(_PAUSED)
    return None if stopped is None else stopped.cpu


class Borrower:
    """Finds tasks to borrow in one guest, which is stopped before and after.

    Attributes:
        memory: of the guest.
        ledger: where tasks note what they lend and give back.
    """

    def __init__(self, debugger: Stub, memory: GuestMemory, kernel: Kernel, ledger: Ledger) -> None:
        self._facts = machine(kernel.arch).borrowing
        self._debugger = debugger
        self.memory = memory
        self._kernel = kernel
        self.ledger = ledger
        self._way = self._facts.way(memory, kernel)

    @contextmanager
    def task(self, *, timeout_s: float = 10.0) -> Generator[Task]:
        """Borrow a task in process context that may sleep.

        Raises:
            TargetError: none came by in time, or somebody else has stopped the guest.
        """
        if self._debugger.is_held:
            raise TargetError(_PAUSED)
        places = self._sleepable()
        thread = self._catch(places, min(_BUSY_WAIT_S, timeout_s))
        if thread is None:
            self._nudge(timeout_s)
            thread = self._catch(places, timeout_s)
        if thread is None:
            raise TargetError("no task of the guest came by that could be borrowed; is it hung?")
        with self._borrowed(thread) as task:
            yield task

    @contextmanager
    def _borrowed(self, thread: int) -> Generator[Task]:
        task = self._frame(thread)
        with stopping_at(self._debugger, self._way.landing):
            yield task

    def _frame(self, thread: int) -> Task:
        self.ledger.check()
        frame, data = self._facts.keep(self._way, self._debugger.registers(thread))
        self.memory.write(frame, data)
        # Nothing may have been called yet when the caller fails: resuming must then be right.
        landing = Landing(
            debugger=self._debugger, place=self._way.landing, frame=frame, facts=self._facts
        )
        return Task(
            landing=landing,
            way=self._way,
            memory=self.memory,
            ledger=self.ledger,
            thread=thread,
        )

    def _catch(self, places: Sequence[Addr], timeout_s: float) -> int | None:
        """Stop somebody who comes to one of these places."""
        deadline = time.monotonic() + timeout_s
        with ExitStack() as breakpoints:
            for place in places:
                breakpoints.enter_context(stopping_at(self._debugger, place))
            while (thread := run_until_stop(self._debugger, deadline)) is not None:
                # Two vCPUs may come to an earlier breakpoint at once. QEMU tells of the second
                # when the guest runs again, and the breakpoint is gone: that one is in the
                # middle of an interrupt, maybe.
                if self._debugger.registers(thread)[self._facts.pc] in places:
                    return thread
            return None

    def _nudge(self, timeout_s: float) -> None:
        """Make an idle guest run vmstat_shepherd, from its next timer interrupt."""
        symbols = self._kernel.symbols
        work, timer = symbols.find("shepherd"), symbols.find(_TIMER)
        # Since 128ea9f6ccfb ("workqueue: Add system_percpu_wq and system_dfl_wq") (v6.17) the old
        # name makes the kernel complain.
        queue = symbols.find("system_percpu_wq") or symbols.find("system_wq")
        call = symbols.find("mod_delayed_work_on")
        if work is None or timer is None or queue is None or call is None:
            return
        self._kick()
        thread = self._catch([timer.addr], timeout_s)
        if thread is None:
            return
        with self._borrowed(thread) as task:
            task.call(call.addr, 0, self.memory.u64(queue.addr), work.addr, 0)

    def _kick(self) -> None:
        """Give a sleeping CPU a timer interrupt, which may be a second away otherwise.

        Its idle task does it itself. A timer interrupt too many changes nothing.
        """
        called = self._facts.kick(self.memory, self._kernel)
        if called is None:
            return
        for thread in self._debugger.ids():
            if not self._is_idle(self._debugger.registers(thread)):
                continue
            # Straight back to what it was doing: the landing may carry a breakpoint by then.
            frame = self._frame(thread).landing.frame
            entered = self._facts.leave(self._way, frame, called)
            self._debugger.set_registers(thread, entered.registers)
            return

    def _is_idle(self, registers: Mapping[str, int]) -> bool:
        symbol = self._kernel.symbols.at(registers[self._facts.pc])
        is_idle = symbol is not None and symbol.name in self._facts.idle
        return is_idle and self._facts.may_leave_idle(registers)

    def _sleepable(self) -> list[Addr]:
        names = [self._facts.switch, *_SLEEPABLE]
        if address_of(self._kernel, self._facts.switch) is None:
            names += [f"{self._facts.system_call}{name}" for name in _SYSCALLS.split()]
        found = [address_of(self._kernel, name) for name in names]
        return [addr for addr in found if addr is not None]
