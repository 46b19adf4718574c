"""One CPU's ring by splice(2) and read(2): whole pages many at once, the one being written copied.

The kernel gives whole pages away and puts new ones in their place. Of the page that is being
written it copies what is new into a page of its own, with a time stamp of its own.
"""

import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kprobes.errors import TargetError

_PIPE = 1 << 20


class Pipe:
    """A pipe that pages go through."""

    def __init__(self) -> None:
        self.source, self.end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with suppress(OSError):
            fcntl.fcntl(self.end, fcntl.F_SETPIPE_SZ, _PIPE)

    def close(self) -> None:
        """Close both ends."""
        os.close(self.source)
        os.close(self.end)


class SplicedRing:
    """Takes pages out of a ring.

    Args:
        file: the ring's ``trace_pipe_raw``, open and not blocking; remains the caller's.
        path: what it is called.
        pipe: for pages on their way, empty; rings that are read in turn can share it.
    """

    def __init__(self, file: int, path: Path, pipe: Pipe) -> None:
        self._file = file
        self._path = path
        self._pipe = pipe

    def take(self, pages: NDArray[np.uint8], skips: NDArray[np.int64]) -> int:
        """Put the oldest pages to the front of some room, and return how many.

        Raises:
            TargetError: the ring is gone.
        """
        # Every page begins where the one before it ends.
        del skips
        # Many whole pages cost two calls and no lock of Python's; what is left, the page that is
        # being written, must be copied.
        room, page_size = pages.reshape(-1).data, pages.shape[1]
        moved = self._move(len(room), page_size)
        if not moved:
            return self._read(room[:page_size], page_size) // page_size
        taken = 0
        while taken < moved:
            taken += os.readv(self._pipe.source, [room[taken:moved]])
        return moved // page_size

    def close(self) -> None:
        """Nothing is kept."""

    def _move(self, size: int, page_size: int) -> int:
        flags = os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE
        end = self._pipe.end
        return self._whole(lambda: os.splice(self._file, end, size, flags=flags), page_size)

    def _read(self, page: memoryview, page_size: int) -> int:
        return self._whole(lambda: os.readv(self._file, [page]), page_size)

    def _whole(self, system_call: Callable[[], int], page_size: int) -> int:
        try:
            size = system_call()
        except BlockingIOError:
            return 0
        except OSError as e:
            raise TargetError(f"cannot read {self._path}: {e.strerror}") from e
        if size % page_size:
            raise TargetError(f"{self._path} gave {size} bytes, which are no whole pages")
        return size
