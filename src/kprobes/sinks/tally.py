"""A sink in front of a sink: passes on so many events, and counts them."""

from kprobes.model.batch import Events
from kprobes.model.layout import Storage
from kprobes.ports import Sink


class Tally:
    """Passes on everything up to a limit and counts it. Implements ``ports.Sink``.

    Attributes:
        events: how many were passed on.
        faulted: how many of their values could not be read.
    """

    def __init__(self, sink: Sink, *, limit: int | None = None) -> None:
        """Count what goes to a sink; after ``limit`` events it gets no more."""
        self._sink = sink
        self._limit = limit
        self.events = 0
        self.faulted = 0

    @property
    def is_full(self) -> bool:
        """Whether the limit is reached."""
        return self._limit is not None and self.events >= self._limit

    def write(self, events: Events) -> None:
        """Pass on as many as the limit leaves, the oldest."""
        if self._limit is not None and len(events) > self._limit - self.events:
            events = _first(events, self._limit - self.events)
            if not len(events):
                return
        self._sink.write(events)
        self.events += len(events)
        self.faulted += _faulted(events)

    def close(self) -> None:
        """Close what is behind."""
        self._sink.close()


def _first(events: Events, count: int) -> Events:
    return Events(batches=events.batches, batch=events.batch[:count], row=events.row[:count])


def _faulted(events: Events) -> int:
    total = 0
    for index, batch in enumerate(events.batches):
        fields = zip(batch.layout.fields, batch.faulted, strict=True)
        read = (mask for field, mask in fields if field.storage is not Storage.DURATION)
        masks = [mask for mask in read if mask is not None and mask.any()]
        if masks:
            rows = events.row[events.batch == index]
            total += sum(int(mask[rows].sum()) for mask in masks)
    return total
