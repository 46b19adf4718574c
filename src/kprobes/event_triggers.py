"""The triggers of a session's events, and which events are in soft mode."""

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from itertools import count, cycle
from typing import Generic, TypeVar

from msgspec.structs import replace

from kprobes.errors import DefinitionError, UsageError
from kprobes.lang.hist import parse_hist
from kprobes.lang.trigger import TriggerChange, parse_trigger
from kprobes.model.codes import HistCode, TriggerCode, hist_error, trigger_error
from kprobes.model.definition import (
    DURATION,
    STACKTRACE,
    USER_STACKTRACE,
    Definition,
    Statement,
    SyntheticFields,
)
from kprobes.model.hist import STACK, USER_STACK, HistTrigger, KnownFields
from kprobes.model.options import Options
from kprobes.model.trigger import MOST, OF_HISTS, OF_TARGETS, Command, SoftEnable, Trigger

_Event = TypeVar("_Event", bound=Hashable)


class EventTriggers(Generic[_Event]):
    """What triggers events have, each kind once, and the numbers of their words in a guest.

    An event that has triggers, or that one enables or disables, is in the kernel's soft mode: it is
    armed whether it is enabled or not, and a word in the guest says whether it is recorded.
    """

    def __init__(self) -> None:
        self._triggers: dict[_Event, tuple[Trigger, ...]] = {}
        self._soft_enables: dict[_Event, int] = {}
        # Whether each hist trigger counts, and how often that was said, by the number of its word.
        self._hists: dict[int, SoftEnable] = {}
        self._tables = count(1)
        # One that was free for long: what is left of a trigger is asked for by its number, and a
        # call in progress may still come to code that has it.
        self._numbers = cycle(range(1, MOST))
        # How often each event in soft mode was enabled or disabled by hand, which undoes what
        # triggers have done.
        self._resets: dict[_Event, int] = {}

    @property
    def is_used(self) -> bool:
        """Whether any event has, or had, triggers."""
        return bool(self._soft_enables)

    def copy(self) -> "EventTriggers[_Event]":
        """Return the same, to be changed."""
        copied = EventTriggers[_Event]()
        copied._triggers, copied._soft_enables = dict(self._triggers), dict(self._soft_enables)
        copied._resets, copied._hists = dict(self._resets), dict(self._hists)
        # A table that was given up is nobody else's: a hit on its way may still count in it.
        copied._tables, copied._numbers = self._tables, self._numbers
        return copied

    def change(
        self,
        events: Collection[_Event],
        text: str,
        find: Callable[[str], _Event | None],
        known: Callable[[_Event], KnownFields],
    ) -> None:
        """Add a trigger to events, or take one away.

        Args:
            events: of each a trigger of its own.
            text: as written to a ``trigger`` file.
            find: returns the event of a name, ``GROUP:EVENT``.
            known: returns what a hist trigger of an event may name.

        Raises:
            DefinitionError: it is wrong, or there is no such event, or one of its kind is there.
        """
        found = parse_trigger(text)
        if found.trigger.command is Command.HIST:
            for event in events:
                self._change_hist(event, found, known(event))
            return
        target = find(found.trigger.target) if found.trigger.command in OF_TARGETS else None
        if found.trigger.command in OF_TARGETS and target is None:
            hint = "define it first; events that a pattern names are found by a name of their own"
            raise _error(TriggerCode.NO_EVENT, text, found.trigger.target, hint)
        for event in events:
            self._change(event, found, text, target)

    def _change(
        self, event: _Event, change: TriggerChange, text: str, target: _Event | None
    ) -> None:
        before, new = self._triggers.get(event, ()), change.trigger
        others = tuple(each for each in before if each.kind != new.kind)
        if change.is_removal:
            self._set(event, others)
            return
        if len(others) < len(before):
            hint = f"take it away first: !{new.command}"
            raise _error(TriggerCode.EXISTS, text, new.command, hint)
        number = _free(self._numbers, {each.number for each in self._all}, text)
        soft_enable = 0 if target is None else self._soft_enable_of(target, text)
        self._soft_enable_of(event, text)
        # The newest first, as the kernel lists them.
        self._set(event, (replace(new, number=number, soft_enable=soft_enable), *others))

    def _change_hist(self, event: _Event, change: TriggerChange, known: KnownFields) -> None:
        # hist_register_trigger() in kernel/trace/trace_events_hist.c.
        text = change.trigger.text
        hist, before = parse_hist(text, known, may_be_there=True), self._triggers.get(event, ())
        new = replace(change.trigger, hist=hist, filter=hist.filter)
        same = next((each for each in before if each.kind == new.kind), None)
        if change.is_removal:
            self._set(event, tuple(each for each in before if each is not same))
        elif same is None:
            # Without one ``cont`` and ``clear`` say nothing.
            parse_hist(text, known)
            self._add_hist(event, new, hist)
        elif hist.is_paused or hist.is_continued:
            _, resets = self._hists[same.soft_enable]
            self._hists[same.soft_enable] = not hist.is_paused, resets + 1
        elif hist.is_cleared:
            self._clear(same)
        else:
            raise hist_error(HistCode.TRIGGER_EEXIST, text=f"hist:{text}", token="")

    def _add_hist(self, event: _Event, new: Trigger, hist: HistTrigger) -> None:
        # With a name it counts in the table of the first one that has it, whatever its own size.
        pairs = ((each.table, each.hist) for each in self._all if each.hist is not None)
        named = (pair for pair in pairs if hist.name and pair[1].name == hist.name)
        table, first = next(named, (0, hist))
        text = new.text
        if first.counted != hist.counted:
            raise hist_error(HistCode.NAMED_MISMATCH, text=f"hist:{text}", token=hist.name)
        others = (each.hist.variables for each in self.of(event) if each.hist is not None)
        known = {each.name for variables in others for each in variables}
        for each in hist.variables:
            if each.name in known:
                raise hist_error(HistCode.DUPLICATE_VAR, text=f"hist:{text}", token=each.name)
        word = _free(range(1, MOST), self._words, text)
        self._hists[word] = not hist.is_paused, 0
        self._soft_enable_of(event, text)
        added = replace(
            new,
            number=_free(self._numbers, {each.number for each in self._all}, text),
            soft_enable=word,
            hist=replace(hist, size=first.size),
            table=table or next(self._tables),
        )
        # After all others: hist_register_trigger() adds to the other end.
        self._set(event, (*self.of(event), added))

    def _clear(self, trigger: Trigger) -> None:
        # All that share the table begin a new one: the code that a hit is in counts in the old.
        table = next(self._tables)
        for event, triggers in self._triggers.items():
            self._triggers[event] = tuple(
                replace(each, table=table) if each.table == trigger.table else each
                for each in triggers
            )

    @property
    def _all(self) -> list[Trigger]:
        return [each for triggers in self._triggers.values() for each in triggers]

    @property
    def _words(self) -> set[int]:
        return {*self._soft_enables.values(), *self._hists}

    def _set(self, event: _Event, triggers: tuple[Trigger, ...]) -> None:
        self._triggers.pop(event, None)
        if triggers:
            self._triggers[event] = triggers
        self._forget_hists()

    def _forget_hists(self) -> None:
        words = {each.soft_enable for each in self._all if each.hist is not None}
        self._hists = {word: each for word, each in self._hists.items() if word in words}

    def _soft_enable_of(self, event: _Event, text: str) -> int:
        if event not in self._soft_enables:
            self._soft_enables[event] = _free(range(1, MOST), self._words, text)
        return self._soft_enables[event]

    def of(self, event: _Event) -> tuple[Trigger, ...]:
        """Return an event's triggers."""
        return self._triggers.get(event, ())

    def left(self, live: Mapping[int, int], *, is_recording: bool) -> Mapping[int, int]:
        """Return what is left of counts, and whether hist triggers count, by triggers' numbers.

        Args:
            live: what the guest says of it, of this recording or of the last one.
            is_recording: whether that is now: else a hist trigger is as it was said last, whatever
                others did to it then.
        """
        hists = (each for each in self._all if each.hist is not None)
        said = {each.number: int(self._hists[each.soft_enable][0]) for each in hists}
        return {**said, **live} if is_recording else {**live, **said}

    def given(self, definition: Definition, event: _Event) -> Definition:
        """Return a definition with its event's triggers and soft enable: itself where it has them.

        Raises:
            DefinitionError: its records have no room for a stack that one asks for.
        """
        triggers = tuple(map(self._with_hists, self.of(event)))
        soft_enable = self._soft_enables.get(event, 0)
        if (definition.triggers, definition.soft_enable) == (triggers, soft_enable):
            return definition
        fields = definition.synthetic_fields
        asked = next((each for each in triggers if each.command is Command.STACKTRACE), None)
        if asked is not None and not fields.is_stack_triggered:
            hint = "give it where the event is defined"
            if fields.stacktrace:
                hint = "its events have their stacks already"
            raise _error(TriggerCode.NO_STACK, asked.listed(None), asked.command, hint)
        return replace(definition, triggers=triggers, soft_enable=soft_enable)

    def _with_hists(self, trigger: Trigger) -> Trigger:
        if trigger.command not in OF_HISTS:
            return trigger
        target = next(e for e, word in self._soft_enables.items() if word == trigger.soft_enable)
        hists = tuple(each.soft_enable for each in self.of(target) if each.hist is not None)
        return replace(trigger, hists=hists)

    def is_soft(self, event: _Event) -> bool:
        """Whether an event is armed also while it is disabled."""
        return event in self._triggers or self.is_target(event)

    def is_target(self, event: _Event, but: Collection[_Event] = ()) -> bool:
        """Whether a trigger enables or disables an event, of those that some events do not have."""
        soft_enable = self._soft_enables.get(event, 0)
        others = (triggers for owner, triggers in self._triggers.items() if owner not in but)
        return soft_enable > 0 and any(
            each.soft_enable == soft_enable for some in others for each in some
        )

    def forget(self, events: Iterable[_Event]) -> None:
        """Let events go that are defined no more."""
        for event in events:
            self._triggers.pop(event, None)
            self._soft_enables.pop(event, None)
            self._resets.pop(event, None)
        self._forget_hists()

    def reset(self, events: Iterable[_Event]) -> None:
        """Have events enabled or disabled whatever triggers have done."""
        for event in events:
            if event in self._soft_enables:
                self._resets[event] = self._resets.get(event, 0) + 1

    def soft_enables(self, is_enabled: Callable[[_Event], bool]) -> Mapping[int, SoftEnable]:
        """Return what the words say, by their numbers, but for what triggers have done since."""
        events = {
            number: (is_enabled(event), self._resets.get(event, 0))
            for event, number in self._soft_enables.items()
        }
        return events | self._hists


_NO_END = "a trigger snapshot is for `kprobe record --snapshot SIZE`, which keeps what it writes"


def check_triggers(triggers: Iterable[Trigger], options: Options) -> None:
    """Raise UsageError for triggers that a recording with some options has nothing to do for."""
    if not options.keeps_end and any(each.command is Command.SNAPSHOT for each in triggers):
        raise UsageError(_NO_END)


_WORD = re.compile(r"(?<=[=,+*/(-])\w+")
_STACKS = frozenset({STACKTRACE, "stacktrace", "STACKTRACE", STACK})
_USER_STACKS = frozenset({USER_STACKTRACE, USER_STACK})


def with_synthetic_fields(
    statements: Iterable[Statement], fields: SyntheticFields, triggers: Iterable[str] = ()
) -> Iterator[Statement]:
    """Return statements, to be read one by one, with what records of the definitions have besides.

    That is also what only triggers ask for: the stack, which records then have where a trigger
    ``stacktrace`` says so; and what hist triggers count by and is no field of the definition's own.

    Args:
        statements: definitions and deletions.
        fields: that are wanted of every event.
        triggers: of the events.

    Raises:
        DefinitionError: a trigger is wrong.
    """
    found = [parse_trigger(each).trigger for each in triggers]
    named = frozenset(word for each in found for word in _WORD.findall(each.text))
    if any(each.command is Command.STACKTRACE for each in found):
        named |= {STACKTRACE}
    return (_with_fields(each, fields, named) for each in statements)


def _with_fields(each: Statement, fields: SyntheticFields, named: frozenset[str]) -> Statement:
    if not isinstance(each, Definition):
        return each
    asked = named - {arg.name for arg in each.args}
    is_triggered = bool(asked & _STACKS) and not fields.stacktrace
    all_fields = replace(
        fields,
        stacktrace=fields.stacktrace or is_triggered,
        is_stack_triggered=is_triggered,
        userstacktrace=fields.userstacktrace or bool(asked & _USER_STACKS),
        duration=fields.duration or DURATION in asked,
    )
    return replace(each, synthetic_fields=all_fields)


def _free(numbers: Iterable[int], used: Collection[int], text: str) -> int:
    if len(used) >= MOST - 1:
        raise _error(TriggerCode.TOO_MANY, text, "", f"at most {MOST - 1}")
    return next(number for number in numbers if number not in used)


def _error(code: TriggerCode, text: str, token: str, hint: str) -> DefinitionError:
    text = text.strip()
    return trigger_error(code, text=text, column=max(text.find(token), 0), hint=hint)
