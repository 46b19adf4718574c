"""A gdb stub's client: the vCPUs, the memory and the monitor of a guest under QEMU.

Written down in the GDB manual, appendix "GDB Remote Serial Protocol"; what QEMU makes of it in
``gdbstub/``. Requests need a stopped guest: QEMU answers none while it runs, and the first byte
of one would stop it.
"""

import math
import re
import socket
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol, Self

from kprobes.errors import FormatError, GuestGoneError, TargetError, UnreachableError
from kprobes.formats import rsp
from kprobes.formats.target_xml import Description
from kprobes.transport.address import dial, peer_pid
from kprobes.transport.connection import DETACH, FAREWELL, Wire, check_ok, handshake
from kprobes.transport.stub_io import StubMemory, StubRegisters, forget_breakpoints

_MAX_CPUS = 4096
_MIGRATING = re.compile(r"status: (?:setup|active|device|pre-|postcopy-|wait-|cancelling)")
_MIGRATED = re.compile(r"\((?:finish-migrate|postmigrate)\)")
_SIGINT, SIGTRAP = 2, 5
"""Of a breakpoint or a step; a stop by a monitor, or of QEMU's own accord, has another."""


class Debugger(Protocol):
    """Another debugger, whose requests come to the guest through our connection."""

    def takes(self, reply: rsp.StopReply) -> bool:
        """Return whether the guest, which has just stopped, has stopped for it."""
        ...

    def serve(self, check: Callable[[], None]) -> None:
        """Do what it asks for until it lets the guest run; ``check`` is called meanwhile."""
        ...

    def pause(self, cpu: int) -> bool:
        """Take over a guest that was stopped for a trigger's hit; return whether it is there."""
        ...


class Stub:
    """A guest through its gdb stub. With ``read`` it implements ``ports.Memory``.

    The guest is stopped when the connection opens and runs when it is closed, whatever happened
    in between, unless somebody else had stopped it. Not to be shared by threads.

    Attributes:
        address: where it listens; another process reconnects there.
        is_running: whether the guest runs.
        is_held: whether somebody else has stopped the guest, who may have let it run since:
            ``stands`` finds out. It is never us who let it run then.
        debugger: another one that is served through this connection, or None.
        is_debugged: whether the guest stands for that, or one to come; it is held then.
        held_until_s: when it goes on whatever a debugger does, by time.monotonic().
        turn: is had by one thread at a time.
        stops: how often we, or a breakpoint of ours, stopped the guest, connecting included.
        longest_s: for how many seconds at once; may be set to 0 for what comes then.
    """

    def __init__(
        self,
        wire: Wire,
        address: str,
        *,
        clock: Callable[[], float] = time.perf_counter,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.address = address
        self.is_running = self.is_held = self.is_debugged = False
        self.debugger: Debugger | None = None
        self.held_until_s = math.inf
        self.stops = 1
        self._wire = wire
        self._clock = clock
        self._on_close = on_close
        self._paused_s = self.longest_s = 0.0
        self._stopped_at = clock()
        # By address: 0 for one that QEMU may write into memory, 1 for one of the CPU's.
        self._breakpoints: dict[int, int] = {}
        self._registers = StubRegisters(wire, packet_size=rsp.DEFAULT_PACKET_SIZE)
        self._memory = StubMemory(wire, packet_size=rsp.DEFAULT_PACKET_SIZE)
        self._can_vcont = False
        # A request to stop is on its way, or answered: that stop is ours.
        self._is_stopping = False
        self._is_closed = False
        self.turn = threading.RLock()
        self._pauses = 0

    @classmethod
    def open(cls, address: str, *, timeout_s: float = 5.0) -> Self:
        """Connect to ``HOST:PORT`` or a unix socket's path; the guest is stopped afterwards.

        Raises:
            UnreachableError: nobody listens, nobody answers, or not as a gdb stub does.
        """
        sock = dial(address, timeout_s=timeout_s)
        handshake(sock, address, timeout_s=timeout_s)
        return cls.adopt(sock, address, timeout_s=timeout_s)

    @classmethod
    def adopt(
        cls,
        sock: socket.socket,
        address: str,
        *,
        timeout_s: float = 5.0,
        is_held: bool = False,
        on_close: Callable[[], None] | None = None,
    ) -> Self:
        """Take over a socket on which ``handshake`` was said.

        Args:
            sock: closed with the stub.
            address: where a new connection can be had.
            timeout_s: for every single answer.
            is_held: whether somebody else had stopped the guest before the connection did.
            on_close: called once, after the connection is closed.

        Raises:
            UnreachableError: as for ``open``.
        """
        stub = cls(Wire(sock, timeout_s=timeout_s), address, on_close=on_close)
        stub.is_held = is_held
        try:
            stub._shake_hands()
        except (FormatError, GuestGoneError) as e:
            stub.close(resume=True)
            raise UnreachableError(f"{address}: not a gdb stub that we know: {e}") from e
        except BaseException:
            stub.close(resume=True)
            raise
        return stub

    def _shake_hands(self) -> None:
        size = rsp.packet_size(rsp.parse_supported(self._first_answer()))
        self._memory.packet_size = self._registers.packet_size = size
        # Without it QEMU's acknowledgements come along and are skipped.
        self._wire.ask(b"QStartNoAckMode")
        forget_breakpoints(self._wire, self.ids())
        words = self._wire.ask(b"vCont?").split(b";")
        self._can_vcont = words[0] == b"vCont" and {b"c", b"s"} <= set(words)
        self._memory.prepare_physical()

    def _first_answer(self) -> bytes:
        # A running guest was stopped by the connection: QEMU before 8.1 says so unasked. One
        # that was stopped already brings no such packet: never wait for it. The empty answer
        # is to the empty packet that came first.
        for answer in self._wire.until(time.monotonic() + self._wire.timeout_s):
            if answer and not rsp.is_stop(answer):
                return answer
        raise GuestGoneError(f"no answer within {self._wire.timeout_s:g} s")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()

    def fileno(self) -> int:
        """Return the socket, readable when the running guest stops."""
        return self._wire.sock.fileno()

    def peer(self) -> int | None:
        """Return the pid of the process that listens, or None when it is not on this machine."""
        return peer_pid(self._wire.sock)

    @property
    def description(self) -> Description:
        """What the stub says of the guest's registers; it stands still."""
        self._must_be_stopped()
        return self._registers.description

    @property
    def has_ended(self) -> bool:
        """Whether the guest is known to have ended; one that is only silent may come back."""
        return self._wire.has_ended

    @property
    def paused_s(self) -> float:
        """Seconds we have stopped the guest since the connection, until now."""
        is_ours = not (self.is_running or self.is_held)
        return self._paused_s + (self._clock() - self._stopped_at if is_ours else 0.0)

    # Running and stopping.

    def resume(self) -> None:
        """Let every vCPU run.

        One that stands on a breakpoint stops there again at once: remove it and ``step`` first. One
        that was migrated stays as it is.
        """
        self._must_be_stopped()
        if self.is_held:
            raise ValueError("somebody else has stopped the guest")
        if self.has_migrated():
            # While we had stopped it: it would run in two places.
            self.is_held = True
            return
        self._wire.send(b"vCont;c" if self._can_vcont else b"c")
        self._mark_running()

    def let_run(self) -> None:
        """Let every vCPU run, unless somebody else has stopped the guest."""
        if not self.is_held:
            self.resume()

    def stands(self) -> bool:
        """Return whether somebody else has stopped the guest and not let it run again."""
        with self.paused():
            return self._is_theirs

    @property
    def _is_theirs(self) -> bool:
        # Whether the guest stands because of somebody else, and not by a request of ours since.
        return self.is_held and not self._wire.has_stopped

    def has_migrated(self) -> bool:
        """Whether a stopped guest runs in another QEMU now, as this one says."""
        with self.turn:
            return self._prints("info status", _MIGRATED)

    def is_migrating(self) -> bool:
        """Whether a stopped guest is on its way to another QEMU, as this one says."""
        return self._prints("info migrate", _MIGRATING)

    def _prints(self, command: str, words: re.Pattern[str]) -> bool:
        try:
            return words.search(self.monitor(command)) is not None
        except GuestGoneError:
            # A late answer would be taken for that to the next request.
            raise
        except TargetError:
            return False

    def stop(self) -> rsp.StopReply:
        """Stop a running guest, unless somebody else has just done it.

        Raises:
            GuestGoneError: it does not stop within the timeout, or has ended.
        """
        if not self.is_running:
            raise ValueError("the guest is stopped already")
        if self._is_stopping:
            # We were interrupted when we waited for the answer, and may have it.
            self._wire.halt()
            self._mark_stopped()
            return rsp.StopReply(signal=_SIGINT, cpu=None)
        reply = self._stop_reply(0) if self._wire.is_readable else None
        if reply is not None:
            self._note_stop(reply)
        else:
            self._is_stopping = True
            self._wire.interrupt()
            reply = self._must_stop()
        self._is_debuggers(reply)
        return reply

    def wait(self, timeout_s: float) -> rsp.StopReply | None:
        """Return why a running guest stopped, or None when it still runs after the time.

        None also where it has stopped for the debugger. Threads take turns.
        """
        with self.turn:
            if not (self.is_running or self.is_held):
                raise ValueError("the guest is stopped already")
            reply = self._stop_reply(timeout_s)
            if reply is None:
                return None
            self._note_stop(reply)
            return None if self._is_debuggers(reply) else reply

    def step(self, cpu: int) -> rsp.StopReply:
        """Run one instruction of one vCPU; the others stay where they are."""
        self._must_be_stopped()
        if self._can_vcont:
            self._wire.send(b"vCont;s:%x" % cpu)
        else:
            check_ok(self._wire.ask(b"Hc%x" % cpu), "a vCPU")
            self._wire.send(b"s")
        self._registers.forget()
        reply = self._stop_reply(self._wire.timeout_s)
        if reply is None:
            self._mark_running()
            raise GuestGoneError(f"vCPU {cpu} did not finish its step")
        return reply

    @contextmanager
    def paused(self) -> Generator[None]:
        """Stop the guest if it runs, and let it run again afterwards if it did.

        Threads take turns.
        """
        with self.turn:
            is_ours = self._take()
            self._pauses += 1
            try:
                yield
            finally:
                self._pauses -= 1
                if self._takes_over() or is_ours:
                    self._let_run_again()

    def _let_run_again(self) -> None:
        # But for what somebody else has stopped meanwhile.
        if self.is_running or self.is_held or self._wire.is_gone:
            return
        try:
            self.resume()
        except KeyboardInterrupt:
            # It asks whether the guest has migrated before it lets it run: once more.
            if not self.is_running:
                self.resume()
            raise

    def _takes_over(self) -> bool:
        # Whether somebody else has let the guest run that he had stopped, and a request of ours
        # has stopped it since: now it is ours.
        if self._pauses or not self._wire.has_stopped:
            return False
        if self.is_debugged:
            self._wire.has_stopped = False
            return False
        was_held, self.is_held, self._wire.has_stopped = self.is_held, False, False
        if was_held:
            self._mark_stopped()
        return was_held

    def _take(self) -> bool:
        # Whether the guest ran: it is stopped now, and ours to let run again.
        if self.is_running:
            self.stop()
            return not self.is_held
        if not self.is_held or self._pauses or not self._wire.halt():
            return False
        self._mark_stopped()
        self.is_held = self.is_debugged
        return not self.is_held

    def _must_stop(self) -> rsp.StopReply:
        reply = self._stop_reply(self._wire.timeout_s)
        if reply is None:
            raise GuestGoneError(f"the guest did not stop within {self._wire.timeout_s:g} s")
        self._mark_stopped()
        return reply

    def _stop_reply(self, timeout_s: float) -> rsp.StopReply | None:
        for packet in self._wire.until(time.monotonic() + timeout_s):
            if rsp.is_stop(packet):
                return rsp.parse_stop(packet)
        return None

    def _is_debuggers(self, reply: rsp.StopReply) -> bool:
        if self.debugger is None or not self.debugger.takes(reply):
            return False
        self.is_held = self.is_debugged = True
        return True

    def _note_stop(self, reply: rsp.StopReply) -> None:
        # We may have been interrupted when we waited for a stop that we had asked for.
        self.is_held = reply.signal != SIGTRAP and not self._is_stopping
        self._mark_stopped()
        if reply.signal == SIGTRAP:
            # Requests go to the vCPU that came to a breakpoint; gdb relies on it, too.
            self._registers.forget(reply.cpu)

    def _mark_stopped(self) -> None:
        self.is_running = self._is_stopping = False
        self.stops += 1
        self._stopped_at = self._clock()
        self._registers.forget()

    def _mark_running(self) -> None:
        self.is_running = True
        pause_s = self._clock() - self._stopped_at
        self._paused_s += pause_s
        self.longest_s = max(self.longest_s, pause_s)

    def _must_be_stopped(self) -> None:
        if self.is_running:
            raise ValueError("the guest runs: stop it first")

    # The debugger that is served through this connection.

    def poll(self) -> bool:
        """Find out whether a running guest has stopped for the debugger.

        False is for a stop of somebody else's, which comes again for whoever waits for it.
        """
        with self.turn:
            reply = self._stop_reply(0) if self.is_running else None
            if reply is not None:
                self._note_stop(reply)
                if not self._is_debuggers(reply):
                    self.let_run()
                    return False
            return True

    def hold(self, until_s: float = math.inf) -> None:
        """Keep the guest stopped for the debugger, until ``go``; see ``held_until_s``."""
        with self.turn:
            if self.is_running:
                self.stop()
            self.is_held = self.is_debugged = True
            self.held_until_s = until_s

    def go(self, how: bytes = b"vCont;c") -> None:
        """Let a guest run that stands for the debugger; ``how`` says which vCPUs, or one step."""
        self._must_be_stopped()
        self.is_held = self.is_debugged = False
        # It was not us who had stopped it.
        self._stopped_at = self._clock()
        self._registers.forget()
        self._wire.send(how)
        self._mark_running()

    def ask(self, request: bytes, *, cpu: int | None = None) -> bytes:
        """Return the answer to a request of the debugger, about a vCPU or, with None, none."""
        self._choose(cpu)
        answer = self._wire.ask(request)
        self._registers.forget(self._registers.selected)
        return answer

    # vCPUs.

    def ids(self) -> tuple[int, ...]:
        """Return the stub's thread ids, one per vCPU."""
        self._must_be_stopped()
        deadline = time.monotonic() + self._wire.timeout_s
        ids = rsp.parse_thread_list(self._wire.ask(b"qfThreadInfo"))
        while more := rsp.parse_thread_list(self._wire.ask(b"qsThreadInfo")):
            ids += more
            if len(ids) > _MAX_CPUS or time.monotonic() > deadline:
                raise FormatError(f"a gdb stub with more than {len(ids)} vCPUs")
        return ids

    def registers(self, cpu: int) -> dict[str, int]:
        """Return a vCPU's registers by the stub's names: those of its g packet.

        To ask the dictionary for one that is not there is a TargetError.
        """
        self._must_be_stopped()
        return self._registers.read(cpu)

    def register(self, cpu: int, name: str) -> int:
        """Return one register, also one that the g packet lacks (arm64: TTBR1_EL1)."""
        self._must_be_stopped()
        return self._registers.read_one(cpu, name)

    def set_registers(self, cpu: int, values: Mapping[str, int]) -> dict[str, int]:
        """Write some registers of a vCPU, and return what they were."""
        self._must_be_stopped()
        return self._registers.write(cpu, values)

    # Breakpoints.

    def insert_breakpoint(self, addr: int, *, is_hardware: bool = False) -> None:
        """Stop the guest when any vCPU comes to an address.

        Args:
            addr: where.
            is_hardware: whether the CPU's own is used, which leaves memory as it is; under KVM
                there are four.
        """
        self._must_be_stopped()
        # Before the request: if we are interrupted in it, detaching still removes it.
        self._breakpoints[addr] = int(is_hardware)
        check_ok(self._wire.ask(b"Z%x,%x,1" % (is_hardware, addr)), f"a breakpoint at {addr:#x}")

    def remove_breakpoint(self, addr: int) -> None:
        """Take a breakpoint away; one that is gone already is not an error."""
        self._must_be_stopped()
        answer = self._wire.ask(b"z%x,%x,1" % (self._breakpoints.get(addr, 0), addr))
        if answer != b"E22":
            check_ok(answer, f"to remove the breakpoint at {addr:#x}")
        self._breakpoints.pop(addr, None)

    # Memory.

    def read(self, addr: int, size: int, *, cpu: int | None = None) -> bytes:
        """Return exactly ``size`` bytes at a virtual address, or raise MemoryFault.

        Args:
            addr: as a vCPU sees it now: with page-table isolation, one in user mode sees
                nearly nothing of the kernel.
            size: bytes.
            cpu: the vCPU; by default the one that stopped, or was used last.
        """
        self._choose(cpu)
        return self._memory.read(addr, size)

    def write(self, addr: int, data: bytes, *, cpu: int | None = None) -> None:
        """Write to virtual addresses; see ``read``.

        Args:
            addr: of the first byte.
            data: what is written.
            cpu: the vCPU, as for ``read``.
        """
        self._choose(cpu)
        self._memory.write([(addr, data)])

    def read_physical_many(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return guest-physical bytes of many (address, size), without waiting for each.

        QEMU reads zeros where there is none.
        """
        self._must_be_stopped()
        with self._memory.physical():
            return self._memory.read_many(spans)

    def write_physical(self, addr: int, data: bytes) -> None:
        """Write to guest-physical memory, code included."""
        self.write_physical_many([(addr, data)])

    def write_physical_many(self, writes: Sequence[tuple[int, bytes]]) -> None:
        """Write many (address, data), without waiting for each.

        Raises:
            MemoryFault: the first write that failed; all others were tried.
        """
        self._must_be_stopped()
        with self._memory.physical():
            self._memory.write(writes)

    def _choose(self, cpu: int | None) -> None:
        self._must_be_stopped()
        if cpu is not None:
            self._registers.select(cpu)

    # QEMU's monitor, and the end.

    def monitor(self, command: str) -> str:
        """Run a command of QEMU's monitor and return what it prints, with ``\\n`` line ends."""
        self._must_be_stopped()
        output: list[bytes] = []
        answer = self._wire.ask(b"qRcmd," + rsp.to_hex(command.encode()), output=output)
        if answer not in (b"", b"OK") and not rsp.is_error(answer):
            # A stub that prints in the answer itself.
            output.append(b"O" + answer)
        elif answer != b"OK":
            check_ok(answer, f"the monitor command {command!r}")
        return rsp.console_text(output).replace("\r\n", "\n")

    def detach(self, *, resume: bool = True) -> None:
        """Remove our breakpoints, let the guest run, and close the connection.

        What somebody else has stopped stays stopped.

        Args:
            resume: False leaves a stopped guest stopped, for another client to go on.

        Raises:
            GuestGoneError: the guest ended meanwhile; the connection is closed all the same.
        """
        try:
            if not self._wire.is_gone:
                self._leave(resume and not self.stands())
        except BaseException:
            self.close(resume=resume)
            raise
        self.close()

    def _leave(self, resume: bool) -> None:
        if resume and self.is_running:
            self.stop()
        if resume and not self.has_migrated():
            check_ok(self._wire.ask(DETACH), "to detach")
            self._mark_running()
            self._breakpoints.clear()
        elif not self.is_running:
            for addr in tuple(self._breakpoints):
                self.remove_breakpoint(addr)

    def close(self, *, resume: bool = False) -> None:
        """Close the connection at once; ``detach`` is the polite way.

        Args:
            resume: let the guest run, without waiting for an answer.
        """
        if self._is_closed:
            return
        self._is_closed = True
        is_left = resume or self._wire.is_gone
        self._wire.close(*((FAREWELL,) if is_left and not self._is_theirs else ()))
        if self._on_close is not None:
            self._on_close()
