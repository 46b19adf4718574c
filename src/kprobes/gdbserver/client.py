"""One debugger that is attached to a guest through us: its requests, and what it is told.

The GDB manual, appendix "GDB Remote Serial Protocol", says what packets ask for; what QEMU's own
stub answers is ``gdbstub/gdbstub.c``. It is what a debugger at QEMU's stub would see if nothing
were probed: see ``guest.view``. While the guest runs only an interrupt is listened to.
"""

import re
from collections.abc import Callable

from msgspec.structs import replace

from kprobes.arch.registry import machine
from kprobes.errors import FormatError, MemoryFault, TargetError
from kprobes.formats import rsp
from kprobes.formats.target_xml import decode_registers, encode_registers
from kprobes.guest.driver import GuestDriver
from kprobes.transport.stub import SIGTRAP

PACKET_SIZE = 0x4000
"""Bytes of a packet, as we tell the debugger."""
_SIGINT = 2
_OK, _NOTHING = b"OK", b""
_BAD, _FAULT, _REFUSED = b"E22", b"E14", b"E01"
"""EINVAL, EFAULT and EPERM of errno.h, as QEMU has them."""
_EXECUTION = (b"0", b"1")
"""Types of breakpoints, by software and by the CPU's own; the others watch memory."""
_FEATURES = b"PacketSize=%x;qXfer:features:read+;vContSupported+;QStartNoAckMode+"
_NAME = re.compile(rb"[qQv][A-Za-z.]+\??|.", re.DOTALL)
_LEAVING = (b"D", b"k", b"vKill")
_FORWARDED = (
    *(b"T", b"qXfer", b"qThreadExtraInfo"),
    *(b"qqemu.sstep", b"qqemu.sstepbits", b"Qqemu.sstep"),
)
_STEP_S = 1.0
"""A step takes longer where its vCPU sleeps."""
_MONITOR_RUNS = {"c", "cont"}
_USE_CONTINUE = "the guest is stopped for the debugger: use gdb's `continue`\n"


class LeftError(Exception):
    """The debugger has detached."""


class GdbClient:
    """What one debugger has done to a guest so far.

    Not to be shared by threads: all is called in a turn of the stub's.

    Attributes:
        has_stopped: whether it is to be told of a stop.
    """

    def __init__(self, driver: GuestDriver, warn: Callable[[str], None]) -> None:
        """Stop the guest for it.

        Args:
            driver: of the guest.
            warn: is told what is refused, and why: a debugger shows numbers only.
        """
        self.has_stopped = False
        self._stub, self._warn = driver.guest.stub, warn
        self._view = driver.view
        self._pc = machine(driver.guest.kernel.arch).inject_ops.pc
        self._breakpoints: set[tuple[bytes, int, bytes]] = set()
        self._stepping: int | None = None
        self._how, self._stops = b"", 0
        self._commands = self._table()
        self._is_physical = False
        self._covered: set[int] = set()
        with self._stub.paused():
            # Whether somebody else had stopped it before the debugger did.
            self._was_held = self._stub.is_held and not self._stub.is_debugged
            self._cpu = self._stub.ids()[0]
            self._view.leave_own_code()
            self._stub.hold()
        self._stop = rsp.StopReply(signal=SIGTRAP, cpu=self._cpu)

    def takes(self, reply: rsp.StopReply) -> bool:
        """Return whether the guest has stopped for it: at a breakpoint of it, or after its step."""
        if reply.signal != SIGTRAP:
            return False
        cpu = self._cpu if reply.cpu is None else reply.cpu
        is_mine = bool(reply.watched) or self._stepping is not None
        if not is_mine:
            at = self._stub.registers(cpu)[self._pc]
            is_mine = any(addr == at for kind, addr, _ in self._breakpoints if kind in _EXECUTION)
        if is_mine:
            self._note(replace(reply, cpu=cpu))
        return is_mine

    def interrupt(self) -> None:
        """Stop the guest, which runs, as the debugger has asked for."""
        self._was_held = self._stub.is_held
        self._stub.hold()
        if not self.has_stopped:
            self._note(rsp.StopReply(signal=_SIGINT, cpu=self._cpu))

    def pause(self, cpu: int) -> None:
        """Take over a guest that was stopped for a trigger's hit on a vCPU."""
        self._was_held = False
        self._stub.hold()
        self._note(rsp.StopReply(signal=SIGTRAP, cpu=cpu))

    def warn_covered(self) -> None:
        """Say which breakpoints are not hit any more, as probes have come since there."""
        places = {addr for kind, addr, _ in self._breakpoints if kind in _EXECUTION}
        covered = {addr for addr in places if self._view.is_inside_patch(addr)}
        for addr in covered - self._covered:
            self._warn(
                f"the debugger: its breakpoint at {addr:#x} is not hit any more: it is in the "
                "middle of instructions that a probe has replaced since"
            )
        self._covered = covered

    def stop_packet(self) -> bytes:
        """Return what it is told of the stop."""
        self.has_stopped = False
        self._view.leave_own_code()
        cpu = self._cpu if self._stop.cpu is None else self._stop.cpu
        watched = self._stop.watched + b";" if self._stop.watched else b""
        return b"T%02xthread:%02x;%s" % (self._stop.signal, cpu, watched)

    def leave(self) -> None:
        """Take its breakpoints away, and let the guest run if it is the debugger that keeps it."""
        stub = self._stub
        if not (self._breakpoints or stub.is_debugged):
            return
        with stub.paused():
            while self._breakpoints:
                stub.ask(b"z%s,%x,%s" % self._breakpoints.pop())
            if stub.is_debugged and self._was_held:
                stub.is_debugged = False
            elif stub.is_debugged:
                stub.go()

    def answer(self, request: bytes) -> bytes | None:
        """Do what a request of a debugger says whose guest stands still; return the answer.

        None is returned where the guest runs now.

        Raises:
            LeftError: it detaches, or wants the guest killed, which is not its to end.
        """
        try:
            return self._answer(request)
        except MemoryFault:
            return _FAULT
        except (FormatError, ValueError):
            return _BAD
        except TargetError as error:
            if self._stub.has_ended:
                raise
            self._warn(f"the debugger: {error}")
            return _REFUSED

    def _answer(self, request: bytes) -> bytes | None:
        name = _NAME.match(request)
        if name is None or name[0] not in self._commands:
            return _NOTHING
        return self._commands[name[0]](request)

    def _table(self) -> dict[bytes, Callable[[bytes], bytes | None]]:
        def constant(answer: bytes) -> Callable[[bytes], bytes]:
            return lambda _: answer

        every: dict[bytes, Callable[[bytes], bytes | None]] = {
            b"?": lambda _: self.stop_packet(),
            b"qSupported": constant(_FEATURES % PACKET_SIZE),
            b"QStartNoAckMode": constant(_OK),
            b"qAttached": constant(b"1"),
            b"qC": lambda _: b"QC%02x" % self._cpu,
            b"qfThreadInfo": self._threads,
            b"qsThreadInfo": constant(b"l"),
            b"vCont?": constant(b"vCont;c;C;s;S"),
            b"qRcmd": self._monitor,
            b"H": self._select,
            b"qqemu.PhyMemMode": lambda _: b"%d" % self._is_physical,
            b"Qqemu.PhyMemMode": self._set_physical,
            b"vCont": self._continue,
        }
        return {
            **every,
            **dict.fromkeys(_FORWARDED, self._stub.ask),
            **dict.fromkeys(_LEAVING, self._detach),
            **dict.fromkeys((b"g", b"G", b"p", b"P"), self._registers),
            **dict.fromkeys((b"m", b"M", b"X"), self._memory),
            **dict.fromkeys((b"Z", b"z"), self._breakpoint),
            **dict.fromkeys((b"c", b"C"), lambda _: self._go([(b"c", None)])),
            **dict.fromkeys((b"s", b"S"), lambda _: self._go([(b"s", self._cpu), (b"c", None)])),
        }

    def _detach(self, request: bytes) -> bytes:
        del request
        raise LeftError

    def _threads(self, request: bytes) -> bytes:
        del request
        return b"m" + b",".join(b"%02x" % cpu for cpu in self._stub.ids())

    def _set_physical(self, request: bytes) -> bytes:
        self._is_physical = request.endswith(b":1")
        return _OK

    def _monitor(self, request: bytes) -> bytes:
        text = rsp.from_hex(request.partition(b",")[2])
        command = text.decode("utf-8", "replace").strip()
        words = _USE_CONTINUE if command in _MONITOR_RUNS else self._stub.monitor(command)
        # gdb prints what the answer itself has.
        return rsp.to_hex(words.encode()) or _OK

    def _select(self, request: bytes) -> bytes:
        # That for steps is said with them.
        kind, thread = request[1:2], request[2:]
        if kind == b"g" and thread not in (b"0", b"-1"):
            cpu = rsp.parse_thread_id(thread)
            if cpu not in self._stub.ids():
                return _BAD
            self._cpu = cpu
        return _OK

    def _registers(self, request: bytes) -> bytes:
        cpu, link = self._cpu, self._view.link_of(self._cpu)
        if link is None:
            return self._stub.ask(request, cpu=cpu)
        name, shown = link
        description = self._stub.description
        slot = description.slot(name)
        is_link = slot is not None and re.match(rb"[pP]%x(?:=|$)" % slot.number, request)
        if request.startswith(b"p") and is_link:
            return _little(shown)
        if request.startswith(b"P") and is_link:
            number, _, value = request.partition(b"=")
            held = self._view.held_link(cpu, int.from_bytes(rsp.from_hex(value), "little"))
            request = b"%s=%s" % (number, _little(held))
        if request.startswith(b"G"):
            value = decode_registers(description, request[1:])[name]
            held = self._view.held_link(cpu, value)
            request = b"G" + encode_registers(description, request[1:], {name: held})
        answer = self._stub.ask(request, cpu=cpu)
        return encode_registers(description, answer, {name: shown}) if request == b"g" else answer

    def _memory(self, request: bytes) -> bytes:
        head, _, data = request[1:].partition(b":")
        addr, size = (int(word, 16) for word in head.split(b","))
        if request.startswith(b"m"):
            return rsp.to_hex(self._read(addr, min(size, PACKET_SIZE // 2)))
        written = data if request.startswith(b"X") else rsp.from_hex(data)
        if len(written) != size:
            return _BAD
        if size:
            self._write(addr, written)
        return _OK

    def _read(self, addr: int, size: int) -> bytes:
        if self._is_physical:
            return self._stub.read_physical_many([(addr, size)])[0]
        return self._view.read(addr, size, cpu=self._cpu)

    def _write(self, addr: int, data: bytes) -> None:
        if self._is_physical:
            self._stub.write_physical(addr, data)
        elif self._view.is_ours(addr, len(data)):
            raise TargetError(
                f"{addr:#x} is not written: a probe has replaced what is there; "
                "disable it, or write elsewhere"
            )
        else:
            self._view.write(addr, data, cpu=self._cpu)

    def _breakpoint(self, request: bytes) -> bytes:
        letter, (kind, addr, size) = request[:1], request[1:].split(b";")[0].split(b",")
        point = kind, int(addr, 16), size
        if letter == b"z":
            self._breakpoints.discard(point)
        elif kind in _EXECUTION and self._view.is_inside_patch(point[1]):
            raise TargetError(
                f"no breakpoint at {point[1]:#x}: it is in the middle of instructions that a "
                "probe has replaced; one at the probe's own address works, or after them"
            )
        answer = self._stub.ask(b"%s%s,%x,%s" % (letter, *point))
        if letter == b"Z" and answer == _OK:
            self._breakpoints.add(point)
        return answer

    def _continue(self, request: bytes) -> bytes | None:
        return self._go([_action(each) for each in request.split(b";")[1:]])

    def _go(self, actions: list[tuple[bytes, int | None]]) -> bytes | None:
        steps = (self._cpu if cpu is None else cpu for how, cpu in actions if how == b"s")
        self._stepping = next(steps, None)
        if self._stepping is not None and self._view.step(self._stepping):
            self._note(rsp.StopReply(signal=SIGTRAP, cpu=self._stepping))
            return self.stop_packet()
        words = (how if cpu is None else how + b":%x" % cpu for how, cpu in actions)
        self._was_held = False
        self._how = b"vCont;" + b";".join(words)
        self._run()
        return self.stop_packet() if self.has_stopped else None

    def step_again(self) -> None:
        """Begin a step anew that takes long, where somebody has stopped the guest meanwhile."""
        if self._stepping is not None and self._stops != self._stub.stops:
            with self._stub.paused():
                # It may have ended just now.
                if not self._stub.is_held:
                    self._run()

    def _run(self) -> None:
        self._stub.go(self._how)
        if self._stepping is not None:
            # In this turn: whoever stops the guest next would end the step.
            self._stub.wait(_STEP_S)
        self._stops = self._stub.stops

    def _note(self, stop: rsp.StopReply) -> None:
        self._stop, self.has_stopped, self._stepping = stop, True, None
        if stop.cpu is not None:
            self._cpu = stop.cpu


def _little(value: int) -> bytes:
    return rsp.to_hex(value.to_bytes(8, "little"))


def _action(text: bytes) -> tuple[bytes, int | None]:
    # Signals are not delivered to a machine; -1 is every vCPU, 0 is any.
    word, _, thread = text.partition(b":")
    how = word[:1].lower()
    if how not in (b"c", b"s"):
        raise FormatError(f"{word!r}: neither to continue nor to step")
    number = thread.rpartition(b".")[2]
    return how, None if number in (b"", b"-1", b"0") else rsp.parse_thread_id(thread)
