"""aarch64 page tables in a bytearray."""

import struct

from kprobes.arch.aarch64.paging import PageTables
from tests.build.pages import FakeRam

VALID, TABLE = 1, 2
READ_ONLY, DIRTY_WRITE, PXN, UXN = 1 << 7, 1 << 51, 1 << 53, 1 << 54
GRANULES = {12: 0b10, 14: 0b01, 16: 0b11}
ROOT = 0x10_0000


def tcr(shift: int, va_bits: int, *, more: int = 0) -> int:
    return GRANULES[shift] << 30 | (64 - va_bits) << 16 | more


class Built:
    """Tables that are written entry by entry."""

    def __init__(self, shift: int, va_bits: int, *, more: int = 0) -> None:
        self.ram = FakeRam(0x100_0000)
        self.tables = PageTables(self.ram, ROOT | 1, tcr=tcr(shift, va_bits, more=more))
        self.layout = self.tables.layout
        self._free = ROOT + 0x1_0000

    def map(self, virt: int, phys: int, *, flags: int = 0, level: int = 3, above: int = 0) -> None:
        table = ROOT
        for at in range(self.layout.first, level):
            word = self._word(table, virt, at)
            if not word & VALID:
                word, self._free = self._free | VALID | TABLE | above, self._free + 0x1_0000
                self.put(table, virt, at, word)
            table = word & 0x0000_FFFF_FFFF_0000
        kind = TABLE if level == 3 else 0
        self.put(table, virt, level, phys | flags | VALID | kind)

    def put(self, table: int, virt: int, level: int, word: int) -> None:
        self.ram.write(self._place(table, virt, level), struct.pack("<Q", word))

    def _word(self, table: int, virt: int, level: int) -> int:
        return int.from_bytes(self.ram.read(self._place(table, virt, level), 8), "little")

    def _place(self, table: int, virt: int, level: int) -> int:
        index = (virt & (1 << self.layout.va_bits) - 1) >> self.layout.page_shift(level)
        return table + 8 * (index & self.layout.count(level) - 1)
