"""The rings of an arena as the host sees them: heads, bytes, limits, counters."""

from bisect import bisect_right
from collections.abc import Iterable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.errors import MemoryFault
from kprobes.guest.arena import Arena
from kprobes.guest.guest import GuestMemory
from kprobes.model.abi import CPU_SHIFT, PERCPU_LIMIT, PERCPU_LOST, PERCPU_SIZE, PERCPU_WORD, SLACK
from kprobes.ports import MappedRun, Ram
from kprobes.units import Phys

_POSITION = (1 << CPU_SHIFT) - 1


class MappedRange:
    """A piece of kernel memory whose pages were found once: read without page tables.

    Only for memory that we own: its pages stay where they are.
    """

    def __init__(self, memory: GuestMemory, addr: int, size: int) -> None:
        """Find the pages of [addr, addr + size); MemoryFault when one is not mapped."""
        self._ram: Ram = memory.ram
        runs = memory.tables.mapped_runs(addr, addr + size)
        self._starts = [max(run.virt - addr, 0) for run in runs]
        self._runs = [_clipped(run, addr, addr + size) for run in runs]
        if sum(length for _, length in self._runs) != size:
            raise MemoryFault(addr, size)

    def read(self, offset: int, size: int) -> NDArray[np.uint8]:
        """Return a copy of bytes of the window, shape (size,)."""
        found = np.empty(size, np.uint8)
        for phys, at, step in self._pieces(offset, size):
            view = self._ram.view(phys, step)
            if view is None:
                view = np.frombuffer(self._ram.read(phys, step), np.uint8)
            found[at : at + step] = view
        return found

    def write(self, offset: int, data: bytes) -> None:
        """Write bytes of the window, in no order."""
        for phys, at, step in self._pieces(offset, len(data)):
            self._ram.write(phys, data[at : at + step])

    def u64(self, offset: int) -> int:
        """Return the u64 at an aligned offset, read at once."""
        ((phys, _, _),) = self._pieces(offset, 8)
        return int.from_bytes(self._ram.read(phys, 8), "little")

    def set_u64(self, offset: int, value: int) -> None:
        """Write the u64 at an aligned offset."""
        ((phys, _, _),) = self._pieces(offset, 8)
        self._ram.write(phys, value.to_bytes(8, "little"))

    def _pieces(self, offset: int, size: int) -> Iterable[tuple[Phys, int, int]]:
        index, done = bisect_right(self._starts, offset) - 1, 0
        while done < size:
            phys, length = self._runs[index]
            skip = offset + done - self._starts[index]
            step = min(length - skip, size - done)
            yield Phys(phys + skip), done, step
            done += step
            index += 1


def _clipped(run: MappedRun, start: int, stop: int) -> tuple[Phys, int]:
    first, last = max(run.virt, start), min(run.virt + run.size, stop)
    return Phys(run.phys + first - run.virt), last - first


class Ring(Struct, frozen=True, eq=False):
    """One CPU's ring."""

    cpu: int
    data: MappedRange
    words: MappedRange
    size: int

    @property
    def head(self) -> int:
        """The position up to which the guest has reserved."""
        return self.words.u64(PERCPU_WORD) & _POSITION

    @property
    def lost(self) -> int:
        """How many records the guest dropped on this CPU because its ring was full."""
        return self.words.u64(PERCPU_LOST)

    def free(self, tail: int) -> None:
        """Let the guest reuse everything before ``tail``."""
        self.words.set_u64(PERCPU_LIMIT, self.cpu << CPU_SHIFT | (tail + self.size) & _POSITION)


def open_rings(arena: Arena, memory: GuestMemory) -> tuple[Ring, ...]:
    """Find the pages of every ring of an arena."""
    return tuple(
        Ring(
            cpu,
            MappedRange(memory, arena.ring(cpu), arena.ring_size + SLACK),
            MappedRange(memory, arena.words(cpu), PERCPU_SIZE),
            arena.ring_size,
        )
        for cpu in range(arena.cpus)
    )
