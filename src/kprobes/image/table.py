"""Arrays in which kernels and their modules say something of their text.

    struct exception_table_entry { int insn, fixup, data; };      // include: asm/extable.h; arm64
                                                                  // has no data until 5.15
    struct jump_entry { s32 code, target; long key; };            // linux/jump_label.h
    struct static_call_site { s32 addr, key; };                   // linux/static_call_types.h

Each s32 that is an address counts from itself.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kprobes.arch.machine import TextFacts

MAX_SIZE = 1 << 25
"""Bytes of the largest array that is believed."""

Addrs = NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """An array of a kernel: the symbols around it, and how its entries look.

    Attributes:
        start, stop: names.
        words: s32 words in an entry.
        columns: those of them that are addresses.
        is_absolute: whether entries are whole addresses instead.
    """

    start: str
    stop: str
    words: int
    columns: int
    is_absolute: bool = False

    @property
    def entry(self) -> int:
        """Bytes of an entry."""
        return 4 * self.words


_EXCEPTIONS = Table(start="__start___ex_table", stop="__stop___ex_table", words=3, columns=2)
JUMP_LABELS = Table(start="__start___jump_table", stop="__stop___jump_table", words=4, columns=2)
STATIC_CALLS = Table(
    start="__start_static_call_sites", stop="__stop_static_call_sites", words=2, columns=1
)
MCOUNT = Table(
    start="__start_mcount_loc", stop="__stop_mcount_loc", words=2, columns=0, is_absolute=True
)
BLACKLIST = Table(
    start="__start_kprobe_blacklist",
    stop="__stop_kprobe_blacklist",
    words=2,
    columns=0,
    is_absolute=True,
)
ALTERNATIVES = Table(start="__alt_instructions", stop="__alt_instructions_end", words=3, columns=1)
"""Of 12 bytes: where the symbols are not known, on arm64."""
PROBE_BUCKETS = 64
"""Of ``kprobe_table``: 1 << KPROBE_HASH_BITS in kernel/kprobes.c."""


def exceptions(facts: TextFacts, version: tuple[int, int]) -> Table:
    """Return how a kernel's exception table looks."""
    return replace(_EXCEPTIONS, words=facts.exception_words(version))


def columns(table: Table, data: bytes, start: int, text: tuple[int, int]) -> list[Addrs]:
    """Return the columns of addresses of an array whose first lies in some text.

    Args:
        table: how its entries look.
        data: the array.
        start: where it is.
        text: addresses [start, stop).
    """
    words = np.frombuffer(data, "<i4").reshape(-1, table.words)
    places = np.arange(len(words), dtype=np.uint64) * np.uint64(table.entry) + np.uint64(start)
    found = [
        places + np.uint64(4 * i) + words[:, i].astype(np.int64).astype(np.uint64)
        for i in range(table.columns)
    ]
    kept = (found[0] >= np.uint64(text[0])) & (found[0] < np.uint64(text[1]))
    return [column[kept] for column in found]


def pairs(found: list[Addrs]) -> dict[int, int]:
    """Return two columns as a mapping."""
    return dict(zip(found[0].tolist(), found[1].tolist(), strict=True))
