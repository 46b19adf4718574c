"""What takes the records of a session's events out of its instance."""

from collections.abc import Sequence
from functools import partial

from kprobes.drivers import host_reader
from kprobes.drivers.host.files import HostFiles
from kprobes.drivers.host.machine import HostMachine
from kprobes.drivers.host.prepare import HostProbe
from kprobes.model.host_event import HostEvent, HostReader
from kprobes.model.symbol import place_of


def open_reader(machine: HostMachine, files: HostFiles, probes: Sequence[HostProbe]) -> HostReader:
    """Open the rings of an instance whose probes are defined; tasks are named from then on.

    Raises:
        UnreachableError: the rings cannot be opened.
        TargetError: a file of the instance cannot be read.
    """
    instance = machine.tracefs.path(files.instance)
    files.name_tasks(host_reader.NAMING_EVENTS)
    events = [
        HostEvent(
            format=host_reader.read_format(instance, files.name_of(probe)),
            layouts=(probe.resolved.layout,),
        )
        for probe in probes
    ]
    kernel = host_reader.HostKernel(
        version=machine.kernel.version, symbol_at=partial(place_of, machine.kernel.symbols)
    )
    return host_reader.open_reader(instance, events, kernel)
