"""Events of one probe as comma-separated values, RFC 4180: a line of names, then one per event.

What could not be read is empty, arrays are JSON, texts are ``sinks.json.valid_text``.
"""

import csv
import json
from collections.abc import Sequence
from functools import partial
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from kprobes.errors import UsageError
from kprobes.model.columns import base_name
from kprobes.model.events import Batch, Column, Events
from kprobes.model.resolved import Field, RecordLayout, Storage
from kprobes.model.strings import Strings
from kprobes.native.lines import Cells, Lines, Texts, formatted
from kprobes.sinks.contexts import ContextInfo, ContextTexts
from kprobes.sinks.json import valid_text
from kprobes.sinks.names import Names, TraceSource, flags, shown_texts, write_in_order

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
    return _line(header_of(layout))


class CsvSink:
    """Writes a table. Does not close the output."""

    def __init__(self, out: BinaryIO, source: TraceSource) -> None:
        """Write nothing yet: the first event's columns are the table's."""
        self._out = out
        self._names = Names(source)
        self._contexts = ContextTexts(partial(_context, source.version))
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

    def lines(self, batch: Batch) -> Lines:
        """Return one line per event."""
        layout = batch.layout
        form = b"%d,%b," + _cell(layout.function).replace(b"%", b"%%")
        columns: list[Cells] = [batch.ts, self._contexts.of(batch)]
        if batch.caller is not None:
            form += b",%b"
            columns.append(self._symbols(batch.caller))
        for field, values, faulted in zip(layout.fields, batch.columns, batch.faulted, strict=True):
            spec, found = self._column(field, values, faulted)
            form += b"," + spec
            columns.append(found)
        return formatted(form + b"\r\n", columns, len(batch))

    def _begin(self, layout: RecordLayout) -> None:
        if self._layout is None:
            self._layout = layout
            if not self._is_rebooted:
                self._out.write(header_line(layout))
        elif _table_of(self._layout) != _table_of(layout):
            raise UsageError(_SEVERAL.format(self._layout.event, layout.event))

    def _column(
        self, field: Field, values: Column | Strings, faulted: Mask | None
    ) -> tuple[bytes, Cells]:
        if field.count is not None:
            return b"%b", self._arrays(field, values, faulted)
        if isinstance(values, Strings) or field.storage not in (Storage.NUMBER, Storage.DURATION):
            is_stack = field.storage is Storage.STACK
            return b"%b", shown_texts(values, self._stack if is_stack else _text)
        is_symbol = field.type in _SYMBOLIC
        found = self._symbols(values) if is_symbol else values
        if faulted is not None and faulted.any():
            plain = found.tolist() if is_symbol else list(map(b"%d".__mod__, values.tolist()))
            return b"%b", [b"" if f else v for v, f in zip(plain, faulted.tolist(), strict=True)]
        return b"%b" if is_symbol else b"%d", found

    def _arrays(self, field: Field, values: Column | Strings, faulted: Mask | None) -> list[bytes]:
        rows: list[list[Any]] = values.tolist()
        if isinstance(values, Strings):
            return [_cell(json.dumps([v if v is None else valid_text(v) for v in r])) for r in rows]
        if field.type in _SYMBOLIC:
            rows = [[valid_text(self._names.symbol(addr)) for addr in row] for row in rows]
        bad = [False] * len(rows) if faulted is None else faulted.tolist()
        return [b"" if f else _cell(json.dumps(row)) for row, f in zip(rows, bad, strict=True)]

    def _symbols(self, addrs: Column) -> Texts:
        # Each is named once.
        unique, which = np.unique(addrs, return_inverse=True)
        names = [_text(self._names.symbol(addr)) for addr in unique.tolist()]
        return Texts(codes=which.astype(np.int32), table=names)

    def _stack(self, stack: bytes | None) -> bytes:
        return _text(self._names.stack_text(stack or b""))


def _context(version: tuple[int, int], info: ContextInfo) -> bytes:
    shown = flags(info.context, version).encode()
    return b"%d,%d,%b,%b" % (info.cpu, info.pid, _text(info.comm), shown)


def _table_of(layout: RecordLayout) -> tuple[str, str, Header]:
    return layout.group, layout.event, header_of(layout)


class _Lines(list[bytes]):
    # A row is written at once.
    def write(self, row: str) -> None:
        self.append(row.encode())


def _line(row: Sequence[str]) -> bytes:
    lines = _Lines()
    csv.writer(lines).writerow(row)
    return lines[0]


def _cell(text: str) -> bytes:
    # As it stands in a line.
    return _line([text, ""])[: -len(b",\r\n")]


def _text(value: bytes | None) -> bytes:
    return b"" if value is None else _cell(valid_text(value))
