"""Monitors of QEMU that a test programs: both kinds, on a unix socket."""

import json
import socket
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class FakeMonitor:
    """Answers commands; what it does not know it refuses as QEMU does.

    Attributes:
        answers: functions by the beginning of a command; they return what is printed.
        ran: the commands, in order.
    """

    answers: dict[str, Callable[[str], str]] = field(
        default_factory=dict[str, Callable[[str], str]]
    )
    ran: list[str] = field(default_factory=list[str])

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
                sock.sendall(b'{"error": {"class": "GenericError", "desc": "stray"}}\r\n')
                data = b""
            lines, data = _lines(data)
            for line in lines:
                sock.sendall(b'{"event": "STOP", "data": {}}\r\n')
                sock.sendall(json.dumps(self._execute(json.loads(line))).encode() + b"\r\n")

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
