"""Columns to what a user reads."""

from collections.abc import Callable, Mapping
from typing import BinaryIO

from kprobes.model.visible import visible
from kprobes.ports import Sink
from kprobes.sinks.json import NdjsonSink, quoted
from kprobes.sinks.names import TraceSource
from kprobes.sinks.text import TextSink

FORMATS: Mapping[str, Callable[[BinaryIO, TraceSource], Sink]] = {
    "text": TextSink,
    "json": NdjsonSink,
}
"""By the name a user gives: where the bytes go and what kernel they come from to a sink."""


def reboot_mark(form: str, release: str) -> bytes:
    """Return what stands in an output where another boot of a guest begins, as one line."""
    if form == "json":
        text = quoted(release.encode(errors="surrogateescape"))
        return b'{"event":"reboot","group":"kprobes","args":{"release":%b}}\n' % text
    return f"# the guest was rebooted: Linux {visible(release)}\n".encode()
