"""Runs in a guest: arms events by hand in an instance, reads them by our reader, and prints both.

    python3 host_reading.py DIRECTORY OPTIONS

OPTIONS is JSON; what comes of it is written to DIRECTORY: ``kernel``, the instance's own trace, and
``ours``; ``told``, JSON of what was counted.
"""

import bisect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kprobes.drivers.host_reader import NAMING_EVENTS, HostKernel, open_reader, read_format
from kprobes.model.host_event import HostEvent
from kprobes.model.layout import Field, RecordLayout, Storage
from kprobes.sinks.origin import Origin
from kprobes.sinks.text import TextSink
from kprobes.units import Addr

TRACING = Path("/sys/kernel/tracing")
_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
_ARGUMENT = re.compile(r"(?P<name>\w+)=(?P<fetch>[^:]*):(?P<type>[^\[]+)(?:\[(?P<count>\d+)\])?")


class Kallsyms:
    """The kernel's own list of its names, and what it prints for an address."""

    def __init__(self) -> None:
        lines = [line.split() for line in Path("/proc/kallsyms").read_text().splitlines()]
        found = sorted(
            ((int(words[0], 16), words[2], words[3:]) for words in lines), key=lambda it: it[0]
        )
        self._addrs = [addr for addr, _, _ in found]
        self._names = [(name, module) for _, name, module in found]

    def addr(self, name: str) -> int:
        """Return where a symbol is."""
        return self._addrs[[own for own, _ in self._names].index(name)]

    def at(self, addr: int) -> str:
        """Return what ``%pS`` prints."""
        last = bisect.bisect_right(self._addrs, addr) - 1
        if last < 0:
            return f"{addr:#x}"
        start = self._addrs[last]
        first = bisect.bisect_left(self._addrs, start)
        name, module = self._names[first]
        size = self._addrs[last + 1] - start if last + 1 < len(self._addrs) else 0
        return " ".join([f"{name}+{addr - start:#x}/{size:#x}", *module])


def layout(event_id: int, definition: str, symbols: Kallsyms) -> RecordLayout:
    """Return how a definition is shown: ``p:GROUP/EVENT SYMBOL NAME=FETCH:TYPE ...``."""
    head, place, *words = definition.split()
    group, event = head.partition(":")[2].split("/")
    function = place.partition("+")[0]
    ip = Addr(symbols.addr(function))
    return RecordLayout(
        event_id=event_id,
        group=group,
        event=event,
        ip=ip,
        where=symbols.at(ip),
        function=function,
        fields=tuple(_field(index, word) for index, word in enumerate(words)),
        size=40,
        is_dynamic=False,
        size_offset=0,
        faults_offset=None,
    )


def _field(index: int, word: str) -> Field:
    found = _ARGUMENT.fullmatch(word)
    if found is None:
        raise ValueError(f"{word} says no type")
    kind, count = found["type"], found["count"]
    is_text = kind in ("string", "ustring")
    if bits := re.fullmatch(r"b\d+@\d+/(\d+)", kind):
        kind = f"u{bits[1]}"
    return Field(
        name=found["name"],
        type=kind,
        storage=Storage.STRING if is_text else Storage.NUMBER,
        offset=0,
        size=4 if is_text else _SIZES.get(kind[1:], 1 if kind == "char" else 8),
        index=index,
        count=None if count is None else int(count),
    )


def run(directory: Path, options: dict[str, Any]) -> None:
    """Record a workload with some definitions and write what the kernel and we say of it."""
    instance = TRACING / "instances/theirs"
    instance.mkdir(exist_ok=True)
    definitions: list[str] = options["definitions"]
    for definition in definitions:
        _append(TRACING / "kprobe_events", definition)
    (instance / "trace_clock").write_text(options.get("clock", "local"))
    (instance / "buffer_size_kb").write_text(str(options.get("size_kb", 4096)))
    namings = list(NAMING_EVENTS) if options.get("is_named") else []
    _enable(instance, namings)
    symbols = Kallsyms()
    layouts = [layout(i, text, symbols) for i, text in enumerate(definitions, 1)]
    events = [
        HostEvent(format=read_format(instance, f"{own.group}/{own.event}"), layouts=(own,))
        for own in layouts
    ]
    version = tuple(map(int, os.uname().release.split(".")[:2]))
    kernel = HostKernel(version=(version[0], version[1]), symbol_at=symbols.at)
    reader = open_reader(instance, events, kernel)
    names = [f"{own.group}/{own.event}" for own in layouts]
    _enable(instance, names)
    WORKLOADS[options.get("workload", "calls")]()
    for name in [*names, *namings]:
        (instance / "events" / name / "enable").write_text("0")
    (directory / "kernel").write_bytes((instance / "trace").read_bytes())
    found = list(reader.rest())
    count = sum(map(len, found))
    origin = Origin(
        version=kernel.version, cpus=os.cpu_count() or 1, entries=count, symbol_at=symbols.at
    )
    with (directory / "ours").open("wb") as out:
        sink = TextSink(out, origin)
        for part in found:
            sink.write(part)
        sink.close()
    told = {"lost": reader.lost, "count": count, "recorded": dict(reader.recorded)}
    (directory / "told").write_text(json.dumps(told))
    reader.close()
    instance.rmdir()
    (TRACING / "kprobe_events").write_text("")


def _append(path: Path, line: str) -> None:
    # Python's own mode for it asks for the file's end, which these files have not.
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


def _enable(instance: Path, names: Sequence[str]) -> None:
    for name in names:
        (instance / "events" / name / "enable").write_text("1")


def calls() -> None:
    """System calls of one task that keeps its name, on every CPU in turn."""
    for cpu in range(os.cpu_count() or 1):
        os.sched_setaffinity(0, {cpu})
        for _ in range(200):
            os.getppid()
            Path("/etc/passwd").read_bytes()
            Path("/no/such/file").exists()


def tasks() -> None:
    """Tasks that are over soon."""
    for _ in range(20):
        subprocess.run(["/bin/busybox", "cat", "/etc/passwd"], check=True, capture_output=True)
        subprocess.run(["/bin/ls", "/"], check=True, capture_output=True)


def flood() -> None:
    """More events than a small ring holds."""
    for _ in range(20_000):
        os.getppid()


WORKLOADS: dict[str, Callable[[], None]] = {"calls": calls, "tasks": tasks, "flood": flood}

if __name__ == "__main__":
    run(Path(sys.argv[1]), json.loads(sys.argv[2]))
