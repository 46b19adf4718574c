"""``kprobe flame``: draw the stacks of hits as a flame graph."""

import argparse
from pathlib import Path
from typing import BinaryIO

from kprobes.cli import counting, options, trace
from kprobes.cli.counting import Counting, Shown
from kprobes.errors import UsageError
from kprobes.model.hist import LARGE_SIZE, MAX_KEYS, STACK, trigger_text

NAME = "flame"
HELP = "draw who calls: the stacks of hits as a flame graph"
USAGE = "kprobe flame [options] [-o FILE] [DEFINITION [--filter EXPR]]... [-- COMMAND...]"
EPILOG = """\
examples:
  kprobe flame 'p vfs_*' -o calls.html -- ls -lR /
  kprobe flame -t qemu:localhost:1234 'p vfs_read' --duration 10s -o reads.svg
  kprobe flame 'p vfs_*' --by comm -o calls.folded -- ls -l /

The end of FILE's name says what is written:
  .html               a page that any browser opens offline: pip install 'kprobes[html]'
  .svg                a picture: pip install 'kprobes[plot]'
  .speedscope.json    for https://www.speedscope.app
  .folded             a line for each stack, for flamegraph.pl, inferno and speedscope; also without
                      -o, on standard output

Each hit counts once: who calls what is probed is shown, and how often; not where time is spent.
Definitions and options are those of `kprobe trace`. Of a recording made with -O stacktrace:
`kprobe report FILE --count function,stack --format folded`.

Exit status: as of `kprobe trace`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    trace.add_begin(parser)
    trace.add_probing(parser)
    parser.add_argument(
        "--by",
        type=counting.words,
        default=(),
        metavar="KEY",
        help="comm, pid, cpu, ustack (the program's stack), or an argument of the definition, at "
        "the bottom of all stacks",
    )
    counting.add_size(parser)
    options.add_symfs(parser)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write it there")
    parser.set_defaults(format="folded", print_trigger=False, **counting.DEFAULTS)


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Count, and draw; return the exit code."""
    from kprobes.flame_graph import SUFFIXES, check_installed

    args.by = [*args.by, "function", STACK]
    if len(args.by) > MAX_KEYS:
        raise UsageError("--by takes one key: the others are the function and its stack")
    form = args.format
    if args.output is not None:
        name = args.output.name
        found = [form for suffix, form in SUFFIXES.items() if name.endswith(suffix)]
        if not found:
            known = ", ".join(SUFFIXES)
            raise UsageError(
                f"cannot write a flame graph to {name!r}: it must end with one of {known}"
            )
        form = found[0]
    check_installed(form)
    trigger = trigger_text(args.by, size=args.size or LARGE_SIZE)
    return counting.run(args, out, Counting(trigger=trigger, shown=Shown(form=form)))
