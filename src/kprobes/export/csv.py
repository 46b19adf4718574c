"""Tables of comma-separated values, RFC 4180: a line of names, then the events of one probe.

What could not be read is empty, arrays are JSON, texts are ``sinks.json.valid_text``.
"""

import csv
import json
from collections.abc import Callable, Hashable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kprobes.export.files import TableFiles
from kprobes.model.events import Batch, Column
from kprobes.model.recording import RecordedKernel
from kprobes.model.resolved import Field, RecordLayout, Storage
from kprobes.sinks.json import valid_text
from kprobes.sinks.names import Names, TraceSource, flags

Mask = NDArray[np.bool_]
_SYMBOLIC = ("symbol", "symstr")


class CsvFiles(TableFiles["CsvTable"]):
    """One file of each event."""

    def __init__(self, path: Path, kernel: RecordedKernel, source: TraceSource) -> None:
        """Begin; OSError where nothing can be written."""
        del kernel
        super().__init__(path, _header, partial(CsvTable, source=source))


class CsvTable:
    """One file."""

    def __init__(self, path: Path, layout: RecordLayout, source: TraceSource) -> None:
        """Write the line of names."""
        self._file = path.open("w", encoding="utf-8", newline="")
        self._writer = csv.writer(self._file)
        self._names = Names(source)
        self._version = source.version
        self._writer.writerow(_header(layout))

    def write(self, batch: Batch) -> None:
        """Append rows, oldest first."""
        columns: list[list[Any]] = [
            batch.ts.tolist(),
            batch.cpu.tolist(),
            batch.pid.tolist(),
            _named(batch.comm, valid_text),
            _named(batch.context, self._flags),
            [batch.layout.function] * len(batch),
        ]
        if batch.caller is not None:
            columns.append(_named(batch.caller, self._symbol))
        fields = zip(batch.layout.fields, batch.values, batch.faulted, strict=True)
        columns += [self._column(field, values, faulted) for field, values, faulted in fields]
        self._writer.writerows(zip(*columns, strict=True))

    def close(self) -> None:
        """Finish the file."""
        self._file.close()

    def _column(self, field: Field, values: Column, faulted: Mask | None) -> list[Any]:
        if field.storage in (Storage.NUMBER, Storage.DURATION):
            found = self._numbers(field, values)
            if faulted is None:
                return found
            return [None if bad else v for v, bad in zip(found, faulted.tolist(), strict=True)]
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


def _header(layout: RecordLayout) -> tuple[Hashable, ...]:
    own = ["caller"] if layout.caller_offset is not None else []
    return "ts", "cpu", "pid", "comm", "flags", "function", *own, *(f.name for f in layout.fields)


def _named(values: Column, name: Callable[[Any], str]) -> list[Any]:
    # Each value is named once.
    unique, which = np.unique(values, return_inverse=True)
    names = np.array([name(each) for each in unique.tolist()], object)
    return names[which].reshape(values.shape).tolist()


def _texts(values: Column) -> list[str | None]:
    found: list[bytes | None] = values.tolist()
    return [None if value is None else valid_text(value) for value in found]
