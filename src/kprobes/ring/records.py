"""Records of one layout as columns.

Nothing read here is trusted: a string is taken only when it lies inside its record.
"""

from collections.abc import Iterable

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from kprobes.model.events import Batch, Column
from kprobes.model.resolved import COMM_SIZE, Field, RecordLayout, Storage
from kprobes.model.strings import Strings, cut
from kprobes.ports import Clock
from kprobes.ring.chunk import Bytes

_ONES = np.uint64(0x0101010101010101)
_HIGHS = np.uint64(0x8080808080808080)

Rows = NDArray[np.void]
_ADDRESS = 8


class Records(Struct, frozen=True, kw_only=True, eq=False):
    """Records of one layout, as they were found.

    Attributes:
        layout: of all of them.
        rows: their fixed parts, with the layout's dtype of ``Shapes``.
        starts: byte offset of each in ``data``; empty when the layout is not dynamic.
        data: the chunk's bytes, for strings.
        has_ended_comms: whether nothing stands behind the end of a task's name.
    """

    layout: RecordLayout
    rows: Rows
    starts: NDArray[np.int64]
    data: Bytes
    has_ended_comms: bool = False


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
    return replace(records, rows=records.rows[is_sound], starts=records.starts[is_sound])


def batch(records: Records, *, cpu: int, clock: Clock) -> Batch:
    """Turn n sound records into columns, shape (n,).

    Numbers are views of the rows, durations are copies.

    Args:
        records: with their rows and their layout.
        cpu: that wrote them.
        clock: what turns its counter into nanoseconds.
    """
    rows, layout = records.rows, records.layout
    comm = rows["comm"] if records.has_ended_comms else _comm(rows)
    ts = clock.ns(rows["counter"], cpu)
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
        columns=tuple(column for column, _ in fields),
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
) -> tuple[Column | Strings, NDArray[np.bool_] | None]:
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


def _string(records: Records, i: int) -> tuple[Strings, NDArray[np.bool_]]:
    offsets, lengths = _span(_columns(records, i))
    # Without the NUL; -1 of what could not be read.
    values = cut(records.data, records.starts[:, None] + offsets, (lengths - 1).astype(np.int32))
    faulted = lengths == 0
    if records.layout.fields[i].count is None:
        return values[:, 0], faulted[:, 0]
    return values, faulted


def _stack(records: Records, i: int) -> Strings:
    offsets, lengths = _span(_columns(records, i)[:, 0])
    whole = (lengths // _ADDRESS * _ADDRESS).astype(np.int32)
    return cut(records.data, records.starts + offsets, whole, is_raw=True)


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
