"""Runs in a guest: arms events by hand in an instance, reads them by our reader, and prints both.

    python3 host_reading.py DIRECTORY RUNS

RUNS is JSON: options by name. What comes of each is written to DIRECTORY/NAME: ``kernel``, the
instance's own trace, and ``ours``; ``told``, JSON of what was counted.
"""

import bisect
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kprobes.host.reader import NAMING_EVENTS, HostKernel, TracefsReader, open_reader, read_format
from kprobes.model.events import Events, HostEvent
from kprobes.model.resolved import Field, RecordLayout, Storage
from kprobes.sinks.names import TraceSource
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


class Run:
    """One recording of a workload in an instance of its own, read by our reader.

    Args:
        options: ``definitions``, and what differs from the usual: ``clock``, ``size_kb``,
            ``is_named`` for tasks' names at the hit, ``workload``.
    """

    def __init__(self, options: dict[str, Any], symbols: Kallsyms) -> None:
        self._options = options
        self._symbols = symbols
        self._instance = TRACING / "instances/theirs"
        self._clock = str(options.get("clock", "local"))
        definitions: list[str] = options["definitions"]
        self._layouts = [layout(i, text, symbols) for i, text in enumerate(definitions, 1)]
        self._probes = [f"{own.group}/{own.event}" for own in self._layouts]
        self._namings = list(NAMING_EVENTS) if options.get("is_named") else []

    def write(self, directory: Path) -> None:
        """Record, and write what the kernel and we say of it."""
        directory.mkdir()
        reader = self._open()
        self._switch(self._probes, "1")
        WORKLOADS[self._options.get("workload", "calls")]()
        self._switch([*self._probes, *self._namings], "0")
        (directory / "kernel").write_bytes((self._instance / "trace").read_bytes())
        found = list(reader.rest())
        (directory / "ours").write_bytes(self._text(found))
        told = {"lost": reader.lost, "count": sum(map(len, found))}
        (directory / "told").write_text(json.dumps(told))
        reader.close()
        self._instance.rmdir()
        (TRACING / "kprobe_events").write_text("")

    def _open(self) -> TracefsReader:
        self._instance.mkdir()
        for definition in self._options["definitions"]:
            append(TRACING / "kprobe_events", definition)
        (self._instance / "trace_clock").write_text(self._clock)
        (self._instance / "buffer_size_kb").write_text(str(self._options.get("size_kb", 4096)))
        self._switch(self._namings, "1")
        events = [
            HostEvent(format=read_format(self._instance, probe), layouts=(own,))
            for probe, own in zip(self._probes, self._layouts, strict=True)
        ]
        kernel = HostKernel(version=version(), symbol_at=self._symbols.at)
        return open_reader(self._instance, events, kernel)

    def _switch(self, names: Sequence[str], state: str) -> None:
        for name in names:
            (self._instance / "events" / name / "enable").write_text(state)

    def _text(self, found: Sequence[Events]) -> bytes:
        origin = TraceSource(
            version=version(),
            cpus=os.cpu_count() or 1,
            entries=sum(map(len, found)),
            symbol_at=self._symbols.at,
            has_ns=self._clock not in ("counter", "uptime", "x86-tsc"),
        )
        out = io.BytesIO()
        sink = TextSink(out, origin)
        for part in found:
            sink.write(part)
        sink.close()
        return out.getvalue()


def version() -> tuple[int, int]:
    """Return what the kernel that runs here is."""
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int(minor)


def append(path: Path, line: str) -> None:
    """Write a line to a file that is only added to."""
    # Python's own mode for it asks for the file's end, which these files have not.
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(file, f"{line}\n".encode())
    finally:
        os.close(file)


def calls(turns: int = 200) -> None:
    """System calls of one task that keeps its name, on every CPU in turn."""
    for cpu in range(os.cpu_count() or 1):
        os.sched_setaffinity(0, {cpu})
        for _ in range(turns):
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


WORKLOADS: dict[str, Callable[[], None]] = {
    "calls": calls,
    "few calls": partial(calls, 20),
    "tasks": tasks,
    "flood": flood,
}


def main(where: Path, runs: dict[str, dict[str, Any]]) -> None:
    """Do some runs, by the names of the directories that they are written to."""
    symbols = Kallsyms()
    for name, options in runs.items():
        Run(options, symbols).write(where / name)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
