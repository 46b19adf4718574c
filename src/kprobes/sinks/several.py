"""Lines of several recordings in one file, each as its own kernel prints them, behind its name."""

from collections.abc import Callable, Mapping
from typing import BinaryIO

from kprobes.model.events import NO_EVENTS, Batch, Events
from kprobes.native.lines import as_list
from kprobes.ports import LineSink
from kprobes.sinks.fields import Fields
from kprobes.sinks.json import quoted
from kprobes.sinks.names import write_in_order


def _before(name: str) -> Callable[[bytes], bytes]:
    prefix = f"{name}: ".encode(errors="surrogateescape")
    return lambda line: prefix + line


def _member(name: str) -> Callable[[bytes], bytes]:
    first = b'{"file":%b,' % quoted(name.strip().encode(errors="surrogateescape"))
    return lambda line: first + line[1:]


NAMED: Mapping[str, Callable[[str], Callable[[bytes], bytes]]] = {"text": _before, "json": _member}
"""By format: a recording's name to what puts it into a line."""


class SeveralSink:
    """Writes lines of several kernels' events. Does not close the output."""

    def __init__(
        self,
        out: BinaryIO,
        form: str,
        sinks: Mapping[str, LineSink],
        *,
        owners: Mapping[int, str],
        fields: Fields,
    ) -> None:
        """Write nothing yet.

        Args:
            out: a binary stream, which the sinks have, too.
            form: of the lines: text or json.
            sinks: by the name of each recording; the first one's header is that of all.
            owners: by the ``id`` of a layout: of which recording it is.
            fields: that are shown.
        """
        self._fields = fields
        self._out = out
        width = max(map(len, sinks))
        self._sinks = {name: (sink, NAMED[form](name.ljust(width))) for name, sink in sinks.items()}
        self._first = next(iter(sinks.values()))
        self._owners = owners

    def write(self, events: Events) -> None:
        """Write and flush one line per event."""
        self._first.write(NO_EVENTS)
        write_in_order(self._out, events, self._lines)
        self._out.flush()

    def close(self) -> None:
        """Write what is buffered."""
        self._out.flush()

    def _lines(self, batch: Batch) -> list[bytes]:
        sink, named = self._sinks[self._owners[id(batch.layout)]]
        return list(map(named, as_list(sink.lines(self._fields.cut(batch)))))
