"""QEMU's monitors: QMP (JSON lines) and the human one (a prompt), one command at a time.

Written down in QEMU's docs/interop/qmp-spec.rst; the human monitor echoes what it reads with
escape sequences and ends every answer with its prompt. That of a libvirt domain, whose one client
is libvirt, is reached through ``virsh qemu-monitor-command``.
"""

import contextlib
import json
import shutil
import socket
import subprocess
import time
from collections import deque
from itertools import count
from typing import Protocol, Self, cast

from kprobes.errors import FormatError, UnreachableError
from kprobes.transport.address import LIBVIRT, dial, is_domain, peer_pid, peer_uid
from kprobes.units import MIB

_PROMPT = b"(qemu) "
_MAX_ANSWER = 4 * MIB
_MAX_WORDS = 200
_MAX_EVENTS = 1000
_LAST = b"kprobes-leaves"


def is_monitor(first: bytes) -> bool:
    """Whether a connection's first byte is that of a monitor's greeting."""
    return first[:1] in (b"{", b"Q", b"(")


def leave(sock: socket.socket, *, timeout_s: float) -> None:
    """Close a connection on which a monitor was taken for something else.

    QEMU 10.0 serves no client of a QMP socket any more, for good, when one leaves before its words
    are answered, be they no JSON at all.
    """
    with contextlib.suppress(OSError):
        sock.settimeout(timeout_s)
        # A newline ends what is no JSON, and this is answered last.
        sock.sendall(b'\n{"execute": "qmp_capabilities", "id": "%s"}\n' % _LAST)
        said, deadline = b"", time.monotonic() + timeout_s
        while _LAST not in said and len(said) < _MAX_ANSWER and time.monotonic() < deadline:
            data = sock.recv(65536)
            if not data:
                break
            said += data
    sock.close()


class _Talk(Protocol):
    def command(self, text: str) -> str: ...


class Monitor:
    """A connection to a monitor of any kind. QEMU serves one client of a socket at a time."""

    def __init__(self, talk: _Talk, sock: socket.socket | None = None) -> None:
        self._talk = talk
        self._sock = sock

    @classmethod
    def open(cls, address: str, *, timeout_s: float = 5.0) -> Self:
        """Connect and find out which kind it is.

        Raises:
            UnreachableError: nobody listens, or no monitor greets; of ``libvirt:DOMAIN``: there is
                no ``virsh``.
        """
        if is_domain(address):
            return cls(_Virsh(address.removeprefix(LIBVIRT), timeout_s))
        lines = _Lines(dial(address, timeout_s=timeout_s), address, timeout_s)
        try:
            greeting = lines.take_first()
            talk = _Qmp(lines) if greeting.startswith(b"{") else _Human(lines)
            talk.greet(greeting)
        except BaseException:
            lines.sock.close()
            raise
        return cls(talk, lines.sock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def command(self, text: str) -> str:
        """Run a command of the human monitor and return what it prints.

        Raises:
            UnreachableError: no answer in time.
            FormatError: an answer that is not a monitor's.
        """
        return self._talk.command(text).replace("\r\n", "\n")

    @property
    def pid(self) -> int | None:
        """Of QEMU's process, or None where that is not known."""
        return None if self._sock is None else peer_pid(self._sock)

    @property
    def uid(self) -> int | None:
        """Of QEMU's user, or None where that is not known, as of a socket that has a path."""
        return None if self._sock is None else peer_uid(self._sock)

    def close(self) -> None:
        """Close the connection."""
        if self._sock is not None:
            self._sock.close()


class _Virsh:
    # A client for each command. LIBVIRT_DEFAULT_URI says which libvirt; virsh(1).
    def __init__(self, domain: str, timeout_s: float) -> None:
        program = shutil.which("virsh")
        if program is None:
            raise UnreachableError(
                f"{LIBVIRT}{domain}: there is no virsh here: install libvirt-clients"
            )
        self._words = [program, "qemu-monitor-command", "--domain", domain, "--hmp", "--"]
        self._domain = domain
        self._timeout_s = timeout_s

    def command(self, text: str) -> str:
        try:
            done = subprocess.run(
                [*self._words, text],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=self._timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as e:
            raise self._error(f"virsh does not answer within {self._timeout_s:g} s") from e
        except OSError as e:
            raise self._error(f"virsh: {e.strerror}") from e
        if done.returncode:
            said = done.stderr.decode("utf-8", "replace").strip().partition("\n")[0]
            raise self._error(f"virsh: {said[:_MAX_WORDS] or f'exit status {done.returncode}'}")
        return done.stdout[:_MAX_ANSWER].decode("utf-8", "replace")

    def _error(self, why: str) -> UnreachableError:
        return UnreachableError(f"{LIBVIRT}{self._domain}: {why}")


class _Lines:
    def __init__(self, sock: socket.socket, address: str, timeout_s: float) -> None:
        self.sock = sock
        self._address = address
        self.timeout_s = timeout_s
        self._data = bytearray()

    def send(self, data: bytes) -> None:
        try:
            self.sock.sendall(data)
        except OSError as e:
            raise UnreachableError(f"{self._address}: {e.strerror or 'takes nothing'}") from e

    def take_first(self) -> bytes:
        deadline = time.monotonic() + self.timeout_s
        while not self._data:
            self._fill(deadline)
        return bytes(self._data[:1])

    def take(self, end: bytes) -> bytes:
        deadline = time.monotonic() + self.timeout_s
        searched = 0
        while (found := self._data.find(end, searched)) < 0:
            searched = max(len(self._data) - len(end), 0)
            self._fill(deadline)
        taken = bytes(self._data[:found])
        del self._data[: found + len(end)]
        return taken

    def _fill(self, deadline: float) -> None:
        try:
            self.sock.settimeout(max(deadline - time.monotonic(), 1e-4))
            before = len(self._data)
            # All in C: between one call and the next an interrupt would lose what has come.
            deque(map(self._data.extend, map(self.sock.recv, (65536,))), maxlen=0)
        except TimeoutError as e:
            why = f"the monitor does not answer within {self.timeout_s:g} s: already in use?"
            raise UnreachableError(f"{self._address}: {why}") from e
        except OSError as e:
            raise UnreachableError(f"{self._address}: {e.strerror}") from e
        if len(self._data) == before:
            raise UnreachableError(f"{self._address}: the monitor hung up")
        if len(self._data) > _MAX_ANSWER:
            raise FormatError(f"{self._address}: a monitor's answer without end")


class _Human:
    def __init__(self, lines: _Lines) -> None:
        self._lines = lines
        self._is_under_way = False
        self._numbers = count(1)

    def greet(self, greeting: bytes) -> None:
        if not is_monitor(greeting):
            raise FormatError(f"no monitor of QEMU: greets with {greeting!r}")
        self._lines.take(_PROMPT)

    def command(self, text: str) -> str:
        if self._is_under_way:
            self._pass_over()
        self._is_under_way = True
        self._lines.send(text.encode() + b"\n")
        # The echo, redrawn with every letter, ends with the line.
        self._lines.take(b"\n")
        answer = self._lines.take(_PROMPT)
        self._is_under_way = False
        return answer.decode("utf-8", "replace")

    def _pass_over(self) -> None:
        # What is left of a command that was interrupted ends before the answer to this one.
        word = b"kprobes-%d" % next(self._numbers)
        self._lines.send(b"\n%b\n" % word)
        self._lines.take(b"unknown command: '%b'" % word)
        self._lines.take(_PROMPT)


class _Qmp:
    def __init__(self, lines: _Lines) -> None:
        self._lines = lines
        self._numbers = count(1)

    def greet(self, greeting: bytes) -> None:
        del greeting
        if "QMP" not in self._message():
            raise FormatError("no monitor of QEMU: greets with other JSON than QMP's")
        self._execute({"execute": "qmp_capabilities"})

    def command(self, text: str) -> str:
        arguments = {"command-line": text}
        return str(self._execute({"execute": "human-monitor-command", "arguments": arguments}))

    def _execute(self, request: dict[str, object]) -> object:
        number = next(self._numbers)
        self._lines.send(json.dumps(request | {"id": number}).encode() + b"\n")
        # Events may come before the answer, and those to commands that were interrupted.
        deadline = time.monotonic() + self._lines.timeout_s
        for _ in range(_MAX_EVENTS):
            message = self._message()
            is_ours = message.get("id", number) == number
            if "error" in message and is_ours:
                why = str(message["error"])[:_MAX_WORDS]
                raise FormatError(f"QMP refuses {request['execute']}: {why}")
            if "return" in message and is_ours:
                return message["return"]
            if time.monotonic() > deadline:
                break
        raise FormatError("QMP sends nothing but events")

    def _message(self) -> dict[str, object]:
        try:
            message = json.loads(self._lines.take(b"\n"))
        except (ValueError, RecursionError) as e:
            raise FormatError(f"no JSON from QMP: {e}") from e
        if not isinstance(message, dict):
            raise FormatError("no JSON object from QMP")
        return cast("dict[str, object]", message)
