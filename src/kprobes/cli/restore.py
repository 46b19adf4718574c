"""``kprobe restore``: put back what killed tracers left in guests, from their journals."""

import argparse
from typing import BinaryIO

from kprobes.cli import options

NAME = "restore"
HELP = "put guests back as they were before a tracer was killed"
EPILOG = """\
examples:
  kprobe restore                                 # every guest that a killed tracer left behind
  kprobe restore --target qemu:localhost:1234    # this one only

A tracer that is killed leaves a guardian behind, which does this within a second. This is for
when the guardian was killed, too. The guest has run on all the while; its probes drop events.

Exit status: 0 put right, or nothing to do; 1 not everything could be put right; 2 usage."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("--target", metavar="T", help=options.TARGET_HELP)


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Restore; return the exit code."""
    from kprobes.cli.outcomes import words_for
    from kprobes.cli.stop import Stop
    from kprobes.drivers.journal import entries
    from kprobes.drivers.restore import of_target, restore

    found = of_target(entries(), args.target)
    if not found:
        of = f" of {args.target}" if args.target else ""
        out.write(f"nothing to restore: no journal{of} was left behind\n".encode())
        return 0
    code = 0
    with Stop() as stop:
        # A guest must not be left in the middle of it.
        stop.defer()
        for each in restore(found):
            out.write(f"{words_for(each)}\n".encode())
            out.flush()
            code = max(code, each.error.exit_code if each.error else 0)
            stop.check()
    return code
