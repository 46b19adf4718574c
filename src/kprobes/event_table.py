"""The events of one session and their state, as the kernel's tracing files have them.

An event is defined, enabled or not, and has a filter and triggers. Events may be changed while
others, or they themselves, are recorded: the driver arms and disarms the difference.
"""

import threading
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from itertools import starmap

from msgspec.structs import replace

from kprobes.collector import without_collector
from kprobes.driver import EventDriver
from kprobes.errors import DefinitionError, RefusedError, UsageError
from kprobes.event_triggers import EventTriggers, check_triggers
from kprobes.histogram import Histogram
from kprobes.lang.append import Definitions, Name
from kprobes.lang.filter import normal
from kprobes.model.definition import Definition, Statement
from kprobes.model.events import Loads
from kprobes.model.hist import KnownFields
from kprobes.model.options import Limits, Options, Wanted
from kprobes.model.trigger import Trigger
from kprobes.resolve.hist import known_fields

_BUSY = "Device or resource busy"
"""strerror(EBUSY): what the kernel answers to the deletion of an event that is enabled."""


class EventTable:
    """The events of a session. Every method may be called by any thread.

    Attributes:
        options: of recordings.
    """

    def __init__(self, driver: EventDriver) -> None:
        """Have no event yet."""
        self.options = Options()
        self._driver = driver
        self._lock = threading.RLock()
        self._definitions = Definitions()
        # Those that are enabled; and those that are recorded then, None for all.
        self._enabled: set[_Event] = set()
        self._triggers = EventTriggers[_Event]()
        self._chosen: set[_Event] | None = None
        # By their ids in what is counted.
        self._over_limit: frozenset[int] = frozenset()
        self._limits = Limits()
        self._is_recording = False

    def __len__(self) -> int:
        """Return how many definitions there are."""
        return len(self._definitions)

    @property
    def definitions(self) -> list[Definition]:
        """All that are defined, oldest first."""
        return list(self._definitions)

    def define(
        self,
        statements: Iterable[Statement],
        *,
        is_enabled: bool,
        filter: str | None = None,
        triggers: Sequence[str] = (),
    ) -> "TraceProbe":
        """Add and delete definitions; if anything is wrong, all stays.

        What joins an event that is there already is enabled, filtered and triggered as that is.

        Args:
            statements: definitions and deletions, read one after the other.
            is_enabled: whether the events of what is added are enabled then.
            filter: of what is added, "" for none; None for that of its event.
            triggers: of what is added, besides those of its event.

        Raises:
            DefinitionError: one is wrong, or names what this kernel has not.
            RefusedError: a function cannot be probed, or what is to be deleted is recorded.
        """
        with self._changing():
            added, deleted = self._changed(statements, filter)
            before, events = dict[int, Definition](), self._events(added)
            try:
                self._filter(added, filter)
                for each in triggers:
                    self._triggers.change(events, each, self._named, partial(self._known, deleted))
                before = self._trigger(added)
                if is_enabled:
                    self._set_enabled(events, is_enabled=True)
                self._apply({*added, *before}, list(deleted.values()))
            except BaseException:
                self._replace(self._numbered(before), before)
                self._take_back(added, deleted, is_new=not self._is_recording)
                raise
            for definition in deleted.values():
                self._driver.forget(definition)
            return TraceProbe(self, added)

    def enable(self, numbers: Collection[int], *, is_enabled: bool) -> None:
        """Enable or disable events; UsageError if one was deleted, else as ``define``."""
        with self._changing():
            self._set_enabled(self._events(self._present(numbers)), is_enabled=is_enabled)
            self._apply(())

    def delete(self, numbers: Collection[int]) -> None:
        """Delete definitions; RefusedError for the last ones of what is recorded: all stays."""
        with self._changing():
            deleted = self._numbered(numbers)
            is_armed = any(map(self._is_recorded, self._events(deleted)))
            self._definitions.undo(deleted, {})
            try:
                self._release(deleted)
                if is_armed:
                    self._apply(())
            except BaseException:
                self._definitions.undo((), deleted)
                raise
            for definition in deleted.values():
                self._driver.forget(definition)

    def set_filter(self, numbers: Collection[int], text: str) -> None:
        """Have another filter for events; "" for none.

        Raises:
            UsageError: one was deleted.
            DefinitionError: it is wrong; then all stays.
        """
        with self._changing():
            events = self._events(self._present(numbers))
            same = [n for event in events for n in self._numbers(event)]
            before, text = self._numbered(same), normal(text)
            changed = {number: replace(each, filter=text) for number, each in before.items()}
            try:
                self._replace(before, changed)
                self._apply(changed)
            except BaseException:
                self._replace(changed, before)
                raise

    def set_trigger(self, numbers: Collection[int], text: str) -> None:
        """Give events a trigger more, or with ``!`` before it take one away.

        Raises:
            UsageError: one was deleted.
            DefinitionError: it is wrong; then all stays.
        """
        with self._changing():
            events = self._events(self._present(numbers))
            self._triggers.change(events, text, self._named, partial(self._known, {}))
            before: dict[int, Definition] = {}
            try:
                before = self._trigger(())
                self._apply(before)
            except BaseException:
                self._replace(self._numbered(before), before)
                raise

    def triggers(self, numbers: Collection[int]) -> list[str]:
        """Return the triggers of events, as the kernel lists them: what is left of their counts."""
        with self._lock:
            return [each.listed(left) for _, each, left in self._triggers_of(numbers)]

    def histograms(self, numbers: Collection[int]) -> list[Histogram]:
        """Return what events' hist triggers have counted since the recording began: copies."""
        with self._lock:
            hists = [
                (_name_of(event), each.shown(left), self._driver.histogram(each.table))
                for event, each, left in self._triggers_of(numbers)
                if each.hist
            ]
        return [replace(e, trigger=h, event=name) for name, h, e in hists if h and e is not None]

    def select(self, pattern: str) -> "TraceProbe":
        """Return the events of a pattern, ``EVENT`` or ``GROUP/EVENT``, or raise UsageError."""
        group, _, event = pattern.replace(":", "/", 1).rpartition("/")
        with self._lock:
            found = [
                number
                for number, each in self._definitions.items()
                if fnmatchcase(each.event, event) and fnmatchcase(each.group, group or "*")
            ]
        if not found:
            raise UsageError(f"no such event: {pattern!r}")
        return TraceProbe(self, found)

    def ids_of(self, probes: "Sequence[TraceProbe]") -> frozenset[int]:
        """Return the numbers of some probes' events in what is counted."""
        with self._lock:
            return self._event_ids([number for probe in probes for number in probe.numbers])

    def begin(self, probes: "Sequence[TraceProbe]" = ()) -> None:
        """Arm what is enabled, of some probes only if any are named; a recording begins.

        Raises:
            UsageError: there is one; it goes on.
            RefusedError, DefinitionError, TargetError: it could not be armed; nothing is.
        """
        with self._changing():
            if self._is_recording:
                # Its end would be the other one's, too.
                raise UsageError(
                    "this kernel is being recorded already: define or enable events to have them "
                    "in that recording"
                )
            chosen = {event for each in probes for event in self._events(each.numbers)}
            self._chosen = chosen if probes else None
            self._is_recording, self._over_limit = True, frozenset()
            self._limits = self.options.limits
            self._apply((), begins=True)

    def end(self) -> None:
        """Have nothing recorded any more; called again, what was not drained until then goes."""
        with self._lock, without_collector():
            self._is_recording, self._chosen = False, None
            self._driver.end()

    def loads(self) -> Loads:
        """Return what hits have taken so far, while limits ask for it."""
        return self._driver.loads()

    def stop_over_limit(self, events: Mapping[int, str]) -> list[str]:
        """Disable single functions' events, until they are enabled again or a recording begins.

        Args:
            events: by their ids in what is counted, what each did to pass a limit.

        Returns:
            That, of those that were still enabled, with their names.
        """
        with self._changing():
            ids = (events.keys() & self._event_ids(self._recorded())) - self._over_limit
            if not ids:
                return []
            self._over_limit |= ids
            # Not in the thread that Ctrl-C is for.
            self._apply((), options=replace(self.options, checkpoint=Options().checkpoint))
            found = self._driver.hits()
            return [
                f"{each.event} ({each.function}) {events[each.event_id]}: it is disabled"
                for each in found
                if each.event_id in ids
            ]

    def is_enabled(self, number: int) -> bool:
        """Whether an event is defined, and enabled; not if all of it has passed a limit."""
        with self._lock:
            is_enabled = any(event in self._enabled for event in self._events([number]))
            return is_enabled and not self._have_passed(self._numbered([number]).values())

    def definition(self, number: int) -> Definition | None:
        """Return what an event is defined as, or None when it was deleted."""
        with self._lock:
            return self._definitions.get(number)

    def describe(self, number: int) -> str:
        """Return an event as a line: its definition, whether it is enabled, and its filter."""
        definition = self.definition(number)
        if definition is None:
            return "(deleted)"
        state = "enabled" if self.is_enabled(number) else "disabled"
        filter_text = f" filter={definition.filter}" if definition.filter else ""
        triggers = "".join(f" trigger={each}" for each in self.triggers([number]))
        name = f"{definition.group}/{definition.event}"
        return f"{name} {state}{filter_text}{triggers}: {definition.command}"

    def counted(self, numbers: Collection[int]) -> tuple[int, int]:
        """Return how many hits of some events became events, and how many were missed."""
        with self._lock:
            ids = self._event_ids(numbers)
        counts = self._driver.counts()
        missed = sum(counts.missed.get(n, 0) + counts.nmissed.get(n, 0) for n in ids)
        return sum(counts.recorded.get(n, 0) for n in ids), missed

    @contextmanager
    def _changing(self) -> Generator[None]:
        with self._lock, without_collector():
            chosen = self._chosen and set(self._chosen)
            before = set(self._enabled), chosen, self._is_recording, self._over_limit
            triggers, self._triggers = self._triggers, self._triggers.copy()
            try:
                yield
            except BaseException:
                self._enabled, self._chosen, self._is_recording, self._over_limit = before
                self._triggers = triggers
                raise

    def _event_ids(self, numbers: Collection[int]) -> frozenset[int]:
        found = self._numbered(numbers).values()
        return frozenset(n for each in found for n in self._driver.event_ids(each))

    def _changed(
        self, statements: Iterable[Statement], filter: str | None
    ) -> tuple[list[int], dict[int, Definition]]:
        made: list[Statement] = []
        last, cuts = self._definitions.last, list[int]()

        def release(gone: dict[int, Definition]) -> None:
            self._release(gone)
            if max(gone) > last:
                cuts.append(len(made))

        try:
            added, deleted = self._definitions.apply(_noted(statements, made), release)
        except (DefinitionError, RefusedError) as error:
            # The kernel is through with a line before it reads the next one, and looks at places
            # and arguments before it compares them with others of the event.
            for cut in [*cuts, len(made)] if made else ():
                self._check(made[:cut], filter)
            if isinstance(error, DefinitionError):
                raise self._driver.first_kernel_error(error) from error
            raise
        if not cuts:
            return added, deleted
        # What the same text deletes again must have been right, too.
        self._take_back(added, deleted, is_new=True)
        for cut in cuts:
            self._check(made[:cut], filter)
        return self._definitions.apply(made, self._release)

    def _check(self, statements: Sequence[Statement], filter: str | None) -> None:
        added, deleted = self._definitions.apply(statements)
        try:
            self._filter(added, filter)
            self._prepare(added, list(deleted.values()))
        finally:
            self._take_back(added, deleted, is_new=True)

    def _apply(
        self,
        new: Collection[int],
        deleted: Sequence[Definition] = (),
        *,
        begins: bool = False,
        options: Options | None = None,
    ) -> None:
        recorded = self._recorded()
        if not self._is_recording or not recorded.keys() >= set(new):
            # What is wrong with others is found without touching the kernel.
            self._prepare(new, deleted)
        if not self._is_recording:
            return
        change = partial(
            replace,
            definitions=list(recorded.values()),
            # What counts hits was watched from the beginning, or never is.
            options=replace(options or self.options, limits=self._limits),
            over_limit=self._over_limit,
            deleted=deleted,
            soft_enables=self._triggers.soft_enables(self._is_hard_enabled),
        )
        self._driver.apply(change, begins=begins)

    def _prepare(self, new: Collection[int], deleted: Sequence[Definition]) -> None:
        # Beside what is recorded, so that only these are planned.
        found = self._recorded() | self._numbered(new)
        definitions = [each for _, each in sorted(found.items())]
        self._driver.prepare(
            Wanted(
                definitions=definitions,
                options=self.options,
                over_limit=self._over_limit,
                deleted=deleted,
            )
        )

    def _recorded(self) -> dict[int, Definition]:
        if not self._is_recording:
            return {}
        numbered = self._definitions.items()
        return {n: each for n, each in numbered if self._is_recorded(_event_of(n, each))}

    def _numbered(self, numbers: Collection[int]) -> dict[int, Definition]:
        found = ((number, self._definitions.get(number)) for number in numbers)
        return {number: each for number, each in found if each is not None}

    def _present(self, numbers: Collection[int]) -> dict[int, Definition]:
        found = self._numbered(numbers)
        if len(found) < len(numbers):
            raise UsageError("the event was deleted")
        return found

    def _named(self, name: str) -> "_Event | None":
        group, _, event = name.partition(":")
        return (group, event) if (group, event) in self._definitions else None

    def _trigger(self, added: Collection[int]) -> dict[int, Definition]:
        # Give definitions what their events have now, and return those of before but for the added.
        numbered = dict(self._definitions.items()) if self._triggers.is_used else {}
        changed = {
            n: self._triggers.given(each, _event_of(n, each)) for n, each in numbered.items()
        }
        before = {n: each for n, each in numbered.items() if changed[n] is not each}
        for number in before:
            check_triggers(changed[number].triggers, self.options)
        self._replace(before, {number: changed[number] for number in before})
        return {number: each for number, each in before.items() if number not in added}

    def _triggers_of(self, numbers: Collection[int]) -> "list[tuple[_Event, Trigger, int | None]]":
        events = dict.fromkeys(starmap(_event_of, self._numbered(numbers).items()))
        found = [(event, each) for event in events for each in self._triggers.of(event)]
        live = self._driver.left([each for _, each in found])
        left = self._triggers.left(live, is_recording=self._is_recording)
        return [(event, each, left.get(each.number)) for event, each in found]

    def _known(self, deleted: Mapping[int, Definition], event: "_Event") -> KnownFields:
        # Those of one event are alike; a pattern's are compared where they count.
        (first, *_) = self._numbered(self._numbers(event)).values()
        layout = self._driver.layout_of(first, list(deleted.values()))
        return known_fields(layout, of_guest=True)

    def _is_hard_enabled(self, event: "_Event") -> bool:
        return event in self._enabled and (self._chosen is None or event in self._chosen)

    def _replace(self, old: dict[int, Definition], new: dict[int, Definition]) -> None:
        for number, definition in new.items():
            self._definitions.replace(number, definition)
            self._driver.replace_definition(old[number], definition)

    def _events(self, numbers: Collection[int]) -> "set[_Event]":
        return {_event_of(number, each) for number, each in self._numbered(numbers).items()}

    def _numbers(self, event: "_Event") -> Collection[int]:
        return [event] if isinstance(event, int) else self._definitions.of_event(event)

    def _set_enabled(self, events: "set[_Event]", *, is_enabled: bool) -> None:
        self._triggers.reset(events)
        if not is_enabled:
            self._enabled -= events
            return
        self._enabled |= events
        if self._over_limit:
            again = [n for event in events for n in self._numbers(event)]
            self._over_limit -= self._event_ids(again)
        if self._chosen is not None:
            self._chosen |= events

    def _filter(self, added: Collection[int], text: str | None) -> None:
        for number, definition in self._numbered(added).items():
            first = next(iter(self._numbers(_event_of(number, definition))))
            same = self._numbered([first])[first].filter if text is None else normal(text)
            self._definitions.replace(number, replace(definition, filter=same))

    def _take_back(
        self, added: Collection[int], deleted: dict[int, Definition], *, is_new: bool
    ) -> None:
        refused = self._numbered(added)
        self._definitions.undo(added, deleted)
        # Nothing of them may be in the way of what comes later.
        for definition in refused.values():
            self._driver.forget(definition, is_new=is_new)

    def _release(self, deleted: dict[int, Definition]) -> None:
        # Of what has been deleted, the events that have no definition left must not be recorded.
        events: dict[_Event, list[Definition]] = {}
        for number, each in deleted.items():
            events.setdefault(_event_of(number, each), []).append(each)
        kept = {each for each in events if isinstance(each, tuple) and each in self._definitions}
        for event in events.keys() - kept:
            definitions = events[event]
            if self._triggers.is_target(event, but=events.keys() - kept):
                name = definitions[-1].event
                raise RefusedError(f"a trigger enables or disables {name}: {_BUSY}; take it away")
            if self._is_recorded(event) and not self._have_passed(definitions):
                name = definitions[-1].event
                raise RefusedError(f"{name} is being recorded: {_BUSY}; disable it first")
            self._enabled.discard(event)
            self._triggers.forget([event])

    def _have_passed(self, definitions: Iterable[Definition]) -> bool:
        # All of them a limit, so that nothing of them is armed.
        if not self._over_limit:
            return False
        ids = {number for each in definitions for number in self._driver.event_ids(each)}
        return bool(ids) and ids <= self._over_limit

    def _is_recorded(self, event: "_Event") -> bool:
        is_chosen = self._chosen is None or event in self._chosen
        is_armed = event in self._enabled or self._triggers.is_soft(event)
        return self._is_recording and is_armed and is_chosen


_Event = Name | int
"""Group and name; of a pattern without a name, whose events have many, the definition's number."""


def _event_of(number: int, definition: Definition) -> _Event:
    return (definition.group, definition.event) if definition.event else number


def _name_of(event: _Event) -> str:
    return "" if isinstance(event, int) else ":".join(event)


def _noted(statements: Iterable[Statement], made: list[Statement]) -> Iterator[Statement]:
    # Who asks for the next one is through with the one before.
    for statement in statements:
        yield statement
        made.append(statement)


class TraceProbe:
    """Some events of a session, as ``Session.probe`` has defined or ``Session.select`` found them.

    ``reads = kernel.probe("p:read vfs_read count")``, and while a recording runs or not
    ``reads.set_filter("count > 4096")``, ``reads.disable()``, ``reads.enable()``.

    Attributes:
        numbers: of their definitions.
    """

    def __init__(self, table: EventTable, numbers: Sequence[int]) -> None:
        self.numbers = tuple(numbers)
        self._table = table

    def __len__(self) -> int:
        """Return how many definitions it has."""
        return len(self.numbers)

    def __repr__(self) -> str:
        """Return what it is: its definitions, and whether they are enabled."""
        if not self.definitions:
            return f"<TraceProbe: {'deleted' if self.numbers else 'no event'}>"
        state = "enabled" if self.is_enabled else "disabled"
        return f"<TraceProbe {'; '.join(self.definitions)}: {state}>"

    @property
    def definitions(self) -> tuple[str, ...]:
        """As text, those that were not deleted."""
        found = map(self._table.definition, self.numbers)
        return tuple(each.command for each in found if each is not None)

    @property
    def is_enabled(self) -> bool:
        """Whether all of them are enabled."""
        return bool(self.numbers) and all(map(self._table.is_enabled, self.numbers))

    @property
    def hits(self) -> int:
        """How many hits became events, since the recording began or in the last one."""
        return self._table.counted(self.numbers)[0]

    @property
    def missed(self) -> int:
        """How many did not, as kprobe_profile counts them: all that was not recorded."""
        return self._table.counted(self.numbers)[1]

    def enable(self) -> None:
        """Enable them: what runs records them from now on; errors as for ``Session.probe``."""
        self._table.enable(self.numbers, is_enabled=True)

    def disable(self) -> None:
        """Disable them: nothing of them is armed any more, and all others go on."""
        self._table.enable(self.numbers, is_enabled=False)

    def set_filter(self, text: str) -> None:
        """Have only hits recorded for which a filter holds; "" for all.

        Raises:
            UsageError: one was deleted.
            DefinitionError: it is wrong; the filter of before stays.
        """
        self._table.set_filter(self.numbers, text)

    @property
    def triggers(self) -> tuple[str, ...]:
        """Their triggers, as the kernel's ``trigger`` files list them."""
        return tuple(self._table.triggers(self.numbers))

    @property
    def histograms(self) -> tuple[Histogram, ...]:
        """What their hist triggers have counted, of this recording or the last one: copies.

        In the order of ``triggers``; none before a recording has begun.
        """
        return tuple(self._table.histograms(self.numbers))

    def trigger(self, text: str) -> None:
        """Have hits do something, ``traceoff:1 if count > 4096``: howto/triggers.md.

        Args:
            text: as written to a ``trigger`` file of the kernel's; ``!traceoff`` takes it away.

        Raises:
            UsageError: one was deleted.
            DefinitionError: it is wrong; the triggers of before stay.
        """
        self._table.set_trigger(self.numbers, text)

    def delete(self) -> None:
        """Delete them for good; RefusedError (EBUSY) for the last of an event that is recorded."""
        self._table.delete(self.numbers)
