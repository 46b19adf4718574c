"""Files that take every byte of a write, or say why not, whatever is behind their descriptors.

Without Python's own buffers (``PYTHONUNBUFFERED=1``) a write to a pipe takes what fits and says so
in a number that nobody reads; on a descriptor that does not block it takes nothing at all.

``--ready FD|FILE``: a line for scripts when everything is armed.
"""

import errno
import io
import math
import os
import select
import stat
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from kprobes.errors import KprobesError, UsageError

_POLL_S = 0.1


class UnwrittenError(OSError):
    """Not all bytes of a write were taken; no reader that has left is meant."""


class WholeFile(io.FileIO):
    """A file of which a write takes all bytes, or raises. Threads take turns.

    Attributes:
        lines: how many of ``writelines`` were taken whole.
        failed: what kept bytes from being taken: not everybody minds what a write raises.
    """

    def __init__(self, file: int | Path, mode: str = "wb") -> None:
        """Open a path; or write to a descriptor, which stays open."""
        super().__init__(file, mode, closefd=not isinstance(file, int))
        self.lines = 0
        self.failed: OSError | None = None
        self._until = math.inf
        self._was_blocking: bool | None = None
        self._lock = threading.Lock()

    def write(self, data: Any, /) -> int:
        """Write all bytes and return how many they are.

        Raises:
            BrokenPipeError: nobody reads them.
            UnwrittenError: not all were taken.
        """
        taken, error = self._put(memoryview(data).cast("B"))
        if error is not None:
            raise error
        return taken

    def writelines(self, lines: Iterable[Any], /) -> None:
        """Write lines at once, and count them; errors as for ``write``."""
        parts = list(lines)
        taken, error = self._put(memoryview(b"".join(parts)))
        self.lines += bisect_right([*accumulate(map(len, parts))], taken) if error else len(parts)
        if error is not None:
            raise error

    def hurry(self, until: float) -> None:
        """Wait no longer for a reader than until ``time.monotonic`` says so; see ``rest``.

        For signal handlers: a write that waits in the kernel comes back and does not wait again.
        """
        self._until = until
        if not self.closed and self._was_blocking is None:
            self._was_blocking = os.get_blocking(self.fileno())
            os.set_blocking(self.fileno(), False)

    def rest(self) -> None:
        """Leave the descriptor, which others may share, as ``hurry`` found it."""
        if self._was_blocking is not None:
            os.set_blocking(self.fileno(), self._was_blocking)
            self._was_blocking = None

    def _put(self, data: memoryview) -> tuple[int, OSError | None]:
        taken = 0
        try:
            while not self._lock.acquire(timeout=_POLL_S):
                self._check_time()
            try:
                while (taken := taken + self._some(data[taken:])) < len(data):
                    self._check_time()
            finally:
                self._lock.release()
        except BrokenPipeError as error:
            return taken, error
        except OSError as error:
            self.failed = UnwrittenError(error.errno, error.strerror)
            return taken, self.failed
        return taken, None

    def _some(self, data: memoryview) -> int:
        # None where a descriptor that does not block has no room.
        taken: int | None = super().write(data)
        if taken is None:
            poll = select.poll()
            poll.register(self.fileno(), select.POLLOUT)
            poll.poll(_POLL_S * 1000)
        return taken or 0

    def _check_time(self) -> None:
        if time.monotonic() >= self._until:
            raise OSError(errno.EAGAIN, "nobody reads it")


def own_streams() -> BinaryIO:
    """Have standard output and error take all that is written; return the former, unbuffered."""
    out = WholeFile(1)
    sys.stdout = _text(out, sys.stdout)
    sys.stderr = _text(WholeFile(2), sys.stderr)
    return out


def _text(file: WholeFile, before: TextIO | None) -> io.TextIOWrapper:
    # Python has no stream for a descriptor that was closed when it started.
    is_old = isinstance(before, io.TextIOWrapper)
    return io.TextIOWrapper(
        cast("BinaryIO", file),
        encoding=before.encoding if is_old else "utf-8",
        errors=before.errors if is_old else "backslashreplace",
        line_buffering=not is_old or before.line_buffering,
        write_through=is_old and before.write_through,
    )


_READY = b"ready\n"


def check_ready(where: str) -> None:
    """Find out early whether it can be told; a file of an earlier time is taken away.

    Raises:
        UsageError: it cannot.
    """
    try:
        if where.isdecimal():
            os.fstat(int(where))
        elif not os.access(Path(where).parent, os.W_OK):
            raise UsageError(f"--ready {where}: its directory cannot be written")
        elif Path(where).is_file():
            Path(where).unlink()
    except OSError as error:
        raise UsageError(f"--ready {where}: {error.strerror}") from error


def report_ready(where: str) -> None:
    """Write the line, to a descriptor that is closed then or to a file that appears.

    Raises:
        KprobesError: nobody takes it.
    """
    try:
        if where.isdecimal():
            os.write(int(where), _READY)
            if int(where) > 2:
                os.close(int(where))
            return
        # It stays open: the reader of a FIFO may come late.
        file = os.open(where, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        os.write(file, _READY)
        if not stat.S_ISFIFO(os.fstat(file).st_mode):
            os.close(file)
    except OSError as error:
        raise KprobesError(f"--ready {where}: {error.strerror}") from error
