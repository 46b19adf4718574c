import os
import signal
import socket
import time
from pathlib import Path

import pytest

from kprobes.errors import FormatError, KprobesError, UnreachableError
from kprobes.transport.monitor import Monitor, is_monitor
from tests.build.monitor import FakeMonitor
from tests.build.stub import serving
from tests.build.virsh import FakeVirsh


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


@pytest.mark.parametrize("kind", ["human", "qmp"])
def test_an_answer_to_a_command_that_was_interrupted_is_nobody_elses(
    tmp_path: Path, fake: FakeMonitor, kind: str
) -> None:
    path = tmp_path / "monitor"
    serve = fake.serve_human if kind == "human" else fake.serve_qmp

    def interrupting(_: str) -> str:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        return "too late\n"

    fake.answers["stop"] = interrupting
    with serving(path, serve), Monitor.open(str(path)) as monitor:
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                monitor.command("stop")
        assert monitor.command("info status") == "VM status: running\n"
        assert monitor.command("bogus") == "unknown command: 'bogus'\n"

    assert fake.ran.count("stop") == 3
    assert fake.ran[-2:] == ["info status", "bogus"]


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


def test_of_a_domain_of_libvirt_it_is_reached_through_virsh(
    tmp_path: Path, fake: FakeMonitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "monitor"
    virsh = FakeVirsh(tmp_path / "bin", "one", path)
    monkeypatch.setenv("PATH", str(virsh.directory), prepend=":")

    with serving(path, fake.serve_human), Monitor.open("libvirt:one", timeout_s=60) as monitor:
        assert (monitor.pid, monitor.uid) == (None, None)
        assert monitor.command("info status") == "VM status: running\n"
    with (
        pytest.raises(UnreachableError, match="libvirt:two: virsh: error: failed to get domain"),
        Monitor.open("libvirt:two", timeout_s=60) as monitor,
    ):
        monitor.command("info status")

    assert virsh.commands == ["info status"]


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (None, "no virsh here: install libvirt-clients"),
        ("#!/bin/sh\nexit 7\n", "virsh: exit status 7"),
        ("#!/bin/sh\nexec sleep 60\n", "does not answer within 0.3 s"),
        ("#!/no/such/program\n", "virsh: No such file"),
    ],
)
def test_a_virsh_that_does_not_help_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str | None, why: str
) -> None:
    if program is not None:
        (tmp_path / "virsh").write_text(program)
        (tmp_path / "virsh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin" if program else str(tmp_path))

    with pytest.raises(UnreachableError, match=f"libvirt:one: .*{why}"):
        Monitor.open("libvirt:one", timeout_s=0.3).command("info status")


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
