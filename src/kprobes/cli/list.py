"""``kprobe list``: functions and tracepoints that can be probed, with their typed arguments."""

import argparse
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kprobes.cli import options
from kprobes.cli.terminal import write_text
from kprobes.collector import without_collector
from kprobes.errors import UsageError

if TYPE_CHECKING:
    # The engine takes a third of a second to import.
    from kprobes.guest.guest import Guest
    from kprobes.guest.text import Text
    from kprobes.inspect.status import Function

NAME = "list"
HELP = "list the functions, or tracepoints, that can be probed"
EPILOG = """\
examples:
  kprobe list -t qemu:localhost:1234 'do_sys_*' -v       # with arguments: $arg1 is the first
  kprobe list --tracepoints 'sched_*' -v                 # with what they give, for t
  kprobe list --exits --image /boot/vmlinuz 'vfs_*' -v   # how their returns can be probed

Exit status: 0 done, 1 nothing matches, 2 usage, 3 target unreachable."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument(
        "pattern", metavar="PATTERN", nargs="?", help="a name or a shell pattern: vfs_*"
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="with arguments or exits")
    parser.add_argument(
        "--exits", action="store_true", help="say how each function's returns can be probed"
    )
    parser.add_argument(
        "--tracepoints", action="store_true", help="list tracepoints of a guest, for t"
    )
    options.add_output(parser)
    parser.add_argument(
        "--image", type=Path, metavar="FILE", help="with --exits: the kernel in a file"
    )
    options.add_target(parser)
    options.add_kernel_files(parser)
    options.add_quiet(parser)
    options.add_boot(parser)


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """List; return the exit code."""
    from kprobes.cli.target import check_options

    check_options(args)
    options.check_image(args)
    if args.tracepoints and (args.exits or args.image is not None):
        raise UsageError("--tracepoints are of a guest that runs, and return nothing")
    if args.exits:
        _write_exits(args, out)
        return 0
    if args.image is not None:
        raise UsageError("--image is for --exits")
    if args.pattern is None:
        what = "tracepoints? use 'sched_*'" if args.tracepoints else "functions? use 'vfs_*'"
        raise UsageError(f"which {what}, or '*' for all")
    _write_functions(args, out)
    return 0


def _write_functions(args: argparse.Namespace, out: BinaryIO) -> None:
    from kprobes.cli.words import functions_as_json, functions_as_names, functions_as_prototypes

    with without_collector():
        found = _probeable(args)
    show = functions_as_prototypes if args.verbose else functions_as_names
    write_text(out, (functions_as_json if args.format == "json" else show)(found))


def _probeable(args: argparse.Namespace) -> "list[Function]":
    from kprobes.cli.options import is_host

    is_typed = args.verbose or args.format == "json"
    if is_host(args):
        from kprobes.cli.target import this_machine
        from kprobes.host.check import probeable_here
        from kprobes.inspect.status import tracepoints

        machine = this_machine(args)
        if args.tracepoints:
            return tracepoints(machine.kernel, pattern=args.pattern)
        return probeable_here(machine, pattern=args.pattern, is_typed=is_typed)
    from kprobes.cli.target import guest_of
    from kprobes.inspect.status import probeable, tracepoints

    with guest_of(args) as guest:
        if args.tracepoints:
            return tracepoints(guest.kernel, pattern=args.pattern)
        _print_why_not(guest)
        memory, kernel, info = guest.memory, guest.kernel, guest.arch.site
        return probeable(memory, kernel, info, pattern=args.pattern, is_typed=is_typed)


def _print_why_not(guest: "Guest") -> None:
    from kprobes.cli.terminal import print_message
    from kprobes.errors import RefusedError
    from kprobes.guest.obstacles import check_possible

    try:
        check_possible(guest)
    except RefusedError as error:
        print_message(f"kprobe: {error}")


def _write_exits(args: argparse.Namespace, out: BinaryIO) -> None:
    from kprobes.arch.registry import arch
    from kprobes.cli.terminal import print_message
    from kprobes.cli.verdicts import as_table, exits_as_json, sum_up
    from kprobes.guest.text import classified

    with _text(args) as text:
        info = arch(text.kernel.arch).patch
        found = list(classified(text, info, pattern=args.pattern or "*"))
    if args.format == "json":
        write_text(out, exits_as_json(found))
    else:
        write_text(out, as_table(found, has_exits=args.verbose))
    if not args.quiet:
        print_message(sum_up(found))


@contextmanager
def _text(args: argparse.Namespace) -> Generator["Text"]:
    from kprobes.cli.target import guest_of
    from kprobes.guest.places import text_of
    from kprobes.guest.text import text_of_image
    from kprobes.image.file import read_image
    from kprobes.plan.ftrace import known_sites

    if args.image is not None:
        yield text_of_image(read_image(args.image))
        return
    with guest_of(args) as guest:
        yield text_of(guest, known_sites(guest.memory, guest.kernel))
