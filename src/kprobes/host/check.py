"""Definitions checked for this machine's kernel: the lines that it would be given.

Which functions of this machine's kernel can be probed by name, and what their arguments are.
"""

from collections import Counter
from collections.abc import Sequence

from kprobes.errors import RefusedError, TargetError
from kprobes.guest.text import Classified
from kprobes.host.machine import HostMachine
from kprobes.host.prepare import HostPlaces
from kprobes.inspect.check import Checker, Placed, Terms, probes_of
from kprobes.inspect.source import SourceKernel
from kprobes.inspect.status import Function
from kprobes.model.definition import Definition, EventType
from kprobes.model.resolved import Resolved
from kprobes.resolve.tracefs_event import to_kprobe_event


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
        self.first_kernel_error = self._places.first_kernel_error
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
        is_function = probe.definition.type is not EventType.TRACEPOINT
        if is_function and symbol is not None and not self._places.is_probeable(symbol):
            raise RefusedError(
                f"{symbol.name}: the kernel takes probe events only in functions that its "
                "function tracer knows (available_filter_functions)"
            )
        declaration = to_kprobe_event(probe, machine.kernel.version, machine.arch)
        definition = probe.definition
        line = declaration.line(definition.group, definition.event)
        return Placed(probe=probe, site=None, declaration=line)


def source_of_host(machine: HostMachine) -> SourceKernel:
    """Return what is asked about the source of this machine's kernel."""
    return SourceKernel(
        kernel=machine.kernel,
        registers=machine.arch.registers,
        open_source=machine.open_source,
        locate=lambda function: function.addr,
    )


def probeable_here(machine: HostMachine, *, pattern: str, is_typed: bool = True) -> list[Function]:
    """Return the functions that match a shell pattern and can be probed, by name.

    Args:
        machine: whose kernel it is.
        pattern: a name or a shell pattern.
        is_typed: whether with prototypes, which take the longest.

    Raises:
        TargetError: none is left; says how many match that cannot be probed.
    """
    kernel, places = machine.kernel, HostPlaces(machine)
    every = kernel.symbols.glob(pattern)
    found = {s.name: s for s in every if s.is_text}
    # A name of two symbols says too little; all that have it match.
    counts = Counter(s.name for s in every)
    chosen = [
        found[name]
        for name in sorted(found)
        if counts[name] == 1 and places.is_probeable(found[name])
    ]
    if not chosen:
        text = f"no function that can be probed matches {pattern!r} in {kernel.release}"
        why = f": {len(found)} match, but the function tracer knows none of them" if found else ""
        raise TargetError(f"{text}{why}")
    types = kernel.types_for
    return [
        Function(symbol=symbol, prototype=of.function(symbol.name) if of and is_typed else None)
        for symbol in chosen
        for of in (types(symbol.module),)
    ]
