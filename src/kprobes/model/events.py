"""Events as columns: what a drained ring becomes, what was counted, and all that a sink sees.

Programs that take events one by one get each with its values by name. Of this machine's kernel,
tracefs makes a ``HostEvent`` of every event that is defined; ``Pages`` that were taken out of the
kernel's rings become batches of those events' layouts.
"""

import struct
from collections.abc import Collection, Iterator, Sequence
from enum import StrEnum
from typing import Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace
from numpy.typing import NDArray

from kprobes.model.resolved import Field, RecordLayout, Storage
from kprobes.model.strings import Strings

Column = NDArray[Any]
TRACERS, SYSCALLS = "ftrace", "syscalls"
"""Groups of events that the kernel prints without their names."""
Rows = slice | NDArray[np.integer[Any]] | NDArray[np.bool_]


class Batch(Struct, frozen=True, kw_only=True, eq=False):
    """``n`` events of one layout. Every array has shape (n,) unless said otherwise.

    Attributes:
        layout: what the events are.
        ts: uint64, nanoseconds of the guest's trace clock.
        cpu: uint16.
        pid: int32.
        context: uint32, the CONTEXT_* bits of ``model.resolved``.
        comm: S16, the task's name at the hit.
        columns: per field, in layout order: numbers in the field's own dtype; a duration as
            uint64 ns; strings without NUL, and stacks, see ``addresses``, as ``Strings``; what all
            events have, as comm, as an array. Array fields have the shape (n, count).
        faulted: per field: a bool array, or None for a field that cannot fault. It has the
            shape (n,), but (n, count) for an array of strings. A duration of 0 is one that could
            not be measured.
        caller: uint64, where a return probe's calls came from; None for other probes.
        place: uint64, greater for what came later on the same CPU, until they are put in order.
    """

    layout: RecordLayout
    ts: NDArray[np.uint64]
    cpu: NDArray[np.uint16]
    pid: NDArray[np.int32]
    context: NDArray[np.uint32]
    comm: Column
    columns: tuple[Column | Strings, ...]
    faulted: tuple[NDArray[np.bool_] | None, ...]
    caller: NDArray[np.uint64] | None = None
    place: NDArray[np.uint64] | None = None

    def __len__(self) -> int:
        """Return the number of events."""
        return len(self.ts)

    @property
    def values(self) -> tuple[Column, ...]:
        """The columns as arrays, shape (n,) or (n, count): of strings new ones, of objects.

        Those are ``bytes``, and None where the fetch faulted.
        """
        return tuple(c.objects if isinstance(c, Strings) else c for c in self.columns)

    @property
    def nbytes(self) -> int:
        """About how many bytes it keeps: all that its columns are views of."""
        columns = [self.ts, self.cpu, self.pid, self.context, self.comm]
        for each in self.columns:
            columns += (
                [each.blob, each.starts, each.lengths] if isinstance(each, Strings) else [each]
            )
        return sum({id(owner): owner.nbytes for owner in map(_owner, columns)}.values())

    def take(self, rows: Rows) -> "Batch":
        """Return some rows: views for a slice, copies for indices, shape (m,), or a mask, (n,)."""
        return Batch(
            layout=self.layout,
            ts=self.ts[rows],
            cpu=self.cpu[rows],
            pid=self.pid[rows],
            context=self.context[rows],
            comm=self.comm[rows],
            columns=tuple(column[rows] for column in self.columns),
            faulted=tuple(None if mask is None else mask[rows] for mask in self.faulted),
            caller=None if self.caller is None else self.caller[rows],
            place=None if self.place is None else self.place[rows],
        )


def addresses(stack: bytes) -> tuple[int, ...]:
    """Return where the hit was and where each call returns to, innermost first.

    Args:
        stack: as a column has it: u64 in a row, little endian.
    """
    return struct.unpack(f"<{len(stack) // 8}Q", stack)


class Events(Struct, frozen=True, kw_only=True, eq=False):
    """Batches of several events with the order that time puts them in.

    Attributes:
        batches: at most one per layout.
        batch: uint16 (n,), for each event in time order its index in ``batches``.
        row: uint32 (n,), and its row there.
    """

    batches: tuple[Batch, ...]
    batch: NDArray[np.uint16]
    row: NDArray[np.uint32]

    def __len__(self) -> int:
        """Return the number of events."""
        return len(self.batch)

    @property
    def nbytes(self) -> int:
        """About how many bytes it keeps; see ``Batch.nbytes``."""
        own = self.batch.nbytes + self.row.nbytes
        return own + sum(batch.nbytes for batch in self.batches)

    def cut(self, events: slice) -> "Events":
        """Return some that follow each other in time, as views."""
        return Events(batches=self.batches, batch=self.batch[events], row=self.row[events])


NO_EVENTS = Events(batches=(), batch=np.empty(0, np.uint16), row=np.empty(0, np.uint32))


def kept_of(events: Events, masks: Sequence[NDArray[np.bool_]]) -> Events:
    """Return some events in their order; the columns are the same, the rest is copies.

    Args:
        events: any.
        masks: for each of the batches which of its rows, shape (n,).
    """
    if all(mask.all() for mask in masks):
        return events
    starts = np.cumsum([0, *map(len, masks)])[:-1]
    kept = np.concatenate(masks)[starts[events.batch] + events.row]
    return Events(batches=events.batches, batch=events.batch[kept], row=events.row[kept])


def with_fields(batch: Batch, names: Collection[str]) -> Batch:
    """Return the same events with only some of their own fields, as views."""
    own = [at for at, field in enumerate(batch.layout.fields) if field.name in names]
    return replace(
        batch,
        layout=replace(batch.layout, fields=tuple(batch.layout.fields[at] for at in own)),
        columns=tuple(batch.columns[at] for at in own),
        faulted=tuple(batch.faulted[at] for at in own),
    )


def _owner(column: Column) -> Column:
    while isinstance(column.base, np.ndarray):
        column = column.base
    return column


class Event(Struct, frozen=True, kw_only=True):
    """One hit of a probe.

    Attributes:
        name, group: of its event.
        function: that was hit.
        ts: nanoseconds of the kernel's trace clock.
        cpu: that it happened on.
        pid, comm: of the task.
        args: values by name: numbers, ``str``, or lists of them; a stack is a tuple of addresses,
            innermost first; None for one that could not be read.
        caller: the address that a return probe's function returned to, else None.
    """

    name: str
    group: str
    function: str
    ts: int
    cpu: int
    pid: int
    comm: str
    args: dict[str, Any]
    caller: int | None = None

    def __getitem__(self, name: str) -> Any:
        """Return one value of ``args``: ``event["path"]``.

        Raises:
            KeyError: the event has no such field.
        """
        if name not in self.args:
            fields = ", ".join(self.args) or "none"
            raise KeyError(f"{self.name} has no field {name!r}; its fields: {fields}")
        return self.args[name]


def each_event(events: Events, name: str | None = None) -> Iterator[Event]:
    """Yield events one by one, oldest first; those of one name if it is given."""
    batches: list[int] = events.batch.tolist()
    rows: list[int] = events.row.tolist()
    for batch, row in zip(batches, rows, strict=True):
        if name in (None, events.batches[batch].layout.event):
            yield _event(events.batches[batch], row)


def _event(batch: Batch, row: int) -> Event:
    layout = batch.layout
    return Event(
        name=layout.event,
        group=layout.group,
        function=layout.function,
        ts=int(batch.ts[row]),
        cpu=int(batch.cpu[row]),
        pid=int(batch.pid[row]),
        comm=_text(bytes(batch.comm[row])),
        args=_values(batch, row),
        caller=None if batch.caller is None else int(batch.caller[row]),
    )


def _values(batch: Batch, row: int) -> dict[str, Any]:
    fields = zip(batch.layout.fields, batch.values, batch.faulted, strict=True)
    return {field.name: _value(field, column[row], mask, row) for field, column, mask in fields}


def _value(field: Field, value: Any, mask: NDArray[np.bool_] | None, row: int) -> Any:
    if mask is not None and mask.ndim == 1 and mask[row]:
        return None
    if isinstance(value, np.ndarray):
        elements: list[Any] = value.tolist()
        return [_plain(each) for each in elements]
    if field.storage is Storage.STACK:
        return addresses(value)
    return _plain(value.item() if isinstance(value, np.generic) else value)


def _plain(value: Any) -> Any:
    return _text(value) if isinstance(value, bytes) else value


def _text(value: bytes) -> str:
    return value.decode(errors="backslashreplace")


class Counts(Struct, frozen=True, kw_only=True):
    """What a run counted.

    Attributes:
        recorded: events read, by event id.
        missed: hits that were not recorded, by event id: another hit of the same context was
            in progress on their CPU.
        lost: records dropped because a ring was full.
        damaged: places in the rings that held no record of ours.
        nmissed: calls whose return is not seen, by event id: as many of the function were in
            progress as there was room for.
    """

    recorded: dict[int, int]
    missed: dict[int, int]
    lost: int
    damaged: int
    nmissed: dict[int, int] = field(default_factory=dict[int, int])


NO_COUNTS = Counts(recorded={}, missed={}, lost=0, damaged=0)


class Loads(Struct, frozen=True, kw_only=True, eq=False):
    """What the hits of every event have taken so far, since a time that does not matter.

    Attributes:
        hits: how many, those that a filter rejects included: a new uint64 array (n,), by event id.
        code_s: the seconds that they were in the code of their probes: a new float64 array (n,), by
            event id; or None where the kernel does not tell.
        site_s: the seconds that one hit takes besides, as it is armed now: likewise.
    """

    hits: NDArray[np.uint64]
    code_s: NDArray[np.float64] | None = None
    site_s: NDArray[np.float64] | None = None


class Hits(Struct, frozen=True, kw_only=True):
    """One probe's numbers.

    Attributes:
        event: its name.
        event_id: its number in what is counted.
        function: what it probes, as it was given; of a pattern, one of its functions.
        recorded: hits that became events.
        missed: hits that did not, as another one was in progress in the same context there.
        nmissed: calls whose return is not seen, as too many others were in progress.
        is_over_limit: whether it was disabled, as it has passed a limit.
    """

    event: str
    function: str
    recorded: int
    missed: int
    event_id: int = 0
    nmissed: int = 0
    is_over_limit: bool = False

    @property
    def all_missed(self) -> int:
        """What kprobe_profile shows: all hits that did not become events but should have."""
        return self.missed + self.nmissed


class Locator(StrEnum):
    """Where a field's bytes are."""

    HERE = "here"
    DATA = "__data_loc"
    """A u32 ``length << 16 | offset`` from the record's start."""
    RELATIVE = "__rel_loc"
    """The same from the u32's own end."""


class EventField(Struct, frozen=True, kw_only=True):
    """One ``field:`` line.

    Attributes:
        type: as C writes it, without the name: ``unsigned short``, ``__data_loc char[]``.
        offset, size: in the record, bytes.
    """

    name: str
    type: str
    offset: int
    size: int
    is_signed: bool
    locator: Locator = Locator.HERE

    @property
    def end(self) -> int:
        """The offset after it."""
        return self.offset + self.size


class EventFormat(Struct, frozen=True, kw_only=True):
    """An event's ``format`` file.

    Attributes:
        number: its ID: what ``common_type`` of its records is.
        common: the fields that all events have.
        fields: its own, in the file's order.
        print_fmt: what is printed of it, in C.
    """

    name: str
    number: int
    common: tuple[EventField, ...]
    fields: tuple[EventField, ...]
    print_fmt: str = ""

    @property
    def size(self) -> int:
        """Bytes of a record's fixed part."""
        return max((field.end for field in (*self.common, *self.fields)), default=0)


class HostEvent(Struct, frozen=True, kw_only=True):
    """An event whose records lie in the kernel's own rings.

    Attributes:
        format: as its file says.
        layouts: how its records are shown: one for each place of the probe, told apart by
            ``ip``, with event ids that are unique in the session. Their fields are those of
            the event in the same order; of each only name, type, storage, count, text and
            enumerators count, for ``format`` has the places. A record of another address is
            shown as the first of them, but for what its address makes of ``where``. An event
            that is not of a probe has one, whatever the address.
    """

    format: EventFormat
    layouts: tuple[RecordLayout, ...]

    def __post_init__(self) -> None:
        if not self.layouts:
            raise ValueError(f"event {self.format.name} is shown by no layout")


class Pages(Struct, frozen=True, kw_only=True, eq=False):
    """Some pages of some CPUs' rings, each CPU's in the ring's order.

    Attributes:
        data: uint8 (n, page size).
        cpu: uint16 (n,), of each.
        skips: int64 (n,), how many bytes of each one's records were in an earlier page: they are
            here for the times of those after them.
    """

    data: NDArray[np.uint8]
    cpu: NDArray[np.uint16]
    skips: NDArray[np.int64]
