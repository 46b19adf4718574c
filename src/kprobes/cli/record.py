"""``kprobe record``: arm definitions, and keep what they record in a file."""

import argparse
import signal
from pathlib import Path
from typing import BinaryIO

from kprobes.cli import options, trace
from kprobes.cli.report import DEFAULT
from kprobes.errors import KprobesError, UsageError

NAME = "record"
HELP = "arm probes and keep their events in a file"
USAGE = "kprobe record [options] [-o FILE] [DEFINITION [--filter EXPR]]... [-- COMMAND...]"
EPILOG = """\
examples:
  kprobe record 'p:open do_sys_openat2 path=+0($arg2):ustring' -- ls /
  kprobe record -t qemu:localhost:1234 -o reads.rec 'r:read vfs_read got=$retval:s64' --duration 10s
  kprobe record -t running 'p vfs_*' --cpu 0 --duration 10s -o vfs.rec

Definitions and options are those of `kprobe trace`. Nothing is decoded while it records: the file
has the rings' own bytes, and all that is needed to print them on any machine (`kprobe report`,
`kprobe info`). It is good up to its last whole part, also when kprobe or this machine is killed.

Several targets in one command: what stands before the first -t is for all, what follows a -t for
that target, but -o, --ready and --summary are for all:
  kprobe record 'p:open do_sys_openat2' -t name:web 'p vfs_read' -t name:db 'p vfs_write' -o x.rec
records x.name-web.rec and x.name-db.rec, until Ctrl-C ends both, or each after its --duration.
`kprobe report x.name-web.rec x.name-db.rec` prints them in one order of time. Where one target
cannot be armed, none is recorded.

Exit status: as of `kprobe trace`; of several targets, the highest."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    trace.add_begin(parser)
    trace.add_probing(parser)
    trace.add_triggers(parser)
    parser.add_argument(
        "-o",
        "--output",
        dest="recording",
        type=Path,
        default=DEFAULT,
        metavar="FILE",
        help="the recording, - for standard output; one that is there becomes FILE.old (default: "
        f"{DEFAULT})",
    )
    parser.add_argument(
        "--max-size",
        type=options.size,
        metavar="SIZE",
        help="end when the file has so many bytes; "
        "with --rotate: remove the oldest file when all have so many",
    )
    parser.add_argument(
        "--rotate",
        type=_rotation,
        metavar="SIZE|TIME",
        help="begin another file each SIZE, 100M, or TIME, 10m: FILE, then .2, .3, ... before its "
        "suffix",
    )
    parser.add_argument(
        "--snapshot",
        type=options.size,
        metavar="SIZE",
        help="keep only the last SIZE, in memory; write it at SIGUSR2, at hits with a trigger "
        "snapshot, and at the end",
    )
    parser.set_defaults(
        max_events=None, until_panic=None, hang_timeout=None, output=None, format="text"
    )
    parser.set_defaults(json_numbers="string", enum=False, several=())


def _rotation(text: str) -> tuple[int | None, float | None]:
    # Bytes, or seconds.
    if text[-1:] in "smh":
        return None, options.duration(text)
    return options.size(text), None


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Record; return the exit code."""
    if args.several:
        return _run_several(args, out)
    _check(args)
    if args.snapshot is not None:
        # One that comes before there is anything must not end us.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    return trace.run(args, out)


def _run_several(args: argparse.Namespace, out: BinaryIO) -> int:
    from kprobes.cli.record_several import parts_of, record_several
    from kprobes.cli.target import check_options

    parts = parts_of(args.several)
    for part in parts:
        try:
            _check(part.args)
            check_options(part.args)
            trace.is_following(part.args)
            trace.prepared(part.args, out)
        except KprobesError as error:
            error.add_note(part.name)
            raise
    return record_several(parts)


def _check(args: argparse.Namespace) -> None:
    from kprobes.recording_writer import check_recording

    if args.snapshot is not None and (args.rotate or args.max_size) is not None:
        raise UsageError("--snapshot keeps the last of all; --rotate and --max-size are without it")
    if str(args.recording) != "-":
        check_recording(args.recording)
    elif args.snapshot is not None or args.rotate is not None:
        raise UsageError("--snapshot and --rotate need a file: -o FILE")
