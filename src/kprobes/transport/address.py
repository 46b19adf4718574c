"""Address of a stub or a monitor: from its text to a connected socket, and the process at its end.

The process is looked up when it runs on this machine. ``/proc/net/tcp`` is written down in proc(5)
and Documentation/networking/proc_net_tcp.rst.
"""

import contextlib
import os
import re
import socket
import struct
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple, cast

from kprobes.errors import UnreachableError, UsageError

_HOST_PORT = re.compile(r"(?:\[([0-9A-Fa-f:.%a-z]+)\]|([^:\[\]/]*)):([0-9]{1,5})")
_MAX_PATH = 107
"""Bytes of a path in ``struct sockaddr_un``, NUL left out."""


LIBVIRT = "libvirt:"
"""Before a domain's name: the address of the monitor that libvirt keeps to itself."""


def is_domain(address: str) -> bool:
    """Whether an address names a domain of libvirt."""
    return address.startswith(LIBVIRT)


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
            return "no answer: in use by another debugger or kprobe command?"
        case _:
            return error.strerror or str(error)


def listen_at(address: str) -> tuple[socket.socket, str]:
    """Listen at a socket that is made, for this user only, or at a port of this machine.

    Args:
        address: the path of a socket, or with a colon ``HOST:PORT``; port 0 is any that is free.

    Returns:
        The socket, and its address, a path from the root on.

    Raises:
        UsageError: another machine, or nothing can be made or listened at there.
    """
    try:
        if _is_made(address):
            path = Path(address).absolute()
            return _listen_at_path(path), str(path)
        sock = socket.create_server(_own_port(address), backlog=1)
    except OSError as e:
        raise UsageError(f"{address}: {e.strerror or e}") from e
    host, port = cast("tuple[str, int]", sock.getsockname()[:2])
    return sock, f"{host}:{port}"


def check_listening(address: str) -> None:
    """Check of an address of ``listen_at`` what can be known before anything listens.

    Raises:
        UsageError: it is none, or another machine's.
    """
    if not _is_made(address):
        _own_port(address)


def _is_made(address: str) -> bool:
    # Of what is made any name will do.
    return is_path(address) or ":" not in address


def _own_port(address: str) -> tuple[str, int]:
    found = parse_host_port(address)
    if address.endswith(":0"):
        found = parse_host_port(address[:-1] + "1")
        found = None if found is None else (found[0], 0)
    if found is None:
        raise UsageError(f"{address}: neither the path of a socket nor HOST:PORT")
    if found[0] not in _LOOPBACK:
        raise UsageError(
            f"{address}: anybody could do anything to the guest; localhost:{found[1]} is "
            "for this machine, and ssh -L leads there from others"
        )
    return found


def _listen_at_path(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        # Whoever may connect may do anything to the guest: of what this leaves bind(2) makes it.
        os.fchmod(sock.fileno(), 0o600)
        if path.is_socket() and not _is_served(path):
            # Of a server that was killed.
            path.unlink()
        sock.bind(str(path))
        sock.listen(1)
    except BaseException:
        sock.close()
        raise
    return sock


def _is_served(path: Path) -> bool:
    try:
        _dial_path(path, 1.0).close()
    except OSError:
        return False
    return True


PROC = Path("/proc")
_UCRED = struct.Struct("3i")
_FAMILIES = {"tcp": socket.AF_INET, "tcp6": socket.AF_INET6}
_MAPPED = "::ffff:"
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}
_LISTENING = "0A"
_ACCEPTS = 0x10000
"""SO_ACCEPTCON of ``/proc/net/unix``."""


def peer_pid(sock: socket.socket) -> int | None:
    """Return the pid of the process that listens, or None when it is elsewhere or hidden.

    For a unix socket it is the one that called ``listen``, which can have been QEMU's parent.
    """
    if sock.family == socket.AF_UNIX:
        found = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        return _UCRED.unpack(found)[0] or None
    found = _peer_end(sock)
    return _owners([found.inode]).get(found.inode) if found is not None else None


def listener_pid(address: str) -> int | None:
    """Return the pid of the process that listens at an address; nobody connects to it.

    None when it is elsewhere, hidden, or not the only one.
    """
    if is_path(address):
        owners = _path_owners(Path(address))
    else:
        host, port = parse_host_port(address) or ("", 0)
        owners = _port_owners(port) if host in _LOOPBACK else set[int]()
    return next(iter(owners)) if len(owners) == 1 else None


def _path_owners(path: Path) -> set[int]:
    # Num RefCount Protocol Flags Type St Inode Path, this as it was given to bind(2).
    bound: dict[int, str] = {}
    for line in socket_table("unix"):
        words = line.split(maxsplit=7)
        if len(words) == 8 and int(words[3], 16) & _ACCEPTS and words[7].endswith(path.name):
            name = words[7]
            if not name.startswith("/") or _is_same(Path(name), path):
                bound[int(words[6])] = name
    found = _owners(bound).items()
    return {pid for inode, pid in found if _is_same(Path(f"/proc/{pid}/cwd", bound[inode]), path)}


def _is_same(path: Path, other: Path) -> bool:
    with contextlib.suppress(OSError):
        return path.samefile(other)
    return False


def _port_owners(port: int) -> set[int]:
    inodes = set[int]()
    for name in _FAMILIES:
        for line in socket_table(name):
            words = line.split()
            if words[3] == _LISTENING and int(words[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(int(words[9]))
    return set(_owners(inodes).values())


def peer_uid(sock: socket.socket) -> int | None:
    """Return whose process has the other end of a TCP connection, or None when it is elsewhere."""
    if sock.family == socket.AF_UNIX:
        return None
    found = _peer_end(sock)
    return found.uid if found is not None else None


class End(NamedTuple):
    """One end of a TCP connection, on this machine."""

    uid: int
    inode: int


def find_end(table: str, local: str, remote: str) -> End | None:
    """Return one end of a TCP connection.

    A connection that nobody has accepted yet has none.

    Args:
        table: text of ``/proc/net/tcp`` or ``tcp6``.
        local: this end's address, as in the table.
        remote: the other end's.
    """
    for line in table.splitlines()[1:]:
        words = line.split()
        if len(words) > 9 and (words[1], words[2]) == (local, remote) and int(words[9]):
            return End(uid=int(words[7]), inode=int(words[9]))
    return None


def table_address(host: str, port: int, family: int) -> str:
    """Return an address in the words of ``/proc/net/tcp`` or ``tcp6``.

    Args:
        host: its IP address.
        port: its number.
        family: ``AF_INET`` or ``AF_INET6``: which of the files.
    """
    if family == socket.AF_INET6 and "." in host and ":" not in host:
        host = _MAPPED + host
    packed = socket.inet_pton(family, host)
    # The kernel prints each 32-bit word of the packed address as a number of this machine's.
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return "".join(f"{word:08X}" for word in words) + f":{port:04X}"


def _peer_end(sock: socket.socket) -> End | None:
    ours = cast("tuple[str, int]", sock.getsockname()[:2])
    theirs = cast("tuple[str, int]", sock.getpeername()[:2])
    # QEMU may have an IPv4 connection on an IPv6 socket.
    for name, family in _FAMILIES.items():
        if family == socket.AF_INET and ":" in ours[0]:
            continue
        table = Path("/proc/net", name)
        if table.exists():
            near, far = table_address(*ours, family), table_address(*theirs, family)
            found = find_end(table.read_text(), far, near)
            if found is not None:
                return found
    return None


def _owners(inodes: Collection[int]) -> dict[int, int]:
    # By socket: the first process that has it open.
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    found: dict[int, int] = {}
    for pid in pids() if wanted else ():
        for link in open_files(PROC / str(pid) / "fd"):
            if link in wanted:
                found.setdefault(wanted[link], pid)
        if len(found) == len(wanted):
            break
    return found


def socket_table(name: str, proc: Path = PROC) -> list[str]:
    """Return the lines of ``/proc/net/NAME``, its head left out; none where it is hidden."""
    with contextlib.suppress(OSError):
        return (proc / "net" / name).read_text("utf-8", "surrogateescape").splitlines()[1:]
    return []


def pids(proc: Path = PROC) -> Iterator[int]:
    """Yield the numbers of all processes."""
    for entry in proc.iterdir():
        if re.fullmatch("[0-9]+", entry.name):
            yield int(entry.name)


def open_files(directory: Path) -> Iterator[str]:
    """Yield what the links of ``/proc/PID/fd`` say; nothing of a process that is not ours."""
    try:
        place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        # Another user's process, or one that has just ended.
        return
    try:
        # By pathlib it is five times as slow, and there are thousands. It may end meanwhile.
        with contextlib.suppress(OSError), os.scandir(place) as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    yield os.readlink(entry.name, dir_fd=place)
    finally:
        os.close(place)
