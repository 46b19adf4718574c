"""The meaning of definitions on one kernel, running or in a file: globs, functions, sites.

The events that a guest's own kernel has: no kprobe event may take the name of one.

Its own events of probes are left out: ours are not among them, and may be the same.

    LIST_HEAD(ftrace_events);           // through trace_event_call.list
    struct trace_event_call { struct list_head list; struct trace_event_class *class;
                              union { const char *name; struct tracepoint *tp; }; ...; int flags; };

As find_trace_event_call() in kernel/trace/trace_probe.c. The guest may run, and may be hostile:
what does not read is left out, and a ring that does not close ends somewhere.

Which of several errors of a definition the kernel tells: the first that it comes to.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from types import MappingProxyType
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from kprobes.arch.arch import Arch
from kprobes.errors import (
    DefinitionError,
    FormatError,
    MemoryFault,
    RefusedError,
    UnknownTypeError,
)
from kprobes.guest.guest import Guest, PageCache, remembering
from kprobes.guest.text import (
    Classified,
    Instructions,
    NoBoundaryError,
    Prover,
    Text,
    check_text,
    first,
)
from kprobes.guest.tracers import GuestProbes
from kprobes.image.system_calls import read_system_call
from kprobes.image.tables import read_tables
from kprobes.lang.listing import at_function
from kprobes.lang.names import DEFAULT_GROUPS
from kprobes.lang.parser import parse_prefix
from kprobes.model.codes import Code, rejection
from kprobes.model.definition import Definition, EventType, Kind
from kprobes.model.kernel import Kernel, Symbol, Types, place_of
from kprobes.model.plan import LONGEST_PATCH, Site, Strategy
from kprobes.model.resolved import Resolved
from kprobes.model.source import OpenSource, no_source
from kprobes.plan import ftrace
from kprobes.plan.ftrace import Sites
from kprobes.plan.strategy import Wish
from kprobes.ports import Memory
from kprobes.resolve.place import Locate, find_function, find_target, ip_of
from kprobes.resolve.resolve import check_parameters, check_variables, resolve, resolve_arguments
from kprobes.resolve.source_place import SourcePlacer
from kprobes.resolve.system_call import NAMED, find_system_call, number_parameters
from kprobes.units import Addr

_MANY = 64
"""Sites that are looked at together."""
_STUB = "__probestub_"
"""Before a tracepoint's name: what the kernel's own event of it is at, since 6.5."""
_MAX_EVENTS = 1 << 16
_MAX_NAME = 64
_TRACEPOINT, _KPROBE = "TRACE_EVENT_FL_TRACEPOINT", "TRACE_EVENT_FL_KPROBE"
_FPROBE = "TRACE_EVENT_FL_FPROBE"
_CALL, _CLASS, _POINT = "trace_event_call", "trace_event_class", "tracepoint"

Name = tuple[str, str]
"""Group and event."""


class _Layout(Struct, frozen=True, kw_only=True):
    list: int
    event_class: int
    name: int
    flags: int
    size: int
    system: int
    point_name: int
    is_tracepoint: int
    is_own: int


def read_events(memory: Memory, kernel: Kernel) -> frozenset[Name]:
    """Return the names of a running kernel's events; none where its types do not tell."""
    head = kernel.symbols.find("ftrace_events")
    if head is None or kernel.types is None:
        return frozenset()
    try:
        layout = _layout(kernel.types)
    except (UnknownTypeError, FormatError):
        return frozenset()
    return frozenset(_walk(memory, layout, head.addr))


def _layout(types: Types) -> _Layout:
    flags, is_own = types.offset(_CALL, "flags"), types.enumerator(_KPROBE)
    with suppress(UnknownTypeError):
        is_own |= types.enumerator(_FPROBE)
    return _Layout(
        list=types.offset(_CALL, "list"),
        event_class=types.offset(_CALL, "class"),
        name=types.offset(_CALL, "name"),
        flags=flags,
        size=flags + 4,
        system=types.offset(_CLASS, "system"),
        point_name=types.offset(_POINT, "name"),
        is_tracepoint=types.enumerator(_TRACEPOINT),
        is_own=is_own,
    )


def _walk(memory: Memory, layout: _Layout, head: int) -> Iterator[Name]:
    at, seen = _pointer(memory, head), {head}
    while at and at not in seen and len(seen) <= _MAX_EVENTS:
        seen.add(at)
        name = _name(memory, layout, at - layout.list)
        if name is not None:
            yield name
        at = _pointer(memory, at)


def _name(memory: Memory, layout: _Layout, call: int) -> Name | None:
    try:
        data = memory.read(call, layout.size)
        flags = _word(data, layout.flags, 4)
        if flags & layout.is_own:
            return None
        system = _pointer(memory, _word(data, layout.event_class) + layout.system)
        name = _word(data, layout.name)
        if flags & layout.is_tracepoint:
            name = _pointer(memory, name + layout.point_name)
        return _text(memory, system), _text(memory, name)
    except MemoryFault:
        return None


def _word(data: bytes, at: int, size: int = 8) -> int:
    return int.from_bytes(data[at : at + size], "little")


def _pointer(memory: Memory, addr: int) -> int:
    try:
        return _word(memory.read(addr, 8), 0)
    except MemoryFault:
        return 0


def _text(memory: Memory, addr: int) -> str:
    # A name may end shortly before memory that is not there.
    try:
        data = memory.read(addr, _MAX_NAME)
    except MemoryFault:
        data = memory.read(addr, -addr % 4096 or 1)
    return data.split(b"\0")[0].decode(errors="backslashreplace")


def _same(definition: Definition) -> Definition:
    return definition


def first_kernel_error(
    error: DefinitionError,
    kernel: Kernel,
    arch: Arch,
    locate: Locate,
    numbered: Callable[[Definition], Definition] = _same,
) -> DefinitionError:
    """Return what a kernel finds first in a definition that has an error in its text.

    It looks up the place, then all words that stand for parameters, and then variables, types and
    members of what stands before the error, as it reads; of ``f`` and ``t`` the place last.
    """
    prefix = parse_prefix(error.command, registers=arch.registers)
    if prefix is None:
        return error
    try:
        target = find_target(prefix.read, kernel, locate)
        read, with_parameters, with_variable = map(numbered, prefix)
        check_parameters(with_parameters, kernel, arch, target)
        resolve_arguments(read, kernel, arch, target)
        check_variables(with_variable, kernel, arch, target)
    except DefinitionError as first:
        is_place_last = prefix.read.type is not EventType.KPROBE
        if is_place_last and first.code in (Code.BAD_PROBE_ADDR.name, Code.NO_TRACEPOINT.name):
            return error
        for note in getattr(error, "__notes__", ()):
            first.add_note(note)
        return first
    except RefusedError:
        return error
    return error


Names = frozenset[tuple[str, str]]
"""Groups and events."""


class FindSite(Protocol):
    """Tells how an address is probed; a definition is for its errors."""

    def __call__(self, addr: Addr, definition: Definition | None = None) -> Site:
        """Return its site."""
        ...


class Places:
    """Resolves definitions on one kernel; touches nothing.

    Attributes:
        kernel: whose names they use.
        arch: its architecture.
        sites: of its function tracer.
        text: of the kernel.
        open_source: as ``model.source.OpenSource``.
    """

    def __init__(
        self,
        text: Text,
        arch: Arch,
        sites: Sites,
        *,
        events: Callable[[], Names] = frozenset,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Resolve by these.

        Args:
            text: of the kernel.
            arch: its architecture.
            sites: of its function tracer.
            events: returns group and event of what the kernel has itself.
            check: raises RefusedError where nothing can be probed.
        """
        self.kernel = text.kernel
        self.arch = arch
        self.sites = sites
        self.text = text
        self.open_source: OpenSource = no_source
        # What opens it may be set later.
        self._source = SourcePlacer(
            self.kernel, lambda kernel, module="": self.open_source(kernel, module)
        )
        self._events = cache(events)
        self._check = cache(check)

    def expand(self, definition: Definition) -> list[Definition]:
        """Return one definition per function that a glob names; those without a site left out.

        Where the kernel has no ftrace sites at all: those where no probe can be.

        Raises:
            RefusedError: no function is left.
        """
        self._check()
        in_source = self._source.at_lines(definition)
        if in_source is not None:
            return self._probeable(in_source)
        if not definition.place.is_glob:
            return [definition]
        pattern, module = definition.function, definition.place.module
        symbols = self.kernel.symbols
        is_there = [s for s in symbols.glob(pattern) if s.module == (module or s.module)]
        found = [symbol for symbol in is_there if symbol.is_text]
        with_site = self._with_place(found)
        # A name of two functions cannot be probed by name; two names of one function are one.
        unique = {s.addr: s.name for s in with_site if symbols.is_unique(s.name)}
        if not unique:
            without = len(found) - len(with_site)
            why = "without an ftrace site" if len(self.sites.addrs) else "where no probe can be"
            raise RefusedError(
                f"no function that can be probed matches {pattern!r}: {len(found)} match, "
                f"{without} of them {why}, {len(with_site)} with a name that several functions have"
            )
        return [at_function(definition, name) for name in sorted(unique.values())]

    def _probeable(self, found: list[Definition]) -> list[Definition]:
        # Of several places those where no probe can be are left out.
        if len(found) == 1:
            return found
        instructions, placed = self.instructions(), list[Definition]()
        for each in found:
            with suppress(RefusedError):
                addr = ip_of(find_target(each, self.kernel, self.locate), self.locate)
                self._site(addr, Wish(), instructions)
                placed.append(each)
        return placed or found[:1]

    def _with_place(self, found: Sequence[Symbol]) -> list[Symbol]:
        if len(self.sites.addrs):
            have_sites = ftrace.have_sites(found, self.sites, self.arch.site)
            return [each for each, has_site in zip(found, have_sites, strict=True) if has_site]
        instructions, placed = self.instructions(), list[Symbol]()
        for each in found:
            with suppress(RefusedError):
                instructions.site(first(each, self.text, self.arch.patch), Wish())
                placed.append(each)
        return placed

    def resolve(self, definition: Definition, *, event_id: int) -> Resolved:
        """Resolve a definition on one function.

        Raises:
            DefinitionError: it names what this kernel has not, or a type does not fit.
            RefusedError: no probe can be placed there.
        """
        self._check()
        kernel, arch = self.kernel, self.arch
        numbered = self._with_numbers(definition)
        resolved = resolve(numbered, kernel, arch, event_id=event_id, locate=self.locate)
        if definition.type is not EventType.KPROBE:
            resolved = self._as_traced(resolved)
        name = definition.group, definition.event
        # Only others' events are in other groups; reading the kernel's takes a tenth of a second.
        if definition.group not in DEFAULT_GROUPS.values() and name in self._events():
            raise rejection(Code.EVENT_EXIST, command=definition.command, column=0)
        return resolved

    def _with_numbers(self, definition: Definition) -> Definition:
        # The kernel's types know the arguments of few system calls.
        if find_system_call(definition, self.kernel) is None:
            return definition
        name = definition.place.symbol.removeprefix(NAMED)
        found = read_system_call(self.text.open_memory(), self.kernel, name)
        return number_parameters(definition, found.parameters or ())

    def first_kernel_error(self, error: DefinitionError) -> DefinitionError:
        """Return what the kernel finds first in a definition that has an error in its text."""
        return first_kernel_error(error, self.kernel, self.arch, self.locate, self._with_numbers)

    def locate(self, function: Symbol) -> Addr:
        """Return where a probe at a function's entry is."""
        site = ftrace.locate(function, self.sites, self.arch.site)
        return first(function, self.text, self.arch.patch) if site is None else site

    def _as_traced(self, probe: Resolved) -> Resolved:
        ip, function = self._traced(probe.definition, find_function(probe.definition, self.kernel))
        where = function.place(ip)
        layout = replace(probe.layout, ip=ip, where=where, function=function.name)
        return replace(probe, layout=layout)

    def _traced(self, definition: Definition, function: Symbol) -> tuple[Addr, Symbol]:
        # As register_fprobe_ips() has it, the address is that of the function tracer's site.
        if definition.type is EventType.TRACEPOINT:
            stub = self.kernel.symbols.find(f"{_STUB}{definition.place.symbol}")
            function = stub or function
        site = ftrace.site_of(function.addr, self.sites, self.arch.site)
        return self.locate(function) if site is None else site, function

    def ftrace_site(self, addr: Addr) -> Addr | None:
        """Return the ftrace site at an address, or that of the function entered there, or None."""
        if self.sites.find(addr) is not None:
            return addr
        function, info = self.kernel.symbols.at(addr), self.arch.site
        if not info.reports_entry or function is None or function.addr != addr:
            return None
        return ftrace.site_of(addr, self.sites, info)

    def instructions(self) -> Instructions:
        """Return what judges the text as it is now."""
        return Instructions(self.text, self.arch.patch)

    def find_site(
        self, wish: Wish, text: Instructions | None = None, addrs: Sequence[Addr] = ()
    ) -> FindSite:
        """Return what tells how a probe is placed.

        It raises RefusedError where no probe can be; where no instruction begins that is a
        DefinitionError of the definition, if there is one.

        Args:
            wish: of the user and the session.
            text: as it was at one time; None for as it is now.
            addrs: that are asked for next; many are looked at together.
        """
        instructions = self.instructions() if text is None else text
        idle: dict[Addr, Site] = {}
        if len(addrs) >= _MANY and wish.strategy in (None, Strategy.FTRACE):
            # A module's may be init text.
            own = [addr for addr in addrs if self.kernel.has_text(addr)]
            idle = ftrace.idle_sites(own, instructions.memory, self.sites, self.arch.site)

        def find_site(addr: Addr, definition: Definition | None = None) -> Site:
            if definition is not None and definition.type is EventType.TRACEPOINT:
                function = find_function(definition, self.kernel)
                shown, _ = self._traced(definition, function)
                return ftrace.tracepoint_site(addr, shown, self.arch.site)
            try:
                return idle.get(addr) or self._site(addr, wish, instructions)
            except NoBoundaryError as error:
                if definition is None:
                    raise
                raise rejection(
                    Code.BAD_INSN_BNDRY,
                    command=definition.command,
                    column=definition.place.span.start,
                    hint=str(error),
                ) from error

        return find_site

    def _site(self, addr: Addr, wish: Wish, instructions: Instructions) -> Site:
        if self.kernel.symbols.is_fleeting(addr):
            place = place_of(self.kernel.symbols, addr)
            raise RefusedError(
                f"{place} is init text, which its module gives back when it has begun"
            )
        check_text(self.kernel, addr)
        at = self.ftrace_site(addr)
        if at is None or (at != addr and wish.strategy is Strategy.JUMP):
            return instructions.site(addr, wish)
        is_in_use = partial(ftrace.is_in_use, at, instructions.memory, self.sites, self.arch.site)
        if wish.strategy in (None, Strategy.FTRACE):
            try:
                found = ftrace.inspect(at, instructions.memory, self.sites, self.arch.site)
            except RefusedError:
                # Asked only here: of tens of thousands of sites nearly all are idle.
                if not is_in_use():
                    raise
            else:
                return found if at == addr else replace(found, shown=addr)
        if is_in_use():
            return self._after_call(addr, at, wish, instructions)
        place = place_of(self.kernel.symbols, addr)
        raise RefusedError(
            f"{place} is an ftrace site, which the guest's own ftrace may change at any time: "
            f"no {wish.strategy}, only the ftrace strategy"
        )

    def _after_call(self, addr: Addr, at: Addr, wish: Wish, instructions: Instructions) -> Site:
        # A call of ours there would have the guest's ftrace give up when its tracer ends, and go on
        # into code that the guest frees then. Registers and stack are the same after the call.
        place = place_of(self.kernel.symbols, addr)
        if wish.strategy is Strategy.FTRACE:
            raise RefusedError(
                f"{place} is an ftrace site that the guest's own ftrace uses, and may change at "
                "any time: no call of ours there; without --strategy ftrace it is probed after it"
            )
        if ftrace.leads_elsewhere(at, instructions.memory, self.sites):
            raise RefusedError(
                f"{place}: the guest's own ftrace uses its site, and may go on elsewhere "
                "from there (a live patch): what comes after need not run"
            )
        try:
            found = instructions.site(Addr(at + self.arch.site.size), wish)
        except RefusedError as error:
            why = str(error).partition("cannot be probed: ")[2] or str(error)
            raise RefusedError(
                f"{place}: the guest's own ftrace uses its site, and what comes after cannot be "
                f"probed: {why}"
            ) from error
        is_jump = found.strategy is Strategy.JUMP
        why = "the guest's own ftrace uses the site in front of it" if is_jump else found.why
        return replace(found, shown=addr, why=why)

    def exits(self, probe: Resolved) -> Classified | None:
        """Return the ways out of the function that a return probe is on, None for other probes.

        It takes the text as it is now.
        """
        function = self.kernel.symbols.at(probe.addr)
        if probe.definition.kind is not Kind.RETURN or function is None:
            return None
        return Prover(self.text, self.arch.patch).classify(function)

    def is_probeable(self, function: Symbol) -> bool:
        """Whether a function can be probed at its entry."""
        try:
            self._check()
        except RefusedError:
            return False
        return self.has_site(function)

    def has_site(self, function: Symbol) -> bool:
        """Whether a function has an ftrace site."""
        return ftrace.locate(function, self.sites, self.arch.site) is not None


def unchecked(guest: Guest) -> None:
    """Raise nothing: for guests that are known to have all that probing needs."""
    del guest


class Unpatched:
    """A guest's memory, as it was before it was patched. Implements ``ports.Memory``."""

    def __init__(self, memory: Memory, patched: Mapping[Addr, bytes]) -> None:
        """Take back what is there of patches; ``patched`` has the bytes before, by address."""
        self._memory = memory
        self._patched = patched

    def read(self, addr: int, size: int) -> bytes:
        """Return exactly ``size`` bytes, or raise MemoryFault."""
        found = self._memory.read(addr, size)
        if not self._patched:
            return found
        around = range(addr - LONGEST_PATCH, addr + size)
        if len(self._patched) < len(around):
            near = [at for at in tuple(self._patched) if at in around]
        else:
            near = [at for at in around if at in self._patched]
        if not near:
            return found
        code = bytearray(LONGEST_PATCH) + found + bytes(LONGEST_PATCH)
        for at in near:
            old, start = self._patched[Addr(at)], at - addr + LONGEST_PATCH
            code[start : start + len(old)] = old
        return bytes(code[LONGEST_PATCH : LONGEST_PATCH + size])


def places_of(
    guest: Guest,
    check: Callable[[Guest], None] = unchecked,
    patched: Mapping[Addr, bytes] = MappingProxyType({}),
) -> Places:
    """Return the places of a running guest.

    Args:
        guest: whose places.
        check: raises RefusedError where nothing can be probed.
        patched: what was there before at addresses that are patched now.
    """
    sites = ftrace.known_sites(guest.memory, guest.kernel)
    events = partial(read_events, guest.memory, guest.kernel)
    may_probe = partial(check, guest)
    text = text_of(guest, sites, patched)
    places = Places(text, guest.arch, sites, events=events, check=may_probe)
    places.open_source = guest.open_source
    return places


def text_of(
    guest: Guest, sites: Sites, patched: Mapping[Addr, bytes] = MappingProxyType({})
) -> Text:
    """Return the text of a running guest.

    Args:
        guest: whose text.
        sites: of its function tracer.
        patched: what was there before at addresses that are patched now.
    """
    return Text(
        kernel=guest.kernel,
        open_memory=lambda: Unpatched(PageCache(remembering(guest.memory)), patched),
        read_tables=partial(
            read_tables, remembering(guest.memory), guest.kernel, ftrace=sites.addrs.tolist()
        ),
        # Static data and what kmalloc() gives stay where they are.
        probes=GuestProbes(remembering(guest.memory), guest.kernel),
    )
