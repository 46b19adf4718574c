"""Sinks that show only some of the events' own fields."""

from collections.abc import Sequence

from kprobes.errors import UsageError
from kprobes.model.events import Batch, Events, with_fields
from kprobes.ports import Sink


class Fields:
    """Which fields are shown, in all sinks of an output."""

    def __init__(self, names: Sequence[str] | None) -> None:
        """Have only some shown, or all."""
        self._names = names
        self._known: set[str] = set()

    def of(self, sink: Sink) -> Sink:
        """Return a sink that shows those."""
        return sink if self._names is None else _FieldsSink(sink, self)

    def cut(self, batch: Batch) -> Batch:
        """Return a batch without the other ones; columns are views."""
        if self._names is None:
            return batch
        self._known.update(field.name for field in batch.layout.fields)
        return with_fields(batch, self._names)

    def check(self) -> None:
        """Find out at the end whether there are such fields.

        Raises:
            UsageError: there were events, and none has one of them.
        """
        missing = [name for name in self._names or () if name not in self._known]
        if missing and self._known:
            known = ", ".join(sorted(self._known))
            raise UsageError(f"no event has a field {missing[0]!r}; there are: {known}")


class _FieldsSink:
    def __init__(self, sink: Sink, fields: Fields) -> None:
        self._sink, self._fields = sink, fields

    def write(self, events: Events) -> None:
        batches = tuple(map(self._fields.cut, events.batches))
        self._sink.write(Events(batches=batches, batch=events.batch, row=events.row))

    def close(self) -> None:
        self._sink.close()
