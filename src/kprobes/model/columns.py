"""Columns of events that came in rounds: each is gathered when it is asked for, and by itself."""

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.errors import UsageError
from kprobes.model.events import Batch, Column, Event, Events, Rows, addresses, each_event
from kprobes.model.resolved import Field, RecordLayout, Storage
from kprobes.model.strings import Strings, joined

Mask = NDArray[np.bool_]
Values = tuple[Column, Mask | None]
"""A column, and which of its rows have no value; None where all have one."""
Get = Callable[[Batch], Values | None]
"""A column of a batch, or None for a batch that has no such column."""
_BASE: dict[str, Get] = {
    "ts": lambda batch: (batch.ts, None),
    "cpu": lambda batch: (batch.cpu, None),
    "pid": lambda batch: (batch.pid, None),
    "comm": lambda batch: (batch.comm, None),
    "context": lambda batch: (batch.context, None),
    "caller": lambda batch: None if batch.caller is None else (batch.caller, None),
}


_COMMON = "common_"
"""In front of a base column's name where a field has that name; ``common_pid`` is the kernel's."""


def base_name(name: str, fields: Container[str]) -> str:
    """Return how a column that all events have is called beside fields of these names."""
    return f"{_COMMON}{name}" if name in fields else name


class _Part(Struct, frozen=True, kw_only=True, eq=False):
    # Rows of one batch, and their places among the events that are selected.
    batch: Batch
    rows: Rows
    places: Rows


class Selection:
    """Some events in an order: as columns, or one by one.

    Attributes:
        kinds: for each layout that they may have, a batch of no events.
        rounds: the events; rows of their batches that are not named in them are not selected.
    """

    def __init__(self, kinds: Sequence[Batch], rounds: Sequence[Events]) -> None:
        """Copy nothing."""
        self.kinds = tuple(kinds)
        self.rounds = tuple(events for events in rounds if len(events))
        self._ends: NDArray[np.intp] = np.cumsum([0, *map(len, self.rounds)])

    def __len__(self) -> int:
        """Return the number of events."""
        return int(self._ends[-1])

    def __iter__(self) -> Iterator[Event]:
        """Yield the events one by one."""
        for events in self.rounds:
            yield from each_event(events)

    def one_by_one(self) -> Iterator[Batch]:
        """Yield each event as a batch of one, a view."""
        for events in self.rounds:
            which: list[int] = events.batch.tolist()
            rows: list[int] = events.row.tolist()
            for batch, row in zip(which, rows, strict=True):
                yield events.batches[batch].take(slice(row, row + 1))

    @property
    def layouts(self) -> tuple[RecordLayout, ...]:
        """What the events may be."""
        return tuple(kind.layout for kind in self.kinds)

    @property
    def fields(self) -> dict[str, Field]:
        """Their own fields by name, each as the first layout that has it."""
        found: dict[str, Field] = {}
        for layout in self.layouts:
            for field in layout.fields:
                found.setdefault(field.name, field)
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """The columns that there are: what all events have, then their fields."""
        own = () if all(kind.caller is None for kind in self.kinds) else ("caller",)
        base = ("ts", "cpu", "pid", "comm", "function", *own) if self.kinds else ()
        named = (base_name(name, self.fields) for name in base)
        return tuple(dict.fromkeys((*named, *self.fields)))

    def at(self, place: int) -> Event:
        """Return one event; places count from 0, and from the end where they are negative.

        Raises:
            IndexError: there are not so many.
        """
        if not -len(self) <= place < len(self):
            raise IndexError(f"no event {place} of {len(self)}")
        return next(iter(self.cut(slice(place % len(self), place % len(self) + 1))))

    def cut(self, chosen: slice) -> "Selection":
        """Return some of the events, as views; backwards, if the step is negative."""
        places = range(len(self))[chosen]
        is_backwards = places.step < 0
        ahead = places[::-1] if is_backwards else places
        rounds = list(self._cut_rounds(ahead))
        if is_backwards:
            rounds = [events.cut(slice(None, None, -1)) for events in reversed(rounds)]
        return Selection(self.kinds, rounds)

    def _cut_rounds(self, places: range) -> Iterator[Events]:
        if not places:
            return
        first = int(np.searchsorted(self._ends, places[0], side="right")) - 1
        for start, events in zip(self._ends[first:-1].tolist(), self.rounds[first:], strict=True):
            if start > places[-1]:
                return
            begin = places[0] - start
            begin = begin if begin >= 0 else begin % places.step
            yield events.cut(slice(begin, max(places[-1] + 1 - start, 0), places.step))

    def counts(self) -> Counter[str]:
        """Return how many events there are of each name, those with none included."""
        found = Counter({layout.event: 0 for layout in self.layouts})
        for events in self.rounds:
            counts = np.bincount(events.batch)
            # Batches may have other events, of which none is selected.
            for index in np.flatnonzero(counts).tolist():
                found[events.batches[index].layout.event] += int(counts[index])
        return found

    def column(self, name: str) -> Column:
        """Return a column for people: texts are ``str``, what could not be read is None.

        Stacks are tuples of addresses, innermost first.

        A copy of shape (n,), or (n, count) for an array field. Numbers have the field's dtype,
        all that has a None, or is text, is of objects.

        Raises:
            KeyError: there is no such column.
        """
        if name not in self.names:
            raise KeyError(f"no column {name!r}; there are: {', '.join(self.names) or 'none'}")
        if name == base_name("function", self.fields):
            codes, names = self.codes(lambda layout: layout.function)
            return np.array(names, object)[codes]
        strings = self.strings(name)
        if strings is None:
            return _readable(*self.gather(name))
        is_stack = self.fields[name].storage is Storage.STACK
        return strings.mapped(_addresses if is_stack else _text)

    def codes(self, label: Callable[[RecordLayout], str]) -> tuple[NDArray[np.int32], list[str]]:
        """Return for each event the index of its layout's label, int32 (n,), new; and the labels.

        Args:
            label: of a layout.
        """
        names = list(dict.fromkeys(map(label, self.layouts)))
        code = {name: np.int32(number) for number, name in enumerate(names)}
        if len(names) <= 1:
            return np.zeros(len(self), np.int32), names
        found, _ = self._gather(
            lambda batch: (np.broadcast_to(code[label(batch.layout)], len(batch)), None)
        )
        return found, names

    def gather(self, name: str) -> Values:
        """Return a column as batches have it by its name, a copy; see ``base`` and ``field``."""
        if name in self.fields:
            return self.field(name)
        return self.base(name if name in _BASE else name.removeprefix(_COMMON))

    def base(self, name: str) -> Values:
        """Return ``ts``, ``cpu``, ``pid``, ``comm``, ``context`` or ``caller``, shape (n,): a copy.

        Where only some of the events have a caller the mask has the others.
        """
        return self._gather(_BASE[name])

    def strings(self, name: str) -> Strings | None:
        """Return a field as strings, new; None where it is no field, or none in some functions."""
        places, none = np.arange(len(self)), slice(0, 0)
        # Kinds are parts without events.
        parts: list[tuple[Batch, Rows, Rows]] = [(kind, none, none) for kind in self.kinds]
        parts += [(part.batch, part.rows, part.places) for part in self._parts]
        found: list[Strings] = []
        for batch, rows, _ in parts:
            strings = _strings(batch, name)
            if strings is None:
                return None
            found.append(strings[rows])
        if len({strings.shape[1:] for strings in found}) != 1:
            return None
        order = np.concatenate([places[own] for _, _, own in parts])
        return joined(found)[np.argsort(order, kind="stable")]

    def field(self, name: str) -> Values:
        """Return a field's values, (n,) or (n, count), and for numbers a mask (n,); both new.

        Texts are ``bytes``, and None where they could not be read.

        Raises:
            UsageError: functions of one event have it as an array and as none.
        """
        return self._gather(lambda batch: _field(batch, name))

    def _gather(self, get: Get) -> Values:
        found = [get(kind) for kind in self.kinds]
        empty = [values[0] for values in found if values is not None]
        shapes = {column.shape[1:] for column in empty}
        if len(shapes) > 1:
            raise UsageError("an array in some functions' events, and none, or another, in others")
        dtype = _common_dtype(empty, is_everywhere=None not in found)
        out = np.zeros((len(self), *shapes.pop()), dtype)
        bad = np.zeros(len(self), np.bool_)
        for part in self._parts:
            values = get(part.batch)
            if values is None:
                bad[part.places] = True
                continue
            column, mask = values
            out[part.places] = column[part.rows]
            if mask is not None:
                bad[part.places] = mask[part.rows]
        if not bad.any():
            return out, None
        if dtype.kind == "O":
            out[bad] = None
            return out, None
        return out, bad

    @cached_property
    def _parts(self) -> list[_Part]:
        return [
            part
            for start, events in zip(self._ends[:-1].tolist(), self.rounds, strict=True)
            for part in _parts_of(events, start)
        ]


def select(rounds: Sequence[Events], name: str | None = None) -> Selection:
    """Return all events, or those of one name.

    Args:
        rounds: one after the other.
        name: of the event, or None.
    """
    kinds: dict[RecordLayout, Batch] = {}
    own: list[Events] = []
    for events in rounds:
        is_own = [name in (None, batch.layout.event) for batch in events.batches]
        for batch, is_kind in zip(events.batches, is_own, strict=True):
            if is_kind and batch.layout not in kinds:
                kinds[batch.layout] = batch.take(slice(0, 0))
        if all(is_own):
            own.append(events)
        elif any(is_own):
            chosen = np.array(is_own)[events.batch]
            own.append(
                Events(batches=events.batches, batch=events.batch[chosen], row=events.row[chosen])
            )
    return Selection([*kinds.values()], own)


def whole(batch: Batch) -> Selection:
    """Return all events of a batch, in its order."""
    events = Events(
        batches=(batch,),
        batch=np.zeros(len(batch), np.uint16),
        row=np.arange(len(batch), dtype=np.uint32),
    )
    return Selection([batch.take(slice(0, 0))], [events])


def _parts_of(events: Events, start: int) -> Iterator[_Part]:
    first = int(events.batch[0])
    if (events.batch == first).all():
        places = slice(start, start + len(events))
        yield _Part(batch=events.batches[first], rows=_run(events.row), places=places)
        return
    for index in np.flatnonzero(np.bincount(events.batch)).tolist():
        at = np.flatnonzero(events.batch == index)
        yield _Part(batch=events.batches[index], rows=_run(events.row[at]), places=_run(start + at))


def _run(rows: NDArray[np.integer[Any]]) -> Rows:
    # Numbers that follow each other are a slice, which takes a third of the time of a gather.
    first, count = int(rows[0]), len(rows)
    if int(rows[-1]) - first == count - 1 and bool((rows[1:] > rows[:-1]).all()):
        return slice(first, first + count)
    return rows


def _field(batch: Batch, name: str) -> Values | None:
    for field, values, faulted in zip(
        batch.layout.fields, batch.values, batch.faulted, strict=True
    ):
        if field.name == name:
            return values, faulted if values.dtype.kind in "iu" else None
    return None


def _strings(batch: Batch, name: str) -> Strings | None:
    pairs = zip(batch.layout.fields, batch.columns, strict=True)
    found = next((column for field, column in pairs if field.name == name), None)
    return found if isinstance(found, Strings) else None


def _addresses(stack: bytes | None) -> tuple[int, ...]:
    return addresses(stack or b"")


def _text(value: object) -> object:
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value


def _common_dtype(columns: Sequence[Column], *, is_everywhere: bool) -> np.dtype[Any]:
    # Integers of 64 bits with a sign and without have no common one but floats, which lose bits.
    kinds = {column.dtype.kind for column in columns}
    if kinds <= {"i", "u"}:
        found = np.result_type(*(column.dtype for column in columns))
        return found if found.kind in "iu" else np.dtype(object)
    is_text = kinds == {"S"} and is_everywhere
    return np.result_type(*(column.dtype for column in columns)) if is_text else np.dtype(object)


def _readable(values: Column, bad: Mask | None) -> Column:
    column = values
    if values.dtype.kind in "OS":
        texts = map(_Texts().__getitem__, values.ravel().tolist())
        column = np.fromiter(texts, object, values.size).reshape(values.shape)
    if bad is None or not bad.any():
        return column
    column = column.astype(object)
    column[bad] = None
    return column


class _Texts(dict[object, object]):
    # Each text once: those that are alike share one object.
    def __missing__(self, value: object) -> object:
        text = self[value] = _text(value)
        return text
