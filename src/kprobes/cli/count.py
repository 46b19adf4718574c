"""``kprobe count``: count hits by who made them, or by what they have."""

import argparse
from typing import BinaryIO

from kprobes.cli import counting
from kprobes.cli.counting import Counting
from kprobes.model.hist import OF_FUNCTIONS, trigger_text

NAME = "count"
HELP = "count hits of probes, by function, task or argument"
USAGE = "kprobe count [options] [--by KEY,...] [DEFINITION [--filter EXPR]]... [-- COMMAND...]"
EPILOG = """\
examples:
  kprobe count 'p vfs_*' -- ls /
  kprobe count -t qemu:localhost:1234 'p vfs_read' --by comm,pid --duration 10s
  kprobe count 'r:read vfs_read got=$retval:s64' --by comm,got.log2 --format csv -- ls /

The table has a row for each different key, those with the most hits first. Definitions and options
are those of `kprobe trace`. --print-trigger shows the kernel's hist trigger for it; --format hist
prints the table as the kernel's hist files do. Without -o it is redrawn on a terminal while it
counts; Ctrl-C prints it for the last time.

Exit status: as of `kprobe trace`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    counting.add_by(parser, "function")
    counting.add_arguments(parser)


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Count; return the exit code."""
    trigger = trigger_text(args.by) if args.by else trigger_text(["function"], size=OF_FUNCTIONS)
    shown = counting.live_shown_of(args, out)
    return counting.run(args, out, Counting(trigger=trigger, shown=shown))
