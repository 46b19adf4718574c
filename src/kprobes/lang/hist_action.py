"""Actions of hist triggers: text to what entries keep, as the kernel reads it.

    onmax($VAR).save(FIELD,...)        onchange($VAR).save(FIELD,...)

As track_data_parse(), action_parse() and track_data_create() in kernel/trace/trace_events_hist.c
read them: first how they are written, before any field, and last what they name.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

from msgspec import Struct

from kprobes.errors import DefinitionError
from kprobes.model.codes import HistCode
from kprobes.model.hist import Handler, HistAction, HistField, HistKind, HistVariable

ACTIONS = ("onmatch(", *(f"{each}(" for each in Handler))
"""How they begin."""
_LEAST_NAME = 2
Error = Callable[[HistCode, str, str], DefinitionError]
"""Returns an error, of what is wrong, where, and what would be right."""


class WrittenAction(Struct, frozen=True, kw_only=True):
    """An action as it is written.

    Attributes:
        handler: of it.
        tracked: what stands in its parentheses.
        names: of what is to be saved.
    """

    handler: Handler
    tracked: str
    names: tuple[str, ...]


def split_action(text: str, error: Error) -> WrittenAction:
    """Take an action apart.

    Raises:
        DefinitionError: what is wrong, in the kernel's words.
    """
    name, _, rest = text.partition("(")
    if name == "onmatch":
        hint = "of a call and its return there is duration; else join what was recorded"
        raise error(HistCode.NO_ACTIONS, text, hint)
    tracked, closes, rest = rest.partition(")")
    if not closes:
        raise error(HistCode.NO_CLOSING_PAREN, text, f"{name}($VARIABLE).save(FIELD,...)")
    action, opens, params = rest.partition(".")[2].partition("(")
    if not opens:
        raise error(HistCode.ACTION_NOT_FOUND, "", f"{name}($VARIABLE).save(FIELD,...)")
    if not action.startswith("save"):
        hint = "there is save(FIELD,...)"
        if action.startswith("snapshot"):
            hint += "; the trigger snapshot takes a filter"
        raise error(HistCode.NO_ACTIONS, action, hint)
    names = tuple(each.strip() for each in params.partition(")")[0].split(","))
    for each in names:
        if len(each) < _LEAST_NAME:
            hint = "kernels have fields of two letters or more there"
            raise error(HistCode.INVALID_PARAM, each, hint)
    return WrittenAction(handler=Handler(name), tracked=tracked, names=names)


def read_action(
    written: Sequence[WrittenAction],
    variables: Mapping[str, HistVariable],
    field: Callable[[str], HistField],
    error: Error,
) -> HistAction | None:
    """Return the action that is written, or None without one.

    Args:
        written: all that are.
        variables: of the trigger, by name.
        field: returns the field of a name, with or without a modifier.
        error: returns an error, of what is wrong, where, and what would be right.

    Raises:
        DefinitionError: what is wrong, in the kernel's words.
    """
    found = None
    for each in written:
        if not each.tracked.startswith("$"):
            raise error(HistCode.ONX_NOT_VAR, each.tracked, "")
        variable = variables.get(each.tracked[1:])
        if variable is None:
            hint = f"{each.tracked[1:]}=FIELD, before it"
            raise error(HistCode.ONX_VAR_NOT_FOUND, each.tracked[1:], hint)
        if found is not None and found.handler is each.handler:
            raise error(HistCode.ONX_VAR_CREATE_FAIL, "", "")
        if found is not None:
            raise error(HistCode.TOO_MANY_SAVE_ACTIONS, "", "")
        saved = tuple(map(field, each.names))
        _check_saved(each.names, saved, variables, error)
        found = HistAction(handler=each.handler, variable=variable, saved=saved)
    return found


def _check_saved(
    names: Sequence[str],
    saved: Sequence[HistField],
    variables: Collection[str],
    error: Error,
) -> None:
    for name, field in zip(names, saved, strict=True):
        if name in variables:
            raise error(HistCode.FIELD_VAR_CREATE_FAIL, name, "a variable has that name")
        if field.kind not in (HistKind.NUMBER, HistKind.DURATION):
            raise error(HistCode.FIELD_VAR_CREATE_FAIL, name, "only numbers are saved here")
