"""Definitions to the lines that the kernel's ``kprobe_events`` lists."""

import re

from msgspec.structs import replace

from kprobes.lang.fetch import ARGUMENTS_MAX
from kprobes.lang.names import ARG_NAME_LIMIT, event_at
from kprobes.model.definition import (
    ITERATOR,
    AllMembers,
    AllParameters,
    AllVariables,
    Argument,
    Definition,
    EventType,
    FetchArg,
    Kind,
    Place,
)

_NUMBERED = re.compile(r"arg[0-9]+")


def show(definition: Definition, *, cpus: int | None = None) -> str:
    """Return the canonical listing line, without its newline.

    A pattern without an event name is listed as ``p:GRP/ PATTERN``.

    Args:
        definition: as parsed, or with its parameters' names filled in.
        cpus: how many the kernel can have. The kernel lists the maxactive that a return probe
            got when none was given, which depends on them; without them none is listed.
    """
    number, is_return = definition.maxactive, definition.kind is Kind.RETURN
    if is_return and definition.type is EventType.KPROBE and not number and cpus is not None:
        number = max(10, 2 * cpus)
    head = f"{definition.letter}{number or ''}:{definition.group}/{definition.event}"
    suffix = "%return" if is_return and definition.type is EventType.FPROBE else ""
    place = f"{show_place(definition.place)}{suffix}"
    return " ".join([head, place, *show_arguments(definition)])


def show_place(place: Place) -> str:
    """Return a place as a listing has it, which is also how a deletion must name it."""
    if place.addr is not None:
        return f"{place.addr:#018x}"
    module = f"{place.module}:" if place.module else ""
    if place.line is not None:
        name = f"{place.symbol}@{place.file}" if place.symbol and place.file else place.symbol
        if place.pattern:
            return f"{module}{name};{place.pattern}"
        return f"{module}{name or place.file}:{place.line}"
    return f"{module}{place.symbol}+{place.offset}" if place.offset else f"{module}{place.symbol}"


def place_as_given(definition: Definition) -> str:
    """Return a definition's place as it was written; of a pattern, the function."""
    if is_of_pattern(definition):
        return show_place(definition.place)
    span = definition.place.span
    return definition.command[span.start : span.stop]


def is_of_pattern(definition: Definition) -> bool:
    """Whether a definition is a pattern, or what ``at_function`` has made of one."""
    place = definition.place
    written = definition.command[place.span.start : place.span.stop]
    return place.addr is None and replace(place, symbol=written).is_glob


def show_arguments(definition: Definition) -> tuple[str, ...]:
    """Return the arguments as a listing has them."""
    args = definition.args
    all_at = next((at for at, arg in enumerate(args) if _is_all(arg)), len(args))
    return tuple(
        arg.text if _is_nameless(arg, is_after_all=at > all_at) else f"{arg.name}={arg.text}"
        for at, arg in enumerate(args)
    )


def _is_nameless(arg: FetchArg, *, is_after_all: bool) -> bool:
    # The name comes with the parameters' names: for $arg*, for a number after it, and for what
    # is right only as a parameter: $argN:string, which may be a pointer that is followed, and a
    # number that no argument has.
    is_parameter = isinstance(arg.fetch, Argument) and (
        "string" in arg.type or arg.fetch.number > ARGUMENTS_MAX
    )
    is_provisional = is_parameter or (is_after_all and _NUMBERED.fullmatch(arg.name) is not None)
    # The kernel lists even a name that it would not read again; no parameter has such a name.
    is_too_long = len(arg.name) > ARG_NAME_LIMIT
    return _is_all(arg) or (not arg.is_named and (is_provisional or is_too_long))


def _is_all(arg: FetchArg) -> bool:
    is_members = isinstance(arg.fetch, AllMembers) and not arg.is_named
    return is_members or isinstance(arg.fetch, AllParameters | AllVariables)


def at_function(definition: Definition, name: str) -> Definition:
    """Return a pattern's definition for one of the functions that it matches."""
    is_tracepoint = definition.type is EventType.TRACEPOINT
    symbol = name.removeprefix(ITERATOR) if is_tracepoint else name
    place = replace(definition.place, symbol=symbol)
    event = definition.event or event_at(definition.kind, place, definition.type)
    return replace(definition, place=place, event=event)
