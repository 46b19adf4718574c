"""``kprobe record``: arm definitions, and keep what they record in a file."""

import argparse
from pathlib import Path
from typing import BinaryIO

from kprobes.cli import trace
from kprobes.cli.report import DEFAULT

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

Exit status: as of `kprobe trace`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    trace.add_begin(parser)
    trace.add_probing(parser)
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
    parser.set_defaults(
        max_events=None, until_panic=None, hang_timeout=None, output=None, format="text"
    )
    parser.set_defaults(json_numbers="string", enum=False)


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Record; return the exit code."""
    from kprobes.recording_writer import check_recording

    if str(args.recording) != "-":
        check_recording(args.recording)
    return trace.run(args, out)
