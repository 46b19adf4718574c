"""``kprobe debuginfo``: which files have a kernel's debug information; Debian's are fetched."""

import argparse
from typing import TYPE_CHECKING, BinaryIO

from kprobes.cli import options
from kprobes.cli.terminal import aligned, json_lines, print_message, write_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kprobes.inspect.debug_files import DebugFile

NAME = "debuginfo"
HELP = "show which files have the debug information of a kernel and its modules"
EPILOG = """\
examples:
  kprobe debuginfo
  kprobe debuginfo --fetch
  kprobe debuginfo -t qemu:localhost:1234 --format json

Lines and variables of the source need it: docs/howto/source.md says where it is looked for. --fetch
downloads Debian's package of it for a kernel of Debian's, by apt, and says how large it is (280 MB
for a cloud kernel, 860 MB for an ordinary one). Of that the kernel's file and those of the modules
that are loaded are kept (0.6 to 1 GB), for the two kernels that it was done for last, below
$XDG_CACHE_HOME/kprobes/debug. Nothing is installed.

Exit status: 0 done, 1 the kernel's is missing, 2 usage, 3 target or package unreachable."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument(
        "--fetch",
        action="store_true",
        help="download Debian's package where something is missing",
    )
    options.add_guest(parser)


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Show; return the exit code."""
    from kprobes.cli.target import source_of
    from kprobes.inspect.debug_files import debug_files, fetch_debug_files

    with source_of(args) as asked:
        kernel, found = asked.kernel, debug_files(asked)
    if args.fetch and not all(each.file for each in found):
        # This takes minutes: others want the guest's stub.
        suite, mirror = args.suite or "", args.mirror or ""
        tell = None if args.quiet else print_message
        fetch_debug_files(kernel, tell, suite=suite, mirror=mirror)
        with source_of(args) as asked:
            found = debug_files(asked)
    write_text(out, as_json(found) if args.format == "json" else as_text(found))
    if not found[0].file:
        print_message("kprobe: the kernel's is missing: docs/howto/source.md, or --fetch")
        return 1
    return 0


def as_text(files: "Sequence[DebugFile]") -> str:
    """Return a line for each, and how to get what is missing."""
    return aligned((each.module or "the kernel", each.file or "-") for each in files)


def as_json(files: "Sequence[DebugFile]") -> str:
    """Return an object for each."""
    return json_lines({"module": each.module, "file": each.file or None} for each in files)
