"""Journals, sessions of this machine's kernel, and a guest's sites as they are, in words."""

from collections import Counter
from collections.abc import Sequence

from kprobes.cli.words import aligned, counted
from kprobes.drivers.host.sessions import Session
from kprobes.drivers.journal import FLAGS, Entry, Undo
from kprobes.drivers.restore import has_ended
from kprobes.drivers.status import ArmedSite, Owner, Status

_MAX_SITES = 20
_WHO = {
    Owner.JOURNAL: "armed by kprobe on this machine",
    Owner.TRACER: "armed by a kprobe whose journal is not on this machine "
    "(`kprobe restore --target` puts them right)",
    Owner.GUEST: "used by the guest's own ftrace",
    Owner.UNKNOWN: "holding bytes that are neither a nop nor a call",
}


def of_journal(entry: Entry, *, is_brief: bool, is_verbose: bool) -> str:
    """Return a line on a journal: which guest, how much is armed, by whom; if wanted, the sites."""
    kernel = f" ({entry.release})" if entry.release else ""
    count = len(patches(entry))
    armed = f"{counted(count, 'site')} armed" if count else "nothing armed"
    lent = f"; {entry.ledger.memory // 1024:,} KiB are lent to it" if entry.ledger.memory else ""
    line = f"{entry.target}{kernel}: {armed} by {_tracer(entry)}{lent}\n"
    if is_brief:
        return line
    rows = [(f"{undo.addr:#x}", undo.what) for undo in patches(entry)]
    return line + _table(rows, is_verbose=is_verbose)


def of_session(session: Session, *, is_verbose: bool) -> str:
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


def of_guest(status: Status, *, is_verbose: bool) -> str:
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


def patches(entry: Entry) -> list[Undo]:
    """Return what a journal has of text, without the marks beside it."""
    return [undo for undo in entry.undos if undo.what != FLAGS]


def _tracer(entry: Entry) -> str:
    if not entry.is_abandoned:
        return f"process {entry.pid}, which is at work"
    if has_ended(entry):
        return f"process {entry.pid}: both have ended; `kprobe restore` removes the journal"
    if entry.is_watched:
        return f"process {entry.pid}, which was killed: its guardian is putting it right"
    if entry.has_only_lent:
        return f"process {entry.pid}, which has ended: `kprobe restore` gives the memory back"
    return (
        f"process {entry.pid}, which was killed: `kprobe restore` puts it right; the guest may "
        "stand still until then"
    )


def _sites(sites: Sequence[ArmedSite], *, is_verbose: bool) -> str:
    return _table([(s.where, s.event or s.code.hex()) for s in sites], is_verbose=is_verbose)


def _table(rows: Sequence[tuple[str, ...]], *, is_verbose: bool) -> str:
    shown = rows if is_verbose else rows[:_MAX_SITES]
    rest = len(rows) - len(shown)
    more = f"    ... and {rest:,} more (-v shows all)\n" if rest else ""
    return aligned(shown, indent="    ") + more
