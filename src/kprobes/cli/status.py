"""``kprobe status``: what is armed in guests and in this machine's kernel, and by whom."""

import argparse
from typing import TYPE_CHECKING, BinaryIO

from kprobes.cli import options
from kprobes.cli.terminal import write_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kprobes.errors import KprobesError
    from kprobes.guest.journal import Entry
    from kprobes.inspect.status import Status

NAME = "status"
HELP = "show what is armed, and by whom"
EPILOG = """\
examples:
  kprobe status                               # what this machine's journals say
  kprobe status -t qemu:localhost:1234 -v     # look at that guest, too
  kprobe status -t host --format json

Every tracer keeps a journal of what it patched. With --target, every ftrace site of the guest is
looked at as well: what the guest's own ftrace uses and what nobody here knows of shows up, too,
as do the probes that a snapshot of a guest was made with.
A guest that is being traced right now has its stub in use: then only the journal can tell.
What recordings have in this machine's own kernel is told by their journals and, to root, by the
kernel: their events, as it lists them.

Exit status: 0 done, 1 error, 2 usage, 3 target unreachable."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    options.add_target(parser, can_boot=False)
    options.add_output(parser)
    parser.add_argument("-v", "--verbose", action="store_true", help="name every site and event")


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Show; return the exit code."""
    from kprobes.cli import words
    from kprobes.cli.options import AUTO, GUEST, HOST
    from kprobes.guest.journal import entries
    from kprobes.guest.recovery import of_target
    from kprobes.host.sessions import sessions

    is_json = args.format == "json"
    of_journal, of_session = (
        (words.journal_as_json, words.session_as_json)
        if is_json
        else (words.journal_as_text, words.session_as_text)
    )
    chosen = None if args.target in (AUTO, GUEST, HOST) else args.target
    broken: list[KprobesError] = []
    found = [] if args.target == HOST else of_target(entries(broken.append), chosen)
    here = sessions() if args.target in (None, AUTO, HOST) else []
    # A stub that is in use tells nobody else.
    target = chosen if all(entry.is_abandoned for entry in found) else None
    words.print_broken(broken)
    if not (found or here or broken) and args.format == "text":
        out.write(b"no journal on this machine: no kprobe is at work, none was killed\n")
    is_brief, is_verbose = target is not None, args.verbose
    texts = [of_journal(entry, is_brief=is_brief, is_verbose=is_verbose) for entry in found]
    texts += [of_session(session, is_verbose=is_verbose) for session in here]
    write_text(out, "".join(texts))
    out.flush()
    if target is not None:
        of_guest = words.guest_as_json if is_json else words.guest_as_text
        write_text(out, of_guest(_read(target, found), is_verbose=is_verbose))
    return 1 if broken else 0


def _read(target: str, found: "Sequence[Entry]") -> "Status":
    from kprobes.cli.target import ATTACHING_S
    from kprobes.cli.terminal import Stop
    from kprobes.guest.notes import can_search, find_notes
    from kprobes.guest.open import attached
    from kprobes.inspect.status import read_status

    with Stop() as stop:
        # Somebody else's guest must not be left in the middle of anything.
        stop.defer(at_most_s=ATTACHING_S)
        with attached(target) as guest:
            marks = {entry.mark for entry in found}
            noted = [
                undo
                for notes in (find_notes(guest) if can_search(guest) else ())
                if notes.mark not in marks
                for undo in notes.patches or ()
            ]
            status = read_status(guest.memory, guest.kernel, guest.arch.site, found, noted)
        stop.check()
    return status
