"""Definitions to plans for one guest: every site as it is now, and its probes.

Filters as text to filters of one guest's probes: it knows its CPUs and functions.

Commands that are followed: a mark in their task, which fork copies to all that descends.

    struct task_struct { ... pid_t pid; ... u64 parent_exec_id; u64 self_exec_id; ... };

copy_process() copies the struct whole, setup_new_exec() adds one to ``self_exec_id``, and only
CLONE_PARENT's choice of a signal compares it, with a copy of itself. So a task that waits just
before its exec gets FOLLOWED - 1: nothing that it did until then counts.

Return probes to what is done at which address of their functions.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from types import MappingProxyType

from kprobes.drain import nothing
from kprobes.errors import KprobesError, NotLoadedError, RefusedError, TargetError
from kprobes.guest.guest import Guest
from kprobes.guest.kernel_abi import per_cpu_bases, task_abi
from kprobes.guest.places import FindSite, Places, places_of, unchecked
from kprobes.guest.stacks import each_task
from kprobes.guest.text import Instructions, Prover
from kprobes.lang.filter import FOLLOWED, parse_filter
from kprobes.lang.filter_value import Known
from kprobes.lang.listing import is_of_pattern
from kprobes.model.definition import Definition, Kind
from kprobes.model.filter import Filter, every
from kprobes.model.kernel import Symbol, place_of, span_of
from kprobes.model.override import Override
from kprobes.model.plan import Exits, Plan, Returning, ReturnMethod, Role, Strategy
from kprobes.model.resolved import Resolved
from kprobes.model.upcall import Upcall
from kprobes.plan.strategy import (
    Wish,
    at_exits,
    check_alone,
    choose_return_method,
    forced_return_method,
    make_returns,
    roles,
)
from kprobes.resolve.resolve import check_alike, filter_fields
from kprobes.units import Addr


def with_filter(probe: Resolved, guest: Guest, tasks: Filter | None) -> Resolved:
    """Give a probe the filter that its definition has.

    Args:
        probe: without one.
        guest: whose probe it is.
        tasks: what a hit must pass before that.

    Raises:
        DefinitionError: the filter is wrong, or names what the event has not.
    """
    text = probe.definition.filter
    own = parse_filter(text, _known(probe, guest)) if text else None
    chosen = every([each for each in (tasks, own) if each is not None])
    return replace(probe, filter=chosen) if chosen is not None else probe


def _known(probe: Resolved, guest: Guest) -> Known:
    function = partial(span_of, guest.kernel.symbols)
    cpus = len(per_cpu_bases(guest.memory, guest.kernel))
    return Known(fields=filter_fields(probe, of_guest=True), cpus=cpus, function=function)


def follow(guest: Guest, pid: int) -> None:
    """Have a task that waits to exec followed from its exec on, with all that descends from it.

    Raises:
        TargetError: there is no such task any more.
    """
    abi, memory = task_abi(guest.kernel), guest.memory
    with guest.stub.paused():
        for task in each_task(memory, guest.kernel):
            if int.from_bytes(memory.read(task + abi.pid, 4), "little") == pid:
                memory.set_u64(task + abi.exec_id, FOLLOWED - 1)
                return
    raise TargetError(f"the command, process {pid} of the guest, ended before it began")


Roles = dict[Addr, list[Returning]]
"""What return probes do, by address."""


class ReturnPlanner:
    """Decides how returns are probed, by the text at one time.

    Attributes:
        text: as it was then.
        left_out: why functions of patterns, whose returns cannot be probed, are left out.
    """

    def __init__(
        self,
        places: Places,
        *,
        return_method: ReturnMethod | None,
        strategy: Strategy | None,
        overridden: Set[Addr] = frozenset(),
    ) -> None:
        """Plan so; ``return_method`` and ``strategy`` are forced unless they are None.

        Args:
            places: of the guest.
            return_method: as forced.
            strategy: likewise.
            overridden: entries of functions whose calls may be skipped.
        """
        self.text = places.instructions()
        self.left_out: list[RefusedError] = []
        self._places = places
        self._return_method = forced_return_method(return_method, strategy)
        self._strategy = strategy
        self._overridden = overridden

    def plan(
        self,
        by_entry: Mapping[Addr, Sequence[Resolved]],
        upcalls_at: Mapping[Addr, Sequence[Upcall]] = MappingProxyType({}),
        checkpoint: Callable[[], None] = nothing,
    ) -> Roles:
        """Return what is done where for the return probes of some functions.

        Args:
            by_entry: probes by the address of their function's probe, newest first.
            upcalls_at: what Python does at returns, likewise.
            checkpoint: called for every function; what it raises ends the planning.

        Raises:
            RefusedError: the returns of a function cannot be probed, or not as it is forced,
                and it was named, or it is the only one.
        """
        found: Roles = {}
        self.left_out = []
        for entry in dict.fromkeys((*by_entry, *upcalls_at)):
            checkpoint()
            probes, upcalls = by_entry.get(entry, ()), upcalls_at.get(entry, ())
            try:
                function = list(self._function(entry, probes, upcalls))
            except RefusedError as error:
                if upcalls or not all(is_of_pattern(probe.definition) for probe in probes):
                    raise
                self.left_out.append(error)
                continue
            for addr, returning in function:
                found.setdefault(addr, []).append(returning)
        if self.left_out and not found:
            raise self.left_out[0]
        return found

    def _function(
        self, entry: Addr, probes: Sequence[Resolved], upcalls: Sequence[Upcall]
    ) -> Iterator[tuple[Addr, Returning]]:
        function = self._places.kernel.symbols.at(probes[0].function if probes else entry)
        if function is None:
            raise RefusedError(f"{entry:#x}: no function is known there")
        exits = self._prover.classify(function).exits
        name = probes[0].layout.function if probes else function.name
        return_method = choose_return_method(name, exits, self._wish(entry, name))
        if (
            return_method is not ReturnMethod.RETHOOK
            and (why := self._in_the_way(exits)) is not None
        ):
            if self._return_method is not None:
                raise RefusedError(f"{name}: not by {self._return_method}: {why}")
            return_method = ReturnMethod.RETHOOK
        yield from roles(make_returns(entry, return_method, probes, upcalls), exits)

    def _wish(self, entry: Addr, name: str) -> ReturnMethod | None:
        # A call that is skipped comes to no return instruction; its return is the override's value.
        wish = self._return_method
        if entry not in self._overridden:
            return wish
        if wish not in (None, ReturnMethod.RETHOOK):
            raise RefusedError(
                f"{name}: not by {wish}: its calls may be skipped, and come to no return "
                f"instruction then; {ReturnMethod.RETHOOK} works"
            )
        return ReturnMethod.RETHOOK

    @cached_property
    def _prover(self) -> Prover:
        # It reads tables that probes at entries do not need.
        return Prover(self._places.text, self._places.arch.patch)

    def _in_the_way(self, exits: Exits) -> str | None:
        others = {exit_.addr for exit_ in exits.exits}
        wish = Wish(strategy=at_exits(self._strategy), others=others)
        find_site = self._places.find_site(wish, self.text)
        return next(
            (why for addr in others if (why := _refusal(find_site, addr)) is not None), None
        )


def _refusal(find_site: FindSite, addr: Addr) -> str | None:
    try:
        find_site(addr)
    except RefusedError as error:
        return str(error)
    return None


_MAX_EVENTS = (1 << 16) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What Python does.

    Attributes:
        at_sites: before or after single instructions.
        at_returns: at every return of a function, by the address of its entry.
        watch: what tells of modules, for when probes are in one or wait for it; without any
            nothing waits.
    """

    at_sites: Sequence[Upcall] = ()
    at_returns: Sequence[Upcall] = ()
    watch: Sequence[Upcall] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is to be armed.

    Attributes:
        definitions: all that share a session.
        tasks: what every hit must pass before its event's own filter.
        strategy: for all definitions; the cheapest that is safe for each when it is None.
        return_method: for all return probes; the cheapest that is proven for each when it is None.
        asked: what Python does, after the probes of the same site.
        overrides: what skips calls, after the probes of the same site and before Python; those of
            one function in the order in which they are asked.
    """

    definitions: Sequence[Definition] = ()
    tasks: Filter | None = None
    strategy: Strategy | None = None
    return_method: ReturnMethod | None = None
    asked: Asked = Asked()
    overrides: Sequence[Override] = ()


@dataclass(slots=True, kw_only=True)
class _Probes:
    # By address, oldest first; of return probes by that of their function's entry.
    by_site: dict[Addr, list[Resolved]] = field(default_factory=dict[Addr, list[Resolved]])
    by_return: dict[Addr, list[Resolved]] = field(default_factory=dict[Addr, list[Resolved]])

    def one_by_one(self) -> "Iterator[_Probes]":
        for addr, found in self.by_site.items():
            yield _Probes(by_site={addr: found})
        for addr, found in self.by_return.items():
            yield _Probes(by_return={addr: found})


@dataclass(slots=True, kw_only=True)
class _LeftOut:
    # Why functions are not probed, by the address of their entry's probe.
    sites: dict[Addr, RefusedError] = field(default_factory=dict[Addr, RefusedError])
    returns: dict[Addr, RefusedError] = field(default_factory=dict[Addr, RefusedError])

    def __len__(self) -> int:
        return len(self.sites) + len(self.returns)

    def errors(self) -> list[RefusedError]:
        return [*self.sites.values(), *self.returns.values()]

    def take(
        self,
        addr: Addr,
        found: Sequence[Resolved],
        returning: Sequence[Returning],
        error: RefusedError,
    ) -> bool:
        """Leave out whose probes need a place that cannot be patched; not what was named."""
        probes = [*found, *(probe for each in returning for probe in each.returns.probes)]
        if not probes or not all(is_of_pattern(probe.definition) for probe in probes):
            return False
        self.sites |= {addr: error} if found else {}
        self.returns |= {each.returns.entry: error for each in returning}
        return True

    def rest(self, probes: _Probes) -> _Probes:
        if not self:
            return probes
        return _Probes(
            by_site={a: p for a, p in probes.by_site.items() if a not in self.sites},
            by_return={a: p for a, p in probes.by_return.items() if a not in self.returns},
        )


class Preparer:
    """Resolves and plans against one guest, without changing it.

    Attributes:
        checkpoint: called for every probe and site; what it raises ends the planning.
        places: what resolves definitions.
        waiting: definitions in modules that are not loaded, by event id.
        left_out: why functions that patterns match are not probed, or not at their returns.
    """

    def __init__(self, guest: Guest, check: Callable[[Guest], None] = unchecked) -> None:
        """Resolve in a guest; ``check`` raises RefusedError where nothing can be probed."""
        self.waiting: dict[int, Definition] = {}
        self.left_out: Sequence[RefusedError] = ()
        self.checkpoint: Callable[[], None] = nothing
        self._guest = guest
        self.places = places_of(guest, check)
        self._wanted = Wanted()
        self._is_resolved = False
        self._probes = _Probes()
        self._by_event: dict[tuple[str, str], Resolved] = {}
        self._singles: dict[int, Definition] = {}

    def prepare(self, wanted: Wanted) -> list[Plan]:
        """Return one plan per site, in the order in which definitions and upcalls name them.

        Of the probes on one site the newest comes first, as in the kernel.

        Raises:
            DefinitionError: a definition names what this kernel has not, or its filter is wrong.
            RefusedError: a place cannot be probed, or is in a module that nobody can wait for.
        """
        before, self._wanted = self._wanted, wanted
        is_same = (before.definitions, before.tasks) == (wanted.definitions, wanted.tasks)
        if not is_same or not self._is_resolved:
            self._is_resolved = False
            self._resolve_all()
            self._is_resolved = True
        # What a site holds may have changed since the last time; what a name is has not.
        is_watched = self.waiting or self._is_in_module()
        asked = wanted.asked if is_watched else replace(wanted.asked, watch=())
        return self._plans(self._probes, asked, wanted.overrides)

    def late(self, guest: Guest) -> tuple[list[Plan], list[KprobesError]]:
        """Return plans for what waited and can be placed now, and what is wrong with the rest.

        Args:
            guest: the same, with the modules that it has now.
        """
        self._guest, self.places = guest, places_of(guest)
        # The next recording begins with what is loaded then.
        self._is_resolved = False
        waiting, self.waiting = self.waiting, {}
        probes, errors = _Probes(), list[KprobesError]()
        for event_id, single in waiting.items():
            try:
                self._resolve(event_id, single, probes)
            except KprobesError as error:
                errors.append(error)
        plans: list[Plan] = []
        for some in probes.one_by_one():
            try:
                plans += self._plans(some, Asked())
            except KprobesError as error:
                errors.append(error)
        return plans, errors

    def wait_again(self, plans: Iterable[Plan]) -> None:
        """Have the probes of some plans wait, if they name the module that is gone."""
        self._is_resolved = False
        ids = [probe.layout.event_id for plan in plans for probe in plan.recorded]
        self.waiting |= {n: self._singles[n] for n in ids if self._singles[n].place.module}

    def locate(self, function: Symbol) -> Addr:
        """Return where a probe at a function's entry is."""
        return self.places.locate(function)

    def _is_in_module(self) -> bool:
        probes, asked = self._probes, self._wanted.asked
        addrs = [
            *probes.by_site,
            *probes.by_return,
            *(upcall.addr for upcall in (*asked.at_sites, *asked.at_returns)),
            *(override.probe.layout.ip for override in self._wanted.overrides),
        ]
        symbols = (self._guest.kernel.symbols.at(addr) for addr in addrs)
        return any(symbol is not None and symbol.module for symbol in symbols)

    def _resolve_all(self) -> None:
        expand, definitions = self.places.expand, self._wanted.definitions
        singles = [single for definition in definitions for single in expand(definition)]
        if len(singles) > _MAX_EVENTS:
            raise RefusedError(f"{len(singles)} probes are too many: at most {_MAX_EVENTS}")
        self._singles, self._by_event = dict(enumerate(singles, 1)), {}
        self._probes, self.waiting = _Probes(), {}
        for event_id, single in self._singles.items():
            self.checkpoint()
            self._resolve(event_id, single, self._probes)

    def _resolve(self, event_id: int, single: Definition, probes: _Probes) -> None:
        try:
            probe = self.places.resolve(single, event_id=event_id)
        except NotLoadedError:
            if not self._wanted.asked.watch:
                raise
            self.waiting[event_id] = single
            return
        first = self._by_event.setdefault((single.group, single.event), probe)
        # A pattern's functions may differ: each has a layout of its own.
        if first.definition.command != single.command:
            check_alike(first, probe)
        found = with_filter(probe, self._guest, self._wanted.tasks)
        is_return = single.kind is Kind.RETURN
        group = probes.by_return if is_return else probes.by_site
        group.setdefault(probe.layout.ip, []).append(found)

    def _plans(
        self, probes: _Probes, asked: Asked, overrides: Sequence[Override] = ()
    ) -> list[Plan]:
        # Of patterns, functions that cannot be probed are left out: with all their places.
        left = _LeftOut()
        while True:
            known = len(left)
            plans = list(self._planned(left.rest(probes), (asked, overrides), left))
            if len(left) == known:
                break
        if left and not plans:
            raise left.errors()[0]
        self.left_out = [*self.left_out, *left.errors()]
        return plans

    def _planned(
        self, probes: _Probes, beside: tuple[Asked, Sequence[Override]], left: _LeftOut
    ) -> Iterator[Plan]:
        wanted, (asked, overrides) = self._wanted, beside
        planner = ReturnPlanner(
            self.places,
            return_method=wanted.return_method,
            strategy=wanted.strategy,
            overridden={override.probe.layout.ip for override in wanted.overrides},
        )
        # Every hit runs them in this order: add_new_kprobe() puts the new one first.
        returns = {addr: found[::-1] for addr, found in probes.by_return.items()}
        roles = planner.plan(returns, _by_addr(asked.at_returns), self.checkpoint)
        self.left_out = planner.left_out
        upcalls_at = _by_addr([*asked.at_sites, *asked.watch])
        for addr, upcalls in _at_exits(roles):
            upcalls_at.setdefault(addr, []).extend(upcalls)
        overrides_at = _by_entry(overrides)
        others = {*self._probes.by_site, *probes.by_site, *roles, *upcalls_at, *overrides_at}
        at_entry, at_exit, freely = self._finders(others, planner.text)
        patched: dict[Addr, Plan] = {}
        for addr in dict.fromkeys((*probes.by_site, *roles, *upcalls_at, *overrides_at)):
            self.checkpoint()
            found, returning = probes.by_site.get(addr, ()), roles.get(addr, ())
            definition = found[0].definition if found else None
            is_recorded = bool(found) or any(each.returns.probes for each in returning)
            is_entry = found or addr in returns
            find_site = (at_entry if is_entry else at_exit) if is_recorded else freely
            try:
                plan = Plan(
                    site=find_site(addr, definition),
                    probes=tuple(reversed(found)),
                    upcalls=tuple(upcalls_at.get(addr, ())),
                    returning=tuple(each for each in returning if each.is_compiled),
                    overrides=tuple(overrides_at.get(addr, ())),
                )
                self._check_upcall(plan)
                self._check_alone(plan, patched)
            except RefusedError as error:
                is_fixed = addr in upcalls_at or addr in overrides_at
                if is_fixed or not left.take(addr, found, returning, error):
                    raise
                continue
            yield plan

    def _finders(self, others: Set[Addr], text: Instructions) -> Iterator[FindSite]:
        # At entries, at exits; and freely: a strategy is forced on definitions, and what Python
        # needs is placed as it can be.
        strategy = self._wanted.strategy
        for each in (strategy, at_exits(strategy), None):
            yield self.places.find_site(Wish(strategy=each, others=others), text)

    def _check_alone(self, plan: Plan, patched: dict[Addr, Plan]) -> None:
        other = patched.setdefault(plan.site.addr, plan)
        check_alone(self._guest.kernel.symbols, other.site, plan.site)

    def _check_upcall(self, plan: Plan) -> None:
        if plan.after and plan.site.shown is not None and plan.site.displaced is not None:
            place = place_of(self._guest.kernel.symbols, plan.site.ip)
            raise RefusedError(
                f"{place} is an ftrace site that the guest's own ftrace uses, and is probed after "
                "it: no handler can be after that instruction"
            )
        if plan.upcalls and any(each.is_conditional for each in plan.returning):
            symbol = self._guest.kernel.symbols.at(plan.site.addr)
            where = symbol.place(plan.site.addr) if symbol is not None else f"{plan.site.addr:#x}"
            raise RefusedError(
                f"{where} is a conditional jump into another function, by which a function is left "
                "whose returns are probed: no handler can be there meanwhile"
            )


def _by_addr(upcalls: Iterable[Upcall]) -> dict[Addr, list[Upcall]]:
    found: dict[Addr, list[Upcall]] = {}
    for upcall in upcalls:
        found.setdefault(upcall.addr, []).append(upcall)
    return found


def _by_entry(overrides: Iterable[Override]) -> dict[Addr, list[Override]]:
    found: dict[Addr, list[Override]] = {}
    for override in overrides:
        found.setdefault(override.probe.layout.ip, []).append(override)
    return found


def _at_exits(roles: Roles) -> Iterator[tuple[Addr, Sequence[Upcall]]]:
    for addr, found in roles.items():
        for each in found:
            if each.role is Role.RETURN and each.returns.upcalls:
                yield addr, each.returns.upcalls
