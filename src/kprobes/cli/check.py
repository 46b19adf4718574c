"""``kprobe check``: what definitions would do, or why they cannot; nothing is armed."""

import argparse
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kprobes.cli import options
from kprobes.cli.terminal import write_text
from kprobes.errors import UsageError

if TYPE_CHECKING:
    # The engine takes a third of a second to import.
    from kprobes.inspect.check import Checker

NAME = "check"
HELP = "say how definitions would be probed and fetched, or why they are refused"
USAGE = "kprobe check [options] DEFINITION..."
EPILOG = """\
examples:
  kprobe check -t qemu:localhost:1234 'p:open do_sys_openat2 path=+0($arg2):ustring'
  kprobe check --image /boot/vmlinuz 'r vfs_read $retval file->f_mode' --call-duration --exits
  kprobe check -t qemu:localhost:1234 @probes.txt --format json -o verdicts.json

Nothing is armed, and nothing written into a guest. Definitions count as if they were all armed
in their order. With --image no guest is needed: the kernel is a vmlinux or boot image, without
modules. JSON is one object per statement; docs/reference/formats/json.md has
its members.

Exit status: 0 all are accepted, 1 error, 2 usage, 3 target unreachable, 5 one is refused."""
_PROBLEMS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    options.add_definitions(parser)
    options.add_output(parser)
    parser.add_argument(
        "--event-format", action="store_true", help="with each event's `format` file"
    )
    parser.add_argument(
        "--cost", action="store_true", help="predict what a hit takes, and the guest's pause"
    )
    parser.add_argument(
        "--image", type=Path, metavar="FILE", help="the kernel in a file, instead of a guest's"
    )
    options.add_recording(parser)
    options.add_trace_options(parser, records=True)
    options.add_target(parser)
    options.add_kernel_files(parser)
    options.add_quiet(parser)
    options.add_boot(parser)


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Check; return the exit code."""
    from kprobes.cli.definitions import read_texts
    from kprobes.cli.target import check_options
    from kprobes.cli.verdicts import as_json, as_text

    if not args.definitions:
        raise UsageError("nothing to check: no definition was given")
    texts = read_texts(args.definitions)
    check_options(args)
    options.check_image(args)
    with _checker(args) as checker:
        found = [(text.source, v) for text in texts for v in checker.check(text.text)]
        arch = checker.arch if args.cost else None
    if not found:
        raise UsageError("nothing to check: no definition was given")
    show = as_json if args.format == "json" else as_text
    write_text(out, show(found, has_format=args.event_format, arch=arch))
    return 0 if all(result.is_accepted for _, result in found) else _PROBLEMS


@contextmanager
def _checker(args: argparse.Namespace) -> Generator["Checker"]:
    from kprobes.cli.options import is_host
    from kprobes.cli.target import opened, this_machine
    from kprobes.cli.terminal import Progress, Stop
    from kprobes.guest.obstacles import check_possible
    from kprobes.inspect.check import Terms, checker_of_guest, checker_of_image
    from kprobes.model.definition import SyntheticFields

    terms = Terms(
        strategy=options.strategy(args),
        return_method=options.return_method(args),
        synthetic_fields=SyntheticFields(
            duration=args.call_duration,
            exits=args.exits,
            tgid=args.record_tgid,
            stacktrace=args.stacktrace,
            userstacktrace=args.userstacktrace,
        ),
        source=args.source,
    )
    if args.image is not None:
        yield checker_of_image(args.image, terms)
        return
    if is_host(args):
        from kprobes.host.check import checker_of_host

        yield checker_of_host(this_machine(args), terms)
        return
    with (
        Stop() as stop,
        Progress(is_quiet=args.quiet) as progress,
        opened(args, stop=stop, progress=progress) as session,
    ):
        yield checker_of_guest(session.driver.guest, terms, check=check_possible)
        stop.check()
