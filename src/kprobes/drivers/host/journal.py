"""Which sessions have something in this machine's tracefs, on disk before it is there.

One empty file per session beside the guests' journals, which is called as its instance is. The
names in tracefs tell as much: the journal is for what neither lists, and for people.
"""

from collections.abc import Iterator
from pathlib import Path

from kprobes.directories import check, make, state
from kprobes.drivers.host.names import Owner, owner_of
from kprobes.drivers.journal import directory

_SUFFIX = ".host"


def note(owner: Owner) -> Path:
    """Note a session; return its file, to be removed when nothing of it is left."""
    folder = directory()
    make(folder, top=state())
    path = folder / f"{owner.label}{_SUFFIX}"
    path.touch(mode=0o600)
    return path


def forget(owner: Owner) -> None:
    """Forget a session."""
    (directory() / f"{owner.label}{_SUFFIX}").unlink(missing_ok=True)


def noted() -> Iterator[Owner]:
    """Yield the sessions that were noted."""
    if not check(directory(), top=state()):
        return
    for path in sorted(directory().glob(f"*{_SUFFIX}")):
        owner = owner_of(path.stem)
        if owner is not None:
            yield owner
