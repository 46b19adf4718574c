"""``kprobe count``: count hits by who made them, or by what they have."""

import argparse
import re
from collections.abc import Sequence
from typing import BinaryIO

from kprobes.cli import counting
from kprobes.cli.counting import Counting
from kprobes.model.hist import LARGE_SIZE, OF_FUNCTIONS, trigger_text

NAME = "count"
HELP = "count hits of probes, by function, task or argument"
USAGE = "kprobe count [options] [--by KEY,...] [DEFINITION [--filter EXPR]]... [-- COMMAND...]"
_ORDERS = (".ascending", ".descending")
_OWN = re.compile(r"\.(?:avg|min|max|p[0-9.]+)$")
EPILOG = """\
examples:
  kprobe count 'p vfs_*' -- ls /
  kprobe count -t qemu:localhost:1234 'p vfs_read' --by comm,pid --duration 10s
  kprobe count 'r vfs_*' --vals duration.avg,duration.p99 --sort duration.p99 -- ls /

The table has a row for each different key, those with the most hits first. Definitions and options
are those of `kprobe trace`. --print-trigger shows the kernel's hist trigger for it; --format hist
prints the table as the kernel's hist files do. Without -o it is redrawn on a terminal while it
counts; Ctrl-C prints it for the last time.

Exit status: as of `kprobe trace`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    counting.add_by(parser, "function")
    parser.add_argument(
        "--vals",
        type=counting.words,
        metavar="FIELD,...",
        help="sums of numbers beside the hits, as `got`; or `got.avg`, `duration.min`, `.max`, "
        "`.p50`, `.p99`",
    )
    parser.add_argument(
        "--sort",
        metavar="FIELD",
        help="by what the rows are sorted, a key or a value as it was given: the greatest first, "
        "with .ascending the least (default: the hits)",
    )
    counting.add_arguments(parser)


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Count; return the exit code."""
    by: list[str] = args.by or ["function"]
    vals: list[str] = args.vals or []
    counting.want_duration(args, [*by, *vals])
    size = args.size or (LARGE_SIZE if args.by else OF_FUNCTIONS)
    trigger = trigger_text(by, vals, sort=_sort(args.sort or "hitcount", by, vals), size=size)
    shown = counting.live_shown_of(args, out)
    return counting.run(args, out, Counting(trigger=trigger, shown=shown))


def _sort(word: str, by: Sequence[str], vals: Sequence[str]) -> str:
    # The kernel names a key or a value without its modifier, but for those that it has not.
    order = next((each for each in _ORDERS if word.endswith(each)), "")
    field = word.removesuffix(order)
    is_plain = field in by or (field in vals and _OWN.search(field) is None)
    return (field.partition(".")[0] if is_plain else field) + (order or ".descending")
