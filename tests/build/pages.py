"""Guest RAM in a bytearray, and x86-64 page tables in it."""

import struct

import numpy as np
from numpy.typing import NDArray

from kprobes.errors import MemoryFault
from kprobes.units import Phys

PRESENT, WRITE, USER, LARGE, NX = 1, 2, 4, 1 << 7, 1 << 63
PAGE = 4096


class FakeRam:
    """A Ram of one run; without views it is as RAM behind a stub."""

    def __init__(self, size: int, *, start: int = 0, has_views: bool = True) -> None:
        self.data = bytearray(size)
        self.start, self.has_views = start, has_views
        self.reads = 0

    @property
    def runs(self) -> list[tuple[Phys, int]]:
        return [(Phys(self.start), len(self.data))]

    def read(self, addr: int, size: int) -> bytes:
        self.reads += 1
        at = self._at(addr, size)
        return bytes(self.data[at : at + size])

    def view(self, addr: int, size: int) -> NDArray[np.uint8] | None:
        if not self.has_views:
            return None
        return np.frombuffer(self.data, np.uint8, size, self._at(addr, size))

    def write(self, addr: int, data: bytes) -> None:
        at = self._at(addr, len(data))
        self.data[at : at + len(data)] = data

    def _at(self, addr: int, size: int) -> int:
        at = addr - self.start
        if at < 0 or size < 0 or at + size > len(self.data):
            raise MemoryFault(addr, size, "no RAM")
        return at


class Pages:
    """Page tables that are written page by page.

    Args:
        ram: where they go.
        root: where the top table is; further ones follow it.
        levels: 4 or 5.
    """

    def __init__(self, ram: FakeRam, root: int, *, levels: int = 4) -> None:
        self.ram, self.root, self.levels = ram, root, levels
        self._free = root + PAGE

    def map(self, virt: int, phys: int, *, flags: int = WRITE, level: int = 1) -> None:
        """Map one page: of 4 KiB at level 1, 2 MiB at 2, 1 GiB at 3."""
        table = self.root
        for above in range(self.levels, level, -1):
            table = self._below(table, virt, above)
        large = LARGE if level > 1 else 0
        self.put(table, virt, level, phys | flags | large | PRESENT)

    def map_range(self, virt: int, phys: int, size: int, *, flags: int = WRITE) -> None:
        for offset in range(0, size, PAGE):
            self.map(virt + offset, phys + offset, flags=flags)

    def put(self, table: int, virt: int, level: int, word: int) -> None:
        """Write an entry as it is given."""
        index = virt >> 12 + 9 * (level - 1) & 511
        self.ram.write(table + 8 * index, struct.pack("<Q", word))

    def _below(self, table: int, virt: int, level: int) -> int:
        index = virt >> 12 + 9 * (level - 1) & 511
        word = int.from_bytes(self.ram.read(table + 8 * index, 8), "little")
        if not word & PRESENT:
            word = self._free | PRESENT | WRITE | USER
            self._free += PAGE
            self.put(table, virt, level, word)
        return word & 0x000F_FFFF_FFFF_F000
