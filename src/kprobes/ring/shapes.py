"""Layouts as lookup tables: what finding records needs to know of every event id at once."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kprobes.model.layout import (
    ALIGN,
    COMM,
    COMM_SIZE,
    CONTEXT,
    COUNTER,
    EVENT_BITS,
    HEADER,
    PID,
    Field,
    RecordLayout,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shapes:
    """All layouts that may occur in a ring. Keep one while its records may still be there.

    Attributes:
        layouts: by event id.
        dtypes: by event id, the fixed part: the header's parts by name, field i as ``f<i>``
            (strings as their u32, arrays as many), fault words as ``faults``, the record's own
            size as ``size``, a return probe's caller as ``caller``.
        sizes: int64 per event id: bytes of the fixed part, 0 for an id that nobody has.
        size_offsets: int64 per event id: where the record's own size is, 0 when it has none.
    """

    layouts: Mapping[int, RecordLayout]
    dtypes: Mapping[int, np.dtype[np.void]]
    sizes: NDArray[np.int64]
    size_offsets: NDArray[np.int64]


def shapes(layouts: Iterable[RecordLayout]) -> Shapes:
    """Tabulate layouts by event id."""
    by_id = {layout.event_id: layout for layout in layouts}
    sizes = np.zeros(1 << EVENT_BITS, np.int64)
    size_offsets = np.zeros(1 << EVENT_BITS, np.int64)
    for event_id, layout in by_id.items():
        _check(layout)
        sizes[event_id] = layout.size
        size_offsets[event_id] = layout.size_offset if layout.is_dynamic else 0
    dtypes = {event_id: _row_dtype(layout) for event_id, layout in by_id.items()}
    return Shapes(layouts=by_id, dtypes=dtypes, sizes=sizes, size_offsets=size_offsets)


def _check(layout: RecordLayout) -> None:
    if not 0 < layout.event_id < 1 << EVENT_BITS:
        raise ValueError(f"{layout.event}: event id {layout.event_id}")
    if layout.size < HEADER or layout.size % ALIGN:
        raise ValueError(f"{layout.event}: a record of {layout.size} bytes")


def _row_dtype(layout: RecordLayout) -> np.dtype[np.void]:
    parts: dict[str, tuple[str, int]] = {
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
