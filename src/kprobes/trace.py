"""What one recording brought, and how it is printed."""

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from kprobes.model.batch import Events
from kprobes.model.hits import Counts, Hits
from kprobes.sinks import FORMATS
from kprobes.sinks.origin import Origin


class Trace:
    """What one recording brought: events in the order of time, and what was counted.

    ``str(trace)`` is the kernel's own trace text.

    Attributes:
        events: what was recorded.
        counts: of the whole recording, when it has ended; else None.
        hits: of each probe, when it has ended.
    """

    def __init__(self, origin: Origin) -> None:
        self.events: list[Events] = []
        self.counts: Counts | None = None
        self.hits: Sequence[Hits] = ()
        self._origin = origin

    def __len__(self) -> int:
        """Return the number of events."""
        return sum(map(len, self.events))

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
        origin = replace(self._origin, entries=len(self), has_wide_numbers=has_wide_numbers)
        sink = FORMATS[form](out, origin)
        for events in self.events:
            sink.write(events)
        sink.close()
        return out.getvalue()
