"""Injected calls of the guest's functions, in a task that may sleep.

A breakpoint at a place that tasks pass with no lock held stops one. Its registers go into a
pt_regs frame on its own stack, with the kernel's interrupt return as return address, and it is
sent into the function instead. When the function returns, the kernel's own code puts the task
back where it was: a tracer killed in the middle harms nobody. What is where on that stack, and
which code of the kernel's it is, is written down in each architecture's ``inject_ops``.
"""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from msgspec import Struct

from kprobes.arch.machine import (
    CallSetup,
    FunctionCall,
    InjectOps,
    ReturnPath,
    address_of,
    is_idle,
)
from kprobes.arch.registry import machine
from kprobes.errors import (
    GuestMigratedError,
    GuestReplacedError,
    MemoryFault,
    TargetError,
)
from kprobes.guest.allocations import Allocation, AllocationLog, Call
from kprobes.guest.boot import sleeping_places
from kprobes.guest.guest import GuestMemory
from kprobes.guest.stops import (
    MIGRATED,
    PAUSED,
    breakpoint_at,
    run_until_stop,
    serve_debugger,
)
from kprobes.model.kernel import Kernel
from kprobes.transport.stub import Stub
from kprobes.units import U64, Addr, Phys

_WORD = 8
_BUSY_WAIT_S = 0.03
_CALL_S = 10.0
_MIGRATION_S = 0.05
"""Between looks whether a guest is still being migrated."""
_MIGRATING = "the guest is being migrated, and nothing can be called in it meanwhile"

_SLEEPABLE = ("vmstat_shepherd", "vmstat_update")
_SYSCALLS = (
    "read write openat close poll ppoll select nanosleep clock_nanosleep getpid getppid wait4 "
    "futex epoll_wait ioctl newfstat sendto recvfrom rt_sigaction rt_sigprocmask sched_yield"
)
_TIMERS = (
    "hrtimer_interrupt",
    "tick_nohz_handler",
    "tick_nohz_lowres_handler",
    "tick_handle_periodic",
)
"""Handlers of a CPU's timer interrupt: with high resolution; without (``highres=off``, or no clock
that is fit for it), when an idle CPU has no ticks, by both names; and when it has them."""


class Returned(Struct, frozen=True, kw_only=True):
    """A task at the return trap.

    Attributes:
        thread: the vCPU that it is on.
        number: of the call that it comes from.
        result: of that call.
    """

    thread: int
    number: int
    result: int


class ReturnTrap(Struct, frozen=True, kw_only=True):
    """The place that a task's injected calls return to.

    Attributes:
        debugger: of its guest, which is stopped before and after.
        place: the address that they return to; who waits has a breakpoint there.
        frame: of the task.
        info: of the guest's architecture.
        check: raises GuestReplacedError unless the guest is the same, and the task's frame there.
    """

    debugger: Stub
    place: Addr
    frame: int
    info: InjectOps
    check: Callable[[], None]

    def poll(self) -> Returned | None:
        """Return the task if it is at the trap."""
        threads = self.debugger.ids()
        found = (self._returned(thread, self.debugger.registers(thread)) for thread in threads)
        return next((returned for returned in found if returned is not None), None)

    def wait(self, number: int | None, timeout_s: float) -> Returned:
        """Let the guest run until a call comes back, any one for None.

        Raises:
            TargetError: it did not come back in time.
        """
        deadline = time.monotonic() + timeout_s
        while (thread := run_until_stop(self.debugger, deadline, self.check)) is not None:
            registers = self.debugger.registers(thread)
            returned = self._returned(thread, registers)
            if returned is not None and number in (None, returned.number):
                return returned
            if registers[self.info.pc] == self.place:
                self._skip_trap(thread, registers)
        raise TargetError("a function that the guest was made to call did not return")

    def _returned(self, thread: int, registers: Mapping[str, int]) -> Returned | None:
        # Sleeping may have moved the task to another vCPU: its stack tells who it is.
        info = self.info
        if registers[info.pc] != self.place or info.returned_frame(registers) != self.frame:
            return None
        return Returned(thread=thread, number=registers[info.number], result=registers[info.result])

    def _skip_trap(self, thread: int, registers: Mapping[str, int]) -> None:
        # A task that made a call before and has not run since: it would stop at the trap
        # again and again, and nobody else would ever run. What is done there is done for it.
        read = partial(self.debugger.read, cpu=thread)
        after = self.info.skip_trap(read, registers)
        _set_registers(self.debugger, thread, after, self.check)


def nothing_of(result: int) -> None:
    """Do nothing with what a call has returned."""
    del result


class Task(Struct, kw_only=True):
    """A task of the guest that runs what we say.

    Attributes:
        trap: where its calls come back to.
        return_path: that it goes from there.
        memory: of its guest.
        allocations: where it notes what its calls allocate and free.
        thread: the vCPU that it is on.
        is_calling: whether a call has not come back: nobody knows where the task is, and it can
            make no other. It goes its own way when the function returns.
    """

    trap: ReturnTrap
    return_path: ReturnPath
    memory: GuestMemory
    allocations: AllocationLog
    thread: int
    is_calling: bool = False

    def call(
        self,
        function: Addr,
        *args: int,
        allocates: Allocation | None = None,
        returns: Allocation | None = None,
        timeout_s: float = _CALL_S,
        mark: Callable[[int], None] = nothing_of,
    ) -> int:
        """Call a function of the guest with some numbers and return its result.

        Args:
            function: its address.
            args: for it.
            allocates: what it allocates, at address 0 when the result will be the address.
            returns: what it frees.
            timeout_s: how long it may take.
            mark: given the result before that is noted: what proves that the guest has it.

        Raises:
            TargetError: it did not come back in time.
            GuestReplacedError: another guest runs there meanwhile; nothing was called.
        """
        self.allocations.check()
        if self.is_calling:
            raise ValueError("the task has not returned from its last call")
        trap = self.trap
        called = FunctionCall(function=function, args=args)
        setup = trap.info.set_up_call(self.return_path, trap.frame, called)
        call = Call(
            frame=trap.frame,
            trap=trap.place,
            number=self.allocations.calls + 1,
            allocates=allocates,
            returns=returns,
        )
        self.allocations.begin(call)
        self.is_calling = True
        self.change(_bytes(setup), {**setup.registers, trap.info.number: self.allocations.calls})
        return self.finish(timeout_s, mark)

    def change(self, frame: bytes, registers: Mapping[str, int]) -> None:
        """Write to the task's frame and its registers.

        Raises:
            GuestReplacedError: another guest runs there, or another state of it. What was written
                after that came is taken back: the guest has stood still.
        """
        place, memory = self.trap.frame, self.memory
        before = memory.read(place, len(frame))
        memory.write(place, frame)
        try:
            _set_registers(self.trap.debugger, self.thread, registers, self.allocations.check)
        except GuestReplacedError:
            # Its page tables may lead nowhere from there.
            with suppress(MemoryFault):
                if memory.read(place, len(frame)) == frame:
                    memory.write(place, before)
            raise

    def finish(self, timeout_s: float, mark: Callable[[int], None] = nothing_of) -> int:
        """Wait for the call that is under way and return its result; see ``call``.

        Raises:
            TargetError: it did not come back in time.
            GuestReplacedError: nor will it, as another guest runs there.
        """
        self.trap.check()
        try:
            returned = self.trap.wait(self.allocations.calls, timeout_s)
        except TargetError:
            self.trap.check()
            raise
        self.thread, self.is_calling = returned.thread, False
        try:
            mark(returned.result)
        finally:
            self.allocations.end(returned.result)
        return returned.result


def _set_registers(
    debugger: Stub, thread: int, registers: Mapping[str, int], check: Callable[[], None]
) -> None:
    # What another guest got, or another state of it, is taken back: it has not run since.
    try:
        before = debugger.set_registers(thread, registers)
    except TargetError:
        check()
        raise
    try:
        check()
    except GuestReplacedError:
        now = debugger.registers(thread)
        if all(now[name] == value & U64 for name, value in registers.items()):
            debugger.set_registers(thread, before)
        raise


def _bytes(setup: CallSetup) -> bytes:
    return b"".join(word.to_bytes(_WORD, "little") for word in setup.words)


class CallInjector:
    """Finds tasks of one guest that can make calls; it is stopped before and after ``task``.

    Attributes:
        memory: of the guest.
        allocations: where tasks note what they allocate and free.
    """

    def __init__(
        self, debugger: Stub, memory: GuestMemory, kernel: Kernel, allocations: AllocationLog
    ) -> None:
        self._info = machine(kernel.arch).inject_ops
        self._debugger = debugger
        self.memory = memory
        self._kernel = kernel
        self.allocations = allocations
        self._return_path = self._info.return_path(memory, kernel)
        self._places = self._sleepable()

    @contextmanager
    def task(self, *, timeout_s: float = 10.0) -> Generator[Task]:
        """Yield a task in process context that may sleep.

        Raises:
            TargetError: none came by in time, or somebody else has stopped the guest.
            GuestMigratedError: it runs in another QEMU now.
        """
        self._await_migration(timeout_s)
        serve_debugger(self._debugger, self.allocations.check)
        if self._debugger.is_held:
            raise TargetError(PAUSED)
        timers = self._timers()
        message = self._info.timer_message(self.memory, self._kernel, timers)
        stopped = None
        # Where all sleep, and one can be woken, nobody would come by.
        if message is None or not self._are_idle():
            stopped = self._stop_at(self._places, min(_BUSY_WAIT_S, timeout_s))
        if stopped is None:
            self._nudge(timers, message, timeout_s)
            stopped = self._stop_at(self._places, timeout_s)
        if stopped is None:
            raise TargetError("no task of the guest came by that could make a call; is it hung?")
        with self._borrowed(*stopped) as task:
            yield task

    def _await_migration(self, timeout_s: float) -> None:
        # QEMU aborts where a guest arrives that left when a vCPU stood at a breakpoint.
        stub, deadline = self._debugger, time.monotonic() + timeout_s
        while not stub.is_held and stub.is_migrating():
            if time.monotonic() > deadline:
                raise TargetError(_MIGRATING)
            stub.resume()
            time.sleep(_MIGRATION_S)
            if stub.is_running:
                stub.stop()
        if stub.is_held and stub.has_migrated():
            raise GuestMigratedError(MIGRATED)

    @contextmanager
    def _borrowed(self, thread: int, registers: Mapping[str, int]) -> Generator[Task]:
        task, data = self._frame(thread, registers)
        # As if a call had come back, from where resuming is right, too: after our death the first
        # call can be told from the one before it by its number, as any other.
        at_trap = self._info.at_trap(self._return_path, task.trap.frame, registers)
        number = {self._info.number: self.allocations.calls}
        task.change(data, {**at_trap, **number})
        with breakpoint_at(self._debugger, self._return_path.trap):
            yield task

    def _frame(self, thread: int, registers: Mapping[str, int]) -> tuple[Task, bytes]:
        # And what must be in its frame.
        self.allocations.check()
        frame, data = self._info.save_frame(self._return_path, registers)
        trap = ReturnTrap(
            debugger=self._debugger,
            place=self._return_path.trap,
            frame=frame,
            info=self._info,
            check=partial(self._check_frame, frame, data),
        )
        task = Task(
            trap=trap,
            return_path=self._return_path,
            memory=self.memory,
            allocations=self.allocations,
            thread=thread,
        )
        return task, data

    def _check_frame(self, frame: int, data: bytes) -> None:
        # A task's saved registers prove its state, too, before memory has a mark: a guest's time
        # may jump ahead after a ``loadvm``, as QEMU's emulated TSC never goes back.
        self.allocations.check()
        # Its functions may write to the first words: arguments, a return address.
        half = len(data) // 2
        with suppress(MemoryFault):
            if self.memory.read(frame + half, len(data) - half) == data[half:]:
                return
        # Later nothing may tell it.
        self.allocations.note_restored()
        self.allocations.check()

    def _stop_at(
        self, places: Sequence[Addr], timeout_s: float
    ) -> tuple[int, Mapping[str, int]] | None:
        """Stop somebody who comes to one of these places; return the vCPU and its registers."""
        # Nobody need come by where one stands there: process 1, in a guest before its initcalls.
        # Let run, it would be past them.
        if (found := self._standing_at(places)) is not None:
            return found
        deadline = time.monotonic() + timeout_s
        with ExitStack() as breakpoints:
            for place in places:
                breakpoints.enter_context(breakpoint_at(self._debugger, place))
            while (
                thread := run_until_stop(self._debugger, deadline, self.allocations.check)
            ) is not None:
                # Two vCPUs may come to an earlier breakpoint at once. QEMU tells of the second
                # when the guest runs again, and the breakpoint is gone: that one is in the
                # middle of an interrupt, maybe.
                registers = self._debugger.registers(thread)
                if registers[self._info.pc] in places:
                    return thread, registers
            return None

    def _standing_at(self, places: Sequence[Addr]) -> tuple[int, Mapping[str, int]] | None:
        for thread in self._debugger.ids():
            registers = self._debugger.registers(thread)
            if registers[self._info.pc] in places:
                return thread, registers
        return None

    def _timers(self) -> list[Addr]:
        found = (address_of(self._kernel, name) for name in _TIMERS)
        return [addr for addr in found if addr is not None]

    def _are_idle(self) -> bool:
        each = map(self._debugger.registers, self._debugger.ids())
        return all(is_idle(self._info, self._kernel, registers) for registers in each)

    def _nudge(
        self, timers: Sequence[Addr], message: tuple[Phys, bytes] | None, timeout_s: float
    ) -> None:
        """Make an idle guest run vmstat_shepherd, from its next timer interrupt."""
        symbols = self._kernel.symbols
        work = symbols.find("shepherd")
        # Since 128ea9f6ccfb ("workqueue: Add system_percpu_wq and system_dfl_wq") (v6.17) the old
        # name makes the kernel complain.
        queue = symbols.find("system_percpu_wq") or symbols.find("system_wq")
        call = symbols.find("mod_delayed_work_on")
        if work is None or not timers or queue is None or call is None:
            return
        # It may be a second away.
        if message is not None:
            self._debugger.write_physical(*message)
        stopped = self._stop_at(timers, timeout_s)
        if stopped is None:
            return
        with self._borrowed(*stopped) as task:
            task.call(call.addr, 0, self.memory.u64(queue.addr), work.addr, 0)

    def _sleepable(self) -> list[Addr]:
        names = [self._info.switch, *_SLEEPABLE]
        names += sleeping_places(self.memory, self._kernel)
        if address_of(self._kernel, self._info.switch) is None:
            names += [f"{self._info.system_call}{name}" for name in _SYSCALLS.split()]
        found = [address_of(self._kernel, name) for name in names]
        return [addr for addr in found if addr is not None]
