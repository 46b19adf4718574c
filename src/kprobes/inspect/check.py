"""Statements to verdicts: what would be armed, or why not and what would. Nothing is touched."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from kprobes.arch.arch import Arch
from kprobes.arch.registry import arch
from kprobes.errors import DefinitionError, NotLoadedError, RefusedError, TargetError
from kprobes.guest.guest import Guest
from kprobes.guest.kernel_abi import possible_cpus
from kprobes.guest.places import Places, places_of, unchecked
from kprobes.guest.returns import ReturnPlanner
from kprobes.guest.text import Classified, text_of_image
from kprobes.image.debug_info import own_files
from kprobes.image.file import read_image
from kprobes.lang.append import Definitions
from kprobes.lang.lexer import lines_of
from kprobes.lang.listing import is_of_pattern
from kprobes.lang.parser import parse_statement
from kprobes.model.definition import (
    NO_SYNTHETIC_FIELDS,
    Definition,
    Deletion,
    Kind,
    Statement,
    SyntheticFields,
)
from kprobes.model.kernel import Kernel, Symbol
from kprobes.model.plan import ReturnMethod, Returns, Site, Strategy
from kprobes.model.resolved import Resolved
from kprobes.model.source import SourceInfo
from kprobes.plan import ftrace
from kprobes.plan.cost import SITE_NS, predicted_ns, predicted_pause_s
from kprobes.plan.strategy import Wish, check_alone
from kprobes.resolve.resolve import check_alike
from kprobes.units import Addr

_NEAR = 3
_MAX_NEAR = 64


class Terms(Struct, frozen=True, kw_only=True):
    """What is asked for beside the definitions.

    Attributes:
        strategy: that is forced on every probe, or None.
        return_method: that is forced on every return probe, or None.
        synthetic_fields: fields of every return probe after its own.
        source: the top of the source of a kernel that is in a file, or None.
    """

    strategy: Strategy | None = None
    return_method: ReturnMethod | None = None
    synthetic_fields: SyntheticFields = NO_SYNTHETIC_FIELDS
    source: Path | None = None


NO_TERMS = Terms()


class Placed(Struct, frozen=True, kw_only=True):
    """One probe of a definition, and where it is; in a running kernel, as it is now.

    Attributes:
        site: at its address; None for a return probe that does nothing at the entry.
        returns: how the returns are probed, of a return probe; else None.
        exits: of its function, then.
        declaration: the line that this machine's kernel is given for it; "" in guests.
    """

    probe: Resolved
    site: Site | None
    returns: Returns | None = None
    exits: Classified | None = None
    declaration: str = ""


class CheckResult(Struct, frozen=True, kw_only=True):
    """What becomes of one statement.

    Attributes:
        command: the statement, its words joined by single blanks.
        line: its number in the text.
        placed: the probes that would be armed, one for each function.
        deleted: the definitions that a deletion takes away.
        waits_for: the module that has to be loaded before it can be placed, or "".
        error: why it is refused, or None when it is accepted.
        advice: what would work instead, or "".
        exits: of the function whose return it is about, where that is refused; else None.
        cpus: how many the kernel can have, which its listing of a return probe tells; or None.
    """

    command: str
    line: int
    cpus: int | None = None
    placed: tuple[Placed, ...] = ()
    deleted: tuple[Definition, ...] = ()
    waits_for: str = ""
    error: DefinitionError | RefusedError | None = None
    advice: str = ""
    exits: Classified | None = None

    @property
    def is_accepted(self) -> bool:
        """Whether nothing is wrong with it."""
        return self.error is None


class Cost(Struct, frozen=True, kw_only=True):
    """What a statement's probes would take, by prediction: ``plan.cost``.

    Attributes:
        hit_ns: nanoseconds of a hit that is recorded, of several functions at the dearest.
        sites: how many places would be patched.
    """

    hit_ns: float
    sites: int

    @property
    def pause_s(self) -> float:
        """For how many seconds the guest would stand still."""
        return predicted_pause_s(self.sites)


def cost_of(result: CheckResult, arch: str) -> Cost | None:
    """Return what a statement's probes would take; None where none of ours would be armed.

    Args:
        result: of the statement.
        arch: of the kernel, in its own words.
    """
    placed = [each for each in result.placed if not each.declaration]
    if not placed:
        return None
    sites = [_strategies(each) for each in placed]
    # A call is left by one of the exits.
    dearest = [sorted(exits, key=SITE_NS.__getitem__)[-1:] for _, exits in sites]
    hits = (
        predicted_ns(arch, each.probe, [*entry, *exit_])
        for each, (entry, _), exit_ in zip(placed, sites, dearest, strict=True)
    )
    return Cost(hit_ns=max(hits), sites=sum(len(entry) + len(exits) for entry, exits in sites))


def _strategies(placed: Placed) -> tuple[list[Strategy], list[Strategy]]:
    # At the entry; and at the exits, where these are patched.
    entry = [] if placed.site is None else [placed.site.strategy]
    returns, exits = placed.returns, placed.exits
    if returns is None or exits is None or returns.return_method is ReturnMethod.RETHOOK:
        return entry, []
    return entry, [
        Strategy.JUMP if each.has_jump else Strategy.BREAKPOINT for each in exits.exits.exits
    ]


class CheckBackend(Protocol):
    """Knows one kernel, and how probes are placed there."""

    @property
    def kernel(self) -> Kernel:
        """What it is."""
        ...

    @property
    def arch(self) -> Arch:
        """Its architecture."""
        ...

    @property
    def cpus(self) -> int | None:
        """How many CPUs it can have, or None where that is not known."""
        ...

    def probes(self, definition: Definition) -> list[Resolved]:
        """Return a definition's probes; raises as ``Places.resolve``."""
        ...

    def place(self, probes: Sequence[Resolved]) -> tuple[Placed, ...]:
        """Place the probes of one definition, or raise RefusedError."""
        ...

    def first_kernel_error(self, error: DefinitionError) -> DefinitionError:
        """Return what the kernel finds before an error of the text."""
        ...

    def is_probeable(self, function: Symbol) -> bool:
        """Whether a function can be probed at its entry."""
        ...

    def exits(self, definition: Definition) -> Classified | None:
        """Return the ways out of a return probe's function, or None where they do not matter."""
        ...


class Checker:
    """Judges statements one after the other; what is accepted stays for the next ones."""

    def __init__(self, backend: CheckBackend, terms: Terms = NO_TERMS) -> None:
        self._backend = backend
        self._terms = terms
        self._definitions = Definitions()
        self._first: dict[tuple[str, str], Resolved] = {}
        self._sites: dict[Addr, list[tuple[Definition, Site]]] = {}

    @property
    def arch(self) -> str:
        """The architecture of the kernel, in its own words."""
        return self._backend.arch.name

    def check(self, text: str) -> list[CheckResult]:
        """Return a verdict for each statement of a text, as a file has them."""
        lines = enumerate(text.split("\n"), start=1)
        results = (self._line(number, line) for number, line in lines)
        return [result for result in results if result is not None]

    def _line(self, number: int, line: str) -> CheckResult | None:
        statement: Statement | None = None
        try:
            found = lines_of(line)
            if not found:
                return None
            statement = self._with_synthetic_fields(self._parse(line))
            return self._accepted(statement, number)
        except DefinitionError as error:
            error.__notes__ = []
            advice = error.hint
            return CheckResult(command=error.command, line=number, error=error, advice=advice)
        except RefusedError as error:
            assert isinstance(statement, Definition)
            return CheckResult(
                command=statement.command,
                line=number,
                error=error,
                advice=self._advice(statement),
                exits=self._backend.exits(statement),
            )

    def _parse(self, line: str) -> Statement:
        try:
            return parse_statement(line, registers=self._backend.arch.registers)
        except DefinitionError as error:
            raise self._backend.first_kernel_error(error) from error

    def _with_synthetic_fields(self, statement: Statement) -> Statement:
        if isinstance(statement, Deletion):
            return statement
        return replace(statement, synthetic_fields=self._terms.synthetic_fields)

    def _accepted(self, statement: Statement, number: int) -> CheckResult:
        if isinstance(statement, Deletion):
            gone = tuple(self._definitions.delete(statement).values())
            self._forget(gone)
            cpus = self._backend.cpus
            return CheckResult(command=statement.command, line=number, cpus=cpus, deleted=gone)
        self._check_joined(statement)
        placed, module = self._place(statement)
        self._definitions.append(statement)
        for each in placed:
            if each.site is not None:
                self._sites.setdefault(each.site.addr, []).append((statement, each.site))
            layout = each.probe.layout
            self._first.setdefault((layout.group, layout.event), each.probe)
        return CheckResult(
            command=statement.command,
            line=number,
            cpus=self._backend.cpus,
            placed=placed,
            waits_for=module,
        )

    def _check_joined(self, definition: Definition) -> None:
        try:
            self._definitions.check(definition)
        except DefinitionError as error:
            raise self._backend.first_kernel_error(error) from error

    def _place(self, definition: Definition) -> tuple[tuple[Placed, ...], str]:
        try:
            return self._place_now(definition), ""
        except NotLoadedError as error:
            return (), error.module

    def _place_now(self, definition: Definition) -> tuple[Placed, ...]:
        probes = self._backend.probes(definition)
        for probe in probes:
            first = self._first.get((probe.layout.group, probe.layout.event))
            if first is not None:
                check_alike(first, probe)
        placed = self._backend.place(probes)
        symbols = self._backend.kernel.symbols
        for site in (each.site for each in placed if each.site is not None):
            for _, other in self._sites.get(site.addr, ())[:1]:
                check_alone(symbols, other, site)
        return placed

    def _forget(self, gone: tuple[Definition, ...]) -> None:
        for addr, sites in self._sites.items():
            self._sites[addr] = [each for each in sites if each[0] not in gone]
        for each in gone:
            name = each.group, each.event
            if each.event and name not in self._definitions:
                self._first.pop(name, None)
        # A pattern's functions have events of their own, which no definition names.
        patterns = {each.command for each in gone if not each.event}
        if patterns:
            first = self._first.items()
            self._first = {n: p for n, p in first if p.definition.command not in patterns}

    def _advice(self, definition: Definition) -> str:
        near = self._near(definition)
        return f"can be probed: {', '.join(near)}" if near else ""

    def _near(self, definition: Definition) -> list[str]:
        # The function itself, if it is only the place in it that is wrong; else some that are
        # named like it.
        place, symbols = definition.place, self._backend.kernel.symbols
        addr = place.addr
        owner = symbols.find(place.symbol) if addr is None else symbols.at(addr)
        if owner is not None and self._is_probeable(owner):
            return [f"p {owner.name}"]
        stem = place.symbol.partition(".")[0].strip("_")
        if not stem or place.is_glob:
            return []
        found = [s for s in symbols.glob(f"*{stem}*")[:_MAX_NEAR] if self._is_probeable(s)]
        return sorted({s.name for s in found}, key=lambda name: (len(name), name))[:_NEAR]

    def _is_probeable(self, symbol: Symbol) -> bool:
        is_unique = self._backend.kernel.symbols.is_unique
        return symbol.is_text and is_unique(symbol.name) and self._backend.is_probeable(symbol)


class Expanding(Protocol):
    """What definitions mean on a kernel: ``Places`` of guests, or of the host."""

    def expand(self, definition: Definition) -> list[Definition]:
        """Return one definition per function that a glob names."""
        ...

    def resolve(self, definition: Definition, *, event_id: int) -> Resolved:
        """Resolve a definition on one function."""
        ...


def probes_of(places: Expanding, definition: Definition) -> list[Resolved]:
    """Return a definition's probes, numbered from 1; raises as ``places`` does."""
    singles = enumerate(places.expand(definition), start=1)
    return [places.resolve(single, event_id=n) for n, single in singles]


class _ByPatching:
    # A kernel whose text we patch ourselves, running or in a file.
    def __init__(self, places: Places, terms: Terms, *, cpus: int | None = None) -> None:
        self._places = places
        self.cpus = cpus
        self._terms = terms
        self._find_site = places.find_site(Wish(strategy=terms.strategy))
        self.kernel = places.kernel
        self.arch = places.arch
        self.first_kernel_error = places.first_kernel_error
        self.is_probeable = places.is_probeable

    def probes(self, definition: Definition) -> list[Resolved]:
        return probes_of(self._places, definition)

    def place(self, probes: Sequence[Resolved]) -> tuple[Placed, ...]:
        if probes[0].definition.kind is Kind.RETURN:
            terms = self._terms
            planner = ReturnPlanner(
                self._places, return_method=terms.return_method, strategy=terms.strategy
            )
            return self._place_returns(probes, planner)
        return tuple(
            Placed(probe=probe, site=self._find_site(probe.addr, probe.definition))
            for probe in probes
        )

    def exits(self, definition: Definition) -> Classified | None:
        if definition.kind is not Kind.RETURN or definition.place.is_glob:
            return None
        try:
            return self._places.exits(self._places.resolve(definition, event_id=1))
        except RefusedError:
            return None

    def _place_returns(
        self, probes: Sequence[Resolved], planner: ReturnPlanner
    ) -> tuple[Placed, ...]:
        placed: list[Placed] = []
        refused: list[RefusedError] = []
        for probe in probes:
            try:
                placed.append(self._place_return(probe, planner))
            except RefusedError as error:
                refused.append(error)
        # Of a pattern's functions those are left out.
        if refused and not (placed and is_of_pattern(probes[0].definition)):
            raise refused[0]
        return tuple(placed)

    def _place_return(self, probe: Resolved, planner: ReturnPlanner) -> Placed:
        entry = probe.addr
        returns, roles = planner.plan(entry, [probe])
        if not roles:
            raise RefusedError(f"{probe.layout.function} never returns")
        is_entry = any(addr == entry for addr, _ in roles)
        site = self._find_site(entry, probe.definition) if is_entry else None
        return Placed(probe=probe, site=site, returns=returns, exits=self._places.exits(probe))


def checker_of_guest(
    guest: Guest, terms: Terms = NO_TERMS, *, check: Callable[[Guest], None] = unchecked
) -> Checker:
    """Return a checker of definitions to be armed on these terms in a running guest.

    Args:
        guest: that is only read.
        terms: of arming.
        check: raises RefusedError where nothing can be probed.
    """
    cpus = possible_cpus(guest.memory, guest.kernel)
    return Checker(_ByPatching(places_of(guest, check), terms, cpus=cpus), terms)


def checker_of_image(path: Path, terms: Terms = NO_TERMS) -> Checker:
    """Return a checker of definitions for the kernel in a vmlinux or boot image, as linked.

    Raises:
        TargetError: the file cannot be read, or was built without dynamic ftrace.
        FormatError: it is not a kernel, or damaged.
    """
    image = read_image(path)
    text = text_of_image(image)
    sites = ftrace.sites_in_image(image, text.kernel)
    places = Places(text, arch(text.kernel.arch), sites)
    places.open_source = cache(partial(_open_source, path, terms.source))
    return Checker(_ByPatching(places, terms), terms)


def _open_source(path: Path, tree: Path | None, kernel: Kernel, module: str = "") -> SourceInfo:
    from kprobes.dwarf.source import open_source

    if module:
        raise TargetError(f"no module is loaded in {path}")
    own = own_files(kernel.release, kernel.build_id, path)
    source = open_source(chain([path], own), kernel.arch, kernel.release, kernel.build_id)
    source.tree = tree
    return source
