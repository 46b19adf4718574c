"""A tracing instance's rings: pages out of ``per_cpu/cpuN/trace_pipe_raw``, taken for good."""

import os
import re
import select
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kprobes.errors import TargetError, UnreachableError

_CPU = re.compile(r"cpu(\d+)")
_COUNTS = ("overrun", "commit overrun", "dropped events")
_AT_ONCE = 1024


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

    def fileno(self) -> int:
        """Return its descriptor."""
        return self._file

    def read(self, page: memoryview) -> bool:
        """Move the oldest records, a page at most, to ``page``; False when there are none.

        Raises:
            TargetError: the ring is gone.
        """
        try:
            size = os.readv(self._file, [page])
        except BlockingIOError:
            return False
        except OSError as e:
            raise TargetError(f"cannot read {self._directory}: {e.strerror}") from e
        if size not in (0, len(page)):
            raise TargetError(f"{self._directory} gave {size} bytes of a page of {len(page)}")
        return size > 0

    def close(self) -> None:
        """Let go of it."""
        os.close(self._file)


class Rings:
    """All CPUs' rings of one instance, in the CPUs' order."""

    def __init__(self, rings: list[CpuRing], *, page_size: int, closing: ExitStack) -> None:
        self._rings = rings
        self._closing = closing
        memory = bytearray(_AT_ONCE * page_size)
        self._buffer = np.frombuffer(memory, np.uint8).reshape(_AT_ONCE, page_size)
        self._cpu = np.zeros(_AT_ONCE, np.uint16)
        starts = range(0, len(memory), page_size)
        self._pages = [memoryview(memory)[start : start + page_size] for start in starts]
        self._poll = select.poll()
        for ring in rings:
            self._poll.register(ring, select.POLLIN)

    @property
    def lost(self) -> int:
        """Events that were overwritten or dropped since the instance was made."""
        return sum(ring.lost for ring in self._rings)

    def wait(self, timeout_s: float) -> bool:
        """Return whether there is something to read, waiting that long for it."""
        return bool(self._poll.poll(timeout_s * 1000))

    def read(self) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.uint16]]]:
        """Yield all that is in the rings now, some at once: pages, and the CPU of each.

        What was yielded is overwritten by what comes next.

        Raises:
            TargetError: the rings are gone.
        """
        count = 0
        for ring in self._rings:
            # A ring that fills as fast as it is read would never be empty.
            for _ in range(ring.pages):
                if not ring.read(self._pages[count]):
                    break
                self._cpu[count] = ring.cpu
                count += 1
                if count == _AT_ONCE:
                    yield self._buffer, self._cpu
                    count = 0
        if count:
            yield self._buffer[:count], self._cpu[:count]

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
