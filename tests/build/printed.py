"""Lines that are printed of values, by a ``print fmt``."""

from typing import Any

import numpy as np

from kprobes.model.events import Batch, Column
from kprobes.native.lines import as_list, formatted
from kprobes.sinks.names import Names, Shown, TraceSource
from kprobes.sinks.print_fmt import PrintedEvent
from tests.build.tracepoints import STRINGS, batch_of, layout_of, symbol_at

NAMES = Names(TraceSource(version=(6, 12), cpus=1, symbol_at=symbol_at, texts=STRINGS))


def lines_of(shown: Shown, count: int) -> list[bytes]:
    """Return each event's line."""
    form, columns = shown
    return as_list(formatted(form, columns, count))


def printed(batch: Batch) -> list[bytes]:
    """Return what is printed of events, the print fmt of which is known."""
    event = PrintedEvent(batch.layout)
    assert not event.unknown
    return lines_of(event.shown(batch, NAMES), len(batch))


def of_values(print_fmt: str, fields: str, *columns: Column) -> list[bytes]:
    """Return what is printed of columns of these fields."""
    return printed(batch_of(layout_of(fields, print_fmt), columns))


def one(print_fmt: str, declared: str, value: Any) -> str:
    """Return what is printed of one field with one value."""
    dtype = object if isinstance(value, bytes) else None
    return of_values(print_fmt, declared, np.array([value], dtype))[0].decode()
