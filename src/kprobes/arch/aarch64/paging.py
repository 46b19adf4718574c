"""aarch64 page tables over guest-physical memory: all granules, 36 to 52 bits of addresses.

Written down in the Arm ARM, "The AArch64 Virtual Memory System Architecture". A granule's table
has one word for every 8 of its bytes; the last level is 3, the first one follows from how many
bits addresses have. An entry whose low bits are 0b11 is a table, or at level 3 a page; 0b01 is a
block of pages. Nothing is cached: the guest changes its tables.
"""

from collections.abc import Iterator
from typing import Any, Self, TypeVar

import numpy as np

from kprobes.arch.paging import (
    EXECUTABLE,
    MAX_TABLES,
    WRITABLE,
    Entry,
    Pieces,
    Words,
    pieces,
    read,
    table_words,
)
from kprobes.errors import MemoryFault, TargetError
from kprobes.ports import MappedRun, Ram
from kprobes.units import U64, Phys

_VALID, _TABLE = 0b1, 0b10
_READ_ONLY, _DIRTY_WRITE = 1 << 7, 1 << 51
_PXN, _UXN = 1 << 53, 1 << 54
_CONTIGUOUS = 1 << 52
_READ_ONLY_BELOW, _PXN_BELOW, _UXN_BELOW = 1 << 62, 1 << 59, 1 << 60
_LAST = 3
_KERNEL = 1 << 55
"""The bit of an address that chooses between TTBR0 and TTBR1."""
_TAG = 0xFF << 56

_GRANULES_0 = {0b00: 12, 0b10: 14, 0b01: 16}
_GRANULES_1 = {0b10: 12, 0b01: 14, 0b11: 16}
_WIDE_TABLES, _WIDE_OUTPUT = 1 << 59, 0b110
_TBI_0, _TBI_1 = 1 << 37, 1 << 38
_Bits = TypeVar("_Bits", int, Words)


class Layout:
    """What TCR_EL1 says of one half of the address space.

    Attributes:
        shift: log2 of the granule.
        va_bits: that addresses have.
        ignores_tag: whether the top byte of an address means nothing.
        has_wide_tables: 52-bit physical addresses in tables of 4 or 16 KiB.
        has_wide_output: whether table registers have 52-bit addresses.
        steps: (level, log2 of what an entry maps, last index), from the first table on.
    """

    def __init__(self, tcr: int, *, is_user: bool) -> None:
        granules = _GRANULES_0 if is_user else _GRANULES_1
        granule, size = (tcr >> 14, tcr) if is_user else (tcr >> 30, tcr >> 16)
        self.va_bits = 64 - (size & 0x3F)
        if granule & 3 not in granules or not 25 <= self.va_bits <= 52:
            raise TargetError(f"TCR_EL1 is {tcr:#x}: the guest is not in a 64-bit kernel yet")
        self.shift = granules[granule & 3]
        self.ignores_tag = bool(tcr & (_TBI_0 if is_user else _TBI_1))
        self.has_wide_tables = bool(tcr & _WIDE_TABLES) and self.shift != 16
        self.has_wide_output = tcr >> 32 & 7 == _WIDE_OUTPUT
        self.steps = tuple(
            (level, self.page_shift(level), self.count(level) - 1)
            for level in range(self.first, _LAST + 1)
        )

    @property
    def first(self) -> int:
        """The level of the first table: -1 to 3."""
        bits = self.va_bits - self.shift
        return _LAST + 1 - -(-bits // (self.shift - 3))

    def page_shift(self, level: int) -> int:
        """Return log2 of what one entry of a level maps."""
        return self.shift + (self.shift - 3) * (_LAST - level)

    def count(self, level: int) -> int:
        """Return how many entries a table of a level has."""
        if level == self.first:
            return 1 << (self.va_bits - self.page_shift(level))
        return 1 << (self.shift - 3)

    def base(self, register: int) -> Phys:
        """Return the physical address in a TTBR; ASID and CnP are left out."""
        low = register & 0x0000_FFFF_FFFF_FFFE
        if not self.has_wide_output:
            return Phys(low)
        return Phys(low & ~0x3F | (register >> 2 & 0xF) << 48)

    def output(self, words: _Bits, shift: int) -> _Bits:
        """Return the physical addresses in entries, a copy of the same shape.

        Args:
            words: one entry, or some of any shape.
            shift: log2 of what the addresses are aligned to.
        """
        found: Any = words & (0x0000_FFFF_FFFF_FFFF & -(1 << self.shift))
        if self.shift == 16:
            found = found | (words >> 12 & 0xF) << 48
        elif self.has_wide_tables:
            found = found | words & 0b11 << 48
            found = found | (words >> 8 & 0b11) << 50
        return found & (-(1 << shift) & U64)


class PageTables:
    """One half of an address space of a guest: a Memory and a Translator.

    Args:
        ram: where the tables and pages are.
        root: a TTBR's value; the ASID in it does not matter.
        tcr: TCR_EL1.
        is_user: whether it is TTBR0's half, which is a task's.
    """

    def __init__(self, ram: Ram, root: int, *, tcr: int, is_user: bool = False) -> None:
        self.ram = ram
        self.tcr = tcr
        self.is_user = is_user
        self.layout = Layout(tcr, is_user=is_user)
        self.root = self.layout.base(root)

    def rooted(self, root: int) -> Self:
        """Return tables of the same kind that begin elsewhere."""
        return type(self)(self.ram, root, tcr=self.tcr, is_user=self.is_user)

    def of_user(self, root: int) -> Self:
        """Return the tables that map a task's memory, by its TTBR0."""
        return type(self)(self.ram, root, tcr=self.tcr, is_user=True)

    def __repr__(self) -> str:
        return f"PageTables(root={self.root:#x}, tcr={self.tcr:#x}, is_user={self.is_user})"

    def entry(self, addr: int) -> Entry | None:
        """Return what maps an address, or None where nothing does.

        Raises:
            MemoryFault: the address is not in this half, or a table lies outside RAM.
        """
        found = self._leaf(addr)
        if found is None:
            return None
        word, shift, above = found
        rights = above & int(self._rights(np.array([word], np.uint64))[0])
        return Entry(
            phys=Phys(self.layout.output(word, shift)),
            size=1 << shift,
            is_writable=bool(rights & WRITABLE),
            is_executable=bool(rights & EXECUTABLE),
        )

    def attributes(self, addr: int) -> int:
        """Return how an address is mapped: its entry without where it leads (Linux: pgprot_t).

        Raises:
            MemoryFault: nothing maps it, or as for ``entry``.
        """
        found = self._leaf(addr)
        if found is None:
            raise MemoryFault(addr, 1)
        word, _, _ = found
        output = self.layout.output(word, self.layout.shift)
        # As a page has it, even where a block of them is mapped.
        return word & ~(output | _CONTIGUOUS) | _TABLE

    def _leaf(self, addr: int) -> tuple[int, int, int] | None:
        # The entry that maps an address, log2 of what it maps, and the rights of all above it.
        layout, at = self.layout, self._offset(addr)
        table, rights = int(self.root), WRITABLE | EXECUTABLE
        for level, shift, last in layout.steps:
            index = at >> shift & last
            word = int.from_bytes(self.ram.read(table + 8 * index, 8), "little")
            if not word & _VALID or (level == _LAST and not word & _TABLE):
                return None
            if level == _LAST or not word & _TABLE:
                return word, shift, rights
            rights &= self._rights_below(word)
            table = layout.output(word, layout.shift)
        raise AssertionError("level 3 has pages only")

    def physical(self, addr: int) -> Phys:
        """Return where an address lies in guest-physical memory, or raise MemoryFault."""
        found = self._leaf(addr)
        if found is None:
            raise MemoryFault(addr, 1)
        word, shift, _ = found
        return Phys(self.layout.output(word, shift) | addr & (1 << shift) - 1)

    def pieces(self, addr: int, size: int) -> Iterator[tuple[Phys, int]]:
        """Cut a range into (phys, size) at page borders, in order, or raise MemoryFault."""
        return pieces(self.entry, addr, size)

    def read(self, addr: int, size: int) -> bytes:
        """Return exactly ``size`` bytes, or raise MemoryFault."""
        return read(self.ram, self.entry, addr, size)

    def mapped_runs(self, start: int, stop: int) -> tuple[MappedRun, ...]:
        """Return what is mapped of [start, stop), by address, neighbours joined.

        What is not in this half is not mapped. A range that reaches to the end of the address
        space has ``stop = 1 << 64``.

        Raises:
            MemoryFault: a table lies outside RAM, or there are too many tables to be true.
        """
        bottom = self.start
        first, last = max(start, bottom), min(stop, bottom + (1 << self.layout.va_bits))
        if first >= last:
            return ()
        walk = _PageWalk(self, first, last)
        walk.visit(int(self.root), self.layout.first, bottom, WRITABLE | EXECUTABLE)
        return walk.pieces.runs()

    @property
    def start(self) -> int:
        """The lowest address of this half."""
        return 0 if self.is_user else (1 << 64) - (1 << self.layout.va_bits)

    def _offset(self, addr: int) -> int:
        plain = addr
        if self.layout.ignores_tag:
            plain = addr & ~_TAG if self.is_user else addr | _TAG
        at = plain - self.start
        if not (0 <= addr <= U64 and 0 <= at < 1 << self.layout.va_bits):
            raise MemoryFault(addr, 1, "not an address of this half")
        return at

    def _rights(self, words: Words) -> Words:
        # With hardware management of the dirty state a page that may be written begins read-only.
        # Linux never sets that bit where writing is forbidden, with permission indirection neither.
        never = np.uint64(_UXN if self.is_user else _PXN)
        writable = (words & np.uint64(_READ_ONLY) == 0) | (words & np.uint64(_DIRTY_WRITE) != 0)
        executable = words & never == 0
        return writable * np.uint64(WRITABLE) | executable * np.uint64(EXECUTABLE)

    def _rights_below(self, word: int) -> int:
        never = _UXN_BELOW if self.is_user else _PXN_BELOW
        can_write = 0 if word & _READ_ONLY_BELOW else WRITABLE
        return can_write | (0 if word & never else EXECUTABLE)

    def table(self, addr: int, level: int, rights: int) -> tuple[Words, Words]:
        """Return a table's words, and the rights of what each maps.

        Args:
            addr: where the table is, in RAM.
            level: its level, which says how many words, n, it has.
            rights: those that all levels above leave.

        Returns:
            Copies, each of shape (n,); a right is 0 or one of WRITABLE and EXECUTABLE, or both.
        """
        words = table_words(self.ram, addr, self.layout.count(level))
        return words, self._rights(words) & np.uint64(rights)

    def rights_below(self, word: int, rights: int) -> int:
        """Return the rights that are left below a table entry."""
        return rights & self._rights_below(word)


class _PageWalk:
    # Collects the pages of one range.
    def __init__(self, tables: PageTables, start: int, stop: int) -> None:
        self.pieces = Pieces(start, stop)
        self._tables, self._start, self._stop = tables, start, stop
        self._budget = MAX_TABLES

    def visit(self, table: int, level: int, base: int, rights: int) -> None:
        self._budget -= 1
        if self._budget < 0:
            raise MemoryFault(self._start, self._stop - self._start, "page tables without end")
        layout = self._tables.layout
        shift, size = layout.page_shift(level), 1 << layout.page_shift(level)
        first = max(self._start - base, 0) >> shift
        last = min((self._stop - base + size - 1) >> shift, layout.count(level))
        words, own = (column[first:last] for column in self._tables.table(table, level, rights))
        virt = np.arange(first, last, dtype=np.uint64) * np.uint64(size) + np.uint64(base)
        is_table = words & np.uint64(_VALID | _TABLE) == np.uint64(_VALID | _TABLE)
        is_leaf = is_table if level == _LAST else (words & np.uint64(_VALID) != 0) & ~is_table
        phys = layout.output(words[is_leaf], shift)
        self.pieces.add(virt[is_leaf], phys, size, own[is_leaf])
        if level == _LAST:
            return
        below = layout.output(words, layout.shift)
        for i in np.flatnonzero(is_table).tolist():
            left = self._tables.rights_below(int(words[i]), rights)
            self.visit(int(below[i]), level + 1, int(virt[i]), left)
