"""What definitions mean on this machine's kernel: globs, functions, arguments."""

from kprobes.drivers.host.machine import HostMachine
from kprobes.drivers.sooner import sooner
from kprobes.errors import DefinitionError, RefusedError
from kprobes.lang.listing import at_function
from kprobes.model.definition import Definition
from kprobes.model.resolved import Resolved
from kprobes.model.symbol import Symbol
from kprobes.resolve.resolve import resolve
from kprobes.units import Addr


class HostPlaces:
    """Resolves definitions on this machine's kernel; touches nothing."""

    def __init__(self, machine: HostMachine) -> None:
        self._machine = machine
        self._kernel = machine.kernel

    def expand(self, definition: Definition) -> list[Definition]:
        """Return one definition per function that a glob names and that can be probed.

        Raises:
            RefusedError: there is none.
        """
        if not definition.place.is_glob:
            return [definition]
        pattern, module = definition.place.symbol, definition.place.module
        symbols = self._kernel.symbols
        found = [s for s in symbols.glob(pattern) if s.is_text and s.module == (module or s.module)]
        # A name of two functions cannot be probed by name; two names of one function are one.
        unique = {
            s.addr: s.name
            for s in found
            if self.is_probeable(s) and len(symbols.all_named(s.name)) == 1
        }
        if not unique:
            raise RefusedError(
                f"no function that can be probed matches {pattern!r}: {len(found)} match, but the "
                "kernel's function tracer knows none of them, or they share their name"
            )
        return [at_function(definition, name) for name in sorted(unique.values())]

    def resolve(self, definition: Definition, *, event_id: int) -> Resolved:
        """Resolve a definition on one function.

        Where its probe is in the end, behind an ``endbr64`` perhaps, its records tell.

        Raises:
            DefinitionError: it names what this kernel has not, or a type does not fit.
            RefusedError: its module is not loaded.
        """
        machine = self._machine
        return resolve(definition, self._kernel, machine.arch, event_id=event_id, locate=_entry_of)

    def sooner(self, error: DefinitionError) -> DefinitionError:
        """Return what the kernel finds first in a definition that has an error in its text."""
        return sooner(error, self._kernel, self._machine.arch, _entry_of)

    def is_probeable(self, function: Symbol) -> bool:
        """Whether the kernel takes a probe in a function, as far as can be told without asking."""
        known = self._machine.traceable
        return not known or function.name in known


def _entry_of(function: Symbol) -> Addr:
    return function.addr
