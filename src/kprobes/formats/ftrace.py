r"""Pages of the kernel's trace rings, and the ``format`` files that describe what is in them.

kernel/trace/ring_buffer.c:

    struct buffer_data_page {
        u64 time_stamp;        // of the first record, whose delta is 0 or counts from here
        local_t commit;        // bytes of data; bit 31: events were lost before this page,
                               //   bit 30: how many is a long right after the data
        u8 data[];
    };

    struct ring_buffer_event {
        u32 type_len : 5, time_delta : 27;
        u32 array[];
    };

    type_len 1..28   data, 4 * type_len bytes in array
             0       data, array[0] - 4 bytes from array[1] on
             29      padding; time_delta 0: the page ends; else array[0] bytes were discarded
             30      time extends: time_delta + (array[0] << 27) more
             31      absolute time: the same sum, of which the page knows the top 5 bits

A record's place is known only from the one before it. So all pages are walked at once, one record
of each per step: a page of 4 KiB holds some hundred records, thousands of pages a million.

An event's ``format`` file:

    name: open
    ID: 1740
    format:
    \tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;
    ...                          // an empty line between the common fields and the event's
    print fmt: ...               // its language: formats/print_fmt.py

kernel/trace/trace_events.c, f_show(), writes it.

The page's own, ``events/header_page``, has lines of the same kind only
(ring_buffer_print_page_header).
"""

import re

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.errors import FormatError, RingError
from kprobes.model.events import EventField, EventFormat, Locator
from kprobes.native.library import Function, function_for

_FIELD = re.compile(
    r"\tfield: ?(?P<declaration>[^;]+);\toffset:(?P<offset>\d+);\tsize:(?P<size>\d+);"
    r"(?:\tsigned:(?P<signed>[01]);)?"
)
# The name is the declaration's last word, but for the brackets of an array after it.
_DECLARATION = re.compile(r"(?P<type>.*[\s*])(?P<name>\w+)(?P<array>(?:\[[^\]]*\])*)", re.DOTALL)
_HEAD = re.compile(r"name: (?P<name>\S+)\nID: (?P<id>\d+)\nformat:\n")
_NUMBER_MAX = (1 << 16) - 1
_SIZE_MAX = 1 << 16


class PageFormat(Struct, frozen=True, kw_only=True):
    """How a page of the ring, a sub-buffer, lies in memory.

    Attributes:
        size: of all of it.
        data: offset of its records.
        commit: offset of the count of their bytes, of which the low 4 bytes matter.
    """

    size: int
    data: int
    commit: int


def parse_event(text: str) -> EventFormat:
    """Read an event's ``format`` file, or raise FormatError."""
    head = _HEAD.match(text)
    if head is None:
        raise FormatError(f"no event's format: {text[:40]!r}")
    body, _, shown = text[head.end() :].partition("\nprint fmt:")
    common, _, own = body.partition("\n\n")
    number = int(head["id"])
    if not 0 < number <= _NUMBER_MAX:
        raise FormatError(f"event {head['name']} has the number {number}")
    return EventFormat(
        name=head["name"],
        number=number,
        common=_fields(common),
        fields=_fields(own),
        print_fmt=shown.strip(),
    )


def parse_page(text: str) -> PageFormat:
    """Read ``header_page``, or raise FormatError."""
    fields = {field.name: field for field in _fields(text)}
    try:
        stamp, commit, data = fields["timestamp"], fields["commit"], fields["data"]
    except KeyError as e:
        raise FormatError(f"header_page has no {e.args[0]}") from e
    if (stamp.offset, stamp.size) != (0, 8) or data.offset % 4 or commit.offset % 4:
        raise FormatError(f"a page with its stamp at {stamp.offset} and data at {data.offset}")
    return PageFormat(size=data.end, data=data.offset, commit=commit.offset)


def _fields(text: str) -> tuple[EventField, ...]:
    return tuple(_field(line) for line in text.splitlines() if line.strip())


def _field(line: str) -> EventField:
    found = _FIELD.fullmatch(line.rstrip())
    declared = None if found is None else _DECLARATION.fullmatch(found["declaration"])
    if found is None or declared is None:
        raise FormatError(f"no field of an event: {line[:60]!r}")
    offset, size = int(found["offset"]), int(found["size"])
    if offset + size > _SIZE_MAX:
        raise FormatError(f"a field beyond the longest record: {line[:60]!r}")
    return EventField(
        name=declared["name"],
        type=declared["type"].strip() + declared["array"],
        offset=offset,
        size=size,
        is_signed=found["signed"] == "1",
        locator=_locator(declared["type"], size),
    )


def _locator(declared: str, size: int) -> Locator:
    word = declared.split(" ", 1)[0]
    if word not in (Locator.DATA, Locator.RELATIVE):
        return Locator.HERE
    if size % 4 or not size:
        raise FormatError(f"a {declared!r} of {size} bytes")
    return Locator(word)


Bytes = NDArray[np.uint8]
Words = NDArray[np.uint32]
Index = NDArray[np.int64]

_LONG, _PADDING, _EXTEND, _STAMP = 0, 29, 30, 31
_KIND_BITS, _KIND = 5, 31
_DELTA_BITS = 27
_STAMP_BITS = 59
_COMMIT = (1 << 20) - 1
_MISSED, _MISSED_STORED = 1 << 31, 1 << 30
_LOST_SIZE = 8
# Words from a record to the next one, by type_len; 0 where array[0] tells.
_STEPS = np.array([0, *range(2, 30), 0, 2, 2], np.int64)
# Pages walked at once: what a step touches of them stays in the L2 cache.
_AT_ONCE = 1024
_WORD = 4
_NONE = np.empty(0, np.int64)
_USUAL = 64
"""Records of a page, as a rule."""
_LEAST = 8
"""Bytes of a record and its head at least."""
_PAGES_PARTS = "data size count commit begin skips at sizes ts page numbers"
_PAGES = np.dtype([(name, "u8") for name in _PAGES_PARTS.split()])


class PageRecords(Struct, frozen=True, kw_only=True, eq=False):
    """The data records of some pages, in the pages' order.

    Attributes:
        at: int64 (n,), where each one's data begins, in bytes from the first page.
        sizes: int64 (n,), of the data.
        ts: uint64 (n,).
        page: int64 (n,), which page it is of.
        numbers: uint16 (n,), of its event: the first of the data; 0 where there is none.
        lost: events that were lost before these pages.
    """

    at: Index
    sizes: Index
    ts: NDArray[np.uint64]
    page: Index
    numbers: NDArray[np.uint16]
    lost: int

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self.at)


def read_pages(pages: Bytes, form: PageFormat, skips: Index | None = None) -> PageRecords:
    """Find the records of pages.

    Args:
        pages: a contiguous array of shape (n, ``form.size``).
        form: how they lie in memory.
        skips: int64 (n,), how many bytes of each one's records are left out: those of whole
            records that were read before.

    Raises:
        RingError: bytes that no kernel wrote.
    """
    if pages.ndim != 2 or pages.shape[1] != form.size or not pages.flags.c_contiguous:
        raise ValueError(f"pages of {pages.shape}, not of {form.size} bytes")
    rests = np.zeros(len(pages), np.int64) if skips is None else skips
    read_all = function_for(len(pages) * _USUAL, "pages", "pages_read", 1)
    if read_all is not None:
        records = _read_by_c(read_all, pages, form, rests)
        if records is not None:
            return records
    parts = [
        _read(pages[i : i + _AT_ONCE], form, rests[i : i + _AT_ONCE], first=i)
        for i in range(0, len(pages), _AT_ONCE)
    ]
    if len(parts) == 1:
        return parts[0]
    return PageRecords(
        at=np.concatenate([_NONE, *(part.at for part in parts)]),
        sizes=np.concatenate([_NONE, *(part.sizes for part in parts)]),
        ts=np.concatenate([np.empty(0, np.uint64), *(part.ts for part in parts)]),
        page=np.concatenate([_NONE, *(part.page for part in parts)]),
        numbers=np.concatenate([np.empty(0, np.uint16), *(part.numbers for part in parts)]),
        lost=sum(part.lost for part in parts),
    )


def set_sizes(pages: Bytes, form: PageFormat, sizes: Index) -> None:
    """Make so many bytes of each page its records; what follows them counts as not written yet.

    Args:
        pages: shape (n, size of a page); changed in place.
        form: where a page has its commit word.
        sizes: shape (n,), bytes.
    """
    words = _words(pages, form)
    commits = words[:, form.commit // _WORD]
    commits &= np.uint32(~_COMMIT & 0xFFFFFFFF)
    commits |= sizes.astype(np.uint32)


def _words(pages: Bytes, form: PageFormat) -> Words:
    return pages.reshape(-1).view("<u4").reshape(len(pages), form.size // _WORD)


def _read(pages: Bytes, form: PageFormat, skips: Index, *, first: int) -> PageRecords:
    words = _words(pages, form)
    commits = words[:, form.commit // _WORD]
    used = (commits & np.uint32(_COMMIT)).astype(np.int64)
    if (used > form.size - form.data).any() or (used % _WORD).any():
        raise RingError(f"a page of {form.size} bytes with {int(used.max())} bytes of records")
    starts = np.arange(len(pages), dtype=np.int64) * words.shape[1] + form.data // _WORD
    at, counts = _walk(words, starts, starts + used // _WORD)
    flat = words.reshape(-1)
    heads = flat.take(at)
    ts = _times(flat, at, heads, counts=counts, stamps=words[:, :2].copy().view("<u8")[:, 0])
    page = np.repeat(np.arange(first, first + len(pages)), counts)
    kinds = heads & np.uint32(_KIND)
    is_data = kinds < _PADDING
    if skips.any():
        is_data &= at >= (starts + skips // _WORD)[page - first]
    if not is_data.all():
        at, kinds, ts, page = at[is_data], kinds[is_data], ts[is_data], page[is_data]
    begins, sizes = _data(flat, at, kinds)
    lost = _lost(pages, commits, used + form.data)
    numbers = np.zeros(len(begins), np.uint16)
    numbers[sizes > 0] = flat.view("<u2")[begins[sizes > 0] // 2]
    begins += first * form.size
    return PageRecords(at=begins, sizes=sizes, ts=ts, page=page, numbers=numbers, lost=lost)


def _read_by_c(
    read_all: Function, pages: Bytes, form: PageFormat, skips: Index
) -> PageRecords | None:
    # None of pages that no kernel wrote.
    most = len(pages) * ((form.size - form.data) // _LEAST)
    at, sizes, page = (np.empty(most, np.int64) for _ in range(3))
    ts, numbers = np.empty(most, np.uint64), np.empty(most, np.uint16)
    skips = np.ascontiguousarray(skips)
    row = (
        *(pages.ctypes.data, form.size, len(pages), form.commit, form.data, skips.ctypes.data),
        *(each.ctypes.data for each in (at, sizes, ts, page, numbers)),
    )
    table = np.array(row, _PAGES)
    count = read_all(table.ctypes.data)
    if count < 0:
        return None
    commits = _words(pages, form)[:, form.commit // _WORD]
    used = (commits & np.uint32(_COMMIT)).astype(np.int64)
    return PageRecords(
        at=at[:count],
        sizes=sizes[:count],
        # What outlives the others does not keep room for more.
        ts=ts[:count].copy(),
        page=page[:count],
        numbers=numbers[:count],
        lost=_lost(pages, commits, used + form.data),
    )


class _Found(Struct, frozen=True, kw_only=True, eq=False):
    # By page: where its records begin and end, in words from the first page, and how many there
    # are, once it is known.
    words: Words
    starts: Index
    ends: Index
    counts: Index


def _walk(words: Words, starts: Index, ends: Index) -> tuple[Index, Index]:
    # The words at which records begin, page after page, and how many each page has.
    walk = _Found(words=words, starts=starts, ends=ends, counts=np.zeros(len(starts), np.int64))
    rest, stride = _even(walk, np.flatnonzero(starts < ends))
    # In a page of its own row: the first so many of it count.
    most = int(walk.counts.max(initial=0))
    found = starts[:, None] + stride * np.arange(most)
    if len(rest):
        wide = np.empty((len(starts), int((ends - starts).max()) // 2 + 1), np.int64)
        wide[:, :most] = found
        _step(walk, rest, wide)
        most = int(walk.counts.max())
        found = wide[:, :most]
    return found[np.arange(most) < walk.counts[:, None]], walk.counts


def _even(walk: _Found, rows: Index) -> tuple[Index, int]:
    # Counts in pages whose records all have the size of the first page's first: mostly in all of
    # them, and at a third of the price. Returns the other pages, and that size.
    kind = int(walk.words.reshape(-1)[walk.starts[rows[0]]]) & _KIND if len(rows) else 0
    if not 0 < kind < _PADDING:
        return rows, 0
    stride = kind + 1
    lengths, over = np.divmod(walk.ends[rows] - walk.starts[rows], stride)
    others, rows, lengths = rows[over != 0], rows[over == 0], lengths[over == 0]
    most = int(lengths.max(initial=0))
    # Choosing rows costs more than looking at them.
    words = walk.words if len(rows) == len(walk.words) else walk.words[rows]
    is_odd = (words[:, int(walk.starts[0]) :: stride][:, :most] & np.uint32(_KIND)) != kind
    odd = np.flatnonzero(is_odd.any(axis=1))
    is_inside = np.arange(most) < lengths[odd, None]
    odd = odd[(is_odd[odd] & is_inside).any(axis=1)]
    walk.counts[rows] = lengths
    return np.concatenate([others, rows[odd]]), stride


def _step(walk: _Found, rows: Index, found: Index) -> None:
    # One record of each page per step. Pages that are done drop out on the way.
    words = walk.words.reshape(-1)
    at, stop = walk.starts[rows], walk.ends[rows]
    step = 0
    while len(rows):
        after = at + _steps(words, at, stop)
        found[rows, step] = at
        step += 1
        is_on = after < stop
        if not is_on.all():
            if (after > stop).any():
                raise RingError("a record that ends after its page")
            walk.counts[rows[~is_on]] = step
            rows, after, stop = rows[is_on], after[is_on], stop[is_on]
        at = after


def _steps(words: Words, at: Index, stop: Index) -> Index:
    # How many words each record takes.
    heads = words.take(at)
    steps = _STEPS.take(heads & np.uint32(_KIND))
    if not steps.all():
        odd = np.flatnonzero(steps == 0)
        steps[odd] = _explicit_steps(words, at[odd], stop[odd], heads[odd])
    return steps


def _explicit_steps(words: Words, at: Index, stop: Index, heads: Words) -> Index:
    # Those of long data and of padding. A null padding takes what is left of its page.
    is_null = heads == _PADDING
    has_length = at + 1 < stop
    if not (is_null | has_length).all():
        raise RingError("a record whose length is after its page")
    length = words.take(np.where(has_length, at + 1, at)).astype(np.int64)
    is_wrong = (length < _WORD) | (length % _WORD != 0)
    if (is_wrong & ~is_null).any():
        raise RingError(f"a record of {int(length[is_wrong & ~is_null][0])} bytes")
    return np.where(is_null, stop - at, 1 + length // _WORD)


def _times(
    words: Words, at: Index, heads: Words, *, counts: Index, stamps: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    # Modulo 2**64 throughout, as the kernel counts.
    kinds = heads & np.uint32(_KIND)
    deltas = (heads >> np.uint32(_KIND_BITS)).astype(np.uint64)
    extends = np.flatnonzero(kinds >= _EXTEND)
    deltas[extends] += words[at[extends] + 1].astype(np.uint64) << np.uint64(_DELTA_BITS)
    firsts = (np.cumsum(counts) - counts)[counts > 0]
    bases = stamps[counts > 0]
    absolutes = np.flatnonzero(kinds == _STAMP)
    if len(absolutes):
        page = np.repeat(stamps, counts)[absolutes]
        values = _whole_stamps(deltas[absolutes], page)
        deltas[absolutes] = 0
        # In front of a page's own beginning nothing stands, so that one is never after it.
        order = np.argsort(np.concatenate([firsts, absolutes]), kind="stable")
        firsts = np.concatenate([firsts, absolutes])[order]
        bases = np.concatenate([bases, values])[order]
    sums = np.cumsum(deltas)
    before = sums[firsts] - deltas[firsts]
    return sums + np.repeat(bases - before, np.diff(np.append(firsts, len(at))))


def _whole_stamps(stamps: NDArray[np.uint64], page: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # rb_fix_abs_ts(): the top bits are the page's, or one more when they have gone round.
    low = np.uint64((1 << _STAMP_BITS) - 1)
    whole = (stamps & low) | (page & ~low)
    went_round = ((page & ~low) != 0) & (whole < page)
    return whole + (went_round.astype(np.uint64) << np.uint64(_STAMP_BITS))


def _data(words: Words, at: Index, kinds: Words) -> tuple[Index, Index]:
    # Where the data of data records is, and how much of it, in bytes.
    starts, sizes = (at + 1) * _WORD, kinds.astype(np.int64) * _WORD
    long = np.flatnonzero(kinds == _LONG)
    sizes[long] = words[at[long] + 1].astype(np.int64) - _WORD
    starts[long] += _WORD
    return starts, sizes


def _lost(pages: Bytes, commits: Words, after: Index) -> int:
    # A page without room for the count says only that there were some: one at least.
    total = 0
    for page in np.flatnonzero(commits & np.uint32(_MISSED)).tolist():
        at = int(after[page])
        is_explicit = bool(commits[page] & _MISSED_STORED) and at + _LOST_SIZE <= pages.shape[1]
        total += (
            int.from_bytes(pages[page, at : at + _LOST_SIZE].tobytes(), "little")
            if is_explicit
            else 1
        )
    return total
