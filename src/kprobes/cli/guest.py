"""``kprobe guest``: boot a guest and leave it to attach to, with a shell in it."""

import argparse
import sys
import time
from typing import BinaryIO

from kprobes.cli import options
from kprobes.cli.terminal import print_message

NAME = "guest"
HELP = "boot a guest to attach to, with a shell in it"
EPILOG = """\
examples:
  kprobe guest                                # a shell in it; Ctrl-] or poweroff ends it
  kprobe guest --memory 1G --cpus 4 --no-shell
  kprobe guest --append nokaslr --file /bin/test=./a.out

The first line on standard output is the target to attach to, with this and any other debugger.
Nothing is left behind when the guest ends.

Exit status: 0 done, 1 error, 2 usage, 3 no QEMU, no kernel, or it does not boot."""
_POLL_S = 0.2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("--no-shell", action="store_true", help="only wait, also on a terminal")
    options.add_quiet(parser)
    options.add_boot(parser)


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Boot and wait; return the exit code."""
    from kprobes.cli.target import machine_options
    from kprobes.cli.terminal import Progress, Stop
    from kprobes.transport.qemu import Machine

    has_shell = not args.no_shell and sys.stdin.isatty() and sys.stdout.isatty()
    with (
        Stop() as stop,
        Progress(is_quiet=args.quiet) as progress,
        Machine.boot(machine_options(args), progress=progress) as machine,
    ):
        progress.done()
        if not has_shell:
            # Whoever reads the target may end us at once.
            stop.defer()
        out.write(f"qemu:{machine.stub_address}\n".encode())
        out.flush()
        if has_shell:
            print_message("Ctrl-] leaves the guest's shell and ends the guest")
            machine.shell()
            return 0
        while machine.is_alive and not stop.is_asked:
            time.sleep(_POLL_S)
    return 0
