"""Which sessions have something in this machine's tracefs, by journal and by name."""

from contextlib import suppress
from dataclasses import dataclass

from kprobes.drivers.host.files import PROBES, HostFiles, owners
from kprobes.drivers.host.journal import noted
from kprobes.drivers.host.names import Owner
from kprobes.errors import TracefsError
from kprobes.transport.tracefs import Tracefs, open_tracefs


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What one session has.

    Attributes:
        owner: whose it is.
        lines: its events, as the kernel lists them; None where we may not look.
    """

    owner: Owner
    lines: tuple[str, ...] | None


def sessions() -> list[Session]:
    """Return what all sessions have; without rights only those of this user's journals."""
    with suppress(TracefsError):
        return sessions_in(open_tracefs())
    return [Session(owner=owner, lines=None) for owner in noted()]


def sessions_in(tracefs: Tracefs) -> list[Session]:
    """Return what all sessions have in a tracefs.

    Raises:
        TracefsError: we may not look.
    """
    if not tracefs.has(PROBES):
        return [Session(owner=owner, lines=()) for owner in noted()]
    found = owners(tracefs)
    return [
        Session(owner=owner, lines=tuple(HostFiles(tracefs, owner).lines()))
        for owner in dict.fromkeys((*noted(), *found))
    ]
