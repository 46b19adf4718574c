"""Journals, sessions of this machine's kernel, and a guest's sites as they are, in words.

What is armed, and by whom, as one JSON object per line; addresses are hexadecimal strings.

Functions that can be probed, as lines for people or programs.

What became of a journal, in words.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import assert_never

from kprobes.cli.terminal import aligned, counted, json_lines, print_message
from kprobes.errors import KprobesError
from kprobes.guest.armed import FLAGS, ArmedPatch
from kprobes.guest.journal import Entry
from kprobes.guest.recovery import Outcome, Restored, has_ended
from kprobes.host.sessions import Removed, Session
from kprobes.inspect.status import ArmedSite, Function, Owner, Status
from kprobes.model.kernel import Parameter, Prototype

_MAX_SITES = 20
_WHO = {
    Owner.JOURNAL: "armed by kprobe on this machine",
    Owner.TRACER: "armed by a kprobe whose journal is not on this machine "
    "(`kprobe restore --target` puts them right)",
    Owner.GUEST: "used by the guest's own ftrace",
    Owner.UNKNOWN: "holding bytes that are neither a nop nor a call",
}


def journal_as_text(entry: Entry, *, is_brief: bool, is_verbose: bool) -> str:
    """Return a line on a journal: which guest, how much is armed, by whom; if wanted, the sites."""
    kernel = f" ({entry.release})" if entry.release else ""
    count = len(patches(entry))
    armed = f"{counted(count, 'site')} armed" if count else "nothing armed"
    allocated = (
        f"; {entry.allocations.memory // 1024:,} KiB are allocated for it"
        if entry.allocations.memory
        else ""
    )
    line = f"{entry.target}{kernel}: {armed} by {_tracer(entry)}{allocated}\n"
    if is_brief:
        return line
    rows = [(f"{patch.addr:#x}", patch.what) for patch in patches(entry)]
    return line + _table(rows, is_verbose=is_verbose)


def session_as_text(session: Session, *, is_verbose: bool) -> str:
    """Return a line on what a session has in this machine's kernel, and its events."""
    owner, lines = session.owner, session.lines
    what = "a recording" if lines is None else counted(len(lines), "event")
    who = (
        f"process {owner.pid}, which was killed: `kprobe restore` takes away what is left"
        if owner.is_gone
        else f"process {owner.pid}, which is at work"
    )
    rows = [tuple(line.split(" ", maxsplit=1)) for line in lines or ()]
    return f"this machine's kernel: {what} of {who}\n{_table(rows, is_verbose=is_verbose)}"


def guest_as_text(status: Status, *, is_verbose: bool) -> str:
    """Return what was seen in a guest."""
    text = f"{status.release}: {counted(status.sites, 'ftrace site')}"
    if not status.sites:
        return f"{status.release}: no ftrace sites are known\n"
    if not status.armed:
        return f"{text}, all of them idle\n"
    lines = [f"{text}, {len(status.armed):,} armed\n"]
    counts = Counter(site.owner for site in status.armed)
    for owner, count in counts.most_common():
        lines.append(f"  {count:,} {_WHO[owner]}\n")
        lines.append(_sites([s for s in status.armed if s.owner is owner], is_verbose=is_verbose))
    return "".join(lines)


def patches(entry: Entry) -> list[ArmedPatch]:
    """Return what a journal has of text, without the marks beside it."""
    return [patch for patch in entry.patches if patch.what != FLAGS]


def _tracer(entry: Entry) -> str:
    if not entry.is_abandoned:
        return f"process {entry.pid}, which is at work"
    if has_ended(entry):
        return f"process {entry.pid}: both have ended; `kprobe restore` removes the journal"
    if entry.is_watched:
        return f"process {entry.pid}, which was killed: its guardian is putting it right"
    if entry.has_only_memory:
        return f"process {entry.pid}, which has ended: `kprobe restore` gives the memory back"
    return (
        f"process {entry.pid}, which was killed: `kprobe restore` puts it right; the guest may "
        "stand still until then"
    )


def _sites(sites: Sequence[ArmedSite], *, is_verbose: bool) -> str:
    return _table([(s.where, s.event or s.code.hex()) for s in sites], is_verbose=is_verbose)


def _table(rows: Sequence[tuple[str, ...]], *, is_verbose: bool) -> str:
    most = None if is_verbose else _MAX_SITES
    return aligned(rows, indent="    ", most=most, more="{} more (-v shows all)")


def journal_as_json(entry: Entry, *, is_brief: bool, is_verbose: bool) -> str:
    """Return a journal."""
    del is_brief, is_verbose
    return _line(
        target=entry.target,
        release=entry.release,
        pid=entry.pid,
        is_at_work=not entry.is_abandoned,
        has_ended=has_ended(entry),
        lent=entry.allocations.memory,
        sites=[{"address": f"{it.addr:#x}", "event": it.what} for it in patches(entry)],
    )


def session_as_json(session: Session, *, is_verbose: bool) -> str:
    """Return what a session has in this machine's kernel; ``events`` is null if nobody may look."""
    del is_verbose
    return _line(
        target="host",
        pid=session.owner.pid,
        is_at_work=not session.owner.is_gone,
        instance=session.owner.instance,
        events=session.lines,
    )


def guest_as_json(status: Status, *, is_verbose: bool) -> str:
    """Return what was seen in a guest."""
    del is_verbose
    armed = [
        {
            "address": f"{site.addr:#x}",
            "where": site.where,
            "bytes": site.code.hex(),
            "owner": site.owner,
            "event": site.event or None,
        }
        for site in status.armed
    ]
    return _line(release=status.release, ftrace_sites=status.sites, armed=armed)


def _line(**members: object) -> str:
    return json_lines([members])


def functions_as_names(functions: Sequence[Function]) -> str:
    """Return one name per line, with its module."""
    return aligned((f.symbol.name, _module(f)) for f in functions)


def functions_as_prototypes(functions: Sequence[Function]) -> str:
    """Return names, arguments and result below each other."""
    return aligned((f.symbol.name, _prototype(f.prototype), _module(f)) for f in functions)


def functions_as_json(functions: Sequence[Function]) -> str:
    """Return one JSON object per line."""
    return json_lines(map(_object, functions))


def declare(parameter: Parameter) -> str:
    """Return a parameter as C declares it: its name may stand inside its type."""
    kind, name = parameter.type, parameter.name
    if kind == "..." or not name:
        return kind
    for inner in ("(*", "["):
        at = kind.find(inner)
        if at >= 0:
            at += len(inner) if inner == "(*" else 0
            return f"{kind[:at]}{'' if inner == '(*' else ' '}{name}{kind[at:]}"
    return f"{kind}{name}" if kind.endswith("*") else f"{kind} {name}"


def _prototype(prototype: Prototype | None) -> str:
    if prototype is None:
        return "(?)"
    parameters = ", ".join(declare(parameter) for parameter in prototype.parameters)
    return f"({parameters or 'void'}) -> {prototype.returns}"


def _module(function: Function) -> str:
    return f"[{function.symbol.module}]" if function.symbol.module else ""


def _object(function: Function) -> dict[str, object]:
    symbol, prototype = function.symbol, function.prototype
    found: dict[str, object] = {
        "function": symbol.name,
        "address": f"{symbol.addr:#x}",
        "module": symbol.module or None,
    }
    if prototype is not None:
        found["args"] = [{"name": p.name, "type": p.type} for p in prototype.parameters]
        found["returns"] = prototype.returns
    return found


def print_broken(errors: Iterable[KprobesError]) -> None:
    """Name the journals that cannot be used."""
    for error in errors:
        print_message(f"kprobe: {error}\n  left alone: remove it if its guest has ended")


def words_for(restored: Restored) -> str:
    """Return a line or two on what became of one journal."""
    entry = restored.entry
    match restored.outcome:
        case Outcome.RESTORED if restored.count or restored.memory:
            memory = f", {restored.memory // 1024:,} KiB given back" if restored.memory else ""
            text = f"{counted(restored.count, 'place')} put back as before{memory}; the guest runs"
        case Outcome.RESTORED:
            text = "as before already; the guest runs, its journal is removed"
        case Outcome.GUEST_ENDED:
            text = "the guest has ended; its journal is removed"
        case Outcome.FORGOTTEN:
            text = "not there, and nothing was patched in it; its journal is removed"
        case Outcome.REPLACED:
            text = f"{restored.error}; nothing was touched, its journal is removed"
        case Outcome.STILL_TRACING:
            text = f"left alone: process {entry.pid} is still tracing it"
        case Outcome.FAILED:
            text = (
                f"{restored.error}\n  kept: {entry.path} (remove it if the guest was booted anew)"
            )
        case _:
            assert_never(restored.outcome)
    return f"{entry.target}: {text}"


def words_for_host(removed: Removed) -> str:
    """Return a line on what became of what one session had in this machine's kernel."""
    owner = removed.owner
    if removed.is_tracing:
        text = f"left alone: process {owner.pid} is still tracing it"
    elif removed.error is not None:
        text = f"something of process {owner.pid} is left: {removed.error}"
    else:
        text = f"{counted(removed.count, 'event')} of process {owner.pid} taken away"
    return f"this machine's kernel: {text}"
