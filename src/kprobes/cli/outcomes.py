"""What became of a journal, in words."""

from collections.abc import Iterable
from typing import assert_never

from kprobes.cli.words import counted, say
from kprobes.drivers.host.leftovers import Removed
from kprobes.drivers.restore import Outcome, Restored
from kprobes.errors import KprobesError


def say_broken(errors: Iterable[KprobesError]) -> None:
    """Name the journals that cannot be used."""
    for error in errors:
        say(f"kprobe: {error}\n  left alone: remove it if its guest has ended")


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
