"""Events of one name: a list of them, and columns for NumPy, pandas, polars and Arrow."""

import operator
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, SupportsIndex, cast, overload

import numpy as np
from numpy.typing import NDArray

from kprobes.column_hist import histogram_of
from kprobes.errors import UsageError
from kprobes.histogram import Histogram
from kprobes.model.columns import Selection
from kprobes.model.events import NO_EVENTS, Column, Event, Events
from kprobes.model.hist import trigger_text
from kprobes.model.resolved import Storage
from kprobes.sinks.names import TraceSource
from kprobes.trace_display import PlotKind, events_table, plot_field, plot_hits

_SHOWN = 3
"""Events that ``repr`` has, of many."""


class EventColumns:
    """Events of one name, in the order that they are in: ``trace["open"]``.

    It is a list of them, of which none is made before it is asked for:
    ``trace["open"][-1]["path"]`` is a value of the last one, ``trace["open"][:10]`` has the first
    ten. By the name of a field it is a column, ``trace["open"]["path"]``, which is gathered each
    time that it is asked for. Whatever takes Arrow takes it: ``polars.DataFrame(trace["open"])``.

    Attributes:
        name: of the event.
    """

    # No collections.abc.Sequence: of one polars makes rows before it asks for Arrow's columns.

    def __init__(self, name: str, chosen: Selection, source: TraceSource) -> None:
        """Copy nothing.

        Args:
            name: of the event.
            chosen: the events.
            source: the kernel that they are of.
        """
        self.name = name
        self._chosen = chosen
        self._source = source

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns; none where an event had no hits.

        ``ts`` (uint64, ns), ``cpu``, ``pid``, ``comm`` and ``function`` (text), and a return
        probe's ``caller`` come before the fields; a field of such a name is there in its place.
        """
        return self._chosen.names

    def __len__(self) -> int:
        """Return the number of events."""
        return len(self._chosen)

    def __iter__(self) -> Iterator[Event]:
        """Yield the events one by one."""
        return iter(self._chosen)

    @overload
    def __getitem__(self, key: SupportsIndex) -> Event: ...
    @overload
    def __getitem__(self, key: slice) -> "EventColumns": ...
    @overload
    def __getitem__(self, key: str) -> Column: ...
    def __getitem__(self, key: str | SupportsIndex | slice) -> "Column | Event | EventColumns":
        """Return a column, one event, or some of the events, which copies nothing.

        A column is a copy of shape (n,), but for an array field: (n, count). Numbers have the
        field's dtype, texts are objects. A column with a value that could not be read has objects,
        and None for it.

        Raises:
            KeyError: there is no such column.
            IndexError: there are not so many events.
        """
        match key:
            case str():
                return self._column(key)
            case slice():
                return EventColumns(self.name, self._chosen.cut(key), self._source)
            case _:
                return self._chosen.at(operator.index(key))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, list | EventColumns):
            return NotImplemented
        events = cast("Sequence[object]", other)
        return len(self) == len(events) and all(map(operator.eq, self, events))

    __hash__ = None  # pyright: ignore[reportAssignmentType] - as a list has none

    def __repr__(self) -> str:
        """Return how many there are, and the first ones."""
        shown = [*map(repr, self[:_SHOWN]), *(["..."] if len(self) > _SHOWN else [])]
        return f"<EventColumns: {len(self)} of {self.name}: [{', '.join(shown)}]>"

    def _repr_html_(self) -> str:
        return events_table(self.name, self._chosen, self._source)

    def durations(self) -> NDArray[np.uint64]:
        """Return how long the calls took: uint64 ns, shape (m,), a copy.

        Calls of which the beginning was not seen have no duration, and are left out.

        Raises:
            KeyError: the event has no duration.
        """
        if not self._chosen.kinds:
            return np.empty(0, np.uint64)
        for field in self._chosen.fields.values():
            if field.storage is Storage.DURATION:
                values, bad = self._chosen.field(field.name)
                is_known = values != 0 if bad is None else (values != 0) & ~bad
                return values[is_known]
        fields = ", ".join(self._chosen.fields) or "none"
        raise KeyError(f"{self.name} has no duration; its fields: {fields}")

    def histogram(self, trigger: str) -> Histogram:
        """Return what a hist trigger of the kernel counts of these events.

        ``trace["read"].histogram("keys=comm:vals=got if got > 0")``

        Raises:
            DefinitionError: it is wrong, with the caret.
            UsageError: no event of this name was recorded.
        """
        kinds = Events(batches=self._chosen.kinds, batch=NO_EVENTS.batch, row=NO_EVENTS.row)
        found = histogram_of([kinds, *self._chosen.rounds], trigger, self._source)
        if found is None:
            raise UsageError(f"no event {self.name} was recorded that could be counted")
        return found

    def count(self, by: str | Sequence[str] = "comm", vals: str | Sequence[str] = ()) -> Histogram:
        """Return how many events there are of each task, or by other keys, most first.

        ``trace["read"].count("comm", "got,duration.p99")`` has sums and percentiles, too.

        Args:
            by: ``comm``, ``pid``, ``cpu``, ``function``, fields with modifiers or without; or up to
                three of these.
            vals: numbers that are summed up, or with ``.avg``, ``.min``, ``.max``, ``.p50``.

        Raises:
            DefinitionError: there is no such field, or modifier.
            UsageError: no event of this name was recorded.
        """
        return self.histogram(trigger_text(_words(by), _words(vals)))

    def hist(self, field: str | None = None, *, by: str | Sequence[str] = ()) -> Histogram:
        """Return how a number is distributed.

        ``trace["read"].hist(by="comm")`` is of durations, ``trace["read"].hist("got.buckets=100")``
        has buckets of that width.

        Args:
            field: of which; None for the duration. Without a modifier by powers of two.
            by: as of ``count``, up to two.

        Raises:
            DefinitionError, UsageError: as of ``count``.
            KeyError: the event has no duration.
        """
        chosen = self._duration() if field is None else field
        name, dot, _ = chosen.partition(".")
        return self.histogram(
            trigger_text([*_words(by), chosen if dot else f"{name}.log2"], sort=name)
        )

    def plot(self, field: str | None = None, *, kind: PlotKind = "time", ax: Any = None) -> Any:
        """Draw over time how often it was hit, or a field's values, and return the ``Axes``.

        ``trace["read"].plot("duration")``; ``trace["read"].plot(kind="hist")`` shows how its
        durations are distributed. What could not be read, or measured, is left out.

        Args:
            field: a number; None for the hits, or with ``kind="hist"`` for the duration.
            kind: ``time``, or ``hist`` for a histogram, of durations with logarithmic bins.
            ax: what is drawn on; None for a new figure's.

        Raises:
            UsageError: matplotlib is not installed, or the field is no number.
            KeyError: there is no such column.
        """
        if field is None and kind == "time":
            return plot_hits(self._chosen, self._source, ax=ax)
        name = self._duration() if field is None else field
        self._check(name)
        return plot_field(self._chosen, self._source, name, kind=kind, ax=ax)

    def to_arrow(self, *, raw: bool = False) -> Any:
        """Return them as a ``pyarrow.Table``.

        It has ``ts`` (int64, ns), ``cpu``, ``pid``, ``comm``, ``flags``, ``function``, of a return
        probe ``caller`` and ``caller_sym``, and the fields. What could not be read is null. Texts
        are dictionaries of valid UTF-8, losslessly: ``kprobe convert``'s are the same.

        Args:
            raw: whether ``comm`` and strings are binary, the bytes that the guest had.

        Raises:
            UsageError: pyarrow is not installed, or functions of one event differ too much.
        """
        return arrow_table(self._chosen, self._source, is_raw=raw)

    def to_pandas(self, *, raw: bool = False) -> Any:
        """Return them as a ``pandas.DataFrame``; see ``to_arrow``.

        Texts are categories. Integers of which some could not be read are pandas' own nullable
        ones (``UInt64``), and no floats, which lose bits.

        Raises:
            UsageError: pandas, or pyarrow, is not installed.
        """
        return to_pandas(self.to_arrow(raw=raw))

    def to_polars(self, *, raw: bool = False) -> Any:
        """Return them as a ``polars.DataFrame``; see ``to_arrow``.

        Raises:
            UsageError: polars, or pyarrow, is not installed.
        """
        return to_polars(self.to_arrow(raw=raw))

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return them for whatever reads Arrow; see ``to_arrow``."""
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def _column(self, name: str) -> Column:
        self._check(name)
        return self._chosen.column(name)

    def _check(self, name: str) -> None:
        if name not in self.columns:
            there = ", ".join(self.columns) or "none, as it was not hit"
            raise KeyError(f"{self.name} has no column {name!r}; its columns: {there}")

    def _duration(self) -> str:
        fields = self._chosen.fields.values()
        named = [field.name for field in fields if field.storage is Storage.DURATION]
        return named[0] if named else "duration"


def arrow_table(
    chosen: Selection, source: TraceSource, *, is_named: bool = True, is_raw: bool = False
) -> Any:
    """Return events as a ``pyarrow.Table``.

    Args:
        chosen: of one name, or any.
        source: the kernel that they are of.
        is_named: whether they are of one name.
        is_raw: whether texts of the guest are binary.

    Raises:
        UsageError: pyarrow is not installed.
    """
    from kprobes.export import load

    return load("arrow").table(chosen, source, is_named=is_named, is_raw=is_raw)


def _words(by: str | Sequence[str]) -> list[str]:
    return by.split(",") if isinstance(by, str) else [*by]


def to_pandas(table: Any) -> Any:
    """Return a ``pyarrow.Table`` as a ``pandas.DataFrame`` whose integers have all their bits."""
    try:
        pandas: Any = import_module("pandas")
    except ModuleNotFoundError as error:
        raise UsageError("pandas is not installed: pip install pandas") from error
    nullable = {
        f"{sign}int{bits}": getattr(pandas, f"{sign.upper()}Int{bits}Dtype")()
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    }
    frame = table.to_pandas()
    with_nulls = [
        name
        for name, column in zip(table.column_names, table.columns, strict=True)
        if column.null_count and str(column.type) in nullable
    ]
    for name in with_nulls:
        column = table.column(name)
        frame[name] = nullable[str(column.type)].__from_arrow__(column)
    return frame


def to_polars(table: Any) -> Any:
    """Return a ``pyarrow.Table`` as a ``polars.DataFrame``."""
    from kprobes.export import load

    return load("polars", package="").from_arrow(table)
