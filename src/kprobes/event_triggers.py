"""The triggers of a session's events, and which events are in soft mode."""

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Generic, TypeVar

from msgspec.structs import replace

from kprobes.errors import DefinitionError
from kprobes.lang.trigger import TriggerChange, parse_trigger
from kprobes.model.codes import TriggerCode, trigger_error
from kprobes.model.definition import Definition, SyntheticFields
from kprobes.model.trigger import MOST, OF_TARGETS, Command, SoftEnable, Trigger

_Event = TypeVar("_Event", bound=Hashable)


class EventTriggers(Generic[_Event]):
    """What triggers events have, each kind once, and the numbers of their words in a guest.

    An event that has triggers, or that one enables or disables, is in the kernel's soft mode: it is
    armed whether it is enabled or not, and a word in the guest says whether it is recorded.
    """

    def __init__(self) -> None:
        self._triggers: dict[_Event, tuple[Trigger, ...]] = {}
        self._soft_enables: dict[_Event, int] = {}
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
        copied._resets = dict(self._resets)
        return copied

    def change(
        self, events: Collection[_Event], text: str, find: Callable[[str], _Event | None]
    ) -> None:
        """Add a trigger to events, or take one away.

        Args:
            events: of each a trigger of its own.
            text: as written to a ``trigger`` file.
            find: returns the event of a name, ``GROUP:EVENT``.

        Raises:
            DefinitionError: it is wrong, or there is no such event, or one of its kind is there.
        """
        found = parse_trigger(text)
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
        number = _free({each.number for some in self._triggers.values() for each in some}, text)
        soft_enable = 0 if target is None else self._soft_enable_of(target, text)
        self._soft_enable_of(event, text)
        # The newest first, as the kernel lists them.
        self._set(event, (replace(new, number=number, soft_enable=soft_enable), *others))

    def _set(self, event: _Event, triggers: tuple[Trigger, ...]) -> None:
        self._triggers.pop(event, None)
        if triggers:
            self._triggers[event] = triggers

    def _soft_enable_of(self, event: _Event, text: str) -> int:
        if event not in self._soft_enables:
            self._soft_enables[event] = _free(self._soft_enables.values(), text)
        return self._soft_enables[event]

    def of(self, event: _Event) -> tuple[Trigger, ...]:
        """Return an event's triggers."""
        return self._triggers.get(event, ())

    def given(self, definition: Definition, event: _Event) -> Definition:
        """Return a definition with its event's triggers and soft enable: itself where it has them.

        Raises:
            DefinitionError: its records have no room for a stack that one asks for.
        """
        triggers, soft_enable = self.of(event), self._soft_enables.get(event, 0)
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

    def reset(self, events: Iterable[_Event]) -> None:
        """Have events enabled or disabled whatever triggers have done."""
        for event in events:
            if event in self._soft_enables:
                self._resets[event] = self._resets.get(event, 0) + 1

    def soft_enables(self, is_enabled: Callable[[_Event], bool]) -> Mapping[int, SoftEnable]:
        """Return what the words say, by their numbers, but for what triggers have done since."""
        return {
            number: (is_enabled(event), self._resets.get(event, 0))
            for event, number in self._soft_enables.items()
        }


def with_stack(fields: SyntheticFields, triggers: Iterable[str]) -> SyntheticFields:
    """Return what records have besides, with a stack also where only a trigger may ask for it.

    Args:
        fields: that are wanted of every event.
        triggers: of the events.

    Raises:
        DefinitionError: a trigger is wrong.
    """
    found = [parse_trigger(each).trigger.command for each in triggers]
    is_triggered = Command.STACKTRACE in found and not fields.stacktrace
    has_stack = fields.stacktrace or is_triggered
    return replace(fields, stacktrace=has_stack, is_stack_triggered=is_triggered)


def _free(used: Collection[int], text: str) -> int:
    number = next((number for number in range(1, MOST) if number not in used), None)
    if number is None:
        raise _error(TriggerCode.TOO_MANY, text, "", f"at most {MOST - 1}")
    return number


def _error(code: TriggerCode, text: str, token: str, hint: str) -> DefinitionError:
    text = text.strip()
    return trigger_error(code, text=text, column=max(text.find(token), 0), hint=hint)
