"""``kprobe status``: what is armed in a guest, and by whom."""

import argparse
from typing import BinaryIO

from kprobes.cli import options

NAME = "status"
HELP = "show what is armed in guests, and by whom"
EPILOG = """\
examples:
  kprobe status                                  # what this machine's journals say
  kprobe status --target qemu:localhost:1234     # look at that guest, too

Every tracer keeps a journal of what it patched. With --target, every ftrace site of the guest is
looked at as well: what the guest's own ftrace uses and what nobody here knows of shows up, too.
A guest that is being traced right now has its stub in use: then only the journal can tell.

Exit status: 0 done, 1 error, 2 usage, 3 target unreachable."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("--target", metavar="T", help=options.TARGET_HELP)
    parser.add_argument("-v", "--verbose", action="store_true", help="name every site")


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Show; return the exit code."""
    from kprobes.cli.armed import journal_text, sites_text, status_text
    from kprobes.cli.stop import Stop
    from kprobes.drivers.journal import entries
    from kprobes.drivers.look import looking
    from kprobes.drivers.restore import of_target
    from kprobes.drivers.status import look

    found = of_target(entries(), args.target)
    # A stub that is in use tells nobody else.
    target = args.target if all(entry.is_abandoned for entry in found) else None
    if not found:
        out.write(b"no journal on this machine: no kprobe is at work, none was killed\n")
    for entry in found:
        sites = "" if target is not None else sites_text(entry, is_verbose=args.verbose)
        out.write(f"{journal_text(entry)}{sites}".encode())
    out.flush()
    if target is not None:
        with Stop() as stop:
            # Somebody else's guest must not be left in the middle of anything.
            stop.defer()
            with looking(target) as guest:
                status = look(guest.memory, guest.kernel, guest.arch.site, found)
            stop.check()
        out.write(status_text(status, is_verbose=args.verbose).encode())
    return 0
