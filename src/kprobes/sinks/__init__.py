"""Columns to what a user reads."""

from collections.abc import Callable, Mapping
from typing import BinaryIO

from kprobes.ports import LineSink, Sink
from kprobes.sinks import csv, json, table, text
from kprobes.sinks.names import TraceSource

LINES: Mapping[str, Callable[[BinaryIO, TraceSource], LineSink]] = {
    "text": text.TextSink,
    "json": json.NdjsonSink,
}
"""As ``FORMATS``: those whose lines do not depend on what stands before them."""

FORMATS: Mapping[str, Callable[[BinaryIO, TraceSource], Sink]] = {
    **LINES,
    "csv": csv.CsvSink,
    "table": table.TableSink,
}
"""By the name a user gives: where the bytes go and what kernel they come from to a sink."""

REBOOT_MARKS: Mapping[str, Callable[[str], bytes]] = {
    "text": text.reboot_mark,
    "json": json.reboot_mark,
    "csv": lambda _: b"",
    "table": text.reboot_mark,
}
"""By the same name: a kernel's release to the line before the events of a guest's next boot."""
