"""Several definitions on one event, and the deletion of some: what the kernel allows of it."""

from collections.abc import Sequence

from kprobes.lang.listing import show_arguments, show_place
from kprobes.lang.types import is_string_alone
from kprobes.model.codes import Code, rejection
from kprobes.model.definition import (
    AllParameters,
    Definition,
    Deletion,
    FetchArg,
    Member,
    Parameter,
    ReturnValue,
    Statement,
)

Definitions = tuple[Definition, ...]


def apply(statements: Sequence[Statement], *, existing: Definitions = ()) -> Definitions:
    """Return the definitions that are there after all statements, in order.

    Args:
        statements: definitions and deletions.
        existing: what was there before them.

    Raises:
        DefinitionError: from ``append`` and ``delete``, for the first that is wrong.
    """
    found = existing
    for statement in statements:
        if isinstance(statement, Deletion):
            found = delete(found, statement)
        else:
            found = append(found, statement)
    return found


def append(existing: Definitions, new: Definition) -> Definitions:
    """Return the definitions with a new one behind them.

    Definitions of one event probe several places, and must agree in all that its records have.

    Raises:
        DefinitionError: DIFF_PROBE_TYPE, DIFF_ARG_TYPE or SAME_PROBE.
    """
    # A pattern without an event name makes an event of its own for each function.
    same = [old for old in existing if new.event and _name(old) == _name(new)]
    if same:
        _check_alike(same[0], new)
        if any(_identity(old) == _identity(new) for old in same):
            raise rejection(Code.SAME_PROBE, command=new.command, column=0)
    return (*existing, new)


def delete(existing: Definitions, deletion: Deletion) -> Definitions:
    """Return the definitions without those that match.

    Raises:
        DefinitionError: NO_EVENT, when none does.
    """
    kept = tuple(old for old in existing if not _matches(old, deletion))
    if len(kept) == len(existing):
        raise rejection(Code.NO_EVENT, command=deletion.command, column=0)
    return kept


def _check_alike(old: Definition, new: Definition) -> None:
    if old.kind is not new.kind:
        raise rejection(Code.DIFF_PROBE_TYPE, command=new.command, column=0)
    at = _first_difference(old.args, new.args)
    if at is not None:
        # Behind the last word, when the old one has more arguments.
        end = len(new.command) + 1
        column = new.args[at].span.start if at < len(new.args) else end
        raise rejection(Code.DIFF_ARG_TYPE, command=new.command, column=column)


def _first_difference(old: Sequence[FetchArg], new: Sequence[FetchArg]) -> int | None:
    if len(old) != len(new):
        return min(len(old), len(new))
    pairs = enumerate(zip(old, new, strict=True))
    return next((at for at, (a, b) in pairs if not _is_alike(a, b)), None)


def _is_alike(old: FetchArg, new: FetchArg) -> bool:
    types = (_stored(old), _stored(new))
    # What only the kernel's types know may turn out to be the same.
    return old.name == new.name and (None in types or types[0] == types[1])


def _stored(arg: FetchArg) -> tuple[str, int | None] | None:
    if arg.spec is None:
        if isinstance(arg.fetch, Parameter | Member | ReturnValue | AllParameters):
            return None
        return ("string" if is_string_alone(arg.text) else "x64"), None
    if arg.spec.base == "bits":
        return f"u{8 * arg.spec.size}", arg.spec.count
    return ("string" if arg.type.startswith("%") else arg.spec.base), arg.spec.count


def _name(definition: Definition) -> tuple[str, str]:
    return definition.group, definition.event


def _identity(definition: Definition) -> tuple[str, ...]:
    return show_place(definition.place), *(arg.text for arg in definition.args)


def _matches(definition: Definition, deletion: Deletion) -> bool:
    if deletion.event and deletion.event != definition.event:
        return False
    if deletion.group is not None and deletion.group != definition.group:
        return False
    words = (show_place(definition.place), *show_arguments(definition))
    return words[: len(deletion.words)] == deletion.words
