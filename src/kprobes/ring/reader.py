"""Reader of one CPU's ring: its bytes from where it was read last to its head, as columns.

A record never wraps: one that begins before the ring's end runs on into the slack after it,
and the next begins where the first lap's bytes would have been overwritten by it. So the end
of the ring and its beginning are two chunks. The format is docs/reference/formats/ring.md.
"""

from collections.abc import Callable, Iterator

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from kprobes.errors import RingError
from kprobes.model.events import Batch
from kprobes.model.resolved import ALIGN, COUNTER
from kprobes.native.library import Function, function_for
from kprobes.ports import Clock
from kprobes.ring.chunk import POSITION_MASK, Bytes, Chunk, Committed, Decoded, Shapes
from kprobes.ring.find import FoundRecords, find, run_of_one
from kprobes.ring.records import Records, Rows, batch, sound

_NO_STARTS = np.empty(0, np.int64)
_GROUP = np.dtype([(name, "u8") for name in ("rows", "starts", "size")])
# glibc maps anew, page by page, what is larger than the largest block that was ever given back, and
# gives memory back at twice that: mallopt(3), M_MMAP_THRESHOLD. This one is never touched.
np.empty(31 << 20, np.uint8)
_MOST = 1 << 20
"""Bytes that are read at once: what is made of them stays in the cache meanwhile, and memory of
that size is used again and not mapped anew. What is kept as bytes is given back part by part."""


def decode(chunk: Chunk, shapes: Shapes, clock: Clock) -> Decoded:
    """Turn the committed records at the start of a chunk into columns.

    Decoding stops at the first record that is not committed, though others after it may be.
    Bytes that no writer of ours wrote are passed over and counted, never an error.

    Args:
        chunk: bytes of one CPU's ring.
        shapes: layouts by the numbers in the records.
        clock: what turns a CPU's counter into nanoseconds.
    """
    run = run_of_one(chunk, shapes)
    if run is None:
        return _decode_mix(chunk, shapes, clock)
    return _decode_run(chunk, shapes, clock, run=run)


def _commit(chunk: Chunk, shapes: Shapes) -> Committed:
    run = run_of_one(chunk, shapes)
    if run is None:
        return _commit_mix(chunk, shapes)
    event_id, count = run
    end = count * int(shapes.sizes[event_id])
    return Committed(
        chunk=_cut(chunk, end),
        counts={event_id: count},
        latest=_counter_at(chunk, end - int(shapes.sizes[event_id])),
        is_blocked=end < chunk.limit,
        is_lost=False,
        damaged=0,
    )


def _commit_mix(chunk: Chunk, shapes: Shapes) -> Committed:
    found = find(chunk, shapes)
    numbers = np.bincount(found.ids)
    present = np.flatnonzero(numbers)
    return Committed(
        chunk=_cut(chunk, found.end),
        counts=dict(zip(present.tolist(), numbers[present].tolist(), strict=True)),
        latest=_counter_at(chunk, int(found.offsets[-1])) if len(found.offsets) else None,
        is_blocked=found.is_blocked,
        is_lost=found.is_lost,
        damaged=found.damaged,
    )


def _counter_at(chunk: Chunk, offset: int) -> int:
    at = offset + COUNTER
    return int.from_bytes(chunk.data[at : at + 8].tobytes(), "little")


def _cut(chunk: Chunk, end: int) -> Chunk:
    data = chunk.data[:end]
    return replace(chunk, limit=min(chunk.limit, end), data=data, commits=data)


def _decode_run(chunk: Chunk, shapes: Shapes, clock: Clock, *, run: tuple[int, int]) -> Decoded:
    event_id, count = run
    end = count * int(shapes.sizes[event_id])
    records = Records(
        layout=shapes.layouts[event_id],
        rows=chunk.data[:end].view(shapes.dtypes[event_id]),
        starts=_NO_STARTS,
        data=chunk.data,
    )
    return Decoded(
        cpu=chunk.cpu,
        batches=(batch(records, cpu=chunk.cpu, clock=clock),),
        position=chunk.position + end & POSITION_MASK,
        is_blocked=end < chunk.limit,
        is_lost=False,
        damaged=0,
    )


def _decode_mix(chunk: Chunk, shapes: Shapes, clock: Clock) -> Decoded:
    found = find(chunk, shapes)
    split = _split(chunk, found, shapes)
    kept = [sound(records) for records in split]
    dropped = len(found.ids) - sum(len(records.rows) for records in kept)
    return Decoded(
        cpu=chunk.cpu,
        batches=tuple(_batches(kept, chunk.cpu, clock)),
        position=chunk.position + found.end & POSITION_MASK,
        is_blocked=found.is_blocked,
        is_lost=found.is_lost,
        damaged=found.damaged + dropped,
    )


def _split(chunk: Chunk, found: FoundRecords, shapes: Shapes) -> list[Records]:
    counts = np.bincount(found.ids)
    copy_all = function_for(len(found.ids), "records", "records_copy", 6)
    if copy_all is not None:
        return _copied(copy_all, chunk, found, counts, shapes=shapes)
    present = np.flatnonzero(counts).tolist()
    split: list[Records] = []
    for event_id in present:
        starts = found.offsets[found.ids == event_id] if len(present) > 1 else found.offsets
        rows = _rows(chunk, starts, shapes.dtypes[event_id])
        layout = shapes.layouts[event_id]
        split.append(Records(layout=layout, rows=rows, starts=starts, data=chunk.data))
    return split


def _copied(
    copy_all: Function,
    chunk: Chunk,
    found: FoundRecords,
    counts: NDArray[np.int64],
    *,
    shapes: Shapes,
) -> list[Records]:
    # By C, in one pass.
    present = np.flatnonzero(counts)
    groups = np.zeros(len(counts), np.uint16)
    groups[present] = np.arange(len(present))
    split = [_room(chunk, shapes, event_id, int(counts[event_id])) for event_id in present.tolist()]
    table = np.array(
        [(each.rows.ctypes.data, _starts_of(each), each.rows.itemsize) for each in split], _GROUP
    )
    records = (
        *(array.ctypes.data for array in (chunk.data, found.offsets, found.ids)),
        len(found.ids),
    )
    copy_all(*records, groups.ctypes.data, table.ctypes.data)
    return split


def _starts_of(records: Records) -> int:
    return records.starts.ctypes.data if len(records.starts) else 0


def _room(chunk: Chunk, shapes: Shapes, event_id: int, count: int) -> Records:
    layout = shapes.layouts[event_id]
    return Records(
        layout=layout,
        rows=np.empty(count * layout.size, np.uint8).view(shapes.dtypes[event_id]),
        starts=np.empty(count if layout.is_dynamic else 0, np.int64),
        data=chunk.data,
        has_ended_comms=True,
    )


def _rows(chunk: Chunk, starts: np.ndarray, dtype: np.dtype[np.void]) -> Rows:
    # Whole fixed parts are gathered as opaque bytes, 6 ns per 48-byte record; by column it
    # is 22. Every 8-byte step is a place where one may begin.
    size = dtype.itemsize
    places = (len(chunk.data) - size) // 8 + 1
    every = np.ndarray((places,), f"V{size}", chunk.data, strides=(8,))
    return every[starts // 8].view(dtype)


def _batches(found: list[Records], cpu: int, clock: Clock) -> list[Batch]:
    return [batch(records, cpu=cpu, clock=clock) for records in found if len(records.rows)]


Copy = Callable[[int, int], Bytes]
"""(offset, size) to a private copy of the ring's bytes there, the slack after it included."""


class Geometry(Struct, frozen=True, kw_only=True):
    """Where a CPU's ring ends: ``size`` bytes, a power of two, and ``slack`` after them."""

    cpu: int
    size: int
    slack: int

    def __post_init__(self) -> None:
        if self.size < ALIGN or self.size & (self.size - 1) or self.slack < 0:
            raise ValueError(f"a ring of {self.size} bytes and {self.slack} after it")


class RingReader:
    """Reads one CPU's ring. Does no input or output but through the functions it is given.

    Attributes:
        tail: position up to which records were taken; what the guest may overwrite.
        lost: records that the guest dropped, as last told to ``note_lost``.
        damaged: how many times a record had to be passed over.
    """

    def __init__(self, geometry: Geometry, copy: Copy) -> None:
        """Start at position 0.

        Args:
            geometry: of the ring.
            copy: called twice for the same bytes: for commit words, then for what they vouch for.
        """
        self._geometry = geometry
        self._copy = copy
        self.tail = 0
        self.lost = 0
        self.damaged = 0

    def read(self, head: int, shapes: Shapes, clock: Clock) -> list[Decoded]:
        """Decode what was committed up to ``head``: a value for each part of the ring, in order.

        The caller reads ``head`` from the guest before, and tells it ``tail`` afterwards.

        Args:
            head: position up to which the guest has reserved.
            shapes: of all events whose records may be there.
            clock: for the timestamps.

        Raises:
            RingError: the guest's head is none that our writer could have reached.
        """
        self._check(head)
        done: list[Decoded] = []
        for chunk in self._chunks(head):
            decoded = decode(chunk, shapes, clock)
            done.append(decoded)
            self.tail = head if decoded.is_lost else decoded.position
            self.damaged += decoded.damaged
            if decoded.is_blocked:
                break
        return done

    def take(self, head: int, shapes: Shapes, most: int) -> Iterator[Committed]:
        """Yield what was committed up to ``head`` as bytes, not decoded; else as ``read``.

        Args:
            head: position up to which the guest has reserved.
            shapes: of all events whose records may be there.
            most: bytes in which the records begin that are taken; others come later, as if one
                before them were not committed.

        Raises:
            RingError: the guest's head is none that our writer could have reached.
        """
        self._check(head)
        ahead = (head - self.tail) & POSITION_MASK
        for chunk in self._chunks((self.tail + min(ahead, most)) & POSITION_MASK):
            committed = _commit(chunk, shapes)
            end = chunk.position + len(committed.chunk.data) & POSITION_MASK
            self.tail = head if committed.is_lost else end
            self.damaged += committed.damaged
            yield committed if ahead <= most else replace(committed, is_blocked=True)
            if committed.is_blocked:
                break

    def note_lost(self, total: int) -> int:
        """Take the guest's count of dropped records, and return how many are new.

        A count that goes back is not believed: nothing is new then.
        """
        new = max(total - self.lost, 0)
        self.lost += new
        return new

    def _check(self, head: int) -> None:
        ahead = (head - self.tail) & POSITION_MASK
        if ahead > self._geometry.size or head % ALIGN or not 0 <= head <= POSITION_MASK:
            raise RingError(
                f"cpu {self._geometry.cpu}: head {head:#x} after tail {self.tail:#x} "
                f"in a ring of {self._geometry.size} bytes"
            )

    def _chunks(self, head: int) -> Iterator[Chunk]:
        while True:
            ahead = (head - self.tail) & POSITION_MASK
            # Beyond the size: the last record that was taken ends after this head.
            if ahead == 0 or ahead > self._geometry.size:
                return
            yield self._chunk(min(ahead, _MOST))

    def _chunk(self, ahead: int) -> Chunk:
        size, slack = self._geometry.size, self._geometry.slack
        offset = self.tail % size
        # The guest gives back what strings did not need. After ``head`` was read, a record can
        # have shrunk and the next one, begun inside, have been committed past ``head``.
        length = min(ahead + slack, size - offset + slack)
        # Commit words first, then what they vouch for; see Chunk.
        commits = self._copy(offset, length)
        data = self._copy(offset, length)
        return Chunk(
            cpu=self._geometry.cpu,
            position=self.tail,
            limit=min(ahead, size - offset),
            data=data,
            commits=commits,
        )
