"""Pages of the kernel's trace rings to columns, by the events' own ``format``."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kprobes.errors import RingError
from kprobes.formats.event_format import PageFormat
from kprobes.formats.ftrace_page import PageRecords, read_pages
from kprobes.model.batch import Batch, Column
from kprobes.model.host_event import Locator
from kprobes.model.host_pages import Pages
from kprobes.model.layout import COMM_SIZE, RecordLayout
from kprobes.ring.host_context import Contexts
from kprobes.ring.host_shapes import COMMON_SIZE, EventShape, NamingShape
from kprobes.ring.strings import cut
from kprobes.ring.task_names import PID_LIMIT, Naming

_LOCATION_SIZE = 4
_STEP = 4  # every record begins at a multiple of it
_NOBODY = (1 << 16) - 1
_NO_COMM = np.zeros((), f"S{COMM_SIZE}")

_ALL = slice(None)

Bytes = NDArray[np.uint8]
Index = NDArray[np.int64]
Which = Index | slice
"""Some records, or all of them at no cost."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostDecoded:
    """What some pages hold.

    Attributes:
        batches: at most one per layout; rows in the pages' order, comm not filled in yet.
        which: uint16 (n,), for each event in the pages' order its index in ``batches``; its row
            there is how many of that batch stand before it.
        namings: what tasks got new names.
        lost: events that the kernel overwrote or dropped before these pages.
    """

    batches: tuple[Batch, ...]
    which: NDArray[np.uint16]
    namings: tuple[Naming, ...]
    lost: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShapes:
    """Everything that may be in the pages of one instance."""

    page: PageFormat
    contexts: Contexts
    events: Mapping[int, EventShape]
    namings: Mapping[int, NamingShape]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Found:
    # The records of some pages, ``kinds`` their events' numbers. ``blob`` is the pages' bytes.
    pages: Pages
    flat: Bytes
    records: PageRecords
    kinds: NDArray[np.uint16]
    blob: bytes

    def rows(self, index: Which, dtype: np.dtype[np.void]) -> NDArray[np.void]:
        """Return the fixed parts of some records, which are copied."""
        size = dtype.itemsize
        smallest = int(self.records.sizes[index].min())
        if smallest < size:
            raise RingError(f"a record of {smallest} bytes, not {size}")
        places = (len(self.flat) - size) // _STEP + 1
        every = np.ndarray((places,), f"V{size}", self.flat, strides=(_STEP,))
        rows = every[self.records.at[index] // _STEP].view(dtype)
        first, last = int(rows["pid"].min()), int(rows["pid"].max())
        if first < 0 or last >= PID_LIMIT:
            raise RingError(f"records of pids from {first} to {last}")
        return rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Part:
    # Records of one event at one address, and which of all records they are.
    shape: EventShape
    layout: RecordLayout
    rows: NDArray[np.void]
    index: Which


def decode_pages(pages: Pages, shapes: HostShapes) -> HostDecoded:
    """Turn pages into columns.

    Raises:
        RingError: bytes that no kernel wrote.
    """
    found = _find(pages, shapes)
    present = np.flatnonzero(np.bincount(found.kinds)).tolist()
    batches: list[Batch] = []
    which = np.full(len(found.kinds), _NOBODY, np.uint16)
    namings: list[Naming] = []
    for kind in present:
        index = _ALL if len(present) == 1 else np.flatnonzero(found.kinds == kind)
        if kind in shapes.namings:
            namings += _namings(found, index, shapes.namings[kind])
        elif kind in shapes.events:
            for part in _split(found, index, shapes.events[kind]):
                which[part.index] = len(batches)
                batches.append(_batch(found, part, shapes.contexts))
    ours = which[which != _NOBODY]
    return HostDecoded(
        batches=tuple(batches),
        which=ours,
        namings=tuple(namings),
        lost=found.records.lost,
    )


def _find(pages: Pages, shapes: HostShapes) -> _Found:
    records = read_pages(pages.data, shapes.page, pages.skips)
    if (records.sizes < COMMON_SIZE).any():
        raise RingError(f"a record of {int(records.sizes.min())} bytes")
    flat = pages.data.reshape(-1)
    kinds = flat.view("<u2")[records.at // 2]
    has_strings = any(shape.has_strings for shape in shapes.events.values())
    blob = flat.tobytes() if has_strings else b""
    return _Found(pages=pages, flat=flat, records=records, kinds=kinds, blob=blob)


def _split(found: _Found, index: Which, shape: EventShape) -> Iterator[_Part]:
    # One part for each address, of which an event has nearly always one.
    rows = found.rows(index, shape.dtype)
    addrs = rows["ip"]
    if (addrs == addrs[0]).all():
        yield _Part(shape=shape, layout=shape.layout(int(addrs[0])), rows=rows, index=index)
        return
    for addr in np.unique(addrs).tolist():
        own = np.flatnonzero(addrs == addr)
        place = own if isinstance(index, slice) else index[own]
        yield _Part(shape=shape, layout=shape.layout(addr), rows=rows[own], index=place)


def _batch(found: _Found, part: _Part, contexts: Contexts) -> Batch:
    rows, records = part.rows, found.records
    fields = [_field(found, part, i) for i in range(len(part.shape.fields))]
    return Batch(
        layout=part.layout,
        ts=records.ts[part.index],
        cpu=found.pages.cpu[records.page[part.index]],
        pid=rows["pid"],
        context=contexts.of(rows["flags"], rows["preempt"]),
        comm=np.broadcast_to(_NO_COMM, len(rows)),
        values=tuple(values for values, _ in fields),
        faulted=tuple(faulted for _, faulted in fields),
        caller=rows["caller"] if part.shape.is_return else None,
    )


def _field(found: _Found, part: _Part, i: int) -> tuple[Column, NDArray[np.bool_] | None]:
    values = part.rows[f"f{i}"]
    locator = part.shape.locators[i]
    if locator is Locator.HERE:
        # A number that could not be read is whatever stood there: the kernel does not say.
        return values, None
    located = values.reshape(len(values), -1).astype(np.int64)
    lengths, offsets = located >> 16, located & 0xFFFF
    if locator is Locator.RELATIVE:
        offsets += part.shape.ends[i] + np.arange(located.shape[1]) * _LOCATION_SIZE
    return _strings(found, part, offsets, lengths, count=part.shape.fields[i].count)


def _strings(
    found: _Found, part: _Part, offsets: Index, lengths: Index, *, count: int | None
) -> tuple[Column, NDArray[np.bool_]]:
    faulted = lengths == 0
    room = found.records.sizes[part.index][:, None]
    if ((offsets + lengths > room) & ~faulted).any():
        raise RingError("a string that ends behind its record")
    starts = found.records.at[part.index][:, None] + offsets
    values = cut(found.blob, starts, starts + lengths)
    values[faulted] = None
    if count is None:
        return values[:, 0], faulted[:, 0]
    return values, faulted


def _namings(found: _Found, index: Which, shape: NamingShape) -> Iterator[Naming]:
    # By task, not by event: a name is given once in a task's life, or twice.
    rows = found.rows(index, shape.dtype)
    news = rows[shape.new].tolist()
    olds = [None] * len(rows) if shape.old is None else rows[shape.old].tolist()
    columns = zip(rows["pid"].tolist(), found.records.ts[index].tolist(), olds, news, strict=True)
    for pid, ts, old, new in columns:
        yield Naming(pid=pid, ts=ts, old=_ended(old), new=_ended(new) or b"")


def _ended(name: bytes | None) -> bytes | None:
    return None if name is None else name.partition(b"\0")[0]
