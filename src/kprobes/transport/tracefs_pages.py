"""A tracing instance's rings: pages out of ``per_cpu/cpuN/trace_pipe_raw``, taken for good."""

import fcntl
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kprobes.errors import TargetError, UnreachableError

_CPU = re.compile(r"cpu(\d+)")
_COUNTS = ("overrun", "commit overrun", "dropped events")
_AT_ONCE = 1024
_PIPE = 1 << 20


class CpuRing:
    """One CPU's ring; use ``open_rings``.

    Attributes:
        cpu: whose it is.
        pages: how many it has, about.
    """

    def __init__(self, directory: Path, *, cpu: int, page_size: int) -> None:
        self.cpu = cpu
        self._directory = directory
        self._page_size = page_size
        self._file = os.open(
            directory / "trace_pipe_raw", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        )

    @property
    def pages(self) -> int:
        """How many it has: what was in it at any moment is in so many."""
        text = _text(self._directory / "buffer_size_kb").split()[0]
        return int(text) * 1024 // self._page_size + 2

    @property
    def lost(self) -> int:
        """Events that were overwritten or dropped since the ring was emptied."""
        counts = dict(line.split(": ") for line in _text(self._directory / "stats").splitlines())
        return sum(int(counts.get(name, "0")) for name in _COUNTS)

    def move(self, pipe: int, size: int) -> int:
        """Move whole pages to a pipe, and return how many bytes.

        Raises:
            TargetError: the ring is gone.
        """
        flags = os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE
        return self._moved(lambda: os.splice(self._file, pipe, size, flags=flags))

    def read(self, page: memoryview) -> int:
        """Copy the oldest records, a page at most, to ``page``, and return how many bytes.

        Raises:
            TargetError: the ring is gone.
        """
        return self._moved(lambda: os.readv(self._file, [page]))

    def _moved(self, system_call: Callable[[], int]) -> int:
        try:
            size = system_call()
        except BlockingIOError:
            return 0
        except OSError as e:
            raise TargetError(f"cannot read {self._directory}: {e.strerror}") from e
        if size % self._page_size:
            raise TargetError(f"{self._directory} gave {size} bytes, which are no whole pages")
        return size

    def close(self) -> None:
        """Let go of it."""
        os.close(self._file)


class Rings:
    """All CPUs' rings of one instance, in the CPUs' order."""

    def __init__(self, rings: list[CpuRing], *, page_size: int, closing: ExitStack) -> None:
        self._rings = rings
        self._closing = closing
        self._page_size = page_size
        self._source, self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        for end in (self._source, self._pipe):
            closing.callback(os.close, end)
        with suppress(OSError):
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, _PIPE)

    @property
    def lost(self) -> int:
        """Events that were overwritten or dropped since the instance was made."""
        return sum(ring.lost for ring in self._rings)

    def read(self) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint16]]]:
        """Yield all that is in the rings now, some at once: pages, and the CPU of each.

        Raises:
            TargetError: the rings are gone.
        """
        pages, cpu, count = self._room()
        for ring in self._rings:
            # A ring that fills as fast as it is read would never be empty.
            left = ring.pages
            while left > 0 and (got := self._take(ring, pages[count : count + left])):
                cpu[count : count + got] = ring.cpu
                count, left = count + got, left - got
                if count == _AT_ONCE:
                    yield pages, cpu
                    pages, cpu, count = self._room()
        if count:
            yield pages[:count], cpu[:count]

    def _room(self) -> tuple[NDArray[np.uint8], NDArray[np.uint16], int]:
        pages = np.empty((_AT_ONCE, self._page_size), np.uint8)
        return pages, np.empty(_AT_ONCE, np.uint16), 0

    def _take(self, ring: CpuRing, pages: NDArray[np.uint8]) -> int:
        # Many whole pages cost two calls and no lock of Python's; what is left, the page that is
        # being written, must be copied.
        room = pages.reshape(-1).data
        moved = ring.move(self._pipe, len(room))
        if not moved:
            return ring.read(room[: self._page_size]) // self._page_size
        taken = 0
        while taken < moved:
            taken += os.readv(self._source, [room[taken:moved]])
        return moved // self._page_size

    def close(self) -> None:
        """Let go of the instance."""
        self._closing.close()


def open_rings(instance: Path, *, page_size: int) -> Rings:
    """Open the rings of an instance: a directory with ``per_cpu``.

    Raises:
        UnreachableError: it cannot be read.
    """
    with ExitStack() as undo:
        try:
            rings = [
                _opened(undo, directory, cpu=cpu, page_size=page_size)
                for cpu, directory in _cpus(instance / "per_cpu")
            ]
        except OSError as e:
            raise UnreachableError(f"cannot open {e.filename}: {e.strerror}") from e
        return Rings(rings, page_size=page_size, closing=undo.pop_all())


def _cpus(directory: Path) -> list[tuple[int, Path]]:
    found = ((_CPU.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted((int(name[1]), path) for name, path in found if name is not None)


def _opened(undo: ExitStack, directory: Path, *, cpu: int, page_size: int) -> CpuRing:
    ring = CpuRing(directory, cpu=cpu, page_size=page_size)
    undo.callback(ring.close)
    return ring


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError as e:
        raise TargetError(f"cannot read {path}: {e.strerror}") from e
