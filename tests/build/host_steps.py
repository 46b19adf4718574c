"""Runs in a guest: reads an instance's rings between bursts of hits, while pages are half full.

    python3 -m tests.build.host_steps DIRECTORY

Once by mapping, where the kernel can, and once by splice and read. What comes of each is written
to DIRECTORY/mapped and DIRECTORY/spliced: ``kernel``, what the instance's own trace showed before
each reading, and ``ours``, both without headers; ``told``, JSON of what was counted.
"""

import io
import itertools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from kprobes.formats.ftrace import parse_page
from kprobes.host.reader import read_format
from kprobes.model.events import Events, HostEvent
from kprobes.ring.ftrace import Contexts, HostShapes, TaskNames, decode_pages
from kprobes.ring.ftrace_merge import HostMerger
from kprobes.ring.ftrace_shapes import EventShape
from kprobes.sinks.names import TraceSource
from kprobes.sinks.text import TextSink
from kprobes.transport.tracefs import running_comms, saved_comms
from kprobes.transport.tracefs_rings import Rings, open_rings
from tests.build.host_reading import TRACING, Kallsyms, append, layout, version

_PROBE = "p:steps/ppid __x64_sys_getppid a=%di:u64 me=$comm:string"
_EVENT = "steps/ppid"
_INSTANCE = TRACING / "instances/steps"
_RING_KB = 64
BURSTS = (1, 2, 3, 40, 7, 500, 1, 90, 3000, 2, 1, 60, 20, 5000, 1, 300, 4, 4, 4)
"""Hits between two readings: parts of a page, some pages, more than the ring holds."""


class Steps:
    """One way of reading."""

    def __init__(self, symbols: Kallsyms, *, is_mapped: bool) -> None:
        _INSTANCE.mkdir()
        (_INSTANCE / "buffer_size_kb").write_text(str(_RING_KB))
        form = parse_page((TRACING / "events/header_page").read_text())
        event = HostEvent(
            format=read_format(_INSTANCE, _EVENT), layouts=(layout(1, _PROBE, symbols),)
        )
        ids = itertools.count(2)
        shape = EventShape(event, symbols.at, lambda: next(ids))
        shapes = {shape.number: shape}
        self._shapes = HostShapes(
            page=form, contexts=Contexts(version()), events=shapes, namings={}
        )
        self._rings: Rings = open_rings(_INSTANCE, form, is_mapped=is_mapped)
        self._merger = HostMerger()
        self._symbols = symbols
        self._names = TaskNames(running_comms(), lambda: saved_comms(TRACING))

    def write(self, directory: Path) -> None:
        """Hit, look and read in turn, and write what was seen."""
        directory.mkdir(parents=True)
        theirs: list[bytes] = []
        ours: list[Events] = []
        for burst in BURSTS:
            _hit(burst)
            theirs += _lines((_INSTANCE / "trace").read_bytes())
            ours += self._read()
        ours.append(self._named(self._merger.finish()))
        maps = Path("/proc/self/maps").read_text()
        told = {
            "lost": self._rings.lost,
            "count": sum(map(len, ours)),
            "is_mapped": maps.count("trace_pipe_raw") > 0,
        }
        self._rings.close()
        _INSTANCE.rmdir()
        (directory / "kernel").write_bytes(b"".join(theirs))
        (directory / "ours").write_bytes(self._text(ours))
        (directory / "told").write_text(json.dumps(told))

    def _read(self) -> Iterator[Events]:
        decoded = [decode_pages(pages, self._shapes) for pages in self._rings.read()]
        yield self._named(self._merger.push(decoded))

    def _named(self, events: Events) -> Events:
        batches = tuple(replace(batch, comm=self._names.of(batch)) for batch in events.batches)
        return replace(events, batches=batches)

    def _text(self, found: list[Events]) -> bytes:
        out = io.BytesIO()
        sink = TextSink(out, TraceSource(version=version(), cpus=2, symbol_at=self._symbols.at))
        for events in found:
            sink.write(events)
        sink.close()
        return b"".join(_lines(out.getvalue()))


def _hit(count: int) -> None:
    # On both CPUs, so that every ring is read in the middle of a page.
    enable = _INSTANCE / "events" / _EVENT / "enable"
    enable.write_text("1")
    for cpu in range(os.cpu_count() or 1):
        os.sched_setaffinity(0, {cpu})
        for _ in range(count):
            os.getppid()
    enable.write_text("0")


def _lines(trace: bytes) -> list[bytes]:
    # Without the words of a trace about what was lost: "CPU:0 [LOST 123 EVENTS]".
    lines = trace.splitlines(keepends=True)
    return [line for line in lines if not line.startswith((b"#", b"CPU:"))]


def main(where: Path) -> None:
    """Read both ways."""
    append(TRACING / "kprobe_events", _PROBE)
    symbols = Kallsyms()
    for name, is_mapped in (("mapped", True), ("spliced", False)):
        Steps(symbols, is_mapped=is_mapped).write(where / name)
    append(TRACING / "kprobe_events", f"-:{_EVENT}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
