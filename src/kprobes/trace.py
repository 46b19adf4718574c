"""The events of one recording, and how they are printed."""

import io
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal, SupportsIndex, overload

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from kprobes.model.columns import Selection, select
from kprobes.model.events import (
    NO_COUNTS,
    NO_EVENTS,
    Column,
    Counts,
    Event,
    Events,
    Hits,
    each_event,
)
from kprobes.model.text_options import text_options
from kprobes.sinks import FORMATS
from kprobes.sinks.names import TraceSource
from kprobes.trace_columns import EventColumns, arrow_table, to_pandas, to_polars
from kprobes.trace_display import plot_hits, trace_tables


class Trace:
    """What one recording brought: events in the order of time, and what was counted.

    ``str(trace)`` is the kernel's own trace text; ``for event in trace`` yields its events,
    ``trace["open"]`` has those of one name, one by one and as columns, and ``trace[100:200]`` some
    that follow each other. Notebooks show a trace as tables.

    Attributes:
        events: what was recorded, and read.
        is_recording: whether there may be more.
    """

    def __init__(
        self,
        source: TraceSource,
        batches: Iterator[Events] | None = None,
        count: Callable[[], Counts] = lambda: NO_COUNTS,
    ) -> None:
        """Have no event yet.

        Args:
            source: of the events.
            batches: brings them as they come, while it is recorded.
            count: returns what was counted until now, while it is recorded.
        """
        self.events: list[Events] = []
        self.is_recording = True
        self._batches = iter(()) if batches is None else batches
        self._count = count
        self._hits: Callable[[], Sequence[Hits]] = tuple
        self._source = source

    @property
    def counts(self) -> Counts:
        """What was recorded, missed and lost: of the whole recording, or until now."""
        return self._count()

    @property
    def hits(self) -> Sequence[Hits]:
        """What each probe counted, when the recording has ended."""
        return self._hits()

    def end(
        self,
        counts: Callable[[], Counts],
        hits: Callable[[], Sequence[Hits]],
        rest: Iterator[Events] | None = None,
    ) -> None:
        """Take what was counted, as there is no more to come.

        Args:
            counts: returns it for the recording.
            hits: for each probe.
            rest: events that are somewhere else, and taken when somebody asks for them.
        """
        self.is_recording, self._count, self._hits = False, counts, hits
        if rest is not None:
            self._batches = rest

    def __len__(self) -> int:
        """Return the number of events."""
        return sum(map(len, self._read()))

    def _read(self) -> list[Events]:
        # All that there is by now.
        if not self.is_recording:
            self.events.extend(self._batches)
        return self.events

    def __iter__(self) -> Iterator[Event]:
        """Yield the events one by one, oldest first; while it is recorded, as they come."""
        return chain.from_iterable(map(each_event, self.batches()))

    def batches(self) -> Iterator[Events]:
        """Yield the events as columns, oldest first; while it is recorded, as they come."""
        yield from self.events
        for events in self._batches:
            self.events.append(events)
            yield events

    @overload
    def __getitem__(self, key: str) -> EventColumns: ...
    @overload
    def __getitem__(self, key: SupportsIndex) -> Event: ...
    @overload
    def __getitem__(self, key: slice) -> "Trace": ...
    def __getitem__(self, key: str | SupportsIndex | slice) -> "EventColumns | Event | Trace":
        """Return the events of one name, or one event, or some, as a trace; copies nothing.

        They are those that there are by now. ``counts`` and ``hits`` of a part are of the whole.

        Raises:
            KeyError: no probe has an event of this name.
            IndexError: there are not so many events.
        """
        match key:
            case str():
                return EventColumns(key, self._select(key), self._source)
            case slice():
                return self._part(key)
            case _:
                return self._select().at(operator.index(key))

    def columns(self, name: str) -> dict[str, Column]:
        """Return the events of one name as arrays, oldest first, for NumPy, pandas or pyarrow.

        ``numpy.percentile(trace.columns("read")["duration"], 99)``,
        ``pandas.DataFrame(trace.columns("read"))``, ``pyarrow.table(trace.columns("read"))``.

        All are copies of shape (n,), but for array fields: (n, count). ``ts`` (uint64, ns),
        ``cpu``, ``pid``, ``comm`` and ``function`` (text), and a return probe's ``caller`` come
        before the fields; where one has such a name, that is ``common_pid``. Numbers have the
        field's dtype, strings are objects. A column with a value that could not be read has
        objects, and None for it. There are no columns where there are no events. ``trace[name]``
        makes one of them at a time.

        Raises:
            KeyError: no probe has an event of this name.
        """
        chosen = self._select(name)
        return {each: chosen.column(each) for each in chosen.names}

    def durations(self, name: str) -> NDArray[np.uint64]:
        """Return how long the calls of one name took: uint64 ns, shape (m,), a copy.

        ``numpy.percentile(trace.durations("read"), [50, 99])``. Calls of which the beginning was
        not seen have no duration, and are left out.

        Raises:
            KeyError: no probe has an event of this name, or that has no duration.
        """
        return self[name].durations()

    def plot(self, *, ax: Any = None) -> Any:
        """Draw how many events of each name there were over time, and return the ``Axes``.

        Args:
            ax: matplotlib's axes that are drawn on; None for a new figure's.

        Raises:
            UsageError: matplotlib is not installed.
        """
        return plot_hits(self._select(), self._source, ax=ax)

    def to_arrow(self, name: str | None = None, *, raw: bool = False) -> Any:
        """Return events as a ``pyarrow.Table``, oldest first: those of one name, or all.

        Of one name they are as ``trace[name].to_arrow()`` has them; of all there are ``event`` and
        what all have: ``ts`` (int64, ns), ``cpu``, ``pid``, ``comm``, ``flags`` and ``function``.

        Args:
            name: of the event, or None.
            raw: whether texts of the guest are binary, and not dictionaries of valid UTF-8.

        Raises:
            UsageError: pyarrow is not installed.
            KeyError: no probe has an event of this name.
        """
        if name is not None:
            return self[name].to_arrow(raw=raw)
        return arrow_table(self._select(), self._source, is_named=False, is_raw=raw)

    def to_pandas(self, name: str | None = None, *, raw: bool = False) -> Any:
        """Return events as a ``pandas.DataFrame``; see ``to_arrow`` and ``EventColumns``."""
        return to_pandas(self.to_arrow(name, raw=raw))

    def to_polars(self, name: str | None = None, *, raw: bool = False) -> Any:
        """Return events as a ``polars.DataFrame``; see ``to_arrow``.

        Raises:
            UsageError: polars is not installed.
        """
        return to_polars(self.to_arrow(name, raw=raw))

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return all events for whatever reads Arrow; see ``to_arrow``."""
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def _repr_html_(self) -> str:
        return trace_tables(self._select(), self._source, self.counts)

    def __repr__(self) -> str:
        """Return what it is: how many events so far."""
        state = ", still recording" if self.is_recording else ""
        return f"<Trace: {len(self)} events{state}>"

    def write(self, events: Events) -> None:
        """Take more events; a trace is a sink."""
        self.events.append(events)

    def close(self) -> None:
        """Do nothing: a trace may be read at any time."""

    def to_text(self, *, options: Iterable[str] = ()) -> str:
        """Return the trace as the kernel prints it; undecodable bytes as backslash escapes.

        Args:
            options: names of the kernel's trace options: ``sym-addr``, ``noirq-info``.

        Raises:
            UsageError: there is no such option.
        """
        source = replace(self._source, options=text_options(options))
        return self._through("text", source).decode(errors="backslashreplace")

    def to_json(self, *, numbers: Literal["string", "number"] = "string") -> str:
        """Return one JSON object per line, with arguments of 64 bits as strings or numbers."""
        source = replace(self._source, has_wide_numbers=numbers == "number")
        return self._through("json", source).decode()

    def __str__(self) -> str:
        return self.to_text()

    def _select(self, name: str | None = None) -> Selection:
        chosen = select(self._read(), name)
        if name is None or chosen.kinds or any(hits.event == name for hits in self.hits):
            return chosen
        raise KeyError(f"no such event: {name!r}")

    def _part(self, places: slice) -> "Trace":
        chosen = self._select().cut(places)
        part = Trace(self._source)
        # It has the columns of those events, too, of which it has none.
        kinds = Events(batches=chosen.kinds, batch=NO_EVENTS.batch, row=NO_EVENTS.row)
        part.events = [kinds, *chosen.rounds]
        part.end(lambda: self.counts, lambda: self.hits)
        return part

    def _through(self, form: str, source: TraceSource) -> bytes:
        out = io.BytesIO()
        sink = FORMATS[form](out, replace(source, entries=len(self)))
        for events in self.events:
            sink.write(events)
        sink.close()
        return out.getvalue()
