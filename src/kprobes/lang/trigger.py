"""Parser of triggers: text to a trigger, as the kernel reads what is written to a ``trigger`` file.

    [!]COMMAND[:GROUP:EVENT][:COUNT] [if FILTER]
    [!]hist:...                                     lang.hist reads it

trigger_process_regex() and event_trigger_separate_filter() in kernel/trace/trace_events_trigger.c.
"""

import re

from msgspec import Struct
from msgspec.structs import replace

from kprobes.lang.lexer import read_unsigned
from kprobes.model.codes import TriggerCode, trigger_error
from kprobes.model.trigger import OF_TARGETS, Command, Trigger
from kprobes.units import U64

_COMMAND = re.compile(r"(!?)([^: \t]*)[: \t]?[ \t]*")
_PARAMETER = re.compile(r"([^ \t]*)[ \t]*")
_IF = re.compile(r"if[ \t]+")
_KNOWN = ", ".join(Command)
_FORM = "COMMAND[:COUNT] [if FILTER]"
_FORM_OF_TARGETS = "{}:GROUP:EVENT[:COUNT] [if FILTER]"


class TriggerChange(Struct, frozen=True, kw_only=True):
    """What a text asks for: a trigger more, or one less.

    Attributes:
        trigger: that comes; or one of the kind that goes. Of a hist trigger only its text.
        is_removal: whether it goes.
    """

    trigger: Trigger
    is_removal: bool = False


def parse_trigger(text: str) -> TriggerChange:
    """Read a trigger.

    Args:
        text: as written to an event's ``trigger`` file; with ``!`` before it one that goes.

    Raises:
        DefinitionError: what is wrong, and where; the kernel says EINVAL.
    """
    text = text.strip()
    found = _COMMAND.match(text)
    word = found[2] if found else ""
    if found is None or word not in {*Command}:
        at = len(found[1]) if found else 0
        hint = f"there are {_KNOWN}"
        raise trigger_error(TriggerCode.UNKNOWN_COMMAND, text=text, column=at, hint=hint)
    command, is_removal = Command(word), bool(found[1])
    if command is Command.HIST:
        # What it counts by, and its filter, depend on the event.
        trigger = Trigger(command=command, text=text[found.end() :])
        return TriggerChange(trigger=trigger, is_removal=is_removal)
    parameter, filter_at = _separated(text, command, found.end())
    target, count_text = "", parameter
    if command in OF_TARGETS:
        target, count_text = _target(text, command, parameter, found.end())
    trigger = Trigger(command=command, target=target)
    if is_removal:
        # What follows is not looked at.
        return TriggerChange(trigger=trigger, is_removal=True)
    filter_text = "" if filter_at is None else _filter(text, filter_at)
    count = _count(text, count_text, command)
    return TriggerChange(trigger=replace(trigger, count=count, filter=filter_text))


def names_target(text: str) -> bool:
    """Whether a trigger is about another event, which must be there; else as ``parse_trigger``."""
    return parse_trigger(text).trigger.command in OF_TARGETS


def _separated(text: str, command: Command, at: int) -> tuple[str | None, int | None]:
    # The parameter, and where the filter begins, of which there may be none.
    if at >= len(text):
        return None, None
    if command not in OF_TARGETS and not text[at].isdigit():
        return None, at
    found = _PARAMETER.match(text, at)
    if found is None:
        return None, None
    return found[1], found.end() if found.end() < len(text) else None


def _target(text: str, command: Command, parameter: str | None, at: int) -> tuple[str, str | None]:
    group, has_event, rest = (parameter or "").partition(":")
    event, has_count, count = rest.partition(":")
    if not (group and has_event and event):
        hint = _FORM_OF_TARGETS.format(command)
        column = min(at, len(text))
        raise trigger_error(TriggerCode.NO_TARGET, text=text, column=column, hint=hint)
    return f"{group}:{event}", count if has_count else None


def _filter(text: str, at: int) -> str:
    found = _IF.match(text, at)
    if found is None or found.end() >= len(text):
        raise trigger_error(TriggerCode.BAD_IF, text=text, column=at, hint=_FORM)
    return text[found.end() :]


def _count(text: str, word: str | None, command: Command) -> int | None:
    if word is None:
        return None
    # The kernel looks at nothing after a second colon.
    number = read_unsigned(word.partition(":")[0])
    if number is None:
        form = _FORM_OF_TARGETS.format(command) if command in OF_TARGETS else _FORM
        column = text.find(word) if word else len(text)
        raise trigger_error(TriggerCode.BAD_COUNT, text=text, column=column, hint=form)
    # As it is kept: -1 is without an end.
    return None if number == U64 else number
