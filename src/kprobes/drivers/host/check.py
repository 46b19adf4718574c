"""What definitions would be on this machine's kernel: the lines that it would be given."""

from collections.abc import Sequence

from kprobes.drivers.check import Checker, Placed, Terms, probes_of
from kprobes.drivers.exits import Classified
from kprobes.drivers.host.machine import HostMachine
from kprobes.drivers.host.places import HostPlaces
from kprobes.errors import RefusedError
from kprobes.model.definition import Definition
from kprobes.model.resolved import Resolved
from kprobes.resolve.spell import spell


def checker_of_host(machine: HostMachine, terms: Terms) -> Checker:
    """Return a checker of definitions for this machine's kernel, which is not asked."""
    return Checker(_BySpelling(machine), terms)


class _BySpelling:
    def __init__(self, machine: HostMachine) -> None:
        self._machine = machine
        self._places = HostPlaces(machine)
        self.kernel = machine.kernel
        self.arch = machine.arch
        self.cpus = machine.cpus
        self.sooner = self._places.sooner
        self.is_probeable = self._places.is_probeable

    def probes(self, definition: Definition) -> list[Resolved]:
        return probes_of(self._places, definition)

    def place(self, probes: Sequence[Resolved]) -> tuple[Placed, ...]:
        return tuple(self._place(probe) for probe in probes)

    def exits(self, definition: Definition) -> Classified | None:
        # The kernel takes over return addresses, whatever the exits.
        del definition

    def _place(self, probe: Resolved) -> Placed:
        machine = self._machine
        symbol = machine.kernel.symbols.at(probe.function)
        if symbol is not None and not self._places.is_probeable(symbol):
            raise RefusedError(
                f"{symbol.name}: the kernel takes probe events only in functions that its "
                "function tracer knows (available_filter_functions)"
            )
        spelled = spell(probe, machine.kernel.version, machine.arch)
        definition = probe.definition
        line = spelled.line(definition.group, definition.event)
        return Placed(probe=probe, site=None, spelled=line)
