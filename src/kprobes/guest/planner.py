"""Plans of all that is wanted in a guest, one per site: only of what changes.

A site has reasons: probes at its address, what return probes of its function do there, overrides,
and Python.
What is planned is kept by address; a change looks at the addresses whose reasons it changes, and
at jumps that would cover a new one.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from operator import itemgetter
from types import MappingProxyType
from typing import TypeVar

from msgspec import Struct, field

from kprobes.errors import KprobesError, RefusedError
from kprobes.guest.guest import Guest
from kprobes.guest.places import FindSite, Places, places_of, unchecked
from kprobes.guest.prepare import Resolver, Single, with_options
from kprobes.guest.returns import ReturnPlanner
from kprobes.guest.text import Instructions, has_text
from kprobes.lang.filter import task_filter
from kprobes.lang.listing import is_of_pattern
from kprobes.model.definition import Definition, Kind
from kprobes.model.kernel import place_of
from kprobes.model.options import Options, Wanted
from kprobes.model.override import Override
from kprobes.model.plan import LONGEST_PATCH, Plan, Returning, Returns, Role, Site, Strategy
from kprobes.model.resolved import Resolved
from kprobes.model.upcall import Upcall
from kprobes.plan.strategy import Wish, at_exits, check_alone
from kprobes.ports import Text
from kprobes.units import Addr

_T = TypeVar("_T")
_Placed = tuple[int, Resolved]
"""A probe with its sequence number."""
_Finders = Mapping[Strategy | None, FindSite]
"""By the strategy that is forced."""


class _State(Struct, kw_only=True):
    # What is planned. A change works on a copy: values are never changed in place.
    definitions: dict[int, tuple[Definition, tuple[Single, ...]]] = field(
        default_factory=dict[int, tuple[Definition, tuple[Single, ...]]]
    )
    waiting: dict[int, Single] = field(default_factory=dict[int, Single])
    over_limit: dict[int, Single] = field(default_factory=dict[int, Single])
    may_go: dict[int, Single] = field(default_factory=dict[int, Single])
    at_sites: dict[Addr, tuple[_Placed, ...]] = field(
        default_factory=dict[Addr, tuple[_Placed, ...]]
    )
    at_returns: dict[Addr, tuple[_Placed, ...]] = field(
        default_factory=dict[Addr, tuple[_Placed, ...]]
    )
    upcalls: dict[Addr, tuple[Upcall, ...]] = field(default_factory=dict[Addr, tuple[Upcall, ...]])
    return_upcalls: dict[Addr, tuple[Upcall, ...]] = field(
        default_factory=dict[Addr, tuple[Upcall, ...]]
    )
    overrides: dict[Addr, tuple[Override, ...]] = field(
        default_factory=dict[Addr, tuple[Override, ...]]
    )
    returns: dict[Addr, Returns] = field(default_factory=dict[Addr, Returns])
    places: dict[Addr, tuple[Addr, ...]] = field(default_factory=dict[Addr, tuple[Addr, ...]])
    """By a function's entry: where its return probes do something."""
    returning: dict[Addr, tuple[Returning, ...]] = field(
        default_factory=dict[Addr, tuple[Returning, ...]]
    )
    plans: dict[Addr, Plan] = field(default_factory=dict[Addr, Plan])
    """By the address of the probes, which is not always that of the patch."""
    addrs: dict[Addr, Addr] = field(default_factory=dict[Addr, Addr])
    """By the address of the patch that of the probes."""

    def copy(self) -> "_State":
        names = self.__struct_fields__
        return _State(**{name: dict(getattr(self, name)) for name in names})


class Prepared(Struct, frozen=True, kw_only=True, eq=False):
    """A change of what is armed; nothing has been changed yet.

    Attributes:
        gone: plans of sites that are as they were before, or have another plan now.
        new: plans of sites that get one.
        old_returns: return probes of functions that are gone, or have changed.
        new_returns: what functions have from now on that had none, or others.
        come, ended: event ids of what is recorded from now on, and no more.
        left_out: why functions that patterns match are not probed, or not at their returns.
        errors: what is wrong with what waited for its module, and is there now.
        state: of the planner afterwards.
    """

    gone: tuple[Plan, ...]
    new: tuple[Plan, ...]
    old_returns: tuple[Returns, ...]
    new_returns: tuple[Returns, ...]
    come: tuple[Resolved, ...]
    ended: frozenset[int]
    left_out: tuple[RefusedError, ...]
    errors: tuple[KprobesError, ...]
    state: _State

    @property
    def plans(self) -> Collection[Plan]:
        """All plans that are wanted now."""
        return self.state.plans.values()

    @property
    def waiting(self) -> list[Definition]:
        """What waits for modules that are not loaded."""
        return [single.definition for single in self.state.waiting.values()]

    @property
    def left_functions(self) -> list[Addr]:
        """Functions whose returns are probed no more, by their entries."""
        return [each.entry for each in self.old_returns if each.entry not in self.state.returns]


class Planner:
    """Plans what is wanted in one guest, without changing it.

    Attributes:
        resolver: of definitions.
        watch: what tells of modules, for when something is in one or waits for it; without any
            nothing waits.
    """

    def __init__(
        self,
        guest: Guest,
        check: Callable[[Guest], None] = unchecked,
        patched: Mapping[Addr, bytes] = MappingProxyType({}),
    ) -> None:
        """Plan in a guest.

        Args:
            guest: whose text is planned on.
            check: raises RefusedError where nothing can be probed.
            patched: what was there before at addresses that are patched now.
        """
        self.watch: Sequence[Upcall] = ()
        self._check = check
        self._patched = patched
        self._guest = guest
        self.resolver = Resolver(places_of(guest, check, self._patched))
        self._state = _State()
        self._options = Options()

    @property
    def places(self) -> Places:
        """What resolves definitions, with the modules that were loaded last."""
        return self.resolver.places

    @property
    def plans(self) -> Collection[Plan]:
        """What is armed."""
        return self._state.plans.values()

    @property
    def waiting(self) -> list[Definition]:
        """What waits for modules that are not loaded."""
        return [single.definition for single in self._state.waiting.values()]

    def use(self, guest: Guest) -> None:
        """Plan with the modules that a guest has now."""
        self._guest = guest
        self.resolver.places = places_of(guest, self._check, self._patched)

    def reset(self) -> list[Returns]:
        """Take nothing as armed any more, and return the return probes that were."""
        returns, self._state = list(self._state.returns.values()), _State()
        return returns

    def plan(self, wanted: Wanted, lost: Sequence[Text] = (), *, is_anew: bool = False) -> Prepared:
        """Return what has to change for what is wanted; nothing is changed.

        Args:
            wanted: all of it.
            lost: the memory of a module that is going; what is in it is wanted no more.
            is_anew: whether also what does not change needs other code.

        Raises:
            DefinitionError: a definition names what this kernel has not, or its filter is wrong.
            RefusedError: a place cannot be probed, or is in a module that nobody can wait for.
        """
        is_fresh = _how(wanted.options) != _how(self._options)
        change = _Change(self._guest, self.resolver, self._state, wanted, is_fresh=is_fresh)
        change.drop_gone(lost)
        change.set_definitions(wanted.definitions, may_wait=bool(self.watch))
        change.set_over_limit(wanted.over_limit)
        if not lost:
            change.resolve_waiting()
        change.set_overrides(wanted.overrides, lost)
        change.set_upcalls(wanted, self.watch, lost)
        if is_anew:
            change.plan_all()
        return change.prepared()

    def keep(self, prepared: Prepared, options: Options) -> None:
        """Take a change as made."""
        self._state, self._options = prepared.state, options


def _how(options: Options) -> tuple[object, ...]:
    return options.strategy, options.return_method, options.tasks, options.trigger


class _Change:
    def __init__(
        self, guest: Guest, resolver: Resolver, before: _State, wanted: Wanted, *, is_fresh: bool
    ) -> None:
        self._guest, self._resolver = guest, resolver
        self._before, self._state = before, before.copy()
        self._options = options = wanted.options
        # Whether sites and return methods are chosen anew, by other options than before.
        self._is_fresh = is_fresh
        self._is_anew = False
        tasks = options.tasks
        self._tasks = task_filter(tasks.pids, tasks.comms, tgids=tasks.tgids, follow=tasks.follow)
        self._come: dict[int, Resolved] = {}
        self._ended: set[int] = set()
        self._left_out: list[RefusedError] = []
        self._errors: list[KprobesError] = []
        self._late: set[int] = set()
        # Addresses, and functions by their entries, whose reasons have changed.
        self._dirty: dict[Addr, None] = {}
        self._functions: dict[Addr, None] = {}
        # All of them, so far.
        self._touched: set[Addr] = set()
        if is_fresh:
            for definition, _ in list(self._state.definitions.values()):
                self._drop(definition)
            self._dirty |= dict.fromkeys((*self._state.upcalls, *self._state.overrides))
            self._functions |= dict.fromkeys(self._state.return_upcalls)

    def set_definitions(self, definitions: Sequence[Definition], *, may_wait: bool) -> None:
        """Want these definitions."""
        state = self._state
        keys = set(map(id, definitions))
        for key, (definition, _) in list(state.definitions.items()):
            if key not in keys:
                self._drop(definition)
        for definition in definitions:
            if id(definition) in state.definitions:
                continue
            singles = self._resolver.resolve(
                definition, self._options.checkpoint, may_wait=may_wait
            )
            state.definitions[id(definition)] = definition, singles
            for single in singles:
                self._options.checkpoint()
                self._add(single)

    def set_over_limit(self, event_ids: AbstractSet[int]) -> None:
        """Want these events not armed, as they have passed a limit."""
        state = self._state
        for number in state.over_limit.keys() - event_ids:
            # Its module may have gone and come meanwhile: it is looked up next.
            state.waiting[number] = state.over_limit.pop(number)
        new = event_ids - state.over_limit.keys()
        found = [each for _, some in state.definitions.values() for each in some if new]
        for single in (each for each in found if each.event_id in new):
            self._remove(single)
            state.waiting.pop(single.event_id, None)
            state.over_limit[single.event_id] = single

    def drop_gone(self, lost: Sequence[Text]) -> None:
        """Want nothing any more in modules that have gone, or go, and in what boot has freed."""
        for single in list(self._state.may_go.values()):
            assert single.probe is not None
            if not self._is_there(single.probe, lost, single.module):
                self._remove(single)
                # What does not name its module is gone with it, as in the kernel.
                if single.definition.place.module:
                    self._state.waiting[single.event_id] = single

    def resolve_waiting(self) -> None:
        """Want what has waited for modules that are there now."""
        for single in list(self._state.waiting.values()):
            try:
                self._resolver.identify(single)
                if single.probe is not None:
                    self._late.add(single.event_id)
                    self._add(single)
            except KprobesError as error:
                self._errors.append(error)
                self._state.waiting.pop(single.event_id, None)

    def set_overrides(self, overrides: Sequence[Override], lost: Sequence[Text]) -> None:
        """Want calls skipped by these."""
        table = dict[Addr, tuple[Override, ...]]()
        for override in overrides:
            if self._is_there(override.probe, lost):
                at = override.probe.addr
                table[at] = (*table.get(at, ()), override)
        before = set(self._state.overrides)
        self._dirty |= _replace(self._state.overrides, table)
        # Their returns are probed in another way where calls may be skipped.
        probed = self._state.at_returns.keys() | self._state.return_upcalls.keys()
        self._functions |= dict.fromkeys((before ^ table.keys()) & probed)

    def set_upcalls(self, wanted: Wanted, watch: Sequence[Upcall], lost: Sequence[Text]) -> None:
        """Want Python to do this, and be told of modules where something is in one."""
        state = self._state

        def left(upcalls: Sequence[Upcall]) -> list[Upcall]:
            # What was in a module that is gone is gone with it, as in the kernel.
            return [u for u in upcalls if wanted.is_there(u.addr) and not _is_inside(u.addr, lost)]

        there, at_returns = left(wanted.upcalls), left(wanted.return_upcalls)
        addrs = [*(each.addr for each in (*there, *at_returns)), *state.overrides]
        symbols = map(self._guest.kernel.symbols.at, addrs)
        is_in_module = any(symbol is not None and symbol.module for symbol in symbols)
        if state.waiting or is_in_module or any(each.module for each in state.may_go.values()):
            there += watch
        self._dirty |= _replace(state.upcalls, _by_addr(there))
        self._functions |= _replace(state.return_upcalls, _by_addr(at_returns))

    def _is_there(self, probe: Resolved, lost: Sequence[Text], module: str | None = None) -> bool:
        kernel, at = self._guest.kernel, probe.addr
        symbol = kernel.symbols.at(at)
        if symbol is None or symbol.addr != probe.function or module not in (None, symbol.module):
            return False
        return has_text(kernel, at) and not _is_inside(at, lost)

    def plan_all(self) -> None:
        """Have a new plan for everything."""
        self._dirty |= dict.fromkeys(self._state.plans)
        self._functions |= dict.fromkeys(self._state.returns)
        self._is_anew = True

    def prepared(self) -> Prepared:
        """Return all of it; errors as for ``Planner.plan``."""
        before, state = self._before, self._state
        planner = ReturnPlanner(
            self._resolver.places,
            return_method=self._options.return_method,
            strategy=self._options.strategy,
            overridden=state.overrides,
        )
        while self._functions or self._dirty:
            self._touched |= self._functions.keys()
            self._plan_returns(planner)
            self._touched |= self._dirty.keys()
            self._plan_sites(planner)
        if self._left_out and not state.plans:
            raise self._left_out[0]
        return Prepared(
            gone=self._others(before.plans, state.plans),
            new=self._others(state.plans, before.plans),
            old_returns=self._others(before.returns, state.returns),
            new_returns=self._others(state.returns, before.returns),
            come=tuple(self._come.values()),
            ended=frozenset(self._ended - self._come.keys()),
            left_out=tuple(self._left_out),
            errors=tuple(self._errors),
            state=state,
        )

    def _others(self, some: Mapping[Addr, _T], others: Mapping[Addr, _T]) -> tuple[_T, ...]:
        # Of what was looked at, in the order in which it is there.
        if len(self._touched) > len(some):
            return tuple(each for at, each in some.items() if others.get(at) is not each)
        touched = [(at, some[at]) for at in sorted(self._touched) if at in some]
        return tuple(each for at, each in touched if others.get(at) is not each)

    def _drop(self, definition: Definition) -> None:
        _, singles = self._state.definitions.pop(id(definition))
        for single in singles:
            self._remove(single)
            self._state.waiting.pop(single.event_id, None)
            self._state.over_limit.pop(single.event_id, None)

    def _add(self, single: Single) -> None:
        state, probe = self._state, single.probe
        state.waiting.pop(single.event_id, None)
        if probe is None:
            state.waiting[single.event_id] = single
            return
        found = with_options(probe, self._guest, self._tasks, trigger=self._options.trigger)
        table, dirty = self._table(single)
        at, placed = probe.addr, (single.sequence, found)
        others = table.get(at, ())
        table[at] = tuple(sorted((*others, placed), key=itemgetter(0))) if others else (placed,)
        dirty[at] = None
        self._come[single.event_id] = found
        if single.may_go:
            state.may_go[single.event_id] = single

    def _remove(self, single: Single) -> None:
        probe = single.probe
        if probe is None:
            return
        table, dirty = self._table(single)
        at = probe.addr
        _set(table, at, tuple(each for each in table.get(at, ()) if each[0] != single.sequence))
        dirty[at] = None
        self._state.may_go.pop(single.event_id, None)
        self._come.pop(single.event_id, None)
        self._ended.add(single.event_id)

    def _table(self, single: Single) -> tuple[dict[Addr, tuple[_Placed, ...]], dict[Addr, None]]:
        if single.definition.kind is Kind.RETURN:
            return self._state.at_returns, self._functions
        return self._state.at_sites, self._dirty

    def _plan_returns(self, planner: ReturnPlanner) -> None:
        entries, self._functions = list(self._functions), {}
        for entry in entries:
            self._options.checkpoint()
            self._clear_returns(entry)
            probes = _newest_first(self._state.at_returns.get(entry, ()))
            upcalls = self._state.return_upcalls.get(entry, ())
            if not (probes or upcalls):
                continue
            try:
                before = self._before.returns.get(entry)
                returns, found = planner.plan(
                    entry, probes, upcalls, before, is_fresh=self._is_fresh
                )
            except RefusedError as error:
                if upcalls or not self._leave_out(probes, error):
                    raise
                _set(self._state.at_returns, entry, ())
                continue
            self._state.returns[entry] = returns
            self._state.places[entry] = tuple(dict.fromkeys(addr for addr, _ in found))
            for addr, returning in found:
                others = self._state.returning.get(addr, ())
                self._state.returning[addr] = (*others, returning)
                self._dirty[addr] = None

    def _clear_returns(self, entry: Addr) -> None:
        state = self._state
        state.returns.pop(entry, None)
        for addr in state.places.pop(entry, ()):
            left = tuple(e for e in state.returning[addr] if e.returns.entry != entry)
            _set(state.returning, addr, left)
            self._dirty[addr] = None

    def _plan_sites(self, planner: ReturnPlanner) -> None:
        state, addrs = self._state, list(self._dirty)
        self._dirty = {}
        for addr in addrs:
            if (old := state.plans.pop(addr, None)) is not None:
                del state.addrs[old.site.addr]
        wanted = [addr for addr in addrs if self._is_wanted(addr)]
        # An armed jump gives way to a breakpoint where it would cover a new place.
        covering = {other for addr in wanted if state.plans for other in self._covering(addr)}
        for addr in covering.difference(wanted):
            old = state.plans.pop(addr)
            del state.addrs[old.site.addr]
            wanted.append(addr)
            self._touched.add(addr)
        finders = self._finders(state.plans.keys() | set(wanted), planner.text, wanted)
        for addr in wanted:
            self._options.checkpoint()
            try:
                plan = self._plan(addr, finders, may_stay=addr not in covering)
                if (other := state.addrs.get(plan.site.addr)) is not None:
                    first = state.plans[other].site
                    check_alone(self._guest.kernel.symbols, first, plan.site)
            except RefusedError as error:
                is_fixed = addr in state.upcalls or addr in state.overrides
                if is_fixed or not self._leave_out_at(addr, error):
                    raise
                continue
            state.addrs[plan.site.addr] = addr
            state.plans[addr] = plan

    def _is_wanted(self, addr: Addr) -> bool:
        state = self._state
        is_probed = addr in state.at_sites or addr in state.returning
        return is_probed or addr in state.upcalls or addr in state.overrides

    def _covering(self, addr: Addr) -> Iterator[Addr]:
        for at in range(addr - LONGEST_PATCH, addr):
            plan = self._state.plans.get(Addr(at))
            displaced = plan.site.displaced if plan is not None else None
            if displaced is not None and displaced.addr < addr < displaced.stop:
                yield Addr(at)

    def _finders(
        self, others: AbstractSet[Addr], text: Instructions, wanted: Sequence[Addr]
    ) -> _Finders:
        strategy, before, places = self._options.strategy, self._before, self._resolver.places
        new = [addr for addr in wanted if self._is_fresh or addr not in before.plans]
        # Those that may be many are entries, on which the strategy is forced.
        return {
            each: places.find_site(
                Wish(strategy=each, others=others), text, new if each == strategy else ()
            )
            for each in {strategy, at_exits(strategy), None}
        }

    def _plan(self, addr: Addr, finders: _Finders, *, may_stay: bool) -> Plan:
        state, before = self._state, self._before.plans.get(addr)
        found, returning = state.at_sites.get(addr, ()), state.returning.get(addr, ())
        upcalls = [*state.upcalls.get(addr, ())]
        for each in returning:
            if each.role is Role.RETURN:
                upcalls += each.returns.upcalls
        may_stay = may_stay and not self._is_fresh
        site = before.site if before and may_stay else self._find_site(addr, finders)
        plan = Plan(
            site=site,
            probes=_newest_first(found),
            upcalls=tuple(upcalls),
            returning=tuple(each for each in returning if each.is_compiled),
            overrides=state.overrides.get(addr, ()),
        )
        if plan.upcalls:
            self._check_upcall(plan)
        return before if before and before == plan and not self._is_anew else plan

    def _find_site(self, addr: Addr, finders: _Finders) -> Site:
        state, strategy = self._state, self._options.strategy
        found, returning = state.at_sites.get(addr, ()), state.returning.get(addr, ())
        definition = found[0][1].definition if found else None
        is_recorded = bool(found) or any(each.returns.probes for each in returning)
        is_entry = found or addr in state.at_returns
        # It is forced on definitions, and what Python needs is placed as it can be.
        forced = strategy if is_entry else at_exits(strategy)
        return finders[forced if is_recorded else None](addr, definition)

    def _leave_out_at(self, addr: Addr, error: RefusedError) -> bool:
        # Of patterns, functions that cannot be probed are left out: with all their places.
        state = self._state
        found = [probe for _, probe in state.at_sites.get(addr, ())]
        returns = [each.returns for each in state.returning.get(addr, ())]
        probes = [*found, *(probe for each in returns for probe in each.probes)]
        if not self._leave_out(probes, error):
            return False
        _set(state.at_sites, addr, ())
        for each in returns:
            _set(state.at_returns, each.entry, ())
            self._functions[each.entry] = None
        return True

    def _leave_out(self, probes: Sequence[Resolved], error: RefusedError) -> bool:
        ids = [probe.layout.event_id for probe in probes]
        is_late = bool(ids) and self._late.issuperset(ids)
        if not probes or not (is_late or all(is_of_pattern(p.definition) for p in probes)):
            return False
        (self._errors if is_late else self._left_out).append(error)
        for number in ids:
            self._come.pop(number, None)
        return True

    def _check_upcall(self, plan: Plan) -> None:
        if plan.after and plan.site.shown is not None and plan.site.displaced is not None:
            place = place_of(self._guest.kernel.symbols, plan.site.ip)
            raise RefusedError(
                f"{place} is an ftrace site that the guest's own ftrace uses, and is probed after "
                "it: no handler can be after that instruction"
            )
        if any(each.is_conditional for each in plan.returning):
            place = place_of(self._guest.kernel.symbols, plan.site.addr)
            raise RefusedError(
                f"{place} is a conditional jump into another function, by which a function is left "
                "whose returns are probed: no handler can be there meanwhile"
            )


def _newest_first(placed: Sequence[_Placed]) -> tuple[Resolved, ...]:
    # Every hit runs them in this order: add_new_kprobe() puts the new one first.
    if len(placed) == 1:
        return (placed[0][1],)
    return tuple(probe for _, probe in reversed(placed))


def _set(table: dict[Addr, tuple[_T, ...]], at: Addr, values: tuple[_T, ...]) -> None:
    if values:
        table[at] = values
    else:
        table.pop(at, None)


def _replace(
    table: dict[Addr, tuple[_T, ...]], new: Mapping[Addr, tuple[_T, ...]]
) -> dict[Addr, None]:
    # Return the addresses at which something has changed.
    changed = [addr for addr in table if table[addr] != new.get(addr)]
    changed += [addr for addr in new if addr not in table]
    table.clear()
    table.update(new)
    return dict.fromkeys(changed)


def _by_addr(upcalls: Iterable[Upcall]) -> dict[Addr, tuple[Upcall, ...]]:
    found: dict[Addr, tuple[Upcall, ...]] = {}
    for upcall in upcalls:
        found[upcall.addr] = (*found.get(upcall.addr, ()), upcall)
    return found


def _is_inside(addr: int, ranges: Sequence[Text]) -> bool:
    return any(start <= addr < stop for start, stop in ranges)
