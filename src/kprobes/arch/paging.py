"""Page tables of any architecture: their entries, and the runs of memory that they map."""

from collections.abc import Callable, Iterator

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.errors import MemoryFault
from kprobes.ports import MappedRun, Ram
from kprobes.units import Addr, Phys

MAX_TABLES = 1 << 15
"""Tables visited for one range: 128 MB of them, far beyond any kernel's own."""
WRITABLE, EXECUTABLE = 1, 2
"""Rights of a piece of memory."""

Words = NDArray[np.uint64]


class Entry(Struct, frozen=True, kw_only=True):
    """What maps one address. Rights are those of all levels together.

    Attributes:
        phys: where the page begins.
        size: of the page, or of the block of pages.
    """

    phys: Phys
    size: int
    is_writable: bool
    is_executable: bool


class Pieces:
    """Collects the pages of one range [start, stop), and joins neighbours."""

    def __init__(self, start: int, stop: int) -> None:
        self._start, self._stop = start, stop
        self._columns: list[tuple[Words, Words, Words, Words]] = []

    def add(self, virt: Words, phys: Words, size: int, rights: Words) -> None:
        """Take pages of one size; the arrays, each of shape (n,), are kept and not copied.

        Args:
            virt: where each page is mapped.
            phys: where each lies in RAM.
            size: bytes of each.
            rights: WRITABLE and EXECUTABLE of each.
        """
        self._columns.append((virt, phys, np.full(len(virt), size, np.uint64), rights))

    def runs(self) -> tuple[MappedRun, ...]:
        """Return what was taken, by address, cut to the range."""
        if not self._columns:
            return ()
        columns = zip(*self._columns, strict=True)
        virt, phys, size, rights = (np.concatenate(column) for column in columns)
        order = np.argsort(virt)
        virt, phys, size, rights = virt[order], phys[order], size[order], rights[order]
        breaks = (
            (virt[1:] != virt[:-1] + size[:-1])
            | (phys[1:] != phys[:-1] + size[:-1])
            | (rights[1:] != rights[:-1])
        )
        firsts = np.flatnonzero(np.r_[np.ones(min(1, len(virt)), np.bool_), breaks])
        sizes = np.add.reduceat(size, firsts) if len(firsts) else size
        rows = np.stack([virt[firsts], phys[firsts], sizes, rights[firsts]], axis=1)
        return tuple(self._clip(*row) for row in rows.tolist())

    def _clip(self, virt: int, phys: int, size: int, rights: int) -> MappedRun:
        before = max(self._start - virt, 0)
        return MappedRun(
            virt=Addr(virt + before),
            phys=Phys(phys + before),
            size=min(virt + size, self._stop) - virt - before,
            is_writable=bool(rights & WRITABLE),
            is_executable=bool(rights & EXECUTABLE),
        )


Entries = Callable[[int], Entry | None]
"""An address to what maps it, or None."""


def pieces(entries: Entries, addr: int, size: int) -> Iterator[tuple[Phys, int]]:
    """Cut a range into (phys, size) at page borders, in order, or raise MemoryFault.

    Args:
        entries: of the page tables.
        addr: where the range begins.
        size: its bytes.
    """
    stop = addr + size
    while addr < stop:
        entry = entries(addr)
        if entry is None:
            raise MemoryFault(addr, stop - addr)
        offset = addr & (entry.size - 1)
        length = min(stop - addr, entry.size - offset)
        yield Phys(entry.phys + offset), length
        addr += length


def read(ram: Ram, entries: Entries, addr: int, size: int) -> bytes:
    """Return exactly ``size`` bytes, or raise MemoryFault.

    Args:
        ram: what the addresses that are found lie in.
        entries: of the page tables.
        addr: virtual.
        size: bytes.
    """
    return b"".join(ram.read(phys, length) for phys, length in pieces(entries, addr, size))


def table_words(ram: Ram, addr: int, count: int) -> Words:
    """Return a table's entries, as a copy: the guest may write to it meanwhile.

    Args:
        ram: of the guest.
        addr: where the table is in it.
        count: entries.

    Returns:
        Shape (count,).
    """
    view = ram.view(addr, 8 * count)
    if view is None:
        return np.frombuffer(ram.read(addr, 8 * count), "<u8").astype(np.uint64)
    return view.copy().view("<u8").astype(np.uint64, copy=False)
