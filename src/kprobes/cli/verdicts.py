"""Verdicts on definitions, as lines for people or programs. ``docs/check.md`` describes both."""

from collections.abc import Iterator, Sequence
from typing import Any

from kprobes.cli.exits import exits_as_object, exits_as_text, proof
from kprobes.cli.words import aligned, counted
from kprobes.drivers.check import Placed, Verdict
from kprobes.errors import DefinitionError
from kprobes.lang.listing import show
from kprobes.model.exits import ReturnWay
from kprobes.model.layout import Field, Storage
from kprobes.model.plan import Site, Strategy
from kprobes.model.resolved import FieldFetch, Resolved, can_fault
from kprobes.model.returns import Returns
from kprobes.resolve.explain import explain, explain_kept
from kprobes.resolve.format import format_text
from kprobes.sinks.json_fields import dumps

_MAX_PLACES = 10

Found = Sequence[tuple[str, Verdict]]
"""Verdicts, each with the file that its statement is from, or ""."""


def as_text(found: Found, *, has_format: bool) -> str:
    """Return a paragraph per statement, and a last line that sums up."""
    paragraphs = ["".join(_paragraph(*each, has_format=has_format)) for each in found]
    refused = sum(not verdict.is_accepted for _, verdict in found)
    number = counted(len(found), "definition")
    sum_ = f"{refused} of {number} refused" if refused else f"{number} accepted"
    return "\n".join([*paragraphs, f"{sum_}\n"])


def as_json(found: Found, *, has_format: bool) -> str:
    """Return one JSON object per line."""
    return "".join(f"{dumps(_object(*each, has_format=has_format))}\n" for each in found)


def _paragraph(origin: str, verdict: Verdict, *, has_format: bool) -> Iterator[str]:
    where = f"{origin}:{verdict.line}: " if origin else ""
    yield f"{where}{verdict.command}\n"
    match verdict.error:
        case None if verdict.placed:
            yield from _accepted(verdict, has_format=has_format)
        case None if verdict.waits_for:
            yield "  accepted\n"
            yield f"  waits until module {verdict.waits_for} is loaded; armed before its init\n"
        case None:
            cpus = verdict.cpus
            yield from (f"  takes away {show(gone, cpus=cpus)}\n" for gone in verdict.deleted)
        case DefinitionError(text=text, column=column):
            yield f"{' ' * (len(where) + column)}^\n  refused: {text}\n"
        case error:
            yield f"  refused: {error}\n"
    if verdict.exits is not None:
        yield f"  its exits: {proof(verdict.exits)}\n"
        yield exits_as_text(verdict.exits, indent="    ")
    if verdict.advice:
        yield f"  {verdict.advice}\n"


def _accepted(verdict: Verdict, *, has_format: bool) -> Iterator[str]:
    placed, first = verdict.placed, verdict.placed[0]
    probe = first.probe
    if len(placed) > 1:
        yield f"  accepted for {counted(len(placed), 'function')}, as for the first one\n"
    else:
        yield "  accepted\n"
    yield f"  listed as {show(probe.definition, cpus=verdict.cpus)}\n"
    yield from (f"  {line}\n" for each in placed[:_MAX_PLACES] for line in _how(each))
    if len(placed) > _MAX_PLACES:
        yield f"  ... and {counted(len(placed) - _MAX_PLACES, 'function')} more\n"
    yield from _exits(first)
    rows = [(f"{fetch.field.name}:", explain(fetch), _room(fetch.field)) for fetch in probe.fetches]
    if first.spelled:
        # How the kernel lays out its own records, it says when the event is there.
        yield aligned([row[:2] for row in rows], indent="    ")
        return
    yield aligned(rows, indent="    ")
    yield f"  record: {_record(probe)}\n"
    if has_format:
        lines = format_text(probe, number=probe.layout.event_id).splitlines(keepends=True)
        yield "".join(f"    {line}" if line.strip() else line for line in lines)


def _how(placed: Placed) -> Iterator[str]:
    if placed.spelled:
        yield f"spelled {placed.spelled}"
    if placed.returns is not None:
        yield f"by {placed.returns.way} at the returns of {placed.probe.layout.function}"
    if placed.site is not None:
        yield f"{_at_entry(placed.returns)}{_site(placed, placed.site)}"


def _at_entry(returns: Returns | None) -> str:
    if returns is None:
        return ""
    does = ["takes the return over"] if returns.way is ReturnWay.RETHOOK else []
    kept = explain_kept(returns)
    does += [f"keeps {', '.join(kept)}"] if kept else []
    return f"at its entry {' and '.join(does)}: "


def _exits(placed: Placed) -> Iterator[str]:
    if placed.exits is not None:
        yield f"  its exits: {proof(placed.exits)}\n"
        yield exits_as_text(placed.exits, indent="    ")


def _site(placed: Placed, site: Site) -> str:
    layout = placed.probe.layout
    return f"by {site.strategy} at {layout.where} ({layout.ip:#x}): {_patch(site)}"


def _patch(site: Site) -> str:
    match site.strategy:
        case Strategy.FTRACE if not site.old:
            return "a call in its site"
        case Strategy.FTRACE:
            return f"a call in place of the nop {site.old.hex()}"
        case Strategy.JUMP:
            return f"a jump in place of {_displaced(site)}; {site.why}"
        case Strategy.BREAKPOINT:
            return f"a breakpoint at {_displaced(site)}; no jump: {site.why}"


def _displaced(site: Site) -> str:
    count = site.displaced.count if site.displaced else 0
    return f"{counted(count, 'instruction')} ({site.old.hex()})"


def _room(field: Field) -> str:
    if field.storage in (Storage.COMM, Storage.TEXT):
        return "no bytes of the record"
    size = counted(field.room, "byte")
    if field.storage is Storage.STRING:
        return f"at {field.offset:#x}, {size} and the text"
    return f"at {field.offset:#x}, {size}"


def _record(probe: Resolved) -> str:
    layout = probe.layout
    fixed = counted(layout.size, "byte")
    caller = "" if layout.caller_offset is None else f", the caller at {layout.caller_offset:#x}"
    return f"{fixed} and its strings{caller}" if layout.is_dynamic else f"{fixed}{caller}"


def _object(origin: str, verdict: Verdict, *, has_format: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "definition": verdict.command,
        "file": origin or None,
        "line": verdict.line,
        "verdict": "accepted" if verdict.is_accepted else "refused",
    }
    if verdict.error is not None:
        return found | _refusal(verdict)
    if verdict.waits_for:
        return found | {"waits_for": verdict.waits_for}
    if not verdict.placed:
        return found | {"deletes": [show(gone, cpus=verdict.cpus) for gone in verdict.deleted]}
    return found | _event(verdict, has_format=has_format)


def _refusal(verdict: Verdict) -> dict[str, Any]:
    error = verdict.error
    if isinstance(error, DefinitionError):
        reason = {"reason": error.text, "code": error.code, "column": error.column}
    else:
        reason = {"reason": str(error), "code": None, "column": None}
    found = reason | {"advice": verdict.advice or None}
    return found if verdict.exits is None else found | {"exits": exits_as_object(verdict.exits)}


def _event(verdict: Verdict, *, has_format: bool) -> dict[str, Any]:
    placed = verdict.placed
    probe = placed[0].probe
    layout = probe.layout
    found: dict[str, Any] = {
        "listing": show(probe.definition, cpus=verdict.cpus),
        "group": layout.group,
        "event": layout.event,
        "places": [_place(each) for each in placed],
        "record": {
            "size": layout.size,
            "has_strings": layout.is_dynamic,
            "caller": layout.caller_offset,
        },
        "fields": [_field(fetch) for fetch in probe.fetches],
    }
    if has_format:
        found["format"] = format_text(probe, number=layout.event_id)
    return found


def _place(placed: Placed) -> dict[str, Any]:
    layout = placed.probe.layout
    return {
        "function": layout.function,
        "where": layout.where,
        "address": f"{layout.ip:#x}",
        **({"spelled": placed.spelled} if placed.spelled else _patched(placed.site)),
        **_returned(placed),
    }


def _patched(site: Site | None) -> dict[str, Any]:
    if site is None:
        return dict.fromkeys(("strategy", "holds", "displaced", "why"))
    return {
        "strategy": site.strategy.value,
        "holds": site.old.hex() or None,
        "displaced": site.displaced.code.hex() if site.displaced else None,
        "why": site.why or None,
    }


def _returned(placed: Placed) -> dict[str, Any]:
    returns, exits = placed.returns, placed.exits
    if returns is None or exits is None:
        return {}
    own = {"way": returns.way.value, "keeps": explain_kept(returns)}
    return {"returns": own | exits_as_object(exits)}


def _field(fetch: FieldFetch) -> dict[str, Any]:
    field = fetch.field
    has_room = field.storage not in (Storage.COMM, Storage.TEXT)
    return {
        "name": field.name,
        "type": field.type,
        "count": field.count,
        "fetch": explain(fetch),
        "can_fault": can_fault(fetch.operand),
        "offset": field.offset if has_room else None,
        "size": field.room,
        "bits": [fetch.bit_offset, fetch.bit_width] if fetch.bit_width else None,
    }
