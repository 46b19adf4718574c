"""Definitions to events of this machine's kernel: lines, names of their own, filters.

What definitions mean on this machine's kernel: globs, functions, arguments.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import count

from msgspec import Struct
from msgspec.structs import replace

from kprobes.errors import DefinitionError, RefusedError, UsageError
from kprobes.guest.places import first_kernel_error
from kprobes.host.machine import HostMachine
from kprobes.lang.filter import parse_filter
from kprobes.lang.filter_value import Known
from kprobes.lang.listing import at_function
from kprobes.model.definition import Definition, EventType
from kprobes.model.kernel import Symbol, span_of
from kprobes.model.options import Tasks
from kprobes.model.resolved import KprobeEvent, Resolved
from kprobes.model.trigger import Trigger
from kprobes.resolve.place import find_target
from kprobes.resolve.resolve import check_alike, filter_fields, resolve
from kprobes.resolve.source_place import SourcePlacer
from kprobes.resolve.tracefs_event import to_kprobe_event
from kprobes.units import Addr


class HostPlaces:
    """Resolves definitions on this machine's kernel; touches nothing."""

    def __init__(self, machine: HostMachine) -> None:
        self._machine = machine
        self._kernel = machine.kernel
        self._source = SourcePlacer(machine.kernel, machine.open_source)

    def expand(self, definition: Definition) -> list[Definition]:
        """Return one definition per function that a glob names and that can be probed.

        Raises:
            RefusedError: there is none.
        """
        in_source = self._source.at_lines(definition)
        if in_source is not None:
            return self._probeable(in_source)
        if not definition.place.is_glob:
            return [definition]
        pattern, module = definition.function, definition.place.module
        symbols = self._kernel.symbols
        found = [s for s in symbols.glob(pattern) if s.is_text and s.module == (module or s.module)]
        # A tracepoint's own function is not what is probed.
        is_tracepoint = definition.type is EventType.TRACEPOINT
        taken = [s for s in found if is_tracepoint or self.is_probeable(s)]
        # A name of two functions cannot be probed by name; two names of one function are one.
        unique = {s.addr: s.name for s in taken if symbols.is_unique(s.name)}
        if not unique:
            raise RefusedError(
                f"no function that can be probed matches {pattern!r}: {len(found)} match, but the "
                "kernel's function tracer knows none of them, or they share their name"
            )
        return [at_function(definition, name) for name in sorted(unique.values())]

    def _probeable(self, found: list[Definition]) -> list[Definition]:
        # Of several places those that the kernel takes no probe at are left out.
        if len(found) == 1:
            return found
        targets = ((each, find_target(each, self._kernel, _entry_of)) for each in found)
        taken = [each for each, target in targets if self.is_probeable(target.function)]
        return taken or found[:1]

    def resolve(self, definition: Definition, *, event_id: int) -> Resolved:
        """Resolve a definition on one function.

        Where its probe is in the end, after an ``endbr64`` perhaps, its records tell.

        Raises:
            DefinitionError: it names what this kernel has not, or a type does not fit.
            RefusedError: its module is not loaded.
        """
        machine = self._machine
        return resolve(definition, self._kernel, machine.arch, event_id=event_id, locate=_entry_of)

    def first_kernel_error(self, error: DefinitionError) -> DefinitionError:
        """Return what the kernel finds first in a definition that has an error in its text."""
        return first_kernel_error(error, self._kernel, self._machine.arch, _entry_of)

    def is_probeable(self, function: Symbol) -> bool:
        """Whether the kernel takes a probe in a function, as far as can be told without asking."""
        known = self._machine.traceable
        return not known or function.name in known


def _entry_of(function: Symbol) -> Addr:
    return function.addr


_MAX_EVENTS = (1 << 16) - 1
_NAME_LENGTH = 50
_COMM_LENGTH = 15
_SPECIAL = re.compile(r"[*?\[]")


class HostProbe(Struct, frozen=True, kw_only=True):
    """One probe, which is to be an event of this kernel.

    Attributes:
        declaration: its line.
        name: that it has in our group; the user's name is in its layout.
        filter: for its filter file, or "".
        triggers: of its event, with filters that choose the tasks, too.
    """

    declaration: KprobeEvent
    name: str
    filter: str
    triggers: tuple[Trigger, ...] = ()

    @property
    def resolved(self) -> Resolved:
        """What it is."""
        return self.declaration.probe

    @property
    def is_tracepoint(self) -> bool:
        """Whether it is at a tracepoint, and no probe to the kernel."""
        return self.resolved.definition.type is EventType.TRACEPOINT

    @property
    def soft_enable(self) -> int:
        """The number of its event, which has triggers, or that some are about; else 0."""
        return self.resolved.definition.soft_enable


class HostPreparer:
    """Definitions to events of this kernel, each prepared once, without touching the kernel."""

    def __init__(self, machine: HostMachine) -> None:
        self._machine = machine
        self._places = HostPlaces(machine)
        self._known: dict[int, tuple[Definition, tuple[_Named, ...]]] = {}
        self._next = count(1)
        self._names: set[str] = set()
        self._old_names: set[str] = set()
        self._deleted: set[int] = set()

    @property
    def probes(self) -> dict[int, Resolved]:
        """All that is known, by event id."""
        found = (named for _, known in self._known.values() for named in known)
        return {named.probe.layout.event_id: named.probe for named in found}

    def prepare(self, definition: Definition, tasks: Tasks) -> list[HostProbe]:
        """Return the events of a definition: with the same names for the same object.

        Raises:
            DefinitionError: it names what this kernel has not, its release cannot record it, or its
                filter is wrong.
            RefusedError: a pattern names no function, or a module is not loaded.
        """
        if id(definition) not in self._known:
            self._known[id(definition)] = definition, self._named(definition)
        _, known = self._known[id(definition)]
        return [_event(self._machine, each.probe, each.name, tasks) for each in known]

    def compare_without(self, deleted: Iterable[Definition]) -> None:
        """Have new definitions not compared with some, which are forgotten when all is well."""
        self._deleted = {number for each in deleted for number in self.event_ids(each)}

    def forget(self, definition: Definition, *, is_new: bool = False) -> None:
        """Let a definition go that is defined no more; of a new one the kernel has no event."""
        _, known = self._known.pop(id(definition), (definition, ()))
        self._old_names.update(each.name for each in known if not is_new)
        self._names.difference_update(each.name for each in known if is_new)

    def reuse_names(self) -> None:
        """Give names of forgotten definitions to others: the kernel has no event of ours."""
        self._names -= self._old_names
        self._old_names = set()

    def replace_definition(self, old: Definition, new: Definition) -> None:
        """Take a definition for another one that differs in its filter or its triggers."""
        if id(old) in self._known:
            _, known = self._known.pop(id(old))
            self._known[id(new)] = new, tuple(each.like(new) for each in known)

    def event_ids(self, definition: Definition) -> list[int]:
        """Return the numbers of a definition's events."""
        _, known = self._known.get(id(definition), (definition, ()))
        return [each.probe.layout.event_id for each in known]

    def _named(self, definition: Definition) -> "tuple[_Named, ...]":
        singles = self._places.expand(definition)
        if len(singles) + len(self._names) > _MAX_EVENTS:
            raise RefusedError(f"too many probes: at most {_MAX_EVENTS}")
        probes = [self._places.resolve(single, event_id=next(self._next)) for single in singles]
        others = [each for number, each in self.probes.items() if number not in self._deleted]
        _check_same_event([*others, *probes])
        # Each probe is an event of its own, so that records and counts tell which one was hit.
        return tuple(_Named(probe=probe, name=self._name(probe)) for probe in probes)

    def _name(self, probe: Resolved) -> str:
        wanted = probe.definition.event[:_NAME_LENGTH]
        name, numbers = wanted, count(2)
        while name in self._names:
            name = f"{wanted}_{next(numbers)}"
        self._names.add(name)
        return name


class _Named(Struct, frozen=True, kw_only=True):
    probe: Resolved
    name: str

    def like(self, other: Definition) -> "_Named":
        definition = replace(
            self.probe.definition,
            filter=other.filter,
            triggers=other.triggers,
            soft_enable=other.soft_enable,
        )
        return replace(self, probe=replace(self.probe, definition=definition))


def _event(machine: HostMachine, probe: Resolved, name: str, tasks: Tasks) -> HostProbe:
    definition = probe.definition
    # The kernel's triggers do not mind which tasks its filters choose.
    return HostProbe(
        declaration=to_kprobe_event(probe, machine.kernel.version, machine.arch),
        name=name,
        filter=_filter(machine, probe, tasks, definition.filter),
        triggers=tuple(
            replace(each, filter=_filter(machine, probe, tasks, each.filter))
            for each in definition.triggers
        ),
    )


def _filter(machine: HostMachine, probe: Resolved, tasks: Tasks, text: str) -> str:
    if text and parse_filter(text, _known(machine, probe)) is None:
        text = ""
    chosen = [*_task_terms(probe, tasks), *([text] if text else [])]
    return " && ".join(f"({each})" for each in chosen) if len(chosen) > 1 else "".join(chosen)


def _check_same_event(probes: Sequence[Resolved]) -> None:
    first: dict[tuple[str, str], Resolved] = {}
    for probe in probes:
        definition = probe.definition
        other = first.setdefault((definition.group, definition.event), probe)
        # A pattern's functions may differ: each is an event of its own.
        if other.definition.command != definition.command:
            check_alike(other, probe)


def _known(machine: HostMachine, probe: Resolved) -> Known:
    function = partial(span_of, machine.kernel.symbols)
    return Known(fields=filter_fields(probe), cpus=machine.cpus, function=function)


def _task_terms(probe: Resolved, tasks: Tasks) -> Iterator[str]:
    if tasks.pids:
        yield " || ".join(f"common_pid == {pid}" for pid in tasks.pids)
    if tasks.comms:
        # An argument may be called comm, too, which then counts.
        own = {field.name for field in probe.layout.fields}
        field = next(name for name in ("comm", "COMM") if name not in own)
        yield " || ".join(_is_comm(field, comm) for comm in tasks.comms)


def _is_comm(field: str, comm: str) -> str:
    if _SPECIAL.search(comm):
        return f"{field} ~ {_quoted(comm)}"
    return f"{field} == {_quoted(comm[:_COMM_LENGTH])}"


def _quoted(text: str) -> str:
    for mark in ('"', "'"):
        if mark not in text:
            return f"{mark}{text}{mark}"
    raise UsageError(f"the kernel's filters cannot name a task {text!r}, with both kinds of quotes")
