"""This machine as the driver sees it: a small typed kernel, and a tracefs that is not there."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from kprobes.arch.x86_64.arch import X86_64
from kprobes.host.events import HostFiles
from kprobes.host.machine import HostMachine
from kprobes.host.prepare import HostProbe
from kprobes.model.events import EventFormat, Events, HostEvent
from kprobes.model.kernel import Kernel
from kprobes.model.source import OpenSource, no_source
from kprobes.recording_writer import RecordingWriter
from tests.build.kernel import make_kernel
from tests.build.tracefs import FakeTracefs
from tests.build.typed import SYMBOLS, types

NO_EVENTS = Events(batches=(), batch=np.empty(0, np.uint16), row=np.empty(0, np.uint32))


class FakeReader:
    """Rings with nothing in them; implements ``HostReader``."""

    def __init__(self, tracefs: FakeTracefs, files: HostFiles) -> None:
        self._instance = tracefs.instances[files.instance.removeprefix("instances/")]
        self._instance.is_open = True
        self.recorded: Mapping[int, int] = {1: 5}
        self.lost = 2
        self.added: list[str] = []

    def add(self, events: Sequence[HostEvent]) -> None:
        self.added += [event.layouts[0].event for event in events]

    def write_to(self, writer: RecordingWriter) -> None:
        self.writer = writer

    def drain(self) -> Events:
        return NO_EVENTS

    def rest(self) -> Iterator[Events]:
        yield NO_EVENTS

    def close(self) -> None:
        self._instance.is_open = False


def make_machine(
    tracefs: FakeTracefs | None = None, *, release: str = "6.1.0-56-cloud-amd64"
) -> HostMachine:
    """Return a machine that runs the kernel of ``tests.build.typed``."""
    kernel = make_kernel(SYMBOLS, types=types(), release=release)
    names = (symbol.name for symbol in SYMBOLS)
    return machine_of(kernel, (each for each in names if each != "untyped"), tracefs)


def machine_of(
    kernel: Kernel,
    traceable: Iterable[str],
    tracefs: FakeTracefs | None = None,
    open_source: OpenSource = no_source,
) -> HostMachine:
    """Return a machine that runs a kernel whose function tracer knows some functions."""
    machine = HostMachine(
        kernel=kernel,
        arch=X86_64,
        tracefs=tracefs or FakeTracefs(),
        cpus=2,
        online=2,
        open_source=open_source,
    )
    # What available_filter_functions would say.
    vars(machine)["traceable"] = frozenset(traceable)
    return machine


def open_fake(machine: HostMachine, files: HostFiles, probes: Sequence[HostProbe]) -> FakeReader:
    """Open the rings of a fake instance; an ``OpenReader``."""
    del probes
    assert isinstance(machine.tracefs, FakeTracefs)
    files.name_tasks(())
    return FakeReader(machine.tracefs, files)


def read_fake(
    machine: HostMachine, files: HostFiles, probes: Sequence[HostProbe]
) -> list[HostEvent]:
    """Read what nobody will decode; a ``ReadEvents``."""
    defined = {line.split(maxsplit=1)[0].partition(":")[2] for line in files.lines()}
    assert defined.issuperset(map(files.name_of, probes)), machine
    none = EventFormat(name="", number=0, common=(), fields=())
    return [HostEvent(format=none, layouts=(each.resolved.layout,)) for each in probes]
