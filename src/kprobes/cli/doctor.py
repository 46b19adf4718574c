"""``kprobe doctor``: what this machine and a target can do, and what to install."""

import argparse
from typing import BinaryIO

from kprobes.cli import options
from kprobes.cli.terminal import write_text

NAME = "doctor"
HELP = "check what this machine and a target can do, and what to install"
EPILOG = """\
examples:
  kprobe doctor
  kprobe doctor --target host                    # this machine's own kernel, in detail
  kprobe doctor --target qemu:localhost:1234     # the guest too: kernel, types, clock, ...

Exit status: 0 all that is needed is there, 5 something is missing, 2 usage."""
_PROBLEMS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument(
        "--target", metavar="T", help=f"host: this machine's own kernel; {options.TARGET_HELP}"
    )
    parser.add_argument("--format", choices=("text", "json"), default="text")


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Look at everything; return the exit code."""
    from kprobes.cli.options import AUTO, GUEST, HOST
    from kprobes.cli.report import findings_as_json as as_json
    from kprobes.cli.report import findings_as_text as as_text
    from kprobes.cli.terminal import Stop
    from kprobes.host.obstacles import check_host
    from kprobes.inspect.doctor import Verdict, check_machine, check_target

    found = [*check_host(is_wanted=args.target == HOST)]
    found += [] if args.target == HOST else check_machine()
    if args.target not in (None, AUTO, GUEST, HOST):
        with Stop() as stop:
            stop.defer()
            found += check_target(args.target)
            stop.check()
    write_text(out, (as_json if args.format == "json" else as_text)(found))
    return _PROBLEMS if any(each.verdict is Verdict.MISSING for each in found) else 0
