import socket
import time
from pathlib import Path

import pytest

from kprobes.errors import FormatError, KprobesError, UnreachableError
from kprobes.transport.monitor import Monitor, is_monitor
from tests.build.monitor import FakeMonitor
from tests.build.stub import serving


@pytest.fixture
def fake() -> FakeMonitor:
    return FakeMonitor(answers={"info status": lambda _: "VM status: running\n"})


@pytest.mark.parametrize("kind", ["human", "qmp"])
def test_both_kinds_run_commands(tmp_path: Path, fake: FakeMonitor, kind: str) -> None:
    path = tmp_path / "monitor"
    serve = fake.serve_human if kind == "human" else fake.serve_qmp

    with serving(path, serve), Monitor.open(str(path)) as monitor:
        assert monitor.command("info status") == "VM status: running\n"
        assert monitor.command("bogus") == "unknown command: 'bogus'\n"

    assert fake.ran == ["info status", "bogus"]


@pytest.mark.parametrize(
    ("greeting", "error"),
    [
        (b"SSH-2.0\r\n", FormatError),
        (b'{"VNC": 1}\r\n', FormatError),
        (b"{}}\r\n", FormatError),
        (b'{"QMP": {}}\r\n[1]\r\n', FormatError),
        (b'{"QMP": {}}\r\n' + b'{"event": "A"}\r\n' * 2000, FormatError),
        (b'{"QMP": {}}\r\n{"error": {}}\r\n', FormatError),
        (b"{" + b" " * (5 << 20), FormatError),
        (b'{"QMP": {}}\r\n' + b'{"return":' * 100_000 + b"\r\n", FormatError),
        (b'{"QMP": ' + b"[" * 100_000 + b"\r\n", FormatError),
        (b"QEMU 7.2 monitor\r\n", UnreachableError),
        (b"", UnreachableError),
    ],
)
def test_what_is_no_monitor_is_refused(
    tmp_path: Path, greeting: bytes, error: type[KprobesError]
) -> None:
    path = tmp_path / "monitor"

    def serve(sock: socket.socket) -> None:
        sock.sendall(greeting)
        sock.recv(1000)

    with serving(path, serve), pytest.raises(error):
        # What is wrong is seen at once; the others say nothing more.
        Monitor.open(str(path), timeout_s=30 if error is FormatError else 0.3)


def test_a_monitor_that_sends_events_without_end_has_a_deadline(tmp_path: Path) -> None:
    path = tmp_path / "monitor"

    def serve(sock: socket.socket) -> None:
        sock.sendall(b'{"QMP": {}}\r\n')
        while True:
            sock.sendall(b'{"event": "A"}\r\n')
            time.sleep(0.01)

    with serving(path, serve), pytest.raises(FormatError, match="nothing but events"):
        Monitor.open(str(path), timeout_s=0.3)


def test_a_monitor_that_hangs_up_is_unreachable(tmp_path: Path) -> None:
    path = tmp_path / "monitor"

    def serve(sock: socket.socket) -> None:
        sock.sendall(b"QEMU 7.2 monitor\r\n(qemu) ")

    with (
        serving(path, serve),
        Monitor.open(str(path), timeout_s=1) as monitor,
        pytest.raises(UnreachableError),
    ):
        monitor.command("info status")


@pytest.mark.parametrize(
    ("first", "claim"), [(b"{", True), (b"Q", True), (b"$", False), (b"+", False), (b"", False)]
)
def test_a_monitor_is_known_by_its_first_byte(first: bytes, claim: bool) -> None:
    assert is_monitor(first) == claim
