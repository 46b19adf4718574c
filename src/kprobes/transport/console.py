"""The guest's first serial port: what it printed, and a person's terminal on it.

The two FIFOs of a QEMU ``pipe`` character device, as one line to the guest.
"""

import os
import re
import select
import socket
import termios
import time
import tty
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

from kprobes.errors import GuestGoneError, TargetError, UsageError
from kprobes.transport.qemu_process import QemuSupervisor
from kprobes.units import MIB

LEAVE = b"\x1d"
"""Ctrl-]: leaves the terminal, as in telnet and virsh."""

_CRASH = re.compile(r"\b(Oops|BUG|int3|invalid opcode|general protection fault)\b")

LONGEST_LOG = 16 * MIB
"""Of what a guest prints; one that prints without end must not fill our disk."""


def read_log(path: Path) -> str:
    """Return what the guest printed: the last 16 MiB, as text with plain line ends."""
    try:
        with path.open("rb+") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - LONGEST_LOG))
            data = log.read(LONGEST_LOG)
    except FileNotFoundError:
        return ""
    return data.decode(errors="replace").replace("\r\n", "\n")


def trim_log(path: Path) -> None:
    """Empty a log that has become too long; QEMU appends, so it goes on at the start."""
    if path.exists() and path.stat().st_size > LONGEST_LOG:
        os.truncate(path, 0)


def last_words(text: str, count: int = 12) -> str:
    """Return what a text ends with, for an error message: from the kernel's panic on, if any."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    panics = [at for at, line in enumerate(lines) if "Kernel panic" in line]
    start = panics[-1] if panics else max(0, len(lines) - count)
    return "\n".join(f"  {line}" for line in lines[start : start + count])


def has_crashed(text: str) -> bool:
    """Whether a kernel says that it came to a fault of its own; not every panic is one."""
    return _CRASH.search(text) is not None


def attach(path: Path, *, source: int, sink: int) -> None:
    """Connect a terminal to a console socket until Ctrl-] is typed or the guest ends.

    Args:
        path: of the socket.
        source: descriptor of the terminal that is read.
        sink: descriptor that is written.

    Raises:
        UsageError: ``source`` is not a terminal.
        GuestGoneError: nobody serves the socket.
    """
    if not os.isatty(source):
        raise UsageError("a shell in the guest needs a terminal")
    with socket.socket(socket.AF_UNIX) as guest, _raw(source):
        try:
            guest.connect(str(path))
        except OSError as e:
            raise GuestGoneError(f"no console at {path}: {e.strerror}") from e
        # The prompt was printed before we came.
        guest.sendall(b"\n")
        while _copy(guest, source=source, sink=sink):
            pass


def _copy(guest: socket.socket, *, source: int, sink: int) -> bool:
    ready, _, _ = select.select([guest, source], [], [])
    if guest in ready:
        if not (printed := _received(guest)):
            return False
        _write(sink, printed)
    if source in ready:
        typed = os.read(source, 4096)
        before, leave, _ = typed.partition(LEAVE)
        guest.sendall(before)
        return bool(typed) and not leave
    return True


def _received(guest: socket.socket) -> bytes:
    try:
        return guest.recv(65536)
    except ConnectionResetError:
        return b""


def _write(sink: int, data: bytes) -> None:
    while data:
        data = data[os.write(sink, data) :]


@contextmanager
def _raw(terminal: int) -> Generator[None]:
    before = termios.tcgetattr(terminal)
    tty.setraw(terminal)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


_CHUNK = MIB


class FifoPair:
    """PATH.in and PATH.out, made here before QEMU starts: QEMU reads the first.

    Both ends are opened for reading and writing, so neither opening waits for QEMU; that the
    other side is gone is therefore learnt from its keeper.
    """

    def __init__(self, path: Path) -> None:
        names = [f"{path}.in", f"{path}.out"]
        for name in names:
            os.mkfifo(name, 0o600)
        self._to_guest, self._from_guest = (os.open(n, os.O_RDWR | os.O_NONBLOCK) for n in names)

    def close(self) -> None:
        """Close our ends."""
        os.close(self._to_guest)
        os.close(self._from_guest)

    def wire(self, supervisor: QemuSupervisor, gone: Callable[[], GuestGoneError]) -> "GuestWire":
        """Return the line, once QEMU runs; ``gone`` says what there is to say of its end."""
        return GuestWire(self._to_guest, self._from_guest, supervisor=supervisor, gone=gone)


class GuestWire:
    """An ``agent.Wire`` that knows when its guest is gone."""

    def __init__(
        self,
        to_guest: int,
        from_guest: int,
        *,
        supervisor: QemuSupervisor,
        gone: Callable[[], GuestGoneError],
    ) -> None:
        self._to_guest = to_guest
        self._from_guest = from_guest
        self._supervisor = supervisor
        self._gone = gone

    def read(self, timeout_s: float) -> bytes:
        """Return what has come, or b"" when nothing came in time."""
        if self._supervisor.is_closed:
            raise self._gone()
        # What a guest wrote before its end is still there, so the end is looked at last.
        ready, _, _ = select.select([self._from_guest, self._supervisor], [], [], timeout_s)
        if self._from_guest in ready:
            return os.read(self._from_guest, _CHUNK)
        if self._supervisor in ready:
            raise self._gone()
        return b""

    def write(self, data: bytes, timeout_s: float | None) -> None:
        """Send everything."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while data:
            if self._supervisor.is_closed:
                raise self._gone()
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ended, ready, _ = select.select([self._supervisor], [self._to_guest], [], left)
            if ended:
                raise self._gone()
            if ready:
                data = data[os.write(self._to_guest, data) :]
            elif left == 0:
                raise TargetError("the guest does not read its console")
