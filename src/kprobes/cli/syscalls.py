"""``kprobe syscalls``: the system calls of a guest's kernel, and the names of their arguments."""

import argparse
from typing import TYPE_CHECKING, BinaryIO

from kprobes.cli import options
from kprobes.cli.terminal import write_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kprobes.inspect.status import SystemCall

NAME = "syscalls"
HELP = "list the system calls of a guest's kernel, with their arguments"
EPILOG = """\
examples:
  kprobe syscalls 'open*'
  kprobe syscalls -t qemu:localhost:1234 '*stat*'
  kprobe syscalls --format json

One is probed by its name: kprobe trace 'p sys_openat filename:ustring'; all of them by number:
kprobe trace 't sys_enter id'. $arg1 to $arg6 are there always, numbers and names where the kernel
has events for system calls (CONFIG_FTRACE_SYSCALLS).

Exit status: 0 done, 1 nothing matches, 2 usage, 3 target unreachable."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument(
        "pattern", metavar="PATTERN", nargs="?", default="*", help="a name or a shell pattern"
    )
    options.add_guest(parser)


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """List; return the exit code."""
    from kprobes.cli.target import only_guest_of
    from kprobes.inspect.status import system_calls

    with only_guest_of(args, "system calls") as guest:
        found = system_calls(guest.memory, guest.kernel, pattern=args.pattern)
    write_text(out, as_json(found) if args.format == "json" else as_text(found))
    return 0


def as_text(calls: "Sequence[SystemCall]") -> str:
    """Return a line for each: number, name and arguments."""
    from kprobes.cli.terminal import aligned

    return aligned(
        ("" if each.number is None else f"{each.number:>3}", each.name, _declared(each))
        for each in calls
    )


def _declared(call: "SystemCall") -> str:
    from kprobes.cli.words import declare
    from kprobes.model.kernel import Parameter

    if call.parameters is None:
        return "(?)"
    declared = (declare(Parameter(name=name, type=type_)) for name, type_ in call.parameters)
    return f"({', '.join(declared) or 'void'})"


def as_json(calls: "Sequence[SystemCall]") -> str:
    """Return an object for each."""
    from kprobes.cli.terminal import json_lines

    return json_lines(
        {
            "syscall": each.name,
            "number": each.number,
            "args": None
            if each.parameters is None
            else [{"name": name, "type": type_} for name, type_ in each.parameters],
        }
        for each in calls
    )
