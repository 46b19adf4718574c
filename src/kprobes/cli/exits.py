"""Ways out of functions, as lines for people or programs. ``docs/returns.md`` describes both."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from kprobes.cli.words import aligned, counted
from kprobes.drivers.exits import Classified
from kprobes.model.exits import Exit, ReturnWay
from kprobes.sinks.json_fields import dumps


def as_table(found: Sequence[Classified], *, has_exits: bool) -> str:
    """Return a line per function: name, class, number of exits, reason; or with its exits."""
    if has_exits:
        return "".join(_paragraph(each) for each in found)
    return aligned((_name(each), str(each.exits.way), _count(each), reason(each)) for each in found)


def as_json(found: Sequence[Classified]) -> str:
    """Return one JSON object per line."""
    return "".join(f"{dumps(_object(each))}\n" for each in found)


def sum_up(found: Sequence[Classified]) -> str:
    """Return how many functions are of which class."""
    ways = Counter(each.exits.way for each in found)
    shares = [f"{ways[way]:,} {way} ({ways[way] / len(found):.1%})" for way in ReturnWay]
    return f"{counted(len(found), 'function')}: {', '.join(shares)}"


def proof(each: Classified) -> str:
    """Return a function's class, and what it rests on."""
    way, why = each.exits.way, reason(each)
    if way is ReturnWay.REFUSED:
        return f"{way}: {why}"
    if way is ReturnWay.RETHOOK:
        return f"{way}, as these may not be all: {why}"
    return f"{way}, as these are proven to be all"


def reason(each: Classified) -> str:
    """Return why a function is of no better class, or ""."""
    exits = each.exits
    if exits.refusal is not None:
        return exits.refusal
    if exits.why_not is None:
        return ""
    return f"{each.place(exits.why_not.addr)}: {exits.why_not.why}"


def exits_as_text(each: Classified, *, indent: str) -> str:
    """Return a line per exit: where, what it does, how it is patched."""
    rows = ((each.place(e.addr), _does(each, e), _patch(e)) for e in each.exits.exits)
    return aligned(rows, indent=indent)


def exit_as_text(each: Classified, exit_: Exit) -> str:
    """Return what one exit does, and how it is patched."""
    return f"exit: {_does(each, exit_)}, by {_patch(exit_)}"


def exits_as_object(each: Classified) -> dict[str, Any]:
    """Return a function's class and exits for JSON."""
    gap = each.exits.why_not
    return {
        "class": each.exits.way.value,
        "reason": each.exits.refusal or (gap.why if gap else None),
        "at": f"{gap.addr:#x}" if gap else None,
        "exits": [_exit(each, e) for e in each.exits.exits],
    }


def _paragraph(each: Classified) -> str:
    return f"{_name(each)}: {proof(each)}\n{exits_as_text(each, indent='    ')}"


def _name(each: Classified) -> str:
    module = each.symbol.module
    return f"{each.symbol.name} [{module}]" if module else each.symbol.name


def _count(each: Classified) -> str:
    count = len(each.exits.exits)
    return counted(count, "exit") if count else ""


def _does(each: Classified, exit_: Exit) -> str:
    if exit_.target is None:
        return str(exit_.kind)
    return f"{exit_.kind} to {each.place(exit_.target)}"


def _patch(exit_: Exit) -> str:
    return "one jump" if exit_.has_jump else f"a breakpoint: {exit_.why}"


def _object(each: Classified) -> dict[str, Any]:
    found = {
        "function": each.symbol.name,
        "address": f"{each.symbol.addr:#x}",
        "module": each.symbol.module or None,
    }
    return found | exits_as_object(each)


def _exit(each: Classified, exit_: Exit) -> dict[str, Any]:
    return {
        "where": each.place(exit_.addr),
        "address": f"{exit_.addr:#x}",
        "kind": exit_.kind.value,
        "target": each.place(exit_.target) if exit_.target is not None else None,
        "size": exit_.size,
        "why": exit_.why or None,
    }
