"""Rings of a tracing instance: pages out of ``per_cpu/cpuN/trace_pipe_raw``, taken for good.

By splice(2) the kernel gives whole pages away, many at once, and puts new ones in their place. Of
the page that is being written read(2) copies what is new into a page of its own, with a time stamp
of its own.
"""

import errno
import fcntl
import os
import re
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.errors import TargetError, UnreachableError
from kprobes.formats.ftrace import PageFormat
from kprobes.model.events import Pages
from kprobes.transport.tracefs_map import map_ring

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

        Args:
            pages: the room, uint8 (n, bytes of a page); changed in place.
            skips: left as it is, as every page begins where the one before it ends.

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
            if e.errno == errno.ENODEV:
                # A CPU that may come and has not been there yet has no ring.
                return 0
            raise TargetError(f"cannot read {self._path}: {e.strerror}") from e
        if size % page_size:
            raise TargetError(f"{self._path} gave {size} bytes, which are no whole pages")
        return size


_CPU = re.compile(r"cpu(\d+)")
_COUNTS = ("overrun", "commit overrun", "dropped events")
_AT_ONCE = 1024
_MOST_TEXT = 65536
"""The kernel's own texts of that kind fit into a page: struct trace_seq."""


class Source(Protocol):
    """What takes pages out of a ring."""

    def take(self, pages: NDArray[np.uint8], skips: NDArray[np.int64]) -> int:
        """Put the oldest pages to the front of some room, and return how many.

        Args:
            pages: the room, of shape (n, page size).
            skips: zeros; to be set for a page whose first records were taken before: how many
                bytes they have.

        Raises:
            TargetError: the ring is gone.
        """
        ...

    def close(self) -> None:
        """Let go of the ring."""
        ...


class CpuRing(Struct, frozen=True, kw_only=True):
    """One CPU's ring.

    Attributes:
        cpu: whose it is.
        directory: its files.
        page_size: bytes.
        source: what takes pages out of it.
    """

    cpu: int
    directory: Path
    page_size: int
    source: Source

    @property
    def pages(self) -> int:
        """How many it has: what was in it at any moment is in so many."""
        text = read_text(self.directory / "buffer_size_kb").split()[0]
        return int(text) * 1024 // self.page_size + 2

    @property
    def lost(self) -> int:
        """Events that were overwritten or dropped since the ring was emptied."""
        counts = dict(
            line.split(": ") for line in _read_once(self.directory / "stats").splitlines()
        )
        return sum(int(counts.get(name, "0")) for name in _COUNTS)


class Rings:
    """All CPUs' rings of one instance, in the CPUs' order."""

    def __init__(self, rings: list[CpuRing], *, page_size: int, closing: ExitStack) -> None:
        self._rings = rings
        self._closing = closing
        self._page_size = page_size

    @property
    def lost(self) -> int:
        """Events that were overwritten or dropped since the instance was made."""
        return sum(ring.lost for ring in self._rings)

    @property
    def lost_by_cpu(self) -> tuple[int, ...]:
        """The same by CPU, from 0 on: none of those that have no ring."""
        lost = {ring.cpu: ring.lost for ring in self._rings}
        return tuple(lost.get(cpu, 0) for cpu in range(max(lost, default=-1) + 1))

    def read(self) -> Iterator[Pages]:
        """Yield all that is in the rings now, some at once.

        Raises:
            TargetError: the rings are gone; what was read before was yielded.
        """
        room, count, error = self._room(), 0, None
        try:
            for ring in self._rings:
                # A ring that fills as fast as it is read would never be empty.
                left = ring.pages
                while left > 0 and (got := _take(ring, room, slice(count, count + left))):
                    count, left = count + got, left - got
                    if count == _AT_ONCE:
                        yield room
                        room, count = self._room(), 0
        except TargetError as e:
            error = e
        if count:
            yield Pages(data=room.data[:count], cpu=room.cpu[:count], skips=room.skips[:count])
        if error is not None:
            raise error

    def _room(self) -> Pages:
        return Pages(
            data=np.empty((_AT_ONCE, self._page_size), np.uint8),
            cpu=np.empty(_AT_ONCE, np.uint16),
            skips=np.zeros(_AT_ONCE, np.int64),
        )

    def close(self) -> None:
        """Let go of the instance."""
        self._closing.close()


def open_rings(instance: Path, page: PageFormat, *, is_mapped: bool) -> Rings:
    """Open the rings of an instance: a directory with ``per_cpu``.

    Args:
        instance: whose they are.
        page: how their pages lie in memory.
        is_mapped: whether to map them where the kernel can.

    Raises:
        UnreachableError: they cannot be read.
    """
    with ExitStack() as undo:
        pipe = Pipe()
        undo.callback(pipe.close)
        rings: list[CpuRing] = []
        try:
            for cpu, directory in _cpus(instance / "per_cpu"):
                path = directory / "trace_pipe_raw"
                file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                undo.callback(os.close, file)
                found = map_ring(file, page) if is_mapped else None
                source = found or SplicedRing(file, path, pipe)
                undo.callback(source.close)
                rings.append(
                    CpuRing(cpu=cpu, directory=directory, page_size=page.size, source=source)
                )
        except OSError as e:
            raise UnreachableError(f"cannot open {e.filename}: {e.strerror}") from e
        return Rings(rings, page_size=page.size, closing=undo.pop_all())


def _cpus(directory: Path) -> list[tuple[int, Path]]:
    found = ((_CPU.fullmatch(path.name), path) for path in directory.iterdir())
    return sorted((int(name[1]), path) for name, path in found if name is not None)


def _take(ring: CpuRing, room: Pages, where: slice) -> int:
    got = ring.source.take(room.data[where], room.skips[where])
    room.cpu[where][:got] = ring.cpu
    return got


def read_text(path: Path) -> str:
    """Return the whole text of an instance's file; TargetError when it cannot be read."""
    with _readable(path):
        return path.read_text()


def _read_once(path: Path) -> str:
    # tracing_stats_read() makes its text anew for each read: one at the end of what was read, to
    # find that it ended, brings the last bytes of a text that has become longer meanwhile.
    with _readable(path), path.open("rb", buffering=0) as file:
        return file.read(_MOST_TEXT).decode()


@contextmanager
def _readable(path: Path) -> Generator[None]:
    try:
        yield
    except OSError as e:
        raise TargetError(f"cannot read {path}: {e.strerror}") from e
