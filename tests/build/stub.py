"""A gdb stub that a test programs: serves one client at a time, as QEMU does, and misbehaves."""

import re
import socket
import tempfile
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from kprobes.formats.rsp import parse_stop

TARGET = (
    b'<?xml version="1.0"?><!DOCTYPE target SYSTEM "gdb-target.dtd"><target>'
    b'<architecture>i386:x86-64</architecture><xi:include href="core.xml"/></target>'
)
CORE = (
    b'<?xml version="1.0"?><feature name="core"><flags id="f" size="4"><field name="A" start="0"'
    b' end="0"/></flags><reg name="rax" bitsize="64" regnum="0"/><reg name="rip" bitsize="64"/>'
    b'<reg name="eflags" bitsize="32" type="f"/><reg name="st0" bitsize="80"/>'
    b'<reg name="ttbr1" bitsize="64" regnum="90"/></feature>'
)
G_SIZE = 8 + 8 + 4 + 10


def packet(payload: bytes) -> bytes:
    """Frame a payload, written apart from the code under test."""
    return b"$" + payload + b"#" + f"{sum(payload) % 256:02x}".encode()


@dataclass
class FakeStub:
    """What the guest is, how it misbehaves, and what was asked.

    Attributes:
        answers: payloads by the beginning of a request; they come before the usual answer.
        hooks: called instead, with the socket; they send what they like.
        wrong_checksums: how many of the next answers are damaged.
        is_split: whether every byte is sent by itself.
        is_silent: whether, as QEMU from 8.1 on, it says only of an interrupt that it has stopped.
        asked: the requests, in order.
    """

    virtual: bytearray = field(default_factory=lambda: bytearray(range(256)) * 64)
    physical: bytearray = field(default_factory=lambda: bytearray(b"\xee" * 16384))
    cpus: int = 2
    is_running: bool = True
    has_no_ack: bool = False
    announces: bool = True
    packet_size: int = 0x400
    answers: dict[bytes, bytes] = field(default_factory=dict[bytes, bytes])
    hooks: dict[bytes, Callable[[socket.socket], None]] = field(
        default_factory=dict[bytes, Callable[[socket.socket], None]]
    )
    wrong_checksums: int = 0
    is_split: bool = False
    is_silent: bool = False
    is_physical: bool = False
    selected: int = 1
    breakpoints: set[int] = field(default_factory=set[int])
    registers: dict[int, bytearray] = field(default_factory=dict[int, bytearray])
    asked: list[bytes] = field(default_factory=list[bytes])

    def __post_init__(self) -> None:
        for cpu in range(1, self.cpus + 1):
            self.registers[cpu] = bytearray([cpu]) * G_SIZE

    def serve(self, sock: socket.socket) -> None:
        """Talk to one client until it hangs up."""
        if self.is_running and self.announces:
            sock.sendall(packet(b"T02thread:01;"))
        self.is_running = False
        data = b""
        while chunk := sock.recv(65536):
            data += chunk
            data = self._consume(sock, data)

    def stop(self, sock: socket.socket, reply: bytes) -> None:
        """Stop the guest and say so, as at a breakpoint, whose vCPU is selected."""
        self.is_running = False
        found = parse_stop(reply)
        if found.signal == 5 and found.cpu is not None:
            self.selected = found.cpu
        self._send(sock, packet(reply))

    def _consume(self, sock: socket.socket, data: bytes) -> bytes:
        while data:
            if self.is_running:
                # Whatever the byte is, it stops the guest and is gone.
                byte, data = data[:1], data[1:]
                if self.is_silent and byte != b"\x03":
                    self.is_running = False
                else:
                    self.stop(sock, b"T02thread:01;")
                continue
            if data[:1] != b"$":
                data = data[1:]
                continue
            found = re.match(rb"\$([^#]*)#(..)", data, re.DOTALL)
            if found is None:
                return data
            data = data[found.end() :]
            assert packet(found[1]) == found[0]
            self._handle(sock, re.sub(rb"}(.)", lambda m: bytes([m[1][0] ^ 0x20]), found[1]))
        return b""

    def _handle(self, sock: socket.socket, request: bytes) -> None:
        self.asked.append(request)
        for prefix, hook in self.hooks.items():
            if request.startswith(prefix):
                hook(sock)
                return
        for prefix, answer in self.answers.items():
            if request.startswith(prefix):
                self._send(sock, packet(answer))
                return
        if request in (b"vCont;c", b"c"):
            self.is_running = True
        elif request.startswith(b"vCont;s:"):
            self.stop(sock, b"T05thread:" + request[8:] + b";")
        else:
            for payload in self._answer(request):
                self._send(sock, packet(payload))

    def _answer(self, request: bytes) -> Iterator[bytes]:
        fixed = {
            b"QStartNoAckMode": b"OK" if self.has_no_ack else b"",
            b"?": b"T05thread:p01.01;",
            b"vCont?": b"vCont;c;C;s;S",
            b"qqemu.PhyMemMode": b"1" if self.is_physical else b"0",
            b"qfThreadInfo": b"m01",
            b"qC": b"QC01",
        }
        if request in fixed:
            yield fixed[request]
        elif request.startswith(b"qSupported"):
            yield b"PacketSize=%x;qXfer:features:read+;vContSupported+" % self.packet_size
        elif request.startswith(b"qRcmd,"):
            yield b"O" + b"ran: ".hex().encode()
            yield b"O" + request[6:] + b"\r\n".hex().encode()
            yield b"OK"
        else:
            yield self._state(request)

    def _state(self, request: bytes) -> bytes:
        match request[:1], request[1:]:
            case b"Q", rest if rest.startswith(b"qemu.PhyMemMode:"):
                self.is_physical = request[-1:] == b"1"
                return b"OK"
            case b"q", b"sThreadInfo":
                # Since the list was begun.
                begun = max(at for at, each in enumerate(self.asked) if each == b"qfThreadInfo")
                seen = self.asked[begun:].count(request)
                left = list(range(2, self.cpus + 1))[seen - 1 : seen]
                return b"m" + b",".join(b"%02x" % cpu for cpu in left) if left else b"l"
            case b"q", rest if rest.startswith(b"Xfer:features:read:"):
                return self._file(request)
            case b"Z" | b"z", rest:
                return self._break(request[:1], int(rest.split(b",")[1], 16))
            case b"D", _:
                self.is_running = True
                self.breakpoints.clear()
                return b"OK"
            case b"m" | b"M", rest:
                return self._memory(rest)
            case _:
                return self._register(request)

    def _file(self, request: bytes) -> bytes:
        _, _, _, name, window = request.split(b":")
        offset, size = (int(n, 16) for n in window.split(b","))
        text = {b"target.xml": TARGET, b"core.xml": CORE}[name]
        part = text[offset : offset + size]
        escaped = re.sub(rb"[#$}*]", lambda m: bytes([0x7D, m[0][0] ^ 0x20]), part)
        return (b"m" if offset + size < len(text) else b"l") + escaped

    def _break(self, kind: bytes, addr: int) -> bytes:
        if kind == b"Z":
            self.breakpoints.add(addr)
        elif addr not in self.breakpoints:
            return b"E22"
        else:
            self.breakpoints.discard(addr)
        return b"OK"

    def _memory(self, rest: bytes) -> bytes:
        place, _, digits = rest.partition(b":")
        addr, size = (int(n, 16) for n in place.split(b","))
        memory = self.physical if self.is_physical else self.virtual
        if addr + size > len(memory):
            return b"E14"
        if digits:
            memory[addr : addr + size] = bytes.fromhex(digits.decode())
            return b"OK"
        return bytes(memory[addr : addr + size]).hex().encode()

    def _register(self, request: bytes) -> bytes:
        if request[:2] == b"Hg":
            self.selected = int(request.removeprefix(b"Hg"), 16)
            return b"OK" if self.selected in self.registers else b"E22"
        values = self.registers[self.selected]
        if request == b"g":
            # st0 is not available.
            return values[:20].hex().encode() + b"x" * 20
        if request[:1] == b"p" and int(request[1:], 16) == 90:
            return b"efcdab8967452301"
        if request[:1] == b"G":
            values[:20] = bytes.fromhex(request[1:41].decode())
            return b"OK"
        return b""

    def _send(self, sock: socket.socket, data: bytes) -> None:
        if self.wrong_checksums:
            self.wrong_checksums -= 1
            data = data[:-2] + (b"00" if data[-2:] != b"00" else b"11")
        if not self.has_no_ack:
            data = b"+" + data
        step = 1 if self.is_split else len(data)
        for start in range(0, len(data), step):
            sock.sendall(data[start : start + step])


def hang_up(sock: socket.socket) -> None:
    """Hook: close the connection."""
    sock.shutdown(socket.SHUT_RDWR)


def send(data: bytes) -> Callable[[socket.socket], None]:
    """Hook: send these bytes as they are."""
    return lambda sock: sock.sendall(data)


def silence(sock: socket.socket) -> None:
    """Hook: no answer."""
    del sock


@contextmanager
def listening(stub: FakeStub) -> Generator[str]:
    """Serve a stub on a unix socket; yields its path."""
    with tempfile.TemporaryDirectory(prefix="kprobes-test-") as directory:
        path = Path(directory, "gdb.sock")
        with serving(path, stub.serve):
            yield str(path)


@contextmanager
def serving(path: Path, serve: Callable[[socket.socket], None]) -> Generator[None]:
    """Serve clients of a unix socket one after the other; a failure in ``serve`` is raised."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen(4)
        with _serving(server, serve):
            yield


@contextmanager
def serving_port(serve: Callable[[socket.socket], None], *, port: int = 0) -> Generator[str]:
    """Serve clients of a TCP port likewise; yields its address."""
    with socket.create_server(("127.0.0.1", port)) as server, _serving(server, serve):
        yield f"127.0.0.1:{server.getsockname()[1]}"


@contextmanager
def _serving(server: socket.socket, serve: Callable[[socket.socket], None]) -> Generator[None]:
    failures: list[BaseException] = []
    with server:
        run = threading.Thread(target=_accept, args=(server, serve, failures), daemon=True)
        run.start()
        try:
            yield
        finally:
            # Ends the accept; a client that is still being served has to hang up.
            server.shutdown(socket.SHUT_RDWR)
            run.join(5)
    if failures:
        raise failures[0]


def _accept(
    server: socket.socket,
    serve: Callable[[socket.socket], None],
    failures: list[BaseException],
) -> None:
    while True:
        try:
            client, _ = server.accept()
        except OSError:
            return
        with client:
            try:
                serve(client)
            except ConnectionError:
                continue
            except BaseException as e:  # noqa: BLE001 - handed to the test's thread
                failures.append(e)
                return
