"""Encoder of pages of the kernel's trace rings: the other way round than ``formats.ftrace``.

A page begins with its first record's time, from which the records after it count. What is further
off than 27 bits of nanoseconds has a time extend in front of it: two words, never apart from the
record. Records are whole words; one of more than 28 has its length in a word of its own. The file
above has the C structs.
"""

from bisect import bisect_right

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.formats.ftrace import PageFormat

Words = NDArray[np.uint32]
Index = NDArray[np.int64]

PAGE = PageFormat(size=4096, data=16, commit=8)
WORD = 4
_ROOM = (PAGE.size - PAGE.data) // WORD
_LOST_ROOM = 2
LONGEST = _ROOM - _LOST_ROOM - 2
"""Words of data that one record has at most: it fits behind its head, and in front of a count."""
_SHORTEST_LONG = 29
_EXTEND, _EXTEND_WORDS = 30, 2
_KIND_BITS, _DELTA_BITS = 5, 27
_LEAP_BITS = 59
_IS_LOST = 3 << 30
"""Records were lost in front of this page; how many stands behind its last one."""
_COUNT_MAX = (1 << 31) - 1
"""Readers keep the count as an int."""


HEADER_EVENT = """\
# compressed entry header
	type_len    :    5 bits
	time_delta  :   27 bits
	array       :   32 bits

	padding     : type == 29
	time_extend : type == 30
	time_stamp : type == 31
	data max type_len  == 28
"""
"""``events/header_event`` of every kernel: ring_buffer_print_entry_header."""


def header_page(*, is_char_signed: bool) -> str:
    """Return ``events/header_page``: ring_buffer_print_page_header of a kernel of 64 bits.

    Args:
        is_char_signed: on x86-64 before 6.2: 3bc753c06dd0 (kbuild: treat char as always unsigned).
    """
    room = PAGE.size - PAGE.data
    return f"""\
	field: u64 timestamp;	offset:0;	size:8;	signed:0;
	field: local_t commit;	offset:{PAGE.commit};	size:8;	signed:1;
	field: int overwrite;	offset:{PAGE.commit};	size:1;	signed:1;
	field: char data;	offset:{PAGE.data};	size:{room};	signed:{is_char_signed:d};
"""


class PageData(Struct, frozen=True, kw_only=True, eq=False):
    """The records of one CPU, in the order of its ring.

    Attributes:
        words: uint32 (m,), the data of all, one after the other.
        sizes: int64 (n,), how many words each one has, ``LONGEST`` at most.
        ts: uint64 (n,).
    """

    words: Words
    sizes: Index
    ts: NDArray[np.uint64]

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.sizes)


class _Placed(Struct, frozen=True, kw_only=True, eq=False):
    # By record: its time after the one before it, and where its head is, in words from the first
    # page. ``firsts`` are the records that pages begin with.
    deltas: NDArray[np.uint64]
    heads: Index
    firsts: Index


def encode_pages(data: PageData, *, lost: int = 0) -> NDArray[np.uint8]:
    """Return as few new pages as have room for these records, shape (p, ``PAGE.size``).

    A page begins anew where time goes back.

    Args:
        data: a record at least.
        lost: how many there were in front of the first one that are missing.
    """
    if not len(data) or int(data.sizes.max()) > LONGEST or not data.sizes.all():
        raise ValueError(f"{len(data)} records of up to {data.sizes.max(initial=0)} words")
    placed = _place(data, is_lost=lost > 0)
    pages = np.zeros((len(placed.firsts), PAGE.size // WORD), "<u4")
    flat = pages.reshape(-1)
    begins = _write_heads(flat, data.sizes, placed)
    starts = np.cumsum(data.sizes) - data.sizes
    flat[np.repeat(begins - starts, data.sizes) + np.arange(len(data.words))] = data.words
    pages[:, :2] = data.ts[placed.firsts].astype("<u8").view("<u4").reshape(-1, 2)
    lasts = np.append(placed.firsts[1:], len(data)) - 1
    ends = (begins + data.sizes)[lasts] - np.arange(len(pages)) * (PAGE.size // WORD)
    pages[:, PAGE.commit // WORD] = ends * WORD - PAGE.data
    if lost:
        pages[0, PAGE.commit // WORD] |= _IS_LOST
        pages[0, ends[0]] = min(lost, _COUNT_MAX)
    return pages.view(np.uint8)


def _place(data: PageData, *, is_lost: bool) -> _Placed:
    deltas = np.diff(data.ts, prepend=data.ts[:1])
    own = data.sizes + 1 + (data.sizes >= _SHORTEST_LONG)
    extends = np.where(deltas >> np.uint64(_DELTA_BITS) != 0, _EXTEND_WORDS, 0)
    # As if all were on one page, the first one's extend left out.
    ends = np.cumsum(own + extends)
    begins = ends - own
    # Times are modulo 2**64: what goes back leaps far.
    leaps = np.flatnonzero(deltas >> np.uint64(_LEAP_BITS))
    firsts = _firsts(begins, ends, leaps.tolist(), room=_ROOM - _LOST_ROOM * is_lost)
    page = np.repeat(np.arange(len(firsts)), np.diff(firsts, append=len(data)))
    deltas[firsts] = 0
    heads = begins - begins[firsts][page] + PAGE.data // WORD + page * (PAGE.size // WORD)
    return _Placed(deltas=deltas, heads=heads, firsts=firsts)


def _firsts(begins: Index, ends: Index, leaps: list[int], *, room: int) -> Index:
    # The records that pages begin with; ``room`` is the first page's.
    found, at, stops = [0], 0, [*leaps, len(ends)]
    while True:
        full = int(np.searchsorted(ends, int(begins[at]) + room, side="right"))
        at = min(full, stops[bisect_right(stops, at)])
        if at == len(ends):
            return np.array(found, np.int64)
        found.append(at)
        room = _ROOM


def _write_heads(flat: Words, sizes: Index, placed: _Placed) -> Index:
    # All but the data; returns where each one's begins.
    low = np.uint64((1 << _DELTA_BITS) - 1)
    heads, is_long = placed.heads, sizes >= _SHORTEST_LONG
    shifted = ((placed.deltas & low) << np.uint64(_KIND_BITS)).astype(np.uint32)
    high = (placed.deltas >> np.uint64(_DELTA_BITS)).astype(np.uint32)
    has_extend = np.flatnonzero(high)
    flat[heads[has_extend] - 2] = shifted[has_extend] | np.uint32(_EXTEND)
    flat[heads[has_extend] - 1] = high[has_extend]
    shifted[has_extend] = 0
    flat[heads] = shifted | np.where(is_long, 0, sizes).astype(np.uint32)
    flat[heads[is_long] + 1] = (sizes[is_long] + 1) * WORD
    return heads + 1 + is_long
