"""``kprobe hist``: show how a number is distributed, such as how long calls take."""

import argparse
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, BinaryIO

from kprobes.cli import counting
from kprobes.cli.counting import Counting
from kprobes.errors import UsageError
from kprobes.model.hist import LARGE_SIZE, trigger_text

if TYPE_CHECKING:
    from kprobes.model.definition import Definition

NAME = "hist"
HELP = "show how durations, or an argument, are distributed"
USAGE = "kprobe hist [options] [--of FIELD] [DEFINITION [--filter EXPR]]... [-- COMMAND...]"
EPILOG = """\
examples:
  kprobe hist 'r vfs_read' --by comm -- dd if=/bin/busybox of=/dev/null
  kprobe hist 'r:read vfs_read got=$retval:s64' --of got -- dd if=/bin/busybox of=/dev/null
  kprobe hist 'p:exit do_exit code=$arg1' --of code --linear 0:65536:256 --duration 10s

A bucket ends with a power of two, or has --linear's width. Of return probes it is how long calls
took, in ns, if nothing else is said; of others it is their argument. Definitions and options are
those of `kprobe trace`. --print-trigger shows the kernel's hist trigger for it; --format hist
prints the table as the kernel's hist files do. Without -o it is redrawn on a terminal while it
counts; Ctrl-C prints it for the last time.

Exit status: as of `kprobe trace`."""
_OPERATOR = re.compile(r"[-+*/]")
_LINEAR = re.compile(r"(\d+):(\d+):(\d+)", re.ASCII)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument(
        "--of", metavar="FIELD", help="of what: duration, or an argument (default: the only one)"
    )
    counting.add_by(parser, "none: one distribution of all")
    parser.add_argument(
        "--linear",
        type=_linear,
        metavar="LO:HI:STEP",
        help="buckets of STEP from LO to HI, in place of powers of two; what is less, and what is "
        "more, is one bucket each",
    )
    counting.add_arguments(parser)


def _linear(text: str) -> tuple[int, int, int]:
    found = _LINEAR.fullmatch(text)
    low, high, step = map(int, found.groups()) if found else (0, 0, 0)
    if not 0 < step <= high - low < 1 << 63:
        raise argparse.ArgumentTypeError(f"invalid buckets: {text!r} (use LO:HI:STEP, 0:1000:100)")
    if low % step or high % step:
        raise argparse.ArgumentTypeError(
            f"invalid buckets: {text!r} (LO and HI must be multiples of STEP)"
        )
    return low, high, step


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Count; return the exit code."""
    definitions = counting.definitions_of(args)
    field = args.of or _field_of(definitions)
    if _OPERATOR.search(field):
        raise UsageError(f"--of {field}: an expression has no buckets; kprobe count --by takes it")
    by: list[str] = args.by or []
    counting.want_duration(args, [field, *by])
    bounds, modifier = None, "log2"
    if args.linear is not None:
        low, high, step = args.linear
        bounds, modifier = (low, high), f"buckets={step}"
    keys = [*by, f"{field}.{modifier}"]
    trigger = trigger_text(keys, sort=field, size=args.size or LARGE_SIZE)
    shown = counting.live_shown_of(args, out, bounds=bounds)
    return counting.run(args, out, Counting(trigger=trigger, shown=shown))


def _field_of(definitions: "Sequence[Definition]") -> str:
    from kprobes.model.definition import DURATION, Kind

    names = [[arg.name for arg in each.args] for each in definitions]
    if all(each.kind is Kind.RETURN for each in definitions):
        return DURATION
    only = {own[0] for own in names if len(own) == 1}
    if len(only) == 1 and all(len(own) == 1 for own in names):
        return only.pop()
    known = ", ".join(dict.fromkeys(name for own in names for name in own))
    raise UsageError(
        f"--of FIELD is needed: which one of {known}"
        if known
        else "nothing to show: the definition has no argument, and only returns have a duration"
    )
