"""The events of one recording, and how they are printed."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Literal

from kprobes.model.events import Counts, Event, Events, Hits, each_event
from kprobes.sinks import FORMATS
from kprobes.sinks.names import TraceSource


class Trace:
    """What one recording brought: events in the order of time, and what was counted.

    ``str(trace)`` is the kernel's own trace text; ``for event in trace`` yields its events, and
    ``trace["open"]`` is a list of those of one name.

    Attributes:
        events: what was recorded.
        counts: of the whole recording, when it has ended; else None.
        hits: of each probe, when it has ended.
    """

    def __init__(self, source: TraceSource, batches: Iterator[Events] | None = None) -> None:
        """Have no event yet; ``batches`` brings them as they come, while it is recorded."""
        self.events: list[Events] = []
        self._batches = iter(()) if batches is None else batches
        self.counts: Counts | None = None
        self.hits: Sequence[Hits] = ()
        self._source = source

    def __len__(self) -> int:
        """Return the number of events."""
        return sum(map(len, self.events))

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
        found = [event for events in self.events for event in each_event(events, name)]
        if not found and all(hits.event != name for hits in self.hits):
            raise KeyError(f"no such event: {name!r}")
        return found

    def __repr__(self) -> str:
        """Return what it is: how many events so far."""
        is_over = "" if self.counts is not None else ", still recording"
        return f"<Trace: {len(self)} events{is_over}>"

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

    def _through(self, form: str, *, has_wide_numbers: bool = False) -> bytes:
        out = io.BytesIO()
        source = replace(self._source, entries=len(self), has_wide_numbers=has_wide_numbers)
        sink = FORMATS[form](out, source)
        for events in self.events:
            sink.write(events)
        sink.close()
        return out.getvalue()
