"""x86-64 page tables, 4 and 5 levels, over guest-physical memory.

Written down in Intel SDM volume 3, section 4.5. Every level has 512 entries of 8 bytes; an
entry's bits 12 to 51 are the physical address of the next table, or of the page when it is
the last level or its PS bit is set. Nothing is cached: the guest changes its tables.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Self

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

PAGE = 4096
PTI_USER = 1 << 12
"""Set in CR3 while page-table isolation runs user code: the kernel's table is the page before."""

_PRESENT, _WRITE, _LARGE, _NX = 1 << 0, 1 << 1, 1 << 7, 1 << 63
_FRAME = 0x000F_FFFF_FFFF_F000
_ENTRIES = 512
_CR0_PE, _CR0_PG, _EFER_LMA = 1 << 0, 1 << 31, 1 << 10


def check_long_mode(registers: Mapping[str, int]) -> None:
    """Check that a vCPU runs 64-bit code under paging, as far as its registers are known.

    Raises:
        TargetError: it is in firmware or a boot loader, or its kernel is not 64-bit.
    """
    cr0, efer = registers.get("cr0"), registers.get("efer")
    if cr0 is not None and not cr0 & _CR0_PE:
        raise TargetError("the guest is in real mode: still in firmware or a boot loader")
    if efer is not None and not efer & _EFER_LMA:
        raise TargetError("the guest is not in 64-bit mode: in firmware, or a 32-bit system")
    if cr0 is not None and not cr0 & _CR0_PG:
        raise TargetError("the guest has paging turned off: still in firmware or a boot loader")


class PageTables:
    """One address space of a guest: a Memory and a Translator.

    Args:
        ram: where the tables and pages are.
        cr3: the register's value; its low 12 bits (PCID, cache bits) do not matter.
        levels: 4, or 5 with CR4.LA57.
    """

    def __init__(self, ram: Ram, cr3: int, *, levels: int = 4) -> None:
        if levels not in (4, 5):
            raise ValueError(f"page tables of {levels} levels")
        self.ram = ram
        self.root = Phys(cr3 & _FRAME)
        self.levels = levels
        self._steps = _STEPS[-levels:]

    def rooted(self, root: int) -> Self:
        """Return tables of the same kind that begin elsewhere; also a CR3."""
        return type(self)(self.ram, root, levels=self.levels)

    def of_user(self, root: int) -> Self:
        """Return the tables that map a task's memory, by its CR3."""
        return self.rooted(root)

    def __repr__(self) -> str:
        return f"PageTables(root={self.root:#x}, levels={self.levels})"

    def entry(self, addr: int) -> Entry | None:
        """Return what maps an address, or None where nothing does.

        Raises:
            MemoryFault: the address is not canonical, or a table lies outside RAM.
        """
        words = self._walk(addr)
        if not words[-1] & _PRESENT:
            return None
        size = self._page_size(words)
        return Entry(
            phys=Phys(words[-1] & _FRAME & -size),
            size=size,
            is_writable=all(word & _WRITE for word in words),
            is_executable=not any(word & _NX for word in words),
        )

    def attributes(self, addr: int) -> int:
        """Return what a page's entry says of it besides where it is: a ``pgprot_t``.

        Raises:
            MemoryFault: nothing is mapped there.
        """
        last = self._walk(addr)[-1]
        if not last & _PRESENT:
            raise MemoryFault(addr, 1)
        return last & ~(_FRAME | _LARGE)

    def _walk(self, addr: int) -> list[int]:
        # The words that lead to a page, its own last; or one that leads nowhere.
        self._check_canonical(addr)
        table, read, words = int(self.root), self.ram.read, list[int]()
        for level, shift in self._steps:
            index = addr >> shift & (_ENTRIES - 1)
            word = int.from_bytes(read(table + 8 * index, 8), "little")
            words.append(word)
            if not word & _PRESENT or _is_leaf(word, level):
                break
            table = word & _FRAME
        return words

    def _page_size(self, words: Sequence[int]) -> int:
        return 1 << _shift(self.levels + 1 - len(words))

    def physical(self, addr: int) -> Phys:
        """Return where an address lies in guest-physical memory, or raise MemoryFault."""
        words = self._walk(addr)
        if not words[-1] & _PRESENT:
            raise MemoryFault(addr, 1)
        size = self._page_size(words)
        return Phys(words[-1] & _FRAME & -size | addr & (size - 1))

    def pieces(self, addr: int, size: int) -> Iterator[tuple[Phys, int]]:
        """Cut a range into (phys, size) at page borders, in order, or raise MemoryFault."""
        return pieces(self.entry, addr, size)

    def read(self, addr: int, size: int) -> bytes:
        """Return exactly ``size`` bytes, or raise MemoryFault."""
        return read(self.ram, self.entry, addr, size)

    def mapped_runs(self, start: int, stop: int) -> tuple[MappedRun, ...]:
        """Return what is mapped of [start, stop), by address, neighbours joined.

        Both ends must be in the same half of the address space. A range that reaches to the
        end of the address space has ``stop = 1 << 64``.

        Raises:
            MemoryFault: a table lies outside RAM, or there are too many tables to be true.
        """
        self._check_canonical(start)
        self._check_canonical(stop - 1)
        leaves = _Leaves(ram=self.ram, start=start, stop=stop)
        top = start >> _shift(self.levels + 1) << _shift(self.levels + 1)
        leaves.visit(int(self.root), self.levels, top, _WRITE)
        return leaves.runs()

    def _check_canonical(self, addr: int) -> None:
        top = addr >> (_shift(self.levels + 1) - 1)
        if not 0 <= addr <= U64 or top not in (0, U64 >> (_shift(self.levels + 1) - 1)):
            raise MemoryFault(addr, 1, "not a canonical address")


def _shift(level: int) -> int:
    return 12 + 9 * (level - 1)


_STEPS = tuple((level, _shift(level)) for level in range(5, 0, -1))


def _is_leaf(word: int, level: int) -> bool:
    return level == 1 or (level <= 3 and bool(word & _LARGE))


class _Leaves:
    # Collects the pages of one range.
    def __init__(self, *, ram: Ram, start: int, stop: int) -> None:
        self._ram, self._start, self._stop = ram, start, stop
        self._pieces = Pieces(start, stop)
        self._budget = MAX_TABLES

    def visit(self, table: int, level: int, base: int, rights: int) -> None:
        # rights: _WRITE when all levels above allow writing, _NX when any forbids execution.
        words, virt = self._entries(table, level, base)
        is_leaf = (words & _LARGE != 0) | (level == 1) if level <= 3 else words == 0
        pending = iter(np.flatnonzero(~is_leaf).tolist())
        self._take(words[is_leaf], virt[is_leaf], level, rights)
        for i in pending:
            word = int(words[i])
            below = rights & word & _WRITE | (rights | word) & _NX
            self.visit(word & _FRAME, level - 1, int(virt[i]), below)

    def runs(self) -> tuple[MappedRun, ...]:
        return self._pieces.runs()

    def _entries(self, table: int, level: int, base: int) -> tuple[Words, Words]:
        # The present entries of one table that map some of the range.
        self._budget -= 1
        if self._budget < 0:
            size = self._stop - self._start
            raise MemoryFault(self._start, size, "page tables without end")
        step = 1 << _shift(level)
        first = max(self._start - base, 0) >> _shift(level)
        last = min((self._stop - base + step - 1) >> _shift(level), _ENTRIES)
        words = table_words(self._ram, table, _ENTRIES)[first:last]
        virt = np.arange(first, last, dtype=np.uint64) * np.uint64(step) + np.uint64(base)
        present = words & _PRESENT != 0
        return words[present], virt[present]

    def _take(self, words: Words, virt: Words, level: int, rights: int) -> None:
        frame = np.uint64(_FRAME & -(1 << _shift(level)))
        writable = words & np.uint64(rights & _WRITE) != 0
        executable = (words | np.uint64(rights)) & np.uint64(_NX) == 0
        own = writable * np.uint64(WRITABLE) | executable * np.uint64(EXECUTABLE)
        self._pieces.add(virt, words & frame, 1 << _shift(level), own)
