import socket
from pathlib import Path

import pytest

from kprobes.errors import UnreachableError
from kprobes.formats import rsp
from kprobes.transport.connection import handshake
from kprobes.transport.stub import Stub
from tests.build.stub import FakeStub, listening, packet, serving


def test_nobody_listening_is_one_clear_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    with pytest.raises(UnreachableError, match=r"no such socket"):
        Stub.open(str(tmp_path / "gdb.sock"))
    with pytest.raises(UnreachableError, match=rf"localhost:{port}: connection refused"):
        Stub.open(f"localhost:{port}")
    with pytest.raises(UnreachableError, match="longer than"):
        Stub.open("/" + "x" * 200)


def test_a_second_client_is_told_after_the_timeout_and_leaves_no_frozen_guest() -> None:
    fake = FakeStub()
    with listening(fake) as path:
        first = Stub.open(path)

        with pytest.raises(UnreachableError, match="in use by another debugger"):
            Stub.open(path, timeout_s=0.1)

        first.detach()
        with Stub.open(path) as third:
            assert third.ids() == (1, 2)
    assert fake.is_running


@pytest.mark.parametrize(
    ("greeting", "why"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "not a gdb stub"),
        (b'{"QMP": {}}\r\n', "not a gdb stub"),
        (packet(b"PacketSize=1"), "not a gdb stub"),
        (b"", "not a gdb stub"),
    ],
)
def test_another_server_is_not_taken_for_a_stub(tmp_path: Path, greeting: bytes, why: str) -> None:
    path = tmp_path / "s"

    def serve(sock: socket.socket) -> None:
        if greeting:
            sock.sendall(greeting)
            sock.recv(1000)

    with serving(path, serve), pytest.raises(UnreachableError, match=why):
        Stub.open(str(path), timeout_s=1)


@pytest.mark.parametrize("half", [b"", b"$m12", b"$M12,4:}", b"$P10=0*", b"$m12,4#", b"$m12,4#5"])
def test_what_a_dead_client_left_in_the_stub_does_not_swallow_the_first_words(half: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"+")

        handshake(ours, "here", timeout_s=1)

        stream = half + theirs.recv(1000)
    # As QEMU reads it: a sum that is not a number is part of the packet.
    stream = stream.replace(b"#$", b"_$").replace(b"#5$", b"_5$").replace(b"}$", b"_$")
    first = rsp.next_packet(stream)
    assert first is not None
    assert first.is_intact == (not half)
    second = rsp.next_packet(stream[first.end :])
    assert second is not None
    assert second.payload.startswith(b"qSupported")
