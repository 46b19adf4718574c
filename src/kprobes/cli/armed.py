"""Journals, and a guest's sites as they are, in words."""

from collections import Counter
from collections.abc import Sequence

from kprobes.cli.words import aligned, counted
from kprobes.drivers.journal import Entry, Undo
from kprobes.drivers.restore import has_ended
from kprobes.drivers.status import ArmedSite, Owner, Status

_MAX_SITES = 20
_WHO = {
    Owner.JOURNAL: "armed by kprobe on this machine",
    Owner.TRACER: "armed by a kprobe whose journal is not on this machine",
    Owner.GUEST: "used by the guest's own ftrace",
    Owner.UNKNOWN: "holding bytes that are neither a nop nor a call",
}
_RECORD = "dyn_ftrace.flags"


def journal_text(entry: Entry) -> str:
    """Return a line on a journal: which guest, how much is armed, and by whom."""
    kernel = f" ({entry.release})" if entry.release else ""
    count = len(_patches(entry))
    armed = f"{counted(count, 'site')} armed" if count else "nothing armed"
    lent = f"; {entry.ledger.memory // 1024:,} KiB are lent to it" if entry.ledger.memory else ""
    return f"{entry.target}{kernel}: {armed} by {_tracer(entry)}{lent}\n"


def sites_text(entry: Entry, *, is_verbose: bool) -> str:
    """Return the sites that a journal names."""
    return _table(
        [(f"{undo.addr:#x}", undo.what) for undo in _patches(entry)], is_verbose=is_verbose
    )


def status_text(status: Status, *, is_verbose: bool) -> str:
    """Return what was seen in a guest."""
    text = f"{status.release}: {counted(status.sites, 'ftrace site')}"
    if not status.armed:
        return f"{text}, all of them idle\n"
    lines = [f"{text}, {len(status.armed):,} armed\n"]
    counts = Counter(site.owner for site in status.armed)
    for owner, count in counts.most_common():
        lines.append(f"  {count:,} {_WHO[owner]}\n")
        lines.append(_sites([s for s in status.armed if s.owner is owner], is_verbose=is_verbose))
    return "".join(lines)


def _patches(entry: Entry) -> list[Undo]:
    return [undo for undo in entry.undos if undo.what != _RECORD]


def _tracer(entry: Entry) -> str:
    if not entry.is_abandoned:
        return f"process {entry.pid}, which is at work"
    if has_ended(entry):
        return f"process {entry.pid}: both have ended; `kprobe restore` removes the journal"
    return f"process {entry.pid}, which was killed: `kprobe restore` puts it right"


def _sites(sites: Sequence[ArmedSite], *, is_verbose: bool) -> str:
    return _table([(s.where, s.event or s.code.hex()) for s in sites], is_verbose=is_verbose)


def _table(rows: Sequence[tuple[str, str]], *, is_verbose: bool) -> str:
    shown = rows if is_verbose else rows[:_MAX_SITES]
    rest = len(rows) - len(shown)
    more = f"    ... and {rest:,} more (-v shows all)\n" if rest else ""
    return aligned(shown, indent="    ") + more
