"""Verdicts on definitions, as lines for people or programs. ``docs/howto/check.md`` describes both.

Ways out of functions, as lines for people or programs. ``docs/howto/returns.md`` has both.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from kprobes.cli.terminal import aligned, counted, json_lines
from kprobes.errors import DefinitionError
from kprobes.guest.text import Classified
from kprobes.inspect.check import CheckResult, Cost, Placed, cost_of
from kprobes.lang.listing import show
from kprobes.model.plan import Exit, ReturnMethod, Returns, Site, Strategy
from kprobes.model.resolved import Field, FieldFetch, Resolved, Storage, can_fault
from kprobes.resolve.explain import explain, explain_kept, format_text


def as_table(found: Sequence[Classified], *, has_exits: bool) -> str:
    """Return a line per function: name, class, number of exits, reason; or with its exits."""
    if has_exits:
        return "".join(_exits_paragraph(each) for each in found)
    return aligned(
        (_name(each), str(each.exits.return_method), _count(each), reason(each)) for each in found
    )


def exits_as_json(found: Sequence[Classified]) -> str:
    """Return one JSON object per line."""
    return json_lines(map(_exit_object, found))


def sum_up(found: Sequence[Classified]) -> str:
    """Return how many functions are of which class."""
    counts = Counter(each.exits.return_method for each in found)
    shares = [f"{counts[each]:,} {each} ({counts[each] / len(found):.1%})" for each in ReturnMethod]
    return f"{counted(len(found), 'function')}: {', '.join(shares)}"


def proof(each: Classified) -> str:
    """Return a function's class, and what it rests on."""
    return_method, why = each.exits.return_method, reason(each)
    if return_method is ReturnMethod.REFUSED:
        return f"{return_method}: {why}"
    if return_method is ReturnMethod.RETHOOK:
        return f"{return_method}, as these may not be all: {why}"
    return f"{return_method}, as these are proven to be all"


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
    rows = ((each.place(e.addr), _does(each, e), _exit_patch(e)) for e in each.exits.exits)
    return aligned(rows, indent=indent)


def exit_as_text(each: Classified, exit_: Exit) -> str:
    """Return what one exit does, and how it is patched."""
    return f"exit: {_does(each, exit_)}, by {_exit_patch(exit_)}"


def exits_as_object(each: Classified) -> dict[str, Any]:
    """Return a function's class and exits for JSON."""
    gap = each.exits.why_not
    return {
        "class": each.exits.return_method.value,
        "reason": each.exits.refusal or (gap.why if gap else None),
        "at": f"{gap.addr:#x}" if gap else None,
        "exits": [_exit(each, e) for e in each.exits.exits],
    }


def _exits_paragraph(each: Classified) -> str:
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


def _exit_patch(exit_: Exit) -> str:
    return "one jump" if exit_.has_jump else f"a breakpoint: {exit_.why}"


def _exit_object(each: Classified) -> dict[str, Any]:
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


_MAX_PLACES = 10

Found = Sequence[tuple[str, CheckResult]]
"""Verdicts, each with the file that its statement is from, or ""."""


def as_text(found: Found, *, has_format: bool, arch: str | None = None) -> str:
    """Return a paragraph per statement, and a last line that sums up.

    Args:
        found: the verdicts.
        has_format: whether with each event's ``format`` file.
        arch: of the kernel, where what probes take is to be predicted.
    """
    costs = [None if arch is None else cost_of(result, arch) for _, result in found]
    paragraphs = [
        "".join((*_paragraph(*each, has_format=has_format), *_cost(cost)))
        for each, cost in zip(found, costs, strict=True)
    ]
    refused = sum(not result.is_accepted for _, result in found)
    number = counted(len(found), "definition")
    sum_ = f"{refused} of {number} refused" if refused else f"{number} accepted"
    if sites := sum(cost.sites for cost in costs if cost is not None):
        sum_ += f"; armed at once: {_pause(Cost(hit_ns=0, sites=sites))}"
    return "\n".join([*paragraphs, f"{sum_}\n"])


def as_json(found: Found, *, has_format: bool, arch: str | None = None) -> str:
    """Return one JSON object per line.

    Args:
        found: the verdicts.
        has_format: see ``as_text``.
        arch: see there, too.
    """
    return json_lines(
        _object(*each, has_format=has_format) | _cost_object(each[1], arch) for each in found
    )


def _cost(cost: Cost | None) -> Iterator[str]:
    if cost is not None:
        yield f"  predicted: {cost.hit_ns:,.0f} ns a hit; {_pause(cost)}\n"


def _pause(cost: Cost) -> str:
    pause_ms = 1000 * cost.pause_s
    return f"the guest paused for {pause_ms:,.0f} ms to patch {counted(cost.sites, 'site')}"


def _cost_object(result: CheckResult, arch: str | None) -> dict[str, Any]:
    cost = None if arch is None else cost_of(result, arch)
    if cost is None:
        return {}
    return {"cost": {"hit_ns": cost.hit_ns, "sites": cost.sites, "pause_s": cost.pause_s}}


def _paragraph(source: str, result: CheckResult, *, has_format: bool) -> Iterator[str]:
    where = f"{source}:{result.line}: " if source else ""
    yield f"{where}{result.command}\n"
    match result.error:
        case None if result.placed:
            yield from _accepted(result, has_format=has_format)
        case None if result.waits_for:
            yield "  accepted\n"
            yield f"  waits until module {result.waits_for} is loaded; armed before its init\n"
        case None:
            cpus = result.cpus
            yield from (f"  takes away {show(gone, cpus=cpus)}\n" for gone in result.deleted)
        case DefinitionError(text=text, column=column):
            yield f"{' ' * (len(where) + column)}^\n  refused: {text}\n"
        case error:
            yield f"  refused: {error}\n"
    if result.exits is not None:
        yield f"  its exits: {proof(result.exits)}\n"
        yield exits_as_text(result.exits, indent="    ")
    if result.advice:
        yield f"  {result.advice}\n"


def _accepted(result: CheckResult, *, has_format: bool) -> Iterator[str]:
    placed, first = result.placed, result.placed[0]
    probe = first.probe
    if len(placed) > 1:
        yield f"  accepted for {counted(len(placed), 'function')}, as for the first one\n"
    else:
        yield "  accepted\n"
    yield f"  listed as {show(probe.definition, cpus=result.cpus)}\n"
    yield from (f"  {line}\n" for each in placed[:_MAX_PLACES] for line in _how(each))
    if len(placed) > _MAX_PLACES:
        yield f"  ... and {counted(len(placed) - _MAX_PLACES, 'function')} more\n"
    yield from _exits(first)
    rows = [(f"{fetch.field.name}:", explain(fetch), _room(fetch.field)) for fetch in probe.fetches]
    if first.declaration:
        # How the kernel lays out its own records, it says when the event is there.
        yield aligned([row[:2] for row in rows], indent="    ")
        return
    yield aligned(rows, indent="    ")
    yield f"  record: {_record(probe)}\n"
    if has_format:
        lines = format_text(probe.layout, number=probe.layout.event_id).splitlines(keepends=True)
        yield "".join(f"    {line}" if line.strip() else line for line in lines)


def _how(placed: Placed) -> Iterator[str]:
    if placed.declaration:
        yield f"spelled {placed.declaration}"
    if placed.returns is not None:
        yield f"by {placed.returns.return_method} at the returns of {placed.probe.layout.function}"
    if placed.site is not None:
        yield f"{_at_entry(placed.returns)}{_site(placed, placed.site)}"


def _at_entry(returns: Returns | None) -> str:
    if returns is None:
        return ""
    does = ["takes the return over"] if returns.return_method is ReturnMethod.RETHOOK else []
    kept = explain_kept(returns)
    does += [f"keeps {', '.join(kept)}"] if kept else []
    return f"at its entry {' and '.join(does)}: "


def _exits(placed: Placed) -> Iterator[str]:
    if placed.exits is not None:
        yield f"  its exits: {proof(placed.exits)}\n"
        yield exits_as_text(placed.exits, indent="    ")


def _site(placed: Placed, site: Site) -> str:
    layout = placed.probe.layout
    if site.is_tracepoint:
        return f"by a function of ours that the tracepoint at {site.addr:#x} calls"
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
    if field.storage is Storage.STACK:
        return f"at {field.offset:#x}, {size} and the addresses"
    return f"at {field.offset:#x}, {size}"


def _record(probe: Resolved) -> str:
    layout = probe.layout
    fixed = counted(layout.size, "byte")
    caller = "" if layout.caller_offset is None else f", the caller at {layout.caller_offset:#x}"
    storages = {field.storage for field in layout.fields}
    named = (("strings", Storage.STRING), ("stacks", Storage.STACK))
    dynamic = " and ".join(name for name, storage in named if storage in storages)
    return f"{fixed} and its {dynamic}{caller}" if layout.is_dynamic else f"{fixed}{caller}"


def _object(source: str, result: CheckResult, *, has_format: bool) -> dict[str, Any]:
    found: dict[str, Any] = {
        "definition": result.command,
        "file": source or None,
        "line": result.line,
        "verdict": "accepted" if result.is_accepted else "refused",
    }
    if result.error is not None:
        return found | _refusal(result)
    if result.waits_for:
        return found | {"waits_for": result.waits_for}
    if not result.placed:
        return found | {"deletes": [show(gone, cpus=result.cpus) for gone in result.deleted]}
    return found | _event(result, has_format=has_format)


def _refusal(result: CheckResult) -> dict[str, Any]:
    error = result.error
    if isinstance(error, DefinitionError):
        reason = {"reason": error.text, "code": error.code, "column": error.column}
    else:
        reason = {"reason": str(error), "code": None, "column": None}
    found = reason | {"advice": result.advice or None}
    return found if result.exits is None else found | {"exits": exits_as_object(result.exits)}


def _event(result: CheckResult, *, has_format: bool) -> dict[str, Any]:
    placed = result.placed
    probe = placed[0].probe
    layout = probe.layout
    found: dict[str, Any] = {
        "listing": show(probe.definition, cpus=result.cpus),
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
        found["format"] = format_text(layout, number=layout.event_id)
    return found


def _place(placed: Placed) -> dict[str, Any]:
    layout = placed.probe.layout
    return {
        "function": layout.function,
        "where": layout.where,
        "address": f"{layout.ip:#x}",
        **({"spelled": placed.declaration} if placed.declaration else _patched(placed.site)),
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
    own = {"way": returns.return_method.value, "keeps": explain_kept(returns)}
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
