"""Names of ours in a tracefs that many share: they say which process made them.

An instance is called ``kprobes-PID-START-N``, its events' group ``kprobes_PID_START_N``. START is
when the process began, in clock ticks since boot, so that another one that gets its number later
is not taken for it; N counts its sessions.

A session's journal is an empty file beside the guests' journals, named as its instance is, and on
disk before anything is in tracefs. The names there tell as much: the journal is for what neither
lists, and for people.
"""

import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from kprobes.directories import check, make, state
from kprobes.guest.journal import directory, process_start

_NAME = re.compile(r"kprobes[-_]([0-9]+)[-_]([0-9]+)[-_]([0-9]+)")
_sessions = itertools.count(1)


class Owner(Struct, frozen=True, kw_only=True):
    """One session of one process."""

    pid: int
    started: str
    session: int

    @property
    def instance(self) -> str:
        """Its tracing instance."""
        return f"instances/{self.label}"

    @property
    def label(self) -> str:
        """Its instance's name."""
        return f"kprobes-{self.pid}-{self.started}-{self.session}"

    @property
    def group(self) -> str:
        """The group of its events."""
        return f"kprobes_{self.pid}_{self.started}_{self.session}"

    @property
    def is_gone(self) -> bool:
        """Whether its process has ended."""
        return process_start(self.pid) != self.started


def new_owner() -> Owner:
    """Return a session of this process."""
    pid = os.getpid()
    return Owner(pid=pid, started=process_start(pid), session=next(_sessions))


def owner_of(name: str) -> Owner | None:
    """Return whose instance or group it is, or None when it is none of ours."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    return Owner(pid=int(found[1]), started=found[2], session=int(found[3]))


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
