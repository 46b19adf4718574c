import os
import re
import socket
from collections.abc import Generator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from kprobes.errors import UnreachableError, UsageError
from kprobes.transport import connect as connect_module
from kprobes.transport import monitor as monitor_module
from kprobes.transport.connect import connect, parse_target
from tests.build.monitor import FakeMonitor
from tests.build.stub import FakeStub, listening, packet, serving, serving_port
from tests.build.virsh import FakeVirsh


class FakeQemu(FakeMonitor):
    """A monitor whose ``gdbserver`` opens a stub."""

    def __init__(self, stack: ExitStack, *, has_sandbox: bool = False) -> None:
        super().__init__()
        self.stub = FakeStub()
        self.chardevs = "serial0: filename=vc\n"
        self.answers["info chardev"] = lambda _: self.chardevs
        self.answers["gdbserver unix:"] = self.refuse if has_sandbox else self.open_stub
        self.answers["gdbserver"] = lambda _: "Could not open gdbserver\n"
        self.answers["gdbserver none"] = lambda _: "Disabled gdbserver\n"
        self.stack = stack

    def refuse(self, command: str) -> str:
        return f"Failed to bind socket\nCould not open gdbserver on device {command}\n"

    def open_stub(self, command: str) -> str:
        found = re.fullmatch(r"gdbserver unix:(.*),server=on,wait=off", command)
        assert found is not None
        self.path = Path(found[1])
        self.stack.enter_context(serving(self.path, self.stub.serve))
        return "Waiting for gdb connection\n"


@pytest.fixture
def stack() -> Generator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    ("target", "address"),
    [
        ("qemu:localhost:1234", "localhost:1234"),
        ("localhost:1234", "localhost:1234"),
        ("qemu::1234", ":1234"),
        ("qemu:[::1]:1234", "[::1]:1234"),
        ("qemu:/run/gdb.sock", "/run/gdb.sock"),
        ("/run/gdb.sock", "/run/gdb.sock"),
        ("qemu:unix:/run/gdb.sock", "/run/gdb.sock"),
        ("libvirt:one", "libvirt:one"),
        ("libvirt:1234", "libvirt:1234"),
    ],
)
def test_targets_are_read(target: str, address: str) -> None:
    assert parse_target(target) == address


@pytest.mark.parametrize("target", ["./gdb.sock", "qemu:./gdb.sock", "unix:./gdb.sock"])
def test_a_path_is_the_same_from_every_directory(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    assert parse_target(target) == str(tmp_path / "gdb.sock")


@pytest.mark.parametrize("target", ["", "qemu:", "guest", "qemu:1234", "qemu:h:99999", "libvirt:"])
def test_what_is_no_target_is_a_usage_error(target: str) -> None:
    with pytest.raises(UsageError, match=r"qemu:HOST:PORT"):
        parse_target(target)


def test_a_stub_is_used_directly() -> None:
    with listening(FakeStub()) as path, connect(f"qemu:{path}") as stub:
        assert stub.ids() == (1, 2)


@pytest.mark.parametrize("kind", ["human", "qmp"])
def test_a_monitor_opens_a_stub_for_us_and_closes_it(
    tmp_path: Path, stack: ExitStack, kind: str
) -> None:
    qemu = FakeQemu(stack)
    monitor = tmp_path / "monitor"
    stack.enter_context(serving(monitor, qemu.serve_human if kind == "human" else qemu.serve_qmp))

    with connect(f"qemu:{monitor}") as stub:
        assert stub.ids() == (1, 2)
        assert stub.address == str(qemu.path)

    assert qemu.ran[-1] == "gdbserver none"
    assert not qemu.path.parent.exists()
    assert qemu.stub.is_running
    assert not qemu.is_forsaken


@pytest.mark.parametrize("status", ["paused", "paused (prelaunch)"])
def test_a_guest_that_its_monitor_calls_paused_stays_so(
    tmp_path: Path, stack: ExitStack, status: str
) -> None:
    qemu = FakeQemu(stack)
    qemu.answers["info status"] = lambda _: f"VM status: {status}\n"
    stack.enter_context(serving(tmp_path / "monitor", qemu.serve_human))

    with connect(str(tmp_path / "monitor")) as stub:
        assert stub.is_held

    assert not qemu.stub.is_running


@pytest.mark.parametrize(
    ("status", "is_held"), [("paused", False), ("paused (prelaunch)", True), ("running", False)]
)
def test_a_stub_tells_of_a_guest_that_has_not_started(status: str, is_held: bool) -> None:
    fake = FakeStub()
    fake.hooks[b"qRcmd," + b"info status".hex().encode()] = lambda sock: sock.sendall(
        packet(b"O" + f"VM status: {status}\r\n".encode().hex().encode()) + packet(b"OK")
    )

    with listening(fake) as path, connect(path) as stub:
        assert stub.is_held == is_held

    assert fake.is_running != is_held


def test_a_stub_that_is_there_already_is_used_and_stays(tmp_path: Path, stack: ExitStack) -> None:
    qemu = FakeQemu(stack)
    monitor = tmp_path / "monitor"
    path = stack.enter_context(listening(qemu.stub))
    relative = os.path.relpath(path)
    stack.enter_context(serving(monitor, qemu.serve_human))

    for name in (path, relative):
        qemu.chardevs = f"gdb: filename=disconnected:unix:{name},server=on\n"
        with connect(str(monitor)) as stub:
            assert stub.address == path

    assert set(qemu.ran) == {"info status", "info chardev"}


@pytest.mark.parametrize("name", ["kprobes-a_1b/stub.sock", "kprobes-0123456789abcdef.sock"])
def test_a_stub_that_a_killed_tracer_has_left_is_used_and_closed(
    tmp_path: Path, stack: ExitStack, name: str
) -> None:
    qemu, path = FakeQemu(stack), tmp_path / name
    path.parent.mkdir(exist_ok=True)
    stack.enter_context(serving(path, qemu.stub.serve))
    qemu.chardevs = f"gdb: filename=disconnected:unix:{path},server=on\n"
    stack.enter_context(serving(tmp_path / "monitor", qemu.serve_human))

    with connect(str(tmp_path / "monitor")) as stub:
        assert stub.address == str(path)

    assert qemu.ran[-1] == "gdbserver none"
    assert path.parent.exists() == (path.parent == tmp_path)


def test_a_stub_that_another_debugger_uses_is_left_alone(tmp_path: Path, stack: ExitStack) -> None:
    qemu = FakeQemu(stack)
    qemu.chardevs = "gdb: filename=tcp:127.0.0.1:1234,server=on <-> 127.0.0.1:40000\n"
    stack.enter_context(serving(tmp_path / "monitor", qemu.serve_human))

    with pytest.raises(UnreachableError, match="already in use"):
        connect(str(tmp_path / "monitor"))

    assert qemu.ran == ["info status", "info chardev"]


def test_a_stub_of_another_kind_is_named(tmp_path: Path, stack: ExitStack) -> None:
    qemu = FakeQemu(stack)
    qemu.chardevs = "gdb: filename=disconnected:pty:/dev/pts/3\n"
    stack.enter_context(serving(tmp_path / "monitor", qemu.serve_human))

    with pytest.raises(UnreachableError, match="pty"):
        connect(str(tmp_path / "monitor"))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("Failed to bind socket\nCould not open gdbserver\n", "Failed to bind socket"),
        ("\n", "it does not say why"),
        ("", "it does not say why"),
    ],
)
def test_a_qemu_that_opens_no_stub_says_why_and_opens_no_port(
    tmp_path: Path, stack: ExitStack, said: str, why: str
) -> None:
    qemu = FakeQemu(stack, has_sandbox=True)
    qemu.answers["gdbserver unix:"] = lambda _: said
    stack.enter_context(serving(tmp_path / "monitor", qemu.serve_qmp))

    with pytest.raises(UnreachableError, match=f"no gdb stub: {why}$"):
        connect(str(tmp_path / "monitor"))

    assert qemu.ran[-1] == "gdbserver none"
    assert not any("tcp:" in command for command in qemu.ran)


def test_a_qemu_in_a_sandbox_opens_a_socket_beside_its_monitors(
    tmp_path: Path, stack: ExitStack
) -> None:
    qemu = FakeQemu(stack, has_sandbox=True)
    qemu.answers = {f"gdbserver unix:{tmp_path}/kprobes-": qemu.open_stub, **qemu.answers}
    stack.enter_context(serving(tmp_path / "monitor", qemu.serve_qmp))

    with connect(str(tmp_path / "monitor")) as stub:
        assert Path(stub.address).parent == tmp_path
        assert stub.ids() == (1, 2)


def test_of_a_domain_of_libvirt_a_stub_is_opened_and_closed_through_virsh(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    qemu = _domain(tmp_path, FakeQemu(stack), monkeypatch)

    with connect("libvirt:one", timeout_s=60) as stub:
        assert stub.ids() == (1, 2)
        assert stub.address == str(qemu.path)

    assert qemu.ran[-1] == "gdbserver none"
    assert not qemu.path.parent.exists()


def test_a_domain_that_is_confined_gets_no_port_but_advice(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    qemu = _domain(tmp_path, FakeQemu(stack, has_sandbox=True), monkeypatch)

    with pytest.raises(UnreachableError, match="Failed to bind socket; run kprobe as QEMU's user"):
        connect("libvirt:one", timeout_s=60)

    assert not [each for each in qemu.ran if "tcp" in each]
    assert qemu.ran[-1] == "gdbserver none"


def _domain(tmp_path: Path, qemu: FakeQemu, monkeypatch: pytest.MonkeyPatch) -> FakeQemu:
    virsh = FakeVirsh(tmp_path / "bin", "one", tmp_path / "monitor")
    qemu.stack.enter_context(serving(tmp_path / "monitor", qemu.serve_qmp))
    monkeypatch.setenv("PATH", str(virsh.directory), prepend=":")
    return qemu


def test_root_gives_the_socket_s_directory_to_qemu_s_user(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[Path, int, int]] = []

    def chown(path: Path, uid: int, gid: int) -> None:
        given.append((path, uid, gid))

    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(os, "chown", chown)
    qemu = FakeQemu(stack)
    stack.enter_context(serving(tmp_path / "monitor", qemu.serve_qmp))

    with connect(str(tmp_path / "monitor")):
        assert given == [(qemu.path.parent, os.getuid(), -1)]


def _open_port(qemu: FakeQemu, stack: ExitStack, command: str) -> str:
    stack.enter_context(serving_port(qemu.stub.serve, port=int(command.rsplit(":", 1)[1])))
    return "Waiting for gdb connection\n"


@pytest.fixture
def sandboxed(stack: ExitStack) -> FakeQemu:
    qemu = FakeQemu(stack, has_sandbox=True)
    qemu.answers = {"gdbserver tcp:": partial(_open_port, qemu, stack), **qemu.answers}
    return qemu


def test_a_qemu_with_a_port_for_its_monitor_opens_another(
    sandboxed: FakeQemu, stack: ExitStack
) -> None:
    monitor = stack.enter_context(serving_port(sandboxed.serve_human))

    with connect(monitor) as stub:
        assert stub.address.startswith("127.0.0.1:")
        assert stub.ids() == (1, 2)


@pytest.mark.parametrize("owners", [[1000, 1001], [None, None]])
def test_a_port_that_another_user_may_have_taken_is_left_at_once(
    sandboxed: FakeQemu,
    stack: ExitStack,
    owners: list[int | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monitor = stack.enter_context(serving_port(sandboxed.serve_human))
    left = iter(owners)

    def peer_uid(sock: socket.socket) -> int | None:
        del sock
        return next(left)

    # Nobody but the kernel says who has a port.
    monkeypatch.setattr(monitor_module, "peer_uid", peer_uid)
    monkeypatch.setattr(connect_module, "peer_uid", peer_uid)

    with pytest.raises(UnreachableError, match="another user's"):
        connect(monitor)

    assert sandboxed.ran[-1] == "gdbserver none"
