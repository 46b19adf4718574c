"""The fate of a guest while it is probed: it ends, others pause it, it is replaced, it crashes.

A panic is noticed by a breakpoint where it begins: after that nothing runs that could tell of it,
and memory may be somebody else's a moment later. In kernel/panic.c all panics go through
``vpanic``, or ``panic`` where there is none, which calls ``kmsg_dump``, or ``kmsg_dump_desc``, when
all is in the log, and before it reboots. Likewise an orderly end: kernel_power_off(),
kernel_restart() and kernel_halt() in kernel/reboot.c all call ``syscore_shutdown`` when everything
else has been shut down. A hang is a CPU that has its interrupts off whenever it is
looked at, for long: what the kernel's own watchdog calls a hard lockup.
"""

import time
from collections.abc import Callable

from kprobes.arch.machine import address_of, is_idle
from kprobes.arch.registry import machine
from kprobes.errors import (
    GuestCrashedError,
    GuestMigratedError,
    GuestShutDownError,
    TargetError,
)
from kprobes.guest.guest import Guest
from kprobes.guest.identity import check_stopped
from kprobes.guest.journal import Journal
from kprobes.guest.stops import MIGRATED, breakpoint_at, run_until_stop
from kprobes.model.kernel import place_of
from kprobes.model.options import Options
from kprobes.transport.stub import SIGTRAP
from kprobes.units import Addr

_CHECK_S = 0.25
_DUMP_S = 5.0
"""How long a guest that panics has to write its log."""
_PANIC = ("vpanic", "panic")
_SHUTDOWN = "syscore_shutdown"
_LOGGED = ("kmsg_dump_desc", "kmsg_dump")
_WAITING = "spin_lock_slowpath"
"""Part of the name of the function that a CPU is in while it waits for another one's lock."""
_PARKED = ("play_dead", "arm_smccc", "cpu_die")
"""Parts of the names of functions that a CPU is in that was taken offline."""


class GuestWatch:
    """Finds out what has become of one guest. One thread checks; others may use its stub.

    Attributes:
        crash: how it crashed, or None.
        hang_timeout_s: for how long a CPU may have its interrupts off; None while no crash is
            looked for.
    """

    def __init__(self, guest: Guest, journal: Journal, warn: Callable[[str], None]) -> None:
        """Look at nothing yet.

        Args:
            guest: that is watched.
            journal: of what is done to it.
            warn: is told when somebody else has paused it.
        """
        self.crash: GuestCrashedError | None = None
        self.hang_timeout_s: float | None = None
        self._guest, self._journal, self._warn = guest, journal, warn
        self._checked_s = 0.0
        self._is_held = False
        self._jiffies = b""
        # Since when each vCPU has had interrupts off, whenever it was looked at.
        self._masked: dict[int, float] = {}
        # Where there are breakpoints, and what it means when one is come to.
        self._ends: dict[Addr, GuestCrashedError] = {}

    def begin(self, options: Options) -> None:
        """Look from now on for the ends that a recording asks for; it stands still for a moment.

        Raises:
            TargetError: this kernel has no function that panics, or that shuts down.
        """
        self.end()
        self.hang_timeout_s = options.hang_timeout_s
        ends = dict[Addr, GuestCrashedError]()
        if options.hang_timeout_s is not None:
            ends[self._place(*_PANIC)] = GuestCrashedError("the guest panicked")
        if options.until_shutdown:
            ends[self._place(_SHUTDOWN)] = GuestShutDownError("the guest shuts down")
        if ends:
            with self._guest.stub.paused():
                for place in ends:
                    self._guest.stub.insert_breakpoint(place, is_hardware=True)
                    self._ends[place] = ends[place]

    def end(self) -> None:
        """Look for no end any more; the guest stands still for a moment."""
        self.hang_timeout_s = None
        self._masked.clear()
        if self._ends:
            with self._guest.stub.paused():
                while self._ends:
                    self._guest.stub.remove_breakpoint(self._ends.popitem()[0])

    def _place(self, *names: str) -> Addr:
        place = address_of(self._guest.kernel, *names)
        if place is None:
            raise TargetError(
                f"this kernel has no function `{names[-1]}`: its end cannot be noticed"
            )
        return place

    def check(self) -> None:
        """Raise what has become of it; to be called often.

        Raises:
            GuestGoneError: it has ended.
            GuestReplacedError: it was rebooted, or restored to an earlier state.
            GuestCrashedError: it panicked, hangs, or shuts down, and that was looked for. It stands
                still after a panic, and before it shuts down, just before whatever its kernel does
                then. Or it was migrated, and what is left here stands still.
        """
        if self.crash is not None:
            raise self.crash
        if time.monotonic() > self._checked_s + _CHECK_S:
            # The guest's memory outlives it; only the stub tells that it is gone.
            self._check_stub()
            self.check_same()
            self._check_hang()
            self._checked_s = time.monotonic()

    def check_same(self) -> None:
        """Check that it is still the one that was attached to.

        It stands still for a moment where its time seems to.

        Raises:
            GuestReplacedError: it was rebooted, or restored to an earlier state.
        """
        self._journal.check()
        jiffies = self._guest.kernel.symbols.find("jiffies_64")
        now = self._guest.memory.read(jiffies.addr, 8) if jiffies is not None else b""
        if now == self._jiffies:
            with self._guest.stub.paused():
                self.check_stopped()
        self._jiffies = now

    def check_stopped(self) -> None:
        """Check the same of a guest that stands still; errors as for ``check_same``."""
        check_stopped(self._journal, self._guest.stub, self._guest.memory.ram)

    def _check_stub(self) -> None:
        stub, was_held = self._guest.stub, self._is_held
        if not (stub.is_running or stub.is_held):
            # At the beginning of its boot.
            return
        reply = stub.wait(0)
        if reply is not None and reply.signal == SIGTRAP:
            # Nobody else lets it run meanwhile.
            with stub.paused():
                self._examine_stop()
        # What a debugger has stopped that we serve goes on when we are gone.
        self._is_held = stub.is_held and not stub.is_debugged
        if self._is_held and stub.has_migrated():
            self.crash = GuestMigratedError(MIGRATED)
            raise self.crash
        if self._is_held != was_held:
            self._journal.note_held(is_held=self._is_held)
        if self._is_held and not was_held:
            self._warn("somebody else has paused the guest; events come again when it goes on")

    def _examine_stop(self) -> None:
        # Of a breakpoint that two vCPUs came to at once the second may be told late.
        stub, pc = self._guest.stub, machine(self._guest.kernel.arch).inject_ops.pc
        places = (Addr(stub.registers(each)[pc]) for each in stub.ids())
        self.crash = next((self._ends[place] for place in places if place in self._ends), None)
        if self.crash is None:
            stub.resume()
            return
        self.end()
        logged = address_of(self._guest.kernel, *_LOGGED)
        if logged is not None and not isinstance(self.crash, GuestShutDownError):
            with breakpoint_at(stub, logged):
                run_until_stop(stub, time.monotonic() + _DUMP_S)
        raise self.crash

    def _check_hang(self) -> None:
        if self.hang_timeout_s is None:
            return
        now, stub = time.monotonic(), self._guest.stub
        with stub.paused():
            masked = {} if stub.is_held else self._where_masked()
        self._masked = {thread: self._masked.get(thread, now) for thread in masked}
        if not self._masked:
            return
        # Others may wait for a lock that the first one has, with their interrupts off, too.
        first = min(self._masked, key=lambda each: (self._masked[each], _WAITING in masked[each]))
        off_s = now - self._masked[first]
        if off_s >= self.hang_timeout_s:
            self.crash = GuestCrashedError(
                f"the guest hangs: a CPU has had interrupts off for {off_s:.0f} s, in "
                f"{masked[first]}"
            )
            raise self.crash

    def _where_masked(self) -> dict[int, str]:
        # By vCPU, of those that sleep or are offline none.
        kernel, info = self._guest.kernel, machine(self._guest.kernel.arch).inject_ops
        found = dict[int, str]()
        for thread in self._guest.stub.ids():
            registers = self._guest.stub.registers(thread)
            pc = registers[info.pc]
            symbol = kernel.symbols.at(pc)
            name = "" if symbol is None else symbol.name
            # A program's, or that of a CPU that was never started; what has no name is in a module
            # that came later, or is somebody's code.
            if not pc >> 63 or any(part in name for part in _PARKED):
                continue
            if not (is_idle(info, kernel, registers) or info.takes_interrupts(registers)):
                found[thread] = place_of(kernel.symbols, pc)
        return found
