"""A debugger at our socket: what it asks for, and when it is told of a stop; QEMU is a test's."""

import math
import socket
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kprobes.errors import GuestGoneError, UsageError
from kprobes.gdbserver.server import GdbServer
from kprobes.guest.driver import GuestDriver
from kprobes.guest.stops import run_until_stop
from kprobes.transport.stub import Stub
from tests.build.stub import FakeStub, packet
from tests.build.stub_client import abandoned, opened
from tests.build.waiting import becomes_true

IDLE = SimpleNamespace(
    guest=SimpleNamespace(
        stub=SimpleNamespace(has_ended=False, turn=threading.RLock(), debugger=None)
    ),
    is_early=True,
)
PLACE, LINK = 0x1000, 0xFFFF_FFFF_8100_0042
_WAIT_S = 30.0


@dataclass
class View:
    """A kernel in which a probe has replaced what is at PLACE."""

    stub: Stub
    left: list[bool] = field(default_factory=list[bool])
    patched: int = PLACE
    is_dead: bool = False

    def read(self, addr: int, size: int, *, cpu: int | None) -> bytes:
        return self.stub.read(addr, size, cpu=cpu)

    def write(self, addr: int, data: bytes, *, cpu: int | None) -> None:
        self.stub.write(addr, data, cpu=cpu)

    def is_ours(self, addr: int, size: int) -> bool:
        return addr < PLACE + 5 and addr + size > PLACE

    def is_inside_patch(self, addr: int) -> bool:
        return self.patched < addr < self.patched + 5

    def link_of(self, cpu: int) -> tuple[str, int] | None:
        return ("rax", LINK) if cpu == 2 else None

    def held_link(self, cpu: int, value: int) -> int:
        return 0x5555 if (cpu, value) == (2, LINK) else value

    def leave_own_code(self) -> None:
        if self.is_dead:
            raise GuestGoneError("it answers no more")
        self.left.append(True)

    def step(self, cpu: int) -> bool:
        return self.stub.registers(cpu)["rip"] == PLACE


class Debugger:
    """A debugger that says and hears packets, written apart from the code under test."""

    def __init__(self, address: str) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(_WAIT_S)
        self.sock.connect(address)
        self.said = b""

    def ask(self, request: bytes) -> bytes:
        self.sock.sendall(packet(request))
        return self.hear()

    def hear(self) -> bytes:
        while b"#" not in self.said[:-2]:
            chunk = self.sock.recv(4096)
            assert chunk, "hung up"
            self.said += chunk
        payload, _, rest = self.said.partition(b"#")
        self.said = rest[2:]
        return payload.lstrip(b"+").removeprefix(b"$")

    def is_alone(self) -> bool:
        """Whether the other end hangs up."""
        return self.sock.recv(4096) == b""


@dataclass
class Served:
    """A server, its guest, and what its user was told."""

    fake: FakeStub
    stub: Stub
    driver: GuestDriver
    server: GdbServer
    view: View
    warned: list[str]
    joined: ExitStack

    def join(self) -> Debugger:
        debugger = Debugger(self.server.address)
        self.joined.callback(debugger.sock.close)
        return debugger


@contextmanager
def served(directory: Path, fake: FakeStub | None = None, **driver: Any) -> Generator[Served]:
    """Serve the guest of a stub, which runs."""
    fake = FakeStub() if fake is None else fake
    warned = list[str]()
    with opened(fake) as stub:
        view = View(stub)
        guest = SimpleNamespace(stub=stub, kernel=SimpleNamespace(arch="x86_64"))
        facts = {"guest": guest, "view": view, "is_early": False, **driver}
        given = cast("GuestDriver", SimpleNamespace(**facts))
        stub.resume()
        assert becomes_true(lambda: fake.is_running, _WAIT_S)
        with (
            ExitStack() as joined,
            GdbServer(given, str(directory / "gdb.sock"), warned.append) as server,
        ):
            yield Served(fake, stub, given, server, view, warned, joined)
        assert becomes_true(lambda: fake.is_running and not fake.breakpoints, _WAIT_S)


def test_whoever_joins_stops_the_guest_and_whoever_leaves_lets_it_run(tmp_path: Path) -> None:
    with served(tmp_path) as it:
        debugger = it.join()
        assert debugger.ask(b"?") == b"T05thread:01;"
        assert not it.fake.is_running
        assert (it.stub.is_held, it.stub.is_debugged) == (True, True)
        assert debugger.ask(b"D;1") == b"OK"
        assert debugger.is_alone()
        assert becomes_true(lambda: it.fake.is_running, _WAIT_S)
        assert it.view.left
    assert not (tmp_path / "gdb.sock").exists()


def test_whoever_joins_while_a_trigger_has_stopped_the_guest_has_it_without_end(
    tmp_path: Path,
) -> None:
    with served(tmp_path) as it:
        it.stub.hold(time.monotonic() + 1000)
        assert not it.server.pause(2)
        debugger = it.join()
        assert debugger.ask(b"?") == b"T05thread:01;"
        assert (it.stub.is_debugged, it.stub.held_until_s) == (True, math.inf)
        assert debugger.ask(b"D;1") == b"OK"
        assert becomes_true(lambda: it.fake.is_running, _WAIT_S)


def test_its_questions_are_answered(tmp_path: Path) -> None:
    with served(tmp_path) as it:
        debugger = it.join()
        assert debugger.ask(b"qSupported:multiprocess+").startswith(b"PacketSize=4000;qXfer")
        assert debugger.ask(b"qfThreadInfo") == b"m01,02"
        assert debugger.ask(b"qsThreadInfo") == b"l"
        assert debugger.ask(b"vCont?") == b"vCont;c;C;s;S"
        assert debugger.ask(b"qAttached") == b"1"
        assert debugger.ask(b"vMustReplyEmpty") == b""
        assert debugger.ask(b"m1100,4") == bytes(it.fake.virtual[0x1100:0x1104]).hex().encode()
        assert debugger.ask(b"qRcmd," + b"info status".hex().encode()) == (
            b"ran: info status\n".hex().encode()
        )
        assert debugger.ask(b"Hg2") == b"OK"
        assert debugger.ask(b"qC") == b"QC02"
        assert debugger.ask(b"Hg9") == b"E22"
        assert debugger.ask(b"m1,zz") == b"E22"
        assert debugger.ask(b"Z0,2000,1") == b"OK"
        assert it.fake.breakpoints == {0x2000}
        assert debugger.ask(b"z0,2000,1") == b"OK"
        assert not it.fake.breakpoints


def test_physical_memory_is_as_it_is(tmp_path: Path) -> None:
    with served(tmp_path) as it:
        debugger = it.join()
        assert debugger.ask(b"Qqemu.PhyMemMode:1") == b"OK"
        assert debugger.ask(b"qqemu.PhyMemMode") == b"1"
        assert debugger.ask(b"m1000,2") == b"eeee"
        assert debugger.ask(b"M1000,1:41") == b"OK"
        assert it.fake.physical[0x1000] == 0x41
        # Ours are virtual again meanwhile.
        assert not it.fake.is_physical


def test_what_is_replaced_is_neither_written_nor_stopped_in_and_it_is_said_why(
    tmp_path: Path,
) -> None:
    with served(tmp_path) as it:
        debugger = it.join()
        assert debugger.ask(b"Mfff,2:0000") == b"E01"
        assert debugger.ask(b"X1004,1:a") == b"E01"
        assert debugger.ask(b"M1005,1:41") == b"OK"
        assert debugger.ask(b"Z0,1002,1") == b"E01"
        assert debugger.ask(b"Z1,1000,1") == b"OK"
        # Whoever watches memory changes nothing.
        assert debugger.ask(b"Z2,1002,1") == b"OK"
        assert it.fake.virtual[0x1005] == 0x41
        debugger.ask(b"z2,1002,1")
    assert [each.split(":")[1] for each in it.warned] == [
        " 0xfff is not written",
        " 0x1004 is not written",
        " no breakpoint at 0x1002",
    ]


def test_a_return_address_in_a_register_is_shown_and_written_as_if_it_were_the_callers(
    tmp_path: Path,
) -> None:
    with served(tmp_path) as it:
        debugger, shown = it.join(), LINK.to_bytes(8, "little").hex().encode()
        debugger.ask(b"Hg2")
        assert debugger.ask(b"g")[:16] == shown
        assert debugger.ask(b"p0") == shown
        registers = debugger.ask(b"g")
        assert debugger.ask(b"G" + registers) == b"OK"
        assert it.fake.registers[2][:8] == (0x5555).to_bytes(8, "little")
        debugger.ask(b"Hg1")
        assert debugger.ask(b"g")[:16] == b"01" * 8


def test_it_is_told_of_its_breakpoint_and_of_an_interrupt(tmp_path: Path) -> None:
    sockets = list[socket.socket]()
    fake = FakeStub()
    fake.hooks[b"vCont;c"] = lambda sock: (sockets.append(sock), setattr(fake, "is_running", True))[
        1
    ]
    with served(tmp_path, fake) as it:
        debugger = it.join()
        at = int.from_bytes(fake.registers[2][8:16], "little")
        assert debugger.ask(b"Z0,%x,1" % at) == b"OK"
        debugger.sock.sendall(packet(b"vCont;c"))
        assert becomes_true(lambda: fake.is_running, _WAIT_S)
        fake.stop(sockets[-1], b"T05thread:02;")
        assert debugger.hear() == b"T05thread:02;"
        assert it.stub.is_debugged
        debugger.ask(b"z0,%x,1" % at)
        debugger.sock.sendall(packet(b"c"))
        assert becomes_true(lambda: fake.is_running, _WAIT_S)
        debugger.sock.sendall(b"\x03")
        assert debugger.hear() == b"T02thread:02;"


def test_a_step_from_what_is_replaced_ends_behind_it(tmp_path: Path) -> None:
    with served(tmp_path) as it:
        debugger = it.join()
        assert debugger.ask(b"vCont;s:1;c") == b"T05thread:01;"
        assert b"vCont;s:1;c" in it.fake.asked
        it.fake.registers[1][8:16] = PLACE.to_bytes(8, "little")
        it.fake.asked.clear()
        assert debugger.ask(b"vCont;s:1;c") == b"T05thread:01;"
        assert b"vCont;s:1;c" not in it.fake.asked
        assert debugger.ask(b"vCont;t") == b"E22"


def test_a_step_that_somebody_ends_by_stopping_the_guest_is_begun_anew(tmp_path: Path) -> None:
    fake, steps = FakeStub(), list[bytes]()

    def step(sock: socket.socket) -> None:
        steps.append(fake.asked[-1])
        if len(steps) < 2:
            # Its vCPU sleeps.
            fake.is_running = True
        else:
            fake.stop(sock, b"T05thread:01;")

    fake.hooks[b"vCont;s"] = step
    with served(tmp_path, fake) as it:
        debugger = it.join()
        assert debugger.ask(b"?") == b"T05thread:01;"
        debugger.sock.sendall(packet(b"vCont;s:1;c"))
        assert becomes_true(lambda: len(steps) == 1, _WAIT_S)
        with it.stub.paused():
            pass
        assert debugger.hear() == b"T05thread:01;"
    assert steps == [b"vCont;s:1;c"] * 2


def test_who_waits_for_the_guest_serves_it_where_it_stops_for_the_debugger(tmp_path: Path) -> None:
    fake = FakeStub()
    # Who stands at a breakpoint comes to it again when it is let run.
    stops = iter([b"T05thread:02;", b"T05thread:01;", b"T05thread:01;"])
    at = int.from_bytes(fake.registers[2][8:16], "little")

    def stop(sock: socket.socket) -> None:
        fake.stop(sock, next(stops))

    with served(tmp_path, fake) as it:
        debugger = it.join()
        debugger.ask(b"Z0,%x,1" % at)
        debugger.sock.sendall(packet(b"c"))
        assert becomes_true(lambda: fake.is_running, _WAIT_S)
        answers = list[bytes]()

        def look_around() -> None:
            answers.append(debugger.hear())
            answers.append(debugger.ask(b"m1100,1"))
            # Longer than the other waits for its own.
            time.sleep(0.3)
            debugger.sock.sendall(packet(b"vCont;c"))

        thread = threading.Thread(target=look_around)
        thread.start()
        fake.hooks[b"vCont;c"] = stop
        with it.stub.paused():
            cpu = run_until_stop(it.stub, time.monotonic() + 0.2)
            fake.hooks.clear()
        thread.join(_WAIT_S)
        assert answers == [b"T05thread:02;", b"00"]
        assert cpu == 1


def test_a_stop_of_somebody_else_is_left_to_him(tmp_path: Path) -> None:
    fake = FakeStub()
    with served(tmp_path, fake) as it:
        debugger = it.join()
        assert debugger.ask(b"?") == b"T05thread:01;"
        resumed = list[socket.socket]()

        def run(sock: socket.socket) -> None:
            fake.is_running = True
            resumed.append(sock)

        fake.hooks[b"vCont;c"] = run
        debugger.sock.sendall(packet(b"vCont;c"))
        assert becomes_true(lambda: bool(resumed), _WAIT_S)
        fake.stop(resumed[0], b"T05thread:01;")
        assert becomes_true(lambda: len(resumed) == 2, _WAIT_S)
        assert not it.stub.is_debugged


@pytest.mark.parametrize("words", [b"$m0,1#00", b"GET / HTTP/1.1\r\n", b"$" + b"x" * (1 << 21)])
def test_whoever_talks_nonsense_is_sent_away_and_the_guest_runs(
    tmp_path: Path, words: bytes
) -> None:
    with served(tmp_path) as it:
        debugger = it.join()
        debugger.ask(b"Z0,2000,1")
        if words.startswith(b"$m"):
            # Damaged on the way: it is asked for once more.
            debugger.sock.sendall(words)
            assert debugger.sock.recv(8).endswith(b"-")
            debugger.sock.close()
        else:
            with suppress(BrokenPipeError, ConnectionResetError):
                debugger.sock.sendall(words)
                assert debugger.is_alone()
        assert becomes_true(lambda: it.fake.is_running and not it.fake.breakpoints, _WAIT_S)
        # The next is served.
        assert it.join().ask(b"?") == b"T05thread:01;"


def test_what_somebody_else_had_stopped_stays_stopped(tmp_path: Path) -> None:
    with served(tmp_path) as it:
        it.stub.stop()
        it.stub.is_held = True
        debugger = it.join()
        assert debugger.ask(b"?") == b"T05thread:01;"
        debugger.ask(b"D")
        assert becomes_true(lambda: not it.stub.is_debugged, _WAIT_S)
        assert it.stub.is_held
        assert not it.fake.is_running
        it.stub.is_held = False
        it.stub.resume()


def test_what_a_monitor_stops_while_the_debugger_lets_it_run_stays_stopped_too(
    tmp_path: Path,
) -> None:
    with served(tmp_path) as it:
        debugger = it.join()
        assert debugger.ask(b"?") == b"T05thread:01;"
        debugger.sock.sendall(packet(b"c"))
        assert becomes_true(lambda: it.fake.is_running, _WAIT_S)
        with it.stub.turn:
            it.stub.stop()
            it.stub.is_held = True
        debugger.sock.sendall(b"\x03")
        assert debugger.hear() == b"T02thread:01;"
        debugger.ask(b"D")
        assert becomes_true(lambda: not it.stub.is_debugged, _WAIT_S)
        assert (it.stub.is_held, it.fake.is_running) == (True, False)
        it.stub.is_held = False
        it.stub.resume()


def test_it_is_said_when_a_probe_comes_over_a_breakpoint(tmp_path: Path) -> None:
    with served(tmp_path) as it:
        debugger = it.join()
        debugger.ask(b"Z0,2002,1")
        debugger.ask(b"Z2,2003,1")
        debugger.sock.sendall(packet(b"c"))
        assert becomes_true(lambda: it.fake.is_running, _WAIT_S)
        time.sleep(0.3)
        assert not it.warned
        it.view.patched = 0x2000
        assert becomes_true(lambda: bool(it.warned), _WAIT_S)
        # Once.
        time.sleep(0.5)
        it.view.patched = PLACE
    assert it.warned == [
        (
            "the debugger: its breakpoint at 0x2002 is not hit any more: it is in the middle of "
            "instructions that a probe has replaced since"
        )
    ]


def test_a_guest_runs_on_when_nobody_can_join(tmp_path: Path) -> None:
    with served(tmp_path) as it:
        it.view.is_dead = True
        debugger = it.join()
        assert debugger.is_alone()
        assert becomes_true(lambda: bool(it.warned), _WAIT_S)
        assert not it.stub.is_debugged
        it.view.is_dead = False
        assert it.join().ask(b"?") == b"T05thread:01;"
    assert it.warned == ["the debugger was sent away: it answers no more"]


def test_a_guest_that_stands_before_its_initcalls_is_not_joined(tmp_path: Path) -> None:
    with served(tmp_path, is_early=True) as it:
        debugger = it.join()
        debugger.sock.settimeout(0.5)
        with pytest.raises(TimeoutError):
            debugger.ask(b"?")
        assert it.fake.is_running


def test_a_socket_is_made_where_we_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    server = GdbServer(cast("GuestDriver", IDLE), "here", lambda _: None)
    assert server.address == str(tmp_path / "here")
    assert (tmp_path / "here").is_socket()
    server.close()
    # Once is enough.
    server.close()
    assert not (tmp_path / "here").exists()


def test_a_port_that_is_free_is_chosen() -> None:
    with GdbServer(cast("GuestDriver", IDLE), "localhost:0", lambda _: None) as server:
        host, _, port = server.address.rpartition(":")
        socket.create_connection((host, int(port)), 5).close()


def test_a_socket_is_its_users_alone_and_replaces_that_of_a_server_that_was_killed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "gdb.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with served(tmp_path) as it:
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(UsageError, match="Address already in use"):
            GdbServer(cast("GuestDriver", IDLE), str(path), it.warned.append)


@pytest.mark.parametrize(
    ("listen", "message"),
    [
        ("0.0.0.0:4444", "anybody could do anything to the guest; localhost:4444"),
        ("a:b:c", "neither the path of a socket nor HOST:PORT"),
        ("localhost:99999", "neither the path of a socket nor HOST:PORT"),
        ("/nonexistent/gdb.sock", "No such file"),
    ],
)
def test_what_cannot_be_listened_at_is_refused(listen: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        GdbServer(cast("GuestDriver", IDLE), listen, lambda _: None)


def test_a_guest_has_one_server(tmp_path: Path) -> None:
    with served(tmp_path) as it:
        with pytest.raises(UsageError, match="a debugger can join already"):
            GdbServer(it.driver, str(tmp_path / "other.sock"), it.warned.append)
        assert not (tmp_path / "other.sock").exists()
        assert it.join().ask(b"?").startswith(b"T05")


def test_a_guest_that_ends_sends_the_debugger_away(tmp_path: Path) -> None:
    fake = FakeStub()
    fake.hooks[b"m"] = lambda sock: sock.shutdown(socket.SHUT_RDWR)
    given: Any = {"is_early": False}
    with abandoned(fake) as stub:
        guest = SimpleNamespace(stub=stub, kernel=SimpleNamespace(arch="x86_64"))
        given = cast("GuestDriver", SimpleNamespace(guest=guest, view=View(stub), **given))
        stub.resume()
        warned = list[str]()
        with GdbServer(given, str(tmp_path / "gdb.sock"), warned.append) as server:
            debugger = Debugger(server.address)
            debugger.sock.sendall(packet(b"m1000,1"))
            assert debugger.sock.recv(1) == b"+"
            assert debugger.is_alone()
            debugger.sock.close()
            assert becomes_true(lambda: bool(warned), _WAIT_S)
    assert warned == ["the debugger was sent away: the gdb stub hung up: the guest has ended"]
