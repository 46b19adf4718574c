"""``kprobe vars``: the variables that are in scope at a place, and where they can be read."""

import argparse
from typing import TYPE_CHECKING, BinaryIO

from kprobes.cli import options
from kprobes.cli.terminal import aligned, json_lines, write_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kprobes.inspect.source import PlaceVariables
    from kprobes.model.source import Location, Variable

NAME = "vars"
HELP = "list the variables that a probe at a place of a kernel can read"
EPILOG = """\
examples:
  kprobe vars vfs_read:12 --vmlinux /usr/lib/debug/boot/vmlinux
  kprobe vars vfs_read+0x68 --vmlinux /usr/lib/debug/boot/vmlinux
  kprobe vars fs/read_write.c:468 --vmlinux /usr/lib/debug/boot/vmlinux --format json

A place is FUNCTION:LINE, FILE:LINE, or as in a definition. Each variable that can be read there is
named in a definition as a parameter is: kprobe trace 'p vfs_read:12 count file->f_mode'. The debug
information is that of --vmlinux, of the kernel's -dbg package, or of servers in DEBUGINFOD_URLS:
docs/howto/source.md.

Exit status: 0 done, 1 no debug information, 2 usage, 3 target unreachable, 4 no such place."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("place", metavar="PLACE", help="where")
    parser.add_argument(
        "--externs", action="store_true", help="the variables of the place's whole file, too"
    )
    options.add_guest(parser)


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """List; return the exit code."""
    from kprobes.cli.target import source_of
    from kprobes.inspect.source import variables_at

    with source_of(args) as kernel:
        found = variables_at(kernel, args.place, has_externs=args.externs)
    write_text(out, as_json(found) if args.format == "json" else as_text(found))
    return 0


def as_text(places: "Sequence[PlaceVariables]") -> str:
    """Return a line for each variable of each place."""
    texts = (
        f"{each.place}\n"
        + aligned(
            ("", variable.name, variable.type, where(variable)) for variable in each.variables
        )
        for each in places
    )
    return "".join(texts)


def where(variable: "Variable") -> str:
    """Return where a variable is, as the kernel's language has it, or why it cannot be read."""
    if variable.pieces:
        return ", ".join(f"+{each.offset} {_where(each.location)}" for each in variable.pieces)
    return f"- ({variable.why})" if variable.location is None else _where(variable.location)


def _where(location: "Location") -> str:
    from kprobes.model.source import LocationKind

    match location.kind:
        case LocationKind.REGISTER:
            return f"%{location.register}"
        case LocationKind.MEMORY:
            base = "".join(map(_where, location.operands)) or f"%{location.register}"
            return f"{location.number:+#x}({base})"
        case LocationKind.STATIC:
            return f"@{location.number:#x}"
        case LocationKind.PER_CPU:
            return f"this_cpu_read(@{location.number:#x})"
        case LocationKind.CONSTANT:
            return f"\\{location.number}"
        case LocationKind.ADDRESS:
            return f"{location.number:#x}"
        case LocationKind.COMPUTED:
            left, right = map(_where, location.operands)
            return f"({left} {location.operation.sign} {right})"


def as_json(places: "Sequence[PlaceVariables]") -> str:
    """Return an object for each variable of each place."""
    return json_lines(
        {
            "place": each.place,
            "name": variable.name,
            "type": variable.type,
            "where": where(variable) if variable.is_readable else None,
            "why": variable.why or None,
        }
        for each in places
        for variable in each.variables
    )
