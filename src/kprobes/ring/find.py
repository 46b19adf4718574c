"""Records of a chunk: commit words checked, and sizes chained.

The first u64 of a record says ``position << 16 | event id`` once the record is whole; see
docs/reference/formats/ring.md. Nothing read here is trusted: a size is taken only when it is one
that a writer of ours could have written and the record ends inside the bytes at hand. Of many
records C follows the chain, native/records.c; what is damaged, and few, NumPy looks at.
"""

from bisect import bisect_left

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.model.resolved import ALIGN, EVENT_BITS, HEADER
from kprobes.native.library import function_for
from kprobes.ring.chunk import Chunk, Shapes
from kprobes.units import U64

_IDS = 1 << EVENT_BITS
# Commit words are compared in pieces that stay in the L2 cache: 9 ns per 48-byte record
# against 10 at once, with a temporary of 256 KB and not one of the chunk's size.
_WORDS = 1 << 14
_FEW = 16
_STEPS = np.arange(_WORDS, dtype=np.uint64) << np.uint64(EVENT_BITS + 3)
_CHUNK_PARTS = "data size commits commits_size limit position sizes size_offsets end is_damaged"
_CHUNK = np.dtype([(name, "u8") for name in _CHUNK_PARTS.split()])


class FoundRecords(Struct, frozen=True, kw_only=True, eq=False):
    """Records of a chunk: byte offsets (n,) ascending, and the event id of each.

    ``end`` is where decoding goes on; for the rest see ``Decoded``.
    """

    offsets: NDArray[np.int64]
    ids: NDArray[np.int64]
    end: int
    is_blocked: bool
    is_lost: bool = False
    damaged: int = 0


def run_of_one(chunk: Chunk, shapes: Shapes) -> tuple[int, int] | None:
    """Return (event id, records) when the chunk holds one event of fixed size only.

    Whether the run ends at the limit or at an uncommitted record follows from its length.
    None means that the chunk is no such run, or not known to be one.
    """
    words = _words(chunk.commits)
    if chunk.limit == 0 or not _is_commit(words, 0, chunk.position):
        return None
    event_id = int(words[0]) & (_IDS - 1)
    size = int(shapes.sizes[event_id])
    if size == 0 or shapes.size_offsets[event_id]:
        return None
    most = min(-(-chunk.limit // size), len(chunk.data) // size)
    count = _matching(words[:: size // ALIGN][:most], chunk.position << EVENT_BITS | event_id, size)
    end = count * size
    if end < chunk.limit and _is_commit(words, end, chunk.position):
        return None
    return event_id, count


def find(chunk: Chunk, shapes: Shapes) -> FoundRecords:
    """Find the records of a chunk of any mix."""
    most = chunk.limit // HEADER + 1
    find_all = function_for(most, "records", "records_find", 3)
    if find_all is not None:
        offsets, ids = np.empty(most, np.int64), np.empty(most, np.int64)
        table = np.array((*_arguments(chunk, shapes), 0, 0), _CHUNK)
        count = find_all(table.ctypes.data, offsets.ctypes.data, ids.ctypes.data)
        if not table["is_damaged"]:
            end = int(table["end"])
            return FoundRecords(
                offsets=offsets[:count], ids=ids[:count], end=end, is_blocked=end < chunk.limit
            )
    return _find_by_numpy(chunk, shapes)


def _arguments(chunk: Chunk, shapes: Shapes) -> tuple[int, ...]:
    return (
        *(chunk.data.ctypes.data, len(chunk.data), chunk.commits.ctypes.data, len(chunk.commits)),
        *(chunk.limit, chunk.position),
        *(shapes.sizes.ctypes.data, shapes.size_offsets.ctypes.data),
    )


def _find_by_numpy(chunk: Chunk, shapes: Shapes) -> FoundRecords:
    starts = _candidates(_words(chunk.commits)[: -(-chunk.limit // ALIGN)], chunk.position)
    ids = _ids(chunk, starts)
    ends = _ends(chunk, starts, ids, shapes)
    if len(starts) == 0 or starts[0] != 0:
        return FoundRecords(offsets=starts[:0], ids=ids[:0], end=0, is_blocked=chunk.limit > 0)
    # Where one record does not end at the next one's start. The last always counts as such.
    breaks = np.flatnonzero(np.append(ends[:-1] != starts[1:], True))
    end = int(ends[breaks[0]])
    if end and (end >= chunk.limit or not _contains(starts, end)):
        kept = slice(0, int(breaks[0]) + 1)
        return FoundRecords(
            offsets=starts[kept], ids=ids[kept], end=end, is_blocked=end < chunk.limit
        )
    return _walk(starts, ends, ids, breaks=breaks, limit=chunk.limit)


def _words(data: NDArray[np.uint8]) -> NDArray[np.uint64]:
    return data[: len(data) // ALIGN * ALIGN].view("<u8")


def _is_commit(words: NDArray[np.uint64], offset: int, position: int) -> bool:
    excess = int(words[offset // ALIGN]) - ((position + offset) << EVENT_BITS) & U64
    # Id 0 is nobody's: at position 0 it is what memory holds before the first record.
    return 0 < excess < _IDS


def _matching(words: NDArray[np.uint64], first: int, size: int) -> int:
    # How many words from the start count up from ``first`` by records of ``size`` bytes. A mix is
    # mostly told by its first few.
    steps = np.arange(min(len(words), _WORDS), dtype=np.uint64) * np.uint64(size << EVENT_BITS)
    i, length = 0, _FEW
    while i < len(words):
        part = words[i : i + length]
        expected = np.uint64((first + (i * size << EVENT_BITS)) & U64)
        equal = (part - steps[: len(part)]) == expected
        if not equal.all():
            return i + int(equal.argmin())
        i, length = i + length, _WORDS
    return len(words)


def _candidates(words: NDArray[np.uint64], position: int) -> NDArray[np.int64]:
    # Offsets of the words that a record at their own position may begin with.
    found = [np.empty(0, np.int64)]
    for i in range(0, len(words), _WORDS):
        part = words[i : i + _WORDS]
        base = np.uint64((((position + i * ALIGN) << EVENT_BITS) + 1) & U64)
        excess = part - _STEPS[: len(part)]
        excess -= base
        found.append(np.flatnonzero(excess < _IDS - 1) + i)
    return np.concatenate(found) * ALIGN


def _ids(chunk: Chunk, starts: NDArray[np.int64]) -> NDArray[np.int64]:
    # From the private copy: in ``commits`` a hostile guest can change them after this look.
    positions = (starts + chunk.position).astype(np.uint64) << np.uint64(EVENT_BITS)
    excess = _words(chunk.data)[starts // ALIGN] - positions
    return np.where(excess < _IDS, excess, 0).astype(np.int64)


def _ends(
    chunk: Chunk, starts: NDArray[np.int64], ids: NDArray[np.int64], shapes: Shapes
) -> NDArray[np.int64]:
    # Where each record ends, or 0 when it cannot be one of ours.
    room = len(chunk.data) - starts
    sizes = shapes.sizes[ids]
    sizes[sizes > room] = 0
    dynamic = np.flatnonzero((shapes.size_offsets[ids] > 0) & (sizes > 0))
    if len(dynamic):
        at = starts[dynamic] + shapes.size_offsets[ids[dynamic]]
        # A view of every u32, aligned or not: the offset comes from the layout.
        every = np.ndarray((len(chunk.data) - 3,), "<u4", chunk.data, strides=(1,))
        own = every[at].astype(np.int64)
        is_sound = (own >= sizes[dynamic]) & (own % ALIGN == 0) & (own <= room[dynamic])
        sizes[dynamic] = np.where(is_sound, own, 0)
    return np.where(sizes > 0, starts + sizes, 0)


def _contains(starts: NDArray[np.int64], offset: int) -> bool:
    i = int(np.searchsorted(starts, offset))
    return i < len(starts) and int(starts[i]) == offset


def _walk(
    starts: NDArray[np.int64],
    ends: NDArray[np.int64],
    ids: NDArray[np.int64],
    *,
    breaks: NDArray[np.int64],
    limit: int,
) -> FoundRecords:
    # From break to break: past words inside a record that look like commits, and past
    # damaged records to the next sound one. Every step goes forward.
    begin, end_of, stops = starts.tolist(), ends.tolist(), breaks.tolist()
    sound = np.flatnonzero(ends).tolist()
    kept = np.zeros(len(starts), np.bool_)
    end, damaged, is_blocked, is_lost = 0, 0, False, False
    while end < limit and not is_lost:
        i = bisect_left(begin, end)
        is_blocked = i == len(begin) or begin[i] != end
        if is_blocked:
            break
        stop = stops[bisect_left(stops, i)]
        kept[i : stop + 1] = True
        end = end_of[stop]
        if end == 0:
            kept[stop] = False
            damaged += 1
            after = bisect_left(sound, stop)
            is_lost = after == len(sound)
            end = limit if is_lost else begin[sound[after]]
    return FoundRecords(
        offsets=starts[kept],
        ids=ids[kept],
        end=end,
        is_blocked=is_blocked,
        is_lost=is_lost,
        damaged=damaged,
    )
