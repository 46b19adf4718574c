"""Events of one probe as comma-separated values, RFC 4180: a line of names, then one per event.

What could not be read is empty, arrays are JSON, texts are ``sinks.json.valid_text``.
"""

import csv
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kprobes.errors import UsageError
from kprobes.model.columns import base_name
from kprobes.model.events import Batch, Column, Events
from kprobes.model.resolved import Field, RecordLayout, Storage
from kprobes.sinks.json import valid_text
from kprobes.sinks.names import Names, TraceSource, flags, write_in_order

Mask = NDArray[np.bool_]
Header = tuple[str, ...]
_SYMBOLIC = ("symbol", "symstr")
_SEVERAL = (
    "comma-separated values are a table of one event, and there are {} and {}: choose by --event, "
    "or `kprobe convert FILE OUT.csv` writes a file of each"
)


def header_of(layout: RecordLayout) -> Header:
    """Return the names of an event's columns."""
    own = ["caller"] if layout.caller_offset is not None else []
    fields = [field.name for field in layout.fields]
    base = ("ts", "cpu", "pid", "comm", "flags", "function", *own)
    return *(base_name(name, fields) for name in base), *fields


def header_line(layout: RecordLayout) -> bytes:
    """Return them as the table's first line."""
    return _lines([header_of(layout)])[0]


class CsvSink:
    """Writes a table. Does not close the output."""

    def __init__(self, out: BinaryIO, source: TraceSource) -> None:
        """Write nothing yet: the first event's columns are the table's."""
        self._out = out
        self._names = Names(source)
        self._version = source.version
        self._is_rebooted = source.is_rebooted
        self._layout: RecordLayout | None = None

    def write(self, events: Events) -> None:
        """Write and flush one line per event.

        Raises:
            UsageError: another event than those before, or one with other columns.
        """
        for index, batch in enumerate(events.batches):
            if (events.batch == index).any():
                self._begin(batch.layout)
        write_in_order(self._out, events, self.lines)
        self._out.flush()

    def close(self) -> None:
        """Write what is buffered."""
        self._out.flush()

    def lines(self, batch: Batch) -> list[bytes]:
        """Return one line per event."""
        layout = batch.layout
        columns: list[list[Any]] = [
            batch.ts.tolist(),
            batch.cpu.tolist(),
            batch.pid.tolist(),
            _named(batch.comm, valid_text),
            _named(batch.context, self._flags),
            [layout.function] * len(batch),
        ]
        if batch.caller is not None:
            columns.append(_named(batch.caller, self._symbol))
        fields = zip(layout.fields, batch.values, batch.faulted, strict=True)
        columns += [self._column(field, values, faulted) for field, values, faulted in fields]
        return _lines(zip(*columns, strict=True))

    def _begin(self, layout: RecordLayout) -> None:
        if self._layout is None:
            self._layout = layout
            if not self._is_rebooted:
                self._out.write(header_line(layout))
        elif _table_of(self._layout) != _table_of(layout):
            raise UsageError(_SEVERAL.format(self._layout.event, layout.event))

    def _column(self, field: Field, values: Column, faulted: Mask | None) -> list[Any]:
        if field.storage in (Storage.NUMBER, Storage.DURATION):
            found = self._numbers(field, values)
            if faulted is None:
                return found
            return [None if bad else v for v, bad in zip(found, faulted.tolist(), strict=True)]
        if field.storage is Storage.STACK:
            return [valid_text(self._names.stack_text(stack)) for stack in values.tolist()]
        if field.count is None:
            return _texts(values)
        rows: list[list[bytes | None]] = values.tolist()
        return [json.dumps([None if v is None else valid_text(v) for v in row]) for row in rows]

    def _numbers(self, field: Field, values: Column) -> list[Any]:
        found: list[Any] = values.tolist()
        if field.type in _SYMBOLIC:
            found = _named(values, self._symbol)
        return found if field.count is None else list(map(json.dumps, found))

    def _flags(self, context: int) -> str:
        return flags(context, self._version)

    def _symbol(self, addr: int) -> str:
        return valid_text(self._names.symbol(addr))


def _table_of(layout: RecordLayout) -> tuple[str, str, Header]:
    return layout.group, layout.event, header_of(layout)


class _Lines(list[bytes]):
    # A row is written at once.
    def write(self, row: str) -> None:
        self.append(row.encode())


def _lines(rows: Iterable[Sequence[Any]]) -> list[bytes]:
    lines = _Lines()
    csv.writer(lines).writerows(rows)
    return lines


def _named(values: Column, name: Callable[[Any], str]) -> list[Any]:
    # Each value is named once.
    unique, which = np.unique(values, return_inverse=True)
    names = np.array([name(each) for each in unique.tolist()], object)
    return names[which].reshape(values.shape).tolist()


def _texts(values: Column) -> list[str | None]:
    found: list[bytes | None] = values.tolist()
    return [None if value is None else valid_text(value) for value in found]
