"""Runs in a guest: kprobe events read by us, by trace-cmd and by perf, and drained as they come.

    python3 -m bench.in_host_guest PROGRAM HITS [mapped]

PROGRAM makes so many system calls. Seconds and counts are printed as JSON: with ``mapped`` only
those of draining, once by splice and once from mapped rings.
"""

import io
import itertools
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from kprobes.formats.ftrace import PageFormat
from kprobes.host.reader import HostKernel, open_reader, read_format
from kprobes.model.events import Events, HostEvent, Pages
from kprobes.ring.ftrace import Contexts, HostShapes, TaskNames, decode_pages
from kprobes.ring.ftrace_merge import HostMerger
from kprobes.ring.ftrace_shapes import EventShape
from kprobes.sinks.names import TraceSource
from kprobes.sinks.text import TextSink
from kprobes.transport.tracefs import running_comms, saved_comms
from tests.build.host_reading import TRACING, Kallsyms, append, layout

_PROBE = "p:bench/hit __x64_sys_getppid a=%di:u64 b=%si:x64"
_EVENT = "bench/hit"
_PAGE = PageFormat(size=4096, data=16, commit=8)
_AT_ONCE = 1024
_RING_KB = 8192


def main(program: str, hits: int, *, is_mapped: bool = False) -> None:
    """Measure everything, or draining in both ways only."""
    append(TRACING / "kprobe_events", _PROBE)
    symbols = Kallsyms()
    event = HostEvent(format=read_format(TRACING, _EVENT), layouts=(layout(1, _PROBE, symbols),))
    told: dict[str, float] = {"hits": hits}
    told |= _drained(program, event, symbols, is_mapped=False)
    if is_mapped:
        told |= _drained(program, event, symbols, is_mapped=True)
        print(json.dumps(told))
        return
    _quietly(
        "trace-cmd", "record", "--file-version", "6", "-b", "40960", "-e", "bench:hit", program
    )
    told["kept"] = sum(map(len, _decoded(event)))
    _quietly("perf", "record", "-q", "-m", "64M", "-a", "-e", "bench:hit", program)
    told["decode_s"] = min(_taken(lambda: sum(map(len, _decoded(event)))) for _ in range(3))
    told["text_s"] = _taken(lambda: _written(event, symbols))
    told["trace_cmd_s"] = _taken(lambda: _quietly("trace-cmd", "report"))
    told["perf_s"] = _taken(lambda: _quietly("perf", "script"))
    print(json.dumps(told))


def _taken(work: Callable[[], object]) -> float:
    # CPU seconds of this process and of what it starts: others may run beside this guest.
    before = sum(os.times()[:4])
    work()
    return sum(os.times()[:4]) - before


def _quietly(*command: str) -> None:
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)


def _decoded(event: HostEvent) -> Iterator[Events]:
    ids = itertools.count(2)
    shape = EventShape(event, hex, lambda: next(ids))
    contexts = Contexts(_version())
    shapes = HostShapes(page=_PAGE, contexts=contexts, events={shape.number: shape}, namings={})
    names = TaskNames(running_comms(), lambda: saved_comms(TRACING))
    merger = HostMerger()
    for pages in _pages(Path("trace.dat").read_bytes()):
        yield _named(merger.push([decode_pages(pages, shapes)]), names)
    yield _named(merger.finish(), names)


def _named(events: Events, names: TaskNames) -> Events:
    for batch in events.batches:
        names.of(batch)
    return events


def _pages(data: bytes) -> Iterator[Pages]:
    # trace-cmd.dat.v6(5): after "flyrecord" each CPU's offset and size.
    table = data.index(b"flyrecord\0") + 10
    places = struct.iter_unpack("<QQ", data[table : table + 16 * (os.cpu_count() or 1)])
    parts = [
        (cpu, np.frombuffer(data, np.uint8, size, start).reshape(-1, _PAGE.size))
        for cpu, (start, size) in enumerate(places)
    ]
    # Side by side, as they are drained: each round has some of every CPU's.
    for i in range(0, max(len(pages) for _, pages in parts), _AT_ONCE):
        some = [(cpu, pages[i : i + _AT_ONCE]) for cpu, pages in parts]
        yield Pages(
            data=np.concatenate([pages for _, pages in some]),
            cpu=np.repeat(
                np.array([cpu for cpu, _ in some], np.uint16), [len(pages) for _, pages in some]
            ),
            skips=np.zeros(sum(len(pages) for _, pages in some), np.int64),
        )


def _written(event: HostEvent, symbols: Kallsyms) -> None:
    sink = TextSink(io.BytesIO(), TraceSource(version=_version(), cpus=2, symbol_at=symbols.at))
    for events in _decoded(event):
        sink.write(events)


def _drained(
    program: str, event: HostEvent, symbols: Kallsyms, *, is_mapped: bool
) -> dict[str, float]:
    # As many hits as two CPUs can make, taken out while they make them.
    instance = TRACING / "instances/bench"
    instance.mkdir()
    (instance / "buffer_size_kb").write_text(str(_RING_KB))
    kernel = HostKernel(version=_version(), symbol_at=symbols.at)
    reader = open_reader(instance, [event], kernel, is_mapped=is_mapped)
    enable = instance / "events" / _EVENT / "enable"
    enable.write_text("1")
    start, drained, spent = time.monotonic(), 0, time.process_time()
    with subprocess.Popen([program], stdout=subprocess.DEVNULL) as running:
        while running.poll() is None:
            drained += len(reader.drain())
            time.sleep(0.001)
        took = time.monotonic() - start
    enable.write_text("0")
    drained += sum(map(len, reader.rest()))
    spent = time.process_time() - spent
    lost = reader.lost
    reader.close()
    instance.rmdir()
    how = "mapped" if is_mapped else "drained"
    return {how: drained, f"{how}_lost": lost, f"{how}_s": took, f"{how}_cpu_s": spent}


def _version() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int(minor)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), is_mapped=len(sys.argv) > 3)
