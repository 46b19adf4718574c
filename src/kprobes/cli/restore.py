"""``kprobe restore``: put back what killed tracers left, in guests and on this machine."""

import argparse
from itertools import chain
from typing import TYPE_CHECKING, BinaryIO

from kprobes.cli import options
from kprobes.cli.terminal import write_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kprobes.errors import KprobesError
    from kprobes.guest.journal import Entry
    from kprobes.guest.recovery import Restored

NAME = "restore"
HELP = "put kernels back as they were before a tracer was killed"
EPILOG = """\
examples:
  kprobe restore                              # all that killed tracers left behind
  kprobe restore -t host                      # in this machine's own kernel only
  kprobe restore -t qemu:localhost:1234       # this one only

A tracer that is killed leaves a guardian behind, which does this within a second. This is for
when the guardian was killed, too. The guest has run on all the while; its probes drop events.
With --target, probes of a tracer whose journal is not here are taken away too, by what the guest's
own memory says of them: a snapshot has its probes, but not their journal.
In this machine's own kernel a killed tracer leaves a tracing instance and events of its own, which
are taken away; nothing of anybody else is touched.

Exit status: 0 put right, or nothing to do; 1 not everything could be put right; 2 usage."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    options.add_target(parser, can_boot=False)


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Restore; return the exit code."""
    from kprobes.cli.options import AUTO, GUEST, HOST
    from kprobes.cli.terminal import Stop
    from kprobes.cli.words import print_broken
    from kprobes.guest.journal import entries
    from kprobes.guest.recovery import of_target

    target = None if args.target in (AUTO, GUEST, HOST) else args.target
    broken: list[KprobesError] = []
    found = [] if args.target == HOST else of_target(entries(broken.append), target)
    print_broken(broken)
    is_here = args.target in (None, AUTO, HOST)
    code, is_idle = (1, False) if broken else (0, True)
    unwritten = None
    with Stop() as stop:
        # A kernel must not be left in the middle of it.
        stop.defer()
        noted = _noted(target, is_first=not found) if target is not None else ()
        for words, failed in chain(_guests(found), noted, _here() if is_here else ()):
            # Whoever does not read of it is not to keep others from being restored.
            unwritten = unwritten or _write(out, words)
            code, is_idle = max(code, failed), False
            stop.check()
    if unwritten is not None:
        raise unwritten
    if is_idle:
        of = f" of {args.target}" if args.target else ""
        write_text(out, f"nothing to restore: no journal{of} was left behind{_nor(target)}\n")
    return code


def _write(out: BinaryIO, words: str) -> OSError | None:
    try:
        write_text(out, f"{words}\n")
        out.flush()
    except OSError as error:
        return error
    return None


def _nor(target: str | None) -> str:
    return ", and no probe of ours is in the guest" if target is not None else ""


def _guests(found: "Sequence[Entry]") -> "Iterator[tuple[str, int]]":
    from kprobes.guest.recovery import restore

    return map(_message, restore(found))


def _noted(target: str, *, is_first: bool) -> "Iterator[tuple[str, int]]":
    from kprobes.errors import UnreachableError
    from kprobes.guest.journal import entries
    from kprobes.guest.recovery import of_target, restore_noted

    if of_target(entries(), target):
        # A tracer is at work there, or what it left could not be put right: that is said already.
        return
    try:
        yield from map(_message, restore_noted(target))
    except UnreachableError:
        if is_first:
            raise


def _message(each: "Restored") -> tuple[str, int]:
    from kprobes.cli.words import words_for
    from kprobes.guest.recovery import Outcome

    failed = each.error if each.outcome is Outcome.FAILED else None
    return words_for(each), failed.exit_code if failed else 0


def _here() -> "Iterator[tuple[str, int]]":
    from kprobes.cli.words import words_for_host
    from kprobes.host.sessions import leftovers

    for each in leftovers():
        yield words_for_host(each), each.error.exit_code if each.error else 0
