"""Journals that killed tracers left behind: their guests are put right, and they are removed."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from kprobes.drivers.guest.guardian import rescue
from kprobes.drivers.journal import Entry
from kprobes.errors import KprobesError, UnreachableError, UsageError
from kprobes.transport.address import is_path
from kprobes.transport.connect import parse_target

_PATIENCE_S = 2.0
_OWN_PREFIX = "kprobes-"


class Outcome(StrEnum):
    """What became of one journal."""

    RESTORED = "restored"
    GUEST_ENDED = "guest ended"
    FORGOTTEN = "forgotten"
    STILL_TRACING = "still tracing"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    """One journal that was dealt with.

    Attributes:
        entry: as it was; its file is gone unless the outcome is FAILED or STILL_TRACING.
        count: places that were put back.
        memory: bytes that the guest got back.
        error: why it FAILED, else None.
    """

    entry: Entry
    outcome: Outcome
    count: int = 0
    memory: int = 0
    error: KprobesError | None = None


def of_target(entries: Iterable[Entry], target: str | None) -> list[Entry]:
    """Return the journals of one target, however it is spelt; all of them for None."""
    found = list(entries)
    if target is None:
        return found
    address = parse_target(target)
    return [entry for entry in found if _address(entry) == address]


def restore(entries: Iterable[Entry], *, patience_s: float = _PATIENCE_S) -> Iterator[Restored]:
    """Roll back every journal whose tracer is gone, the newest first.

    Args:
        entries: oldest first.
        patience_s: how long a stub may be busy with a tracer that has just died.
    """
    # A later tracer may have patched over what an earlier one left.
    for entry in reversed(list(entries)):
        if not entry.is_abandoned:
            yield Restored(entry=entry, outcome=Outcome.STILL_TRACING)
        elif has_ended(entry):
            entry.path.unlink(missing_ok=True)
            yield Restored(entry=entry, outcome=Outcome.GUEST_ENDED)
        else:
            yield _restore(entry, patience_s)


def has_ended(entry: Entry) -> bool:
    """Whether a journal's guest was one that kprobes booted, and is gone with its directory."""
    address = _address(entry)
    if not is_path(address):
        return False
    directory = Path(address).parent
    return directory.name.startswith(_OWN_PREFIX) and not directory.exists()


def _address(entry: Entry) -> str:
    try:
        return parse_target(entry.target)
    except UsageError:
        # Nothing can have been written to such a target.
        return entry.target


def _restore(entry: Entry, patience_s: float) -> Restored:
    try:
        rescued = rescue(entry.target, entry.path, patience_s=patience_s)
    except UnreachableError as error:
        return _unreachable(entry, error)
    except KprobesError as error:
        return Restored(entry=entry, outcome=Outcome.FAILED, error=error)
    return Restored(
        entry=entry, outcome=Outcome.RESTORED, count=rescued.places, memory=rescued.memory
    )


def _unreachable(entry: Entry, error: UnreachableError) -> Restored:
    if not entry.is_done:
        return Restored(entry=entry, outcome=Outcome.FAILED, error=error)
    # Nothing was written to it.
    entry.path.unlink(missing_ok=True)
    return Restored(entry=entry, outcome=Outcome.FORGOTTEN)
