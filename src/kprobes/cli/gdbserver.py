"""``kprobe gdbserver``: trace, and let a debugger join through the same stub."""

import argparse
from typing import BinaryIO

from kprobes.cli import trace
from kprobes.cli.options import is_host
from kprobes.errors import UsageError

NAME = "gdbserver"
HELP = "let gdb join a guest beside probes, by one stub"
USAGE = "kprobe gdbserver --listen PATH|PORT [options] [DEFINITION...] [-- COMMAND...]"
EPILOG = """\
examples:
  kprobe gdbserver --listen localhost:2345 -t running 'r vfs_read got=$retval' --duration 10s
  kprobe gdbserver --listen gdb.sock 'p vfs_read count' --trigger 'pause if count<9' --duration 10s
  kprobe gdbserver --listen gdb.sock -t qemu:localhost:1234 --duration 10s

`gdb vmlinux -ex 'target remote gdb.sock'` joins, stops the guest, and leaves it running. gdb sees
the kernel as if nothing were probed: its text, its stacks, where its CPUs are. Its breakpoints,
steps and watchpoints are QEMU's, also at places that are probed; in the middle of instructions that
a probe has replaced they are refused, and it is said here why. While the debugger keeps the guest
stopped, events wait. A trigger `pause` is a breakpoint whose condition the guest itself looks at:
docs/howto/gdb.md.

Definitions and options are those of `kprobe trace`; without one the debugger is served until
Ctrl-C. Exit status: as of `kprobe trace`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument(
        "--listen",
        metavar="PATH|PORT",
        help="where gdb joins: the path of a socket that is made, for you alone; or HOST:PORT of "
        "this machine, for every user of it (port 0: any that is free)",
    )
    trace.add_arguments(parser)


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Trace, and serve a debugger; return the exit code."""
    if args.listen is None:
        # Definitions are parsed on their own, without it.
        args.parser.error("--listen is required: where does gdb join?")
    if is_host(args):
        raise UsageError("a debugger joins guests: this machine's own kernel cannot be stopped")
    from kprobes.transport.address import check_listening

    check_listening(str(args.listen))
    return trace.run(args, out)
