"""The events of one recording, and how they are printed."""

import io
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Literal

from msgspec.structs import replace

from kprobes.model.events import (
    NO_COUNTS,
    Column,
    Counts,
    Event,
    Events,
    Hits,
    columns_of,
    each_event,
)
from kprobes.sinks import FORMATS
from kprobes.sinks.names import TraceSource


class Trace:
    """What one recording brought: events in the order of time, and what was counted.

    ``str(trace)`` is the kernel's own trace text; ``for event in trace`` yields its events, and
    ``trace["open"]`` is a list of those of one name.

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

    def __getitem__(self, name: str) -> list[Event]:
        """Return the events of one name, oldest first.

        Raises:
            KeyError: no probe has an event of this name.
        """
        found = [event for events in self._read() for event in each_event(events, name)]
        self._check(name, is_found=bool(found))
        return found

    def columns(self, name: str) -> dict[str, Column]:
        """Return the events of one name as arrays, oldest first, for NumPy, pandas or pyarrow.

        ``numpy.percentile(trace.columns("read")["duration"], 99)``,
        ``pandas.DataFrame(trace.columns("read"))``, ``pyarrow.table(trace.columns("read"))``.

        All are copies of shape (n,), but for array fields: (n, count). ``ts`` (uint64, ns),
        ``cpu``, ``pid``, ``comm`` and ``function`` (text), and a return probe's ``caller`` come
        before the fields; a field of such a name is there in its place. Numbers have the field's
        dtype, strings are objects. A column with a value that could not be read has objects, and
        None for it. There are no columns where there are no events.

        Raises:
            KeyError: no probe has an event of this name.
        """
        found = columns_of(self._read(), name)
        self._check(name, is_found=bool(found))
        return found

    def to_arrow(self, name: str | None = None) -> Any:
        """Return events as a ``pyarrow.Table``, oldest first: those of one name, or all.

        Of one name they have ``ts`` (ns), ``cpu``, ``pid``, ``comm``, ``flags``, ``function`` and
        the fields; of all, what all have and ``event``. Texts are dictionaries of valid UTF-8.

        Raises:
            UsageError: pyarrow is not installed.
            KeyError: no probe has an event of this name.
        """
        from kprobes.export import load

        arrow = load("arrow")
        found = arrow.table(self._read(), self._source, name)
        if name is not None:
            self._check(name, is_found=bool(len(found)))
        return found

    def to_pandas(self, name: str | None = None) -> Any:
        """Return events as a ``pandas.DataFrame``; see ``to_arrow``."""
        return self.to_arrow(name).to_pandas()

    def to_polars(self, name: str | None = None) -> Any:
        """Return events as a ``polars.DataFrame``; see ``to_arrow``.

        Raises:
            UsageError: polars is not installed.
        """
        from kprobes.export import load

        return load("polars", package="").from_arrow(self.to_arrow(name))

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Return all events for whatever reads Arrow; see ``to_arrow``."""
        return self.to_arrow().__arrow_c_stream__(requested_schema)

    def __repr__(self) -> str:
        """Return what it is: how many events so far."""
        state = ", still recording" if self.is_recording else ""
        return f"<Trace: {len(self)} events{state}>"

    def write(self, events: Events) -> None:
        """Take more events; a trace is a sink."""
        self.events.append(events)

    def close(self) -> None:
        """Do nothing: a trace may be read at any time."""

    def to_text(self) -> str:
        """Return the trace as the kernel prints it; undecodable bytes as backslash escapes."""
        return self._through("text").decode(errors="backslashreplace")

    def to_json(self, *, numbers: Literal["string", "number"] = "string") -> str:
        """Return one JSON object per line, with arguments of 64 bits as strings or numbers."""
        return self._through("json", has_wide_numbers=numbers == "number").decode()

    def __str__(self) -> str:
        return self.to_text()

    def _check(self, name: str, *, is_found: bool) -> None:
        if not is_found and all(hits.event != name for hits in self.hits):
            raise KeyError(f"no such event: {name!r}")

    def _through(self, form: str, *, has_wide_numbers: bool = False) -> bytes:
        out = io.BytesIO()
        source = replace(self._source, entries=len(self), has_wide_numbers=has_wide_numbers)
        sink = FORMATS[form](out, source)
        for events in self.events:
            sink.write(events)
        sink.close()
        return out.getvalue()
