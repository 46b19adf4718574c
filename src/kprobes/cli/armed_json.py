"""What is armed, and by whom, as one JSON object per line; addresses are hexadecimal strings."""

from kprobes.cli.armed import patches
from kprobes.drivers.host.sessions import Session
from kprobes.drivers.journal import Entry
from kprobes.drivers.restore import has_ended
from kprobes.drivers.status import Status
from kprobes.sinks.json_fields import dumps


def of_journal(entry: Entry, *, is_brief: bool, is_verbose: bool) -> str:
    """Return a journal."""
    del is_brief, is_verbose
    return _line(
        target=entry.target,
        release=entry.release,
        pid=entry.pid,
        is_at_work=not entry.is_abandoned,
        has_ended=has_ended(entry),
        lent=entry.ledger.memory,
        sites=[{"address": f"{it.addr:#x}", "event": it.what} for it in patches(entry)],
    )


def of_session(session: Session, *, is_verbose: bool) -> str:
    """Return what a session has in this machine's kernel; ``events`` is null if nobody may look."""
    del is_verbose
    return _line(
        target="host",
        pid=session.owner.pid,
        is_at_work=not session.owner.is_gone,
        instance=session.owner.instance,
        events=session.lines,
    )


def of_guest(status: Status, *, is_verbose: bool) -> str:
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
    return f"{dumps(members)}\n"
