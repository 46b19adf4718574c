"""Guest-physical memory, in three ways: a file that QEMU shares, QEMU's own memory, the stub.

All three implement ``ports.Ram``. Reads and writes stay inside the runs of RAM; they may cross
from one run into its neighbour.
"""

import contextlib
import mmap
import os
from bisect import bisect_right
from collections.abc import Generator, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.errors import GuestGoneError, MemoryFault
from kprobes.transport.stub import Stub
from kprobes.units import Phys

Span = tuple[int, int]
"""(address, size)."""


class FileRun(Struct, frozen=True, kw_only=True):
    """A run of RAM that lies in a file, from ``offset`` on."""

    start: Phys
    size: int
    path: Path
    offset: int


class ProcessRun(Struct, frozen=True, kw_only=True):
    """A run of RAM that lies in a process's memory, from ``addr`` on."""

    start: Phys
    size: int
    addr: int


class ProcessPlace(Struct, frozen=True, kw_only=True):
    """Where RAM lies in QEMU's own memory: whoever may read that needs no stub.

    Attributes:
        pid: of QEMU.
        runs: in ascending order.
    """

    pid: int
    runs: tuple[ProcessRun, ...]


class RunMap:
    """Where RAM is: splits addresses into runs."""

    def __init__(self, runs: Sequence[tuple[Phys, int]]) -> None:
        ends = [0, *(start + size for start, size in runs)]
        if any(end > start or size < 1 for end, (start, size) in zip(ends, runs, strict=False)):
            raise ValueError("runs of RAM that are empty or not in ascending order")
        self.runs = tuple(runs)
        self._starts = [start for start, _ in runs]
        self._stops = [start + size for start, size in runs]

    def holder(self, addr: int, size: int) -> int:
        """Return the index of the run that has all of some bytes, or -1 where none has.

        Args:
            addr: the first byte's.
            size: bytes.
        """
        index = bisect_right(self._starts, addr) - 1
        return index if index >= 0 and 0 < size <= self._stops[index] - addr else -1

    def split(self, addr: int, size: int, verb: str = "read") -> list[tuple[int, int, int]]:
        """Return (index of the run, offset in it, size) of each piece, or raise MemoryFault.

        Args:
            addr: the first byte's.
            size: bytes.
            verb: what fails, for the error: ``read`` or ``write``.
        """
        index = self.holder(addr, size)
        if index >= 0:
            # Nearly always, and in a third of the time.
            return [(index, addr - self._starts[index], size)]
        index = bisect_right(self._starts, addr) - 1
        pieces: list[tuple[int, int, int]] = []
        at, left = addr, size
        while left > 0:
            start, length = self.runs[index] if 0 <= index < len(self.runs) else (at, 0)
            n = min(left, start + length - at)
            if at < start or n <= 0:
                raise MemoryFault(addr, size, f"no RAM at {at:#x}", verb=verb)
            pieces.append((index, at - start, n))
            index, at, left = index + 1, at + n, left - n
        return pieces


class SharedRam:
    """RAM in files that QEMU maps with ``share=on``, mapped by us too."""

    backend = "shared"
    host: ProcessPlace | None = None

    def __init__(self, runs: Sequence[FileRun]) -> None:
        """Map the files.

        Args:
            runs: in ascending order.

        Raises:
            OSError: a file that cannot be opened or mapped.
            ValueError: a run beyond its file's end.
        """
        self._map = RunMap([(run.start, run.size) for run in runs])
        self._files = {path: _map_file(path) for path in {run.path for run in runs}}
        for run in runs:
            # A mapping may be longer than the file, but touching it there is SIGBUS.
            if run.offset < 0 or run.offset + run.size > len(self._files[run.path]):
                self.close()
                raise ValueError(f"RAM at {run.start:#x} is beyond the end of {run.path}")
        # By run: its file, and what an address is moved by to be an offset there.
        self._places = [(self._files[run.path], run.offset - run.start) for run in runs]

    @property
    def runs(self) -> tuple[tuple[Phys, int], ...]:
        """Where RAM is: (start, size), ascending."""
        return self._map.runs

    def read(self, addr: int, size: int) -> bytes:
        """Return exactly ``size`` bytes, or raise MemoryFault."""
        index = self._map.holder(addr, size)
        if index >= 0:
            # Nearly always.
            data, moved = self._places[index]
            return data[addr + moved : addr + moved + size]
        return b"".join(data[at : at + n] for data, at, n in self._pieces(addr, size, verb="read"))

    def read_many(self, spans: Sequence[Span]) -> list[bytes]:
        """Return the bytes of each (address, size)."""
        return [self.read(*span) for span in spans]

    def view(self, addr: int, size: int) -> NDArray[np.uint8] | None:
        """Return a writable view of the bytes, or None when they are not side by side.

        It shows them as they change; its shape is (size,).
        """
        pieces = list(self._pieces(addr, size, verb="read"))
        if not pieces:
            return np.empty(0, np.uint8)
        data, first, _ = pieces[0]
        if any(piece[0] is not data for piece in pieces) or not _is_contiguous(pieces):
            return None
        return np.frombuffer(data, np.uint8, size, first)

    def write(self, addr: int, data: bytes) -> None:
        """Write data, never code: QEMU does not learn of it."""
        done = 0
        for target, at, n in self._pieces(addr, len(data), verb="write"):
            target[at : at + n] = data[done : done + n]
            done += n

    def close(self) -> None:
        """Unmap the files, as soon as no view of them is left."""
        for data in self._files.values():
            # A view still exports the mapping; the garbage collector unmaps it after the last.
            with contextlib.suppress(BufferError):
                data.close()

    def _pieces(self, addr: int, size: int, *, verb: str) -> Iterator[tuple[mmap.mmap, int, int]]:
        for index, offset, n in self._map.split(addr, size, verb):
            data, moved = self._places[index]
            yield data, self.runs[index][0] + offset + moved, n


class ProcessRam:
    """RAM in the QEMU process's memory, through ``/proc/PID/mem``."""

    backend = "process"
    host: ProcessPlace | None = None

    def __init__(self, pid: int, runs: Sequence[ProcessRun]) -> None:
        """Open the process's memory.

        Raises:
            OSError: it is not ours to open.
        """
        self._map = RunMap([(run.start, run.size) for run in runs])
        self._addrs = [run.addr for run in runs]
        self._fd = os.open(f"/proc/{pid}/mem", os.O_RDWR | os.O_CLOEXEC)

    @property
    def runs(self) -> tuple[tuple[Phys, int], ...]:
        """Where RAM is: (start, size), ascending."""
        return self._map.runs

    def read(self, addr: int, size: int) -> bytes:
        """Return exactly ``size`` bytes, or raise MemoryFault."""
        pieces = self._map.split(addr, size)
        with _process_memory(addr, size, "read"):
            parts = [self._pread(self._addrs[i] + at, n) for i, at, n in pieces]
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def read_many(self, spans: Sequence[Span]) -> list[bytes]:
        """Return the bytes of each (address, size)."""
        return [self.read(*span) for span in spans]

    def view(self, addr: int, size: int) -> NDArray[np.uint8] | None:
        """Return None: another process's memory has no view of shape (size,), only copies."""
        self._map.split(addr, size)
        return None

    def write(self, addr: int, data: bytes) -> None:
        """Write data, never code: QEMU does not learn of it."""
        done = 0
        pieces = self._map.split(addr, len(data), "write")
        with _process_memory(addr, len(data), "write"):
            for index, at, n in pieces:
                self._pwrite(self._addrs[index] + at, data[done : done + n])
                done += n

    def close(self) -> None:
        """Close the process's memory."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _pread(self, at: int, size: int) -> bytes:
        parts: list[bytes] = []
        left = size
        # The kernel gives less than 2 GiB at a time.
        while left:
            part = os.pread(self._fd, left, at + size - left)
            if not part:
                raise GuestGoneError("the QEMU process has ended")
            parts.append(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _pwrite(self, at: int, data: bytes) -> None:
        done = 0
        while done < len(data):
            n = os.pwrite(self._fd, data[done:], at + done)
            if not n:
                raise GuestGoneError("the QEMU process has ended")
            done += n


class StubRam:
    """RAM through the stub, the last resort: stops a running guest for every access."""

    backend = "stub"
    host: ProcessPlace | None = None

    def __init__(self, stub: Stub, runs: Sequence[tuple[Phys, int]]) -> None:
        self._map = RunMap(runs)
        self._stub = stub

    @property
    def runs(self) -> tuple[tuple[Phys, int], ...]:
        """Where RAM is: (start, size), ascending."""
        return self._map.runs

    def read(self, addr: int, size: int) -> bytes:
        """Return exactly ``size`` bytes, or raise MemoryFault."""
        return self.read_many([(addr, size)])[0]

    def read_many(self, spans: Sequence[Span]) -> list[bytes]:
        """Return the bytes of each (address, size), in one stop."""
        # QEMU itself reads zeros where there is no RAM.
        for span in spans:
            self._map.split(*span)
        with self._stub.paused():
            return self._stub.read_physical_many(spans)

    def view(self, addr: int, size: int) -> NDArray[np.uint8] | None:
        """Return None: memory behind a socket has no view of shape (size,), only copies."""
        self._map.split(addr, size)
        return None

    def write(self, addr: int, data: bytes) -> None:
        """Write data."""
        self._map.split(addr, len(data), "write")
        with self._stub.paused():
            self._stub.write_physical(addr, data)

    def close(self) -> None:
        """Leave the stub open: it is not ours."""


GuestRam = SharedRam | ProcessRam | StubRam


def _map_file(path: Path) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        return mmap.mmap(fd, os.fstat(fd).st_size)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _process_memory(at: int, size: int, verb: str) -> Generator[None]:
    try:
        yield
    except OSError as e:
        raise MemoryFault(at, size, f"in the QEMU process: {e.strerror}", verb=verb) from e


def _is_contiguous(pieces: Sequence[tuple[mmap.mmap, int, int]]) -> bool:
    return all(before[1] + before[2] == after[1] for before, after in pairwise(pieces))
