"""Events as a table for people: a column for each field, as wide as what is in it.

Values are the kernel's own text of them; an event without such a field has an empty cell. Widths
are those of a window of events, and grow with later ones. A field that no event had so far begins
another table.
"""

from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kprobes.model.events import Batch, Events
from kprobes.model.resolved import Storage
from kprobes.model.visible import visible
from kprobes.native.lines import listed
from kprobes.sinks.names import WINDOW, Names, TraceSource
from kprobes.sinks.text import microseconds, shown

_GAP = "  "
_OWN = ("TIME", "CPU", "TASK", "PID", "EVENT", "FUNCTION", "CALLER")
_TEXTUAL = ("char", "symbol", "symstr")


class TableSink:
    """Writes tables. Does not close the output."""

    def __init__(self, out: BinaryIO, source: TraceSource) -> None:
        """Write nothing yet: the first events say which columns there are."""
        self._out = out
        self._has_ns = source.has_ns
        self._names = Names(source)
        self._columns: dict[str, Callable[[str, int], str]] = {}
        self._widths: dict[str, int] = {}

    def write(self, events: Events) -> None:
        """Write and flush one line per event."""
        for start in range(0, len(events), WINDOW):
            self._write_window(events.cut(slice(start, start + WINDOW)))
        self._out.flush()

    def close(self) -> None:
        """Write what is buffered."""
        self._out.flush()

    def _write_window(self, events: Events) -> None:
        which = events.batch
        cells: dict[str, NDArray[Any]] = {}
        known = len(self._columns)
        for index, batch in enumerate(events.batches):
            is_its = which == index
            if not is_its.any():
                continue
            for name, align, texts in self._cells(batch.take(events.row[is_its])):
                self._columns.setdefault(name, align)
                cells.setdefault(name, np.full(len(which), "", object))[is_its] = texts
        if len(self._columns) > known:
            by_place = sorted(self._columns, key=lambda name: (*_OWN, name).index(name))
            self._columns = {name: self._columns[name] for name in by_place}
        for name, column in cells.items():
            self._widths[name] = max(self._widths.get(name, len(name)), *map(len, column))
        lines: list[list[str]] = [[""], [*self._columns]] if len(self._columns) > known else []
        empty = np.full(len(which), "", object)
        lines += map(list, zip(*(cells.get(name, empty) for name in self._columns), strict=True))
        self._out.writelines(map(self._line, lines if known else lines[1:]))

    def _cells(self, batch: Batch) -> Iterator[tuple[str, Callable[[str, int], str], list[str]]]:
        layout, count = batch.layout, len(batch)
        yield "TIME", str.rjust, self._times(batch)
        yield "CPU", str.rjust, list(map(str, batch.cpu.tolist()))
        yield "TASK", str.ljust, list(map(_text, batch.comm.tolist()))
        yield "PID", str.rjust, list(map(str, batch.pid.tolist()))
        yield "EVENT", str.ljust, [layout.event] * count
        if layout.function not in ("", layout.event):
            yield "FUNCTION", str.ljust, [layout.function] * count
        if batch.caller is not None:
            yield "CALLER", str.ljust, list(map(_text, self._names.callers(batch.caller)))
        for field, values, faulted in zip(layout.fields, batch.columns, batch.faulted, strict=True):
            form, columns = shown(field, values, faulted, self._names)
            texts = listed(form, columns, count)
            is_number = field.storage in (Storage.NUMBER, Storage.DURATION)
            is_right = is_number and field.type not in _TEXTUAL and field.count is None
            name = f"arg.{field.name}" if field.name in _OWN else field.name
            yield name, str.rjust if is_right else str.ljust, list(map(_text, texts))

    def _times(self, batch: Batch) -> list[str]:
        if not self._has_ns:
            return list(map(str, batch.ts.tolist()))
        pairs = (each.tolist() for each in microseconds(batch.ts))
        return [f"{s}.{us:06}" for s, us in zip(*pairs, strict=True)]

    def _line(self, row: list[str]) -> bytes:
        aligned = (
            align(cell, self._widths[name])
            for cell, (name, align) in zip(row, self._columns.items(), strict=False)
        )
        return f"{_GAP.join(aligned).rstrip()}\n".encode()


def _text(value: bytes) -> str:
    return visible(value.decode(errors="surrogateescape"))
