"""Columns to what a user reads."""

from collections.abc import Callable, Mapping
from typing import BinaryIO

from kprobes.ports import Sink
from kprobes.sinks.json import NdjsonSink
from kprobes.sinks.names import TraceSource
from kprobes.sinks.text import TextSink

FORMATS: Mapping[str, Callable[[BinaryIO, TraceSource], Sink]] = {
    "text": TextSink,
    "json": NdjsonSink,
}
"""By the name a user gives: where the bytes go and what kernel they come from to a sink."""
