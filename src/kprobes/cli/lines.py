"""``kprobe lines``: the lines of a function or file that have code, and so can be probed."""

import argparse
from typing import TYPE_CHECKING, BinaryIO

from kprobes.cli import options
from kprobes.cli.terminal import aligned, json_lines, write_text

if TYPE_CHECKING:
    from kprobes.inspect.source import Lines, ShownLine

NAME = "lines"
HELP = "list the lines of a kernel's source that can be probed"
EPILOG = """\
examples:
  kprobe lines vfs_read --vmlinux /usr/lib/debug/boot/vmlinux
  kprobe lines fs/read_write.c:450-480 --vmlinux /usr/lib/debug/boot/vmlinux
  kprobe lines do_sys_openat2 --vmlinux /usr/lib/debug/boot/vmlinux --source linux-6.1

A line is probed by FUNCTION:N, counted from the function's own, or FILE:N, with the variables that
`kprobe vars` lists: kprobe trace 'p vfs_read:12 count'. The kernel's debug information is that of
--vmlinux, of its -dbg package, or of servers in DEBUGINFOD_URLS: docs/howto/source.md.

Exit status: 0 done, 1 no debug information, 2 usage, 3 target unreachable, 4 no such function."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("what", metavar="FUNCTION|FILE[:FIRST[-LAST]]", help="of what")
    options.add_guest(parser)


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """List; return the exit code."""
    from kprobes.cli.target import source_of
    from kprobes.inspect.source import lines_of, read_lines

    with source_of(args) as kernel:
        found = lines_of(kernel, args.what)
    text = None if args.source is None else read_lines(args.source, found)
    write_text(out, as_json(found) if args.format == "json" else as_text(found, text))
    return 0


def as_text(lines: "Lines", source: list[str] | None = None) -> str:
    """Return a line for each, those without code only where their text is known."""
    name = f"{lines.function} at {lines.file}:{lines.first}" if lines.function else lines.file
    if source is None:
        return f"{name}\n" + aligned(
            (f"{_number(each, lines):>6}", ", ".join(each.places)) for each in lines.lines
        )
    coded = {each.line: each for each in lines.lines}
    rows = [
        f"{_number(coded[number], lines) if number in coded else '':>6}  {text}".rstrip()
        for number, text in enumerate(source, start=lines.first)
    ]
    return "\n".join([name, *rows]) + "\n"


def _number(line: "ShownLine", lines: "Lines") -> int:
    return line.line if line.relative is None or not lines.function else line.relative


def as_json(lines: "Lines") -> str:
    """Return an object for each."""
    return json_lines(
        {
            "file": lines.file,
            "line": each.line,
            "function": lines.function,
            "relative": each.relative,
            "places": list(each.places),
        }
        for each in lines.lines
    )
