"""Where a stub or a monitor listens, as text to a connected socket."""

import os
import re
import socket
from pathlib import Path

from kprobes.errors import UnreachableError, UsageError

_HOST_PORT = re.compile(r"(?:\[([0-9A-Fa-f:.%a-z]+)\]|([^:\[\]/]*)):([0-9]{1,5})")
_MAX_PATH = 107
"""Bytes of a path in ``struct sockaddr_un``, NUL left out."""


def parse_host_port(address: str) -> tuple[str, int] | None:
    """Return host and port of ``HOST:PORT``, ``[IPV6]:PORT`` or ``:PORT``; None for others."""
    found = _HOST_PORT.fullmatch(address)
    if found is None or not 0 < int(found[3]) < 1 << 16:
        return None
    return found[1] or found[2] or "localhost", int(found[3])


def is_path(address: str) -> bool:
    """Whether an address names a unix socket."""
    return "/" in address


def dial(address: str, *, timeout_s: float) -> socket.socket:
    """Connect to ``HOST:PORT`` or to a unix socket's path.

    Raises:
        UsageError: neither of the two.
        UnreachableError: nobody listens there.
    """
    try:
        if is_path(address):
            return _dial_path(Path(address), timeout_s)
        return _dial_port(address, timeout_s)
    except OSError as e:
        raise UnreachableError(f"{address}: {_reason(e)}") from e


def _dial_path(path: Path, timeout_s: float) -> socket.socket:
    if len(bytes(path)) > _MAX_PATH:
        return _dial_long_path(path, timeout_s)
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(timeout_s)
    try:
        sock.connect(str(path))
    except OSError:
        sock.close()
        raise
    return sock


def _dial_long_path(path: Path, timeout_s: float) -> socket.socket:
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY)
    try:
        short = Path(f"/proc/self/fd/{directory}", path.name)
        if len(bytes(short)) > _MAX_PATH:
            raise UnreachableError(f"{path}: longer than the {_MAX_PATH} bytes of a socket's path")
        return _dial_path(short, timeout_s)
    finally:
        os.close(directory)


def _dial_port(address: str, timeout_s: float) -> socket.socket:
    host_port = parse_host_port(address)
    if host_port is None:
        raise UsageError(f"{address!r} is neither HOST:PORT nor the path of a socket")
    sock = socket.create_connection(host_port, timeout_s)
    # Packets are small and each waits for an answer: 40 ms each with Nagle's algorithm.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _reason(error: OSError) -> str:
    match error:
        case ConnectionRefusedError():
            return "connection refused: is QEMU running, with -s or -gdb?"
        case FileNotFoundError():
            return "no such socket: is QEMU running?"
        case PermissionError():
            return "permission denied: the socket belongs to another user"
        case TimeoutError() | BlockingIOError():
            # A unix socket whose queue of clients is full answers EAGAIN.
            return "no answer: already in use by another debugger?"
        case _:
            return error.strerror or str(error)
