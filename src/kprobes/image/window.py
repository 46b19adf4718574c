"""A kernel's own image in RAM, by the places where its pages were when the guest stood still.

The kernel's image never moves, but the page table through which it was seen may be a process's,
which can end as soon as the guest runs again.
"""

from bisect import bisect_right
from collections.abc import Sequence

from kprobes.errors import MemoryFault
from kprobes.ports import MappedRun, Ram
from kprobes.units import Phys


class ImageWindow:
    """Memory of mapped runs, without page tables. Implements ``ports.Memory``."""

    def __init__(self, ram: Ram, runs: Sequence[MappedRun]) -> None:
        """Take runs sorted by address."""
        self.ram = ram
        self._runs = runs
        self._starts = [run.virt for run in runs]

    def physical(self, addr: int) -> Phys:
        """Return where an address lies in RAM, or raise MemoryFault."""
        return Phys(self._run(addr).phys + addr - self._run(addr).virt)

    def read(self, addr: int, size: int) -> bytes:
        """Return exactly ``size`` bytes, or raise MemoryFault."""
        pieces: list[bytes] = []
        at, stop = addr, addr + size
        while at < stop:
            run = self._run(at)
            step = min(stop, run.virt + run.size) - at
            pieces.append(self.ram.read(run.phys + at - run.virt, step))
            at += step
        return b"".join(pieces)

    def _run(self, addr: int) -> MappedRun:
        index = bisect_right(self._starts, addr) - 1
        if index < 0 or addr >= self._runs[index].virt + self._runs[index].size:
            raise MemoryFault(addr, 1)
        return self._runs[index]
