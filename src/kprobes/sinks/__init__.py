"""Columns to what a user reads."""

from collections.abc import Callable, Mapping
from typing import BinaryIO

from kprobes.ports import Sink
from kprobes.sinks import json, text
from kprobes.sinks.names import TraceSource

FORMATS: Mapping[str, Callable[[BinaryIO, TraceSource], Sink]] = {
    "text": text.TextSink,
    "json": json.NdjsonSink,
}
"""By the name a user gives: where the bytes go and what kernel they come from to a sink."""

REBOOT_MARKS: Mapping[str, Callable[[str], bytes]] = {
    "text": text.reboot_mark,
    "json": json.reboot_mark,
}
"""By the same name: a kernel's release to the line before the events of a guest's next boot."""
