"""Input and output of decoding: a ring's bytes, and the columns made of them.

Layouts as lookup tables: what finding records needs to know of every event id at once.
"""

from collections.abc import Iterable, Mapping

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.model.events import Batch
from kprobes.model.resolved import (
    ALIGN,
    COMM,
    COMM_SIZE,
    COMMIT,
    CONTEXT,
    COUNTER,
    EVENT_BITS,
    HEADER,
    PID,
    Field,
    RecordLayout,
    Storage,
)

POSITION_MASK = (1 << 48) - 1
"""Positions are 48 bits wide: what is left of a commit word beside the event id."""

_SIZE_OF = {"char": 1, "symbol": 8, "symstr": 8}
_MOST_ELEMENTS = 1 << 10

Bytes = NDArray[np.uint8]


class Chunk(Struct, frozen=True, kw_only=True, eq=False):
    """Bytes of one CPU's ring, without a wrap inside.

    Attributes:
        cpu: whose ring.
        position: of the first byte; a record begins there.
        limit: bytes of ``data`` in which records begin; the last one may end after it.
        data: a private copy, at least ``limit`` bytes. Columns become views of it.
        commits: the same bytes as they were before ``data`` was copied, of which only commit
            words are read; ``data`` itself when nobody wrote meanwhile. A copy is not made
            in order: it can hold a commit word newer than the values after it.
    """

    cpu: int
    position: int
    limit: int
    data: Bytes
    commits: Bytes

    def __post_init__(self) -> None:
        if not 0 <= self.limit <= len(self.data) or len(self.commits) < self.limit:
            raise ValueError(f"records begin in {self.limit} of {len(self.data)} bytes")


class Committed(Struct, frozen=True, kw_only=True, eq=False):
    """The committed records at the start of a chunk, as bytes.

    Attributes:
        chunk: cut to them: ``decode`` finds what it would have found in the whole.
        counts: of them, by event id.
        latest: the counter of the last of them; None where there is none.
        is_blocked, is_lost, damaged: as of ``Decoded``.
    """

    chunk: Chunk
    counts: Mapping[int, int]
    latest: int | None
    is_blocked: bool
    is_lost: bool
    damaged: int


class Decoded(Struct, frozen=True, kw_only=True, eq=False):
    """The committed records of one chunk.

    Attributes:
        cpu: whose they are.
        batches: one per layout that occurs, by event id; rows in ring order.
        position: where to go on.
        is_blocked: whether an uncommitted record stands there.
        is_lost: whether damage left no sound record to go on with; ``position`` is then
            the end of what was searched and need not be where a record begins.
        damaged: how many times a record had to be passed over.
    """

    cpu: int
    batches: tuple[Batch, ...]
    position: int
    is_blocked: bool
    is_lost: bool
    damaged: int

    def __len__(self) -> int:
        """Return the number of events."""
        return sum(map(len, self.batches))


class Shapes:
    """All layouts that may occur in a ring; more may be added while others read with it.

    Attributes:
        layouts: by event id.
        dtypes: by event id, the fixed part: the header's parts by name, field i as ``f<i>``
            (strings as their u32, arrays as many), fault words as ``faults``, the record's own
            size as ``size``, a return probe's caller as ``caller``.
        sizes: int64 per event id: bytes of the fixed part, 0 for an id that nobody has.
        size_offsets: int64 per event id: where the record's own size is, 0 when it has none.
    """

    def __init__(self, layouts: Iterable[RecordLayout] = ()) -> None:
        self.layouts: dict[int, RecordLayout] = {}
        self.dtypes: dict[int, np.dtype[np.void]] = {}
        self._types: dict[object, np.dtype[np.void]] = {}
        self.sizes = np.zeros(1 << EVENT_BITS, np.int64)
        self.size_offsets = np.zeros(1 << EVENT_BITS, np.int64)
        for layout in layouts:
            self.add(layout)

    def add(self, layout: RecordLayout) -> None:
        """Add a layout; its event id last, by which readers find it."""
        _check(layout)
        number = layout.event_id
        # All functions of a pattern have the same type, which numpy takes long to make.
        offsets = layout.size_offset, layout.faults_offset, layout.caller_offset
        shape = layout.size, layout.is_dynamic, layout.fields, *offsets
        if shape not in self._types:
            self._types[shape] = _row_dtype(layout)
        self.layouts[number], self.dtypes[number] = layout, self._types[shape]
        self.size_offsets[number] = layout.size_offset if layout.is_dynamic else 0
        self.sizes[number] = layout.size


def _check(layout: RecordLayout) -> None:
    if not 0 < layout.event_id < 1 << EVENT_BITS:
        raise ValueError(f"{layout.event}: event id {layout.event_id}")
    if layout.size < HEADER or layout.size % ALIGN:
        raise ValueError(f"{layout.event}: a record of {layout.size} bytes")
    for index, field in enumerate(layout.fields):
        if field.index != index or field.size not in _sizes(field):
            raise ValueError(f"{layout.event}: field {field.name!r} of {field.size} bytes")
        is_array = field.storage in (Storage.NUMBER, Storage.STRING)
        if field.count is not None and not (is_array and 0 < field.count < _MOST_ELEMENTS):
            raise ValueError(f"{layout.event}: field {field.name!r} of {field.count} elements")


def _sizes(field: Field) -> tuple[int, ...]:
    match field.storage:
        case Storage.NUMBER:
            return (_SIZE_OF[field.type],) if field.type in _SIZE_OF else (1, 2, 4, 8)
        case Storage.STRING | Storage.STACK:
            return (4,)
        case Storage.DURATION:
            return (8,)
        case Storage.COMM | Storage.TEXT:
            return (0,)


def _row_dtype(layout: RecordLayout) -> np.dtype[np.void]:
    parts: dict[str, tuple[str, int]] = {
        "commit": ("<u8", COMMIT),
        "counter": ("<u8", COUNTER),
        "pid": ("<i4", PID),
        "context": ("<u4", CONTEXT),
        "comm": (f"S{COMM_SIZE}", COMM),
        "comm0": ("<u8", COMM),
        "comm1": ("<u8", COMM + 8),
    }
    for i, field in enumerate(layout.fields):
        if field.size:
            parts[f"f{i}"] = (_field_dtype(field), field.offset)
    if layout.faults_offset is not None:
        parts["faults"] = (f"({_fault_words(layout)},)<u8", layout.faults_offset)
    if layout.is_dynamic:
        parts["size"] = ("<u4", layout.size_offset)
    if layout.caller_offset is not None:
        parts["caller"] = ("<u8", layout.caller_offset)
    formats = [form for form, _ in parts.values()]
    offsets = [offset for _, offset in parts.values()]
    return np.dtype(
        {"names": list(parts), "formats": formats, "offsets": offsets, "itemsize": layout.size}
    )


def _field_dtype(field: Field) -> str:
    dtype = f"<{'i' if field.is_signed else 'u'}{field.size}"
    return dtype if field.count is None else f"({field.count},){dtype}"


def _fault_words(layout: RecordLayout) -> int:
    return 1 + max((field.index for field in layout.fields), default=0) // 64
