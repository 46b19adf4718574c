"""Records of a chunk: commit words checked, sizes chained, and those of one layout as columns.

The first u64 of a record says ``position << 16 | event id`` once the record is whole; see
docs/reference/formats/ring.md. Nothing read here is trusted: a size is taken only when it is one
that a writer of ours could have written and the record ends inside the bytes at hand. Strings of
many records are cut out of the bytes at once.
"""

from bisect import bisect_left
from collections.abc import Iterable

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.model.events import Batch, Column
from kprobes.model.resolved import ALIGN, COMM_SIZE, EVENT_BITS, Field, RecordLayout, Storage
from kprobes.ports import Clock
from kprobes.ring.chunk import Chunk, Shapes
from kprobes.units import U64

_IDS = 1 << EVENT_BITS
# Commit words are compared in pieces that stay in the L2 cache: 9 ns per 48-byte record
# against 10 at once, with a temporary of 256 KB and not one of the chunk's size.
_WORDS = 1 << 14
_STEPS = np.arange(_WORDS, dtype=np.uint64) << np.uint64(EVENT_BITS + 3)


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
    # How many words from the start count up from ``first`` by records of ``size`` bytes.
    steps = np.arange(min(len(words), _WORDS), dtype=np.uint64) * np.uint64(size << EVENT_BITS)
    for i in range(0, len(words), _WORDS):
        part = words[i : i + _WORDS]
        expected = np.uint64((first + (i * size << EVENT_BITS)) & U64)
        equal = (part - steps[: len(part)]) == expected
        if not equal.all():
            return i + int(equal.argmin())
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


def cut(blob: bytes, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Column:
    """Return what stands from each start to its stop, or to a NUL before it, as copies.

    Args:
        blob: the bytes of all records.
        starts: of any shape, which is the answer's: an array of ``bytes`` objects.
        stops: after the last byte of each.
    """
    begins, lengths = starts.ravel(), (stops - starts).ravel()
    width = max(int(lengths.max(initial=0)), 1)
    if width * len(begins) > _MOST_ROOM * len(blob):
        return _cut_each(blob, begins, lengths).reshape(starts.shape)
    # All of them as long as the longest, the rest zeroed: 80 ns for each, and 200 one by one.
    every = np.ndarray((len(blob) + 1,), f"V{width}", blob + bytes(width), strides=(1,))
    rows = every[np.minimum(begins, len(blob))].view(np.uint8).reshape(-1, width)
    rows *= np.arange(width, dtype=np.int32) < lengths[:, None].astype(np.int32)
    values = rows.view(f"S{width}")[:, 0].astype(object)
    found = np.count_nonzero(rows)
    # NULs at the end are gone.
    if found < lengths.sum() and found < sum(map(len, values.tolist())):
        values[:] = [value.partition(b"\0")[0] for value in values.tolist()]
    return values.reshape(starts.shape)


def cut_raw(blob: bytes, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> Column:
    """Return what stands from each start to its stop, NULs and all, as copies.

    Args:
        blob: the bytes of all records.
        starts: of any shape, which is the answer's: an array of ``bytes`` objects.
        stops: after the last byte of each.
    """
    values = np.empty(starts.shape, object)
    pairs = zip(starts.ravel().tolist(), stops.ravel().tolist(), strict=True)
    values.ravel()[:] = [blob[begin:end] for begin, end in pairs]
    return values


def _cut_each(blob: bytes, begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> Column:
    values = np.empty(len(begins), object)
    pairs = zip(begins.tolist(), (begins + lengths).tolist(), strict=True)
    values[:] = [blob[begin:end].partition(b"\0")[0] for begin, end in pairs]
    return values


_MOST_ROOM = 4
"""Times the bytes that strings are cut out of: what these may take while they are cut."""
_ONES = np.uint64(0x0101010101010101)
_HIGHS = np.uint64(0x8080808080808080)

Rows = NDArray[np.void]
_ADDRESS = 8


class Records(Struct, frozen=True, kw_only=True, eq=False):
    """Records of one layout, as they were found.

    Attributes:
        layout: of all of them.
        rows: their fixed parts, with the layout's dtype of ``Shapes``.
        starts: byte offset of each in ``blob``; empty when the layout is not dynamic.
        blob: the chunk's bytes, for strings.
    """

    layout: RecordLayout
    rows: Rows
    starts: NDArray[np.int64]
    blob: bytes


def sound(records: Records) -> Records:
    """Leave out the records whose strings lie outside of them, or take more than they have.

    The second bounds what is allocated: a record's strings never overlap, so together they
    are no longer than the record.
    """
    if not records.layout.is_dynamic:
        return records
    sizes = records.rows["size"].astype(np.int64)
    is_sound = np.ones(len(records.rows), np.bool_)
    total = np.zeros(len(records.rows), np.int64)
    for i in _strings(records.layout):
        offsets, lengths = _span(_columns(records, i))
        is_inside = (offsets + lengths <= sizes[:, None]) | (lengths == 0)
        is_sound &= is_inside.all(axis=1)
        total += lengths.sum(axis=1)
    is_sound &= total <= sizes - records.layout.size
    if is_sound.all():
        return records
    return Records(
        layout=records.layout,
        rows=records.rows[is_sound],
        starts=records.starts[is_sound],
        blob=records.blob,
    )


def batch(records: Records, *, cpu: int, clock: Clock) -> Batch:
    """Turn n sound records into columns, shape (n,).

    Numbers are views of the rows, durations are copies.

    Args:
        records: with their rows and their layout.
        cpu: that wrote them.
        clock: what turns its counter into nanoseconds.
    """
    rows, layout = records.rows, records.layout
    comm, ts = _comm(rows), clock.ns(rows["counter"], cpu)
    fields = [_field(records, i, field, comm) for i, field in enumerate(layout.fields)]
    for i, field in enumerate(layout.fields):
        if field.storage is Storage.DURATION:
            took = _since(clock.ns(rows[f"f{i}"], cpu), ts)
            # No call takes no time: it was shorter than a step of the clock, or on two CPUs.
            fields[i] = took, took == 0
    return Batch(
        layout=layout,
        ts=ts,
        cpu=np.broadcast_to(np.uint16(cpu), len(rows)),
        pid=rows["pid"],
        context=rows["context"],
        comm=comm,
        values=tuple(values for values, _ in fields),
        faulted=tuple(faulted for _, faulted in fields),
        caller=None if layout.caller_offset is None else rows["caller"],
        place=rows["commit"],
    )


def _since(entered: NDArray[np.uint64], ts: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # The counter of the CPU where a task came from may be a little ahead.
    return np.maximum(ts, entered) - entered


def _strings(layout: RecordLayout) -> Iterable[int]:
    fields = enumerate(layout.fields)
    return (i for i, field in fields if field.storage in (Storage.STRING, Storage.STACK))


def _columns(records: Records, i: int) -> NDArray[np.uint32]:
    # One column for each string, of which an array has several.
    located = records.rows[f"f{i}"]
    return located.reshape(len(located), records.layout.fields[i].count or 1)


def _span(located: NDArray[np.uint32]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    # u32 length << 16 | offset
    wide = located.astype(np.int64)
    return wide & 0xFFFF, wide >> 16


def _field(
    records: Records, i: int, field: Field, comm: Column
) -> tuple[Column, NDArray[np.bool_] | None]:
    match field.storage:
        case Storage.COMM:
            return comm, None
        case Storage.TEXT:
            return np.full(len(comm), field.text, object), None
        case Storage.NUMBER:
            return records.rows[f"f{i}"], _faulted(records, field)
        case Storage.DURATION:
            return records.rows[f"f{i}"], None
        case Storage.STRING:
            return _string(records, i)
        case Storage.STACK:
            return _stack(records, i), None


def _faulted(records: Records, field: Field) -> NDArray[np.bool_] | None:
    if records.layout.faults_offset is None:
        return None
    word = records.rows["faults"][:, field.index // 64]
    return (word >> np.uint64(field.index % 64) & np.uint64(1)).astype(np.bool_)


def _string(records: Records, i: int) -> tuple[Column, NDArray[np.bool_]]:
    offsets, lengths = _span(_columns(records, i))
    faulted = lengths == 0
    starts = records.starts[:, None] + offsets
    stops = starts + np.maximum(lengths - 1, 0)  # without the NUL
    values = cut(records.blob, starts, stops)
    values[faulted] = None
    if records.layout.fields[i].count is None:
        return values[:, 0], faulted[:, 0]
    return values, faulted


def _stack(records: Records, i: int) -> Column:
    # Stacks repeat: those that are alike share one object.
    offsets, lengths = _span(_columns(records, i)[:, 0:1])
    starts = records.starts + offsets[:, 0]
    stops = starts + lengths[:, 0] // _ADDRESS * _ADDRESS
    known: dict[bytes, bytes] = {}
    values = np.empty(len(starts), object)
    pairs = zip(starts.tolist(), stops.tolist(), strict=True)
    cuts = (records.blob[begin:end] for begin, end in pairs)
    values[:] = [known.setdefault(stack, stack) for stack in cuts]
    return values


def _comm(rows: Rows) -> Column:
    # A task that was renamed to a shorter name keeps the end of the old one behind the NUL
    # (strlcpy in __set_task_comm, up to 6.1 at least). Tasks hit in bursts, so the first of
    # every run of equal names is looked at: 3 ns per record and not 15.
    low, high = rows["comm0"], rows["comm1"]
    changes = np.flatnonzero((low[1:] != low[:-1]) | (high[1:] != high[:-1])) + 1
    heads = np.concatenate([np.zeros(min(len(rows), 1), np.int64), changes])
    names = np.stack([low[heads], high[heads]], axis=1)
    ended = np.stack(_ended(names[:, 0], names[:, 1]), axis=1)
    if np.array_equal(names, ended):
        return rows["comm"]
    lengths = np.diff(np.append(heads, len(rows)))
    return np.repeat(ended.view(f"S{COMM_SIZE}")[:, 0], lengths)


def _ended(
    low: NDArray[np.uint64], high: NDArray[np.uint64]
) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    # The two halves of 16-byte strings with everything from the first NUL on zeroed.
    low_kept, high_kept = _before_nul(low), _before_nul(high)
    is_longer = low_kept == ~np.uint64(0)
    return low & low_kept, np.where(is_longer, high & high_kept, np.uint64(0))


def _before_nul(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    # A mask of the bytes before the first zero byte, little endian (Hacker's Delight, 6-1:
    # the lowest bit of ``zeros`` is exact).
    zeros = (words - _ONES) & ~words & _HIGHS
    first = zeros & (~zeros + np.uint64(1))
    return np.where(zeros == 0, ~np.uint64(0), (first >> np.uint64(7)) - np.uint64(1))
