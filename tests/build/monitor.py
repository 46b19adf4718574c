"""Monitors of QEMU that a test programs: both kinds, on a unix socket."""

import json
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class FakeMonitor:
    """Answers commands; what it does not know it refuses as QEMU does.

    Attributes:
        answers: functions by the beginning of a command; they return what is printed.
        ran: the commands, in order.
        is_forsaken: whether a client left before its words were answered: QEMU's QMP answers
            nobody afterwards.
    """

    answers: dict[str, Callable[[str], str]] = field(
        default_factory=dict[str, Callable[[str], str]]
    )
    ran: list[str] = field(default_factory=list[str])
    is_forsaken: bool = False

    def serve_human(self, sock: socket.socket) -> None:
        """Talk as a human monitor: echo, output, prompt."""
        sock.sendall(b"QEMU 7.2.22 monitor - type 'help' for more information\r\n(qemu) ")
        data = b""
        while chunk := sock.recv(4096):
            lines, data = _lines(data + chunk)
            for line in lines:
                echo = b"".join(line[:n] + b"\x1b[K\x1b[D" for n in range(1, len(line) + 1))
                output = self._run(line.decode()).replace("\n", "\r\n").encode()
                sock.sendall(echo + b"\r\n" + output + b"(qemu) ")

    def serve_qmp(self, sock: socket.socket) -> None:
        """Talk QMP: JSON in lines, an event before every answer."""
        sock.sendall(b'{"QMP": {"version": {}, "capabilities": []}}\r\n')
        data = b""
        while chunk := sock.recv(4096):
            data += chunk
            if data[:1] == b"$":
                self._look_whether_left(sock)
                sock.sendall(b'{"error": {"class": "GenericError", "desc": "stray"}}\r\n')
                data = b"\n".join(data.split(b"\n")[1:])
            lines, data = _lines(data)
            for line in filter(None, lines):
                sock.sendall(b'{"event": "STOP", "data": {}}\r\n')
                sock.sendall(json.dumps(self._answer(json.loads(line))).encode() + b"\r\n")

    def _look_whether_left(self, sock: socket.socket) -> None:
        ready, _, _ = select.select([sock], [], [], 0.2)
        try:
            self.is_forsaken |= bool(ready) and not sock.recv(1, socket.MSG_PEEK)
        except ConnectionResetError:
            self.is_forsaken = True

    def _answer(self, request: dict[str, object]) -> dict[str, object]:
        given = {"id": request.pop("id")} if "id" in request else {}
        return self._execute(request) | given

    def _execute(self, request: object) -> dict[str, object]:
        match request:
            case {"execute": "qmp_capabilities"}:
                return {"return": {}}
            case {"execute": "human-monitor-command", "arguments": {"command-line": str(command)}}:
                return {"return": self._run(command).replace("\n", "\r\n")}
            case _:
                return {"error": {"class": "CommandNotFound", "desc": "unknown"}}

    def _run(self, command: str) -> str:
        self.ran.append(command)
        for prefix, answer in self.answers.items():
            if command.startswith(prefix):
                return answer(command)
        return f"unknown command: '{command}'\n"


def _lines(data: bytes) -> tuple[list[bytes], bytes]:
    *lines, rest = data.split(b"\n")
    return lines, rest
