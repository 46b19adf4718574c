"""Sessions that have something in this machine's tracefs, by journal and by name.

What killed tracers left in this machine's tracefs: found by journal and by name, taken away.
"""

from collections.abc import Iterator
from contextlib import suppress

from msgspec import Struct

from kprobes.errors import TracefsError
from kprobes.host.events import PROBES, HostFiles, owners
from kprobes.host.owner import Owner, forget, noted
from kprobes.transport.tracefs import Tracefs, open_tracefs


class Session(Struct, frozen=True, kw_only=True):
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


class Removed(Struct, frozen=True, kw_only=True):
    """What became of one session's things.

    Attributes:
        owner: whose they were.
        count: events that were taken away.
        is_tracing: whether its process is still there, so that all was left alone.
        error: why something is left, else None.
    """

    owner: Owner
    count: int = 0
    is_tracing: bool = False
    error: TracefsError | None = None


def leftovers() -> Iterator[Removed]:
    """Take away what sessions left in this machine's tracefs; nothing where it has none for us.

    Nor where we may not look: whoever may not has left nothing there.

    A journal from before the machine was booted anew is forgotten.
    """
    try:
        tracefs = open_tracefs()
        has_probes = tracefs.has(PROBES)
    except TracefsError:
        return
    if has_probes:
        yield from remove_leftovers(tracefs)


def remove_leftovers(tracefs: Tracefs) -> Iterator[Removed]:
    """Take away what sessions left whose processes are gone; what is not ours is not touched."""
    for owner in dict.fromkeys((*noted(), *owners(tracefs))):
        if not owner.is_gone:
            yield Removed(owner=owner, is_tracing=True)
            continue
        yield _remove(tracefs, owner)


def _remove(tracefs: Tracefs, owner: Owner) -> Removed:
    files = HostFiles(tracefs, owner)
    try:
        count = len(files.lines())
        files.remove()
    except TracefsError as error:
        return Removed(owner=owner, error=error)
    forget(owner)
    return Removed(owner=owner, count=count)
