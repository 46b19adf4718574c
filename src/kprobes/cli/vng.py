"""``kprobe vng``: run virtme-ng, and trace the guest that it boots, to its end."""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from kprobes.cli import trace
from kprobes.cli.terminal import Stop, print_message
from kprobes.errors import UnreachableError

NAME = "vng"
HELP = "run virtme-ng, and trace the guest that it boots"
USAGE = "kprobe vng [options] DEFINITION... -- [VNG OPTIONS]"
EPILOG = """\
examples:
  kprobe vng 'p:call do_one_initcall fn=$arg1:symbol' -o boot.txt -- --run arch/x86/boot/bzImage
  kprobe vng 'r:read vfs_read got=$retval:s64' --call-duration -- --run --exec 'make check'
  kprobe vng 'p:write vfs_write count' --until-panic 16M -- --run . --exec ./reproduce.sh

What stands behind -- are virtme-ng's own options: it is run with them, and an option more, by which
its QEMU has a gdb stub. Probes are armed before the initcalls, and the trace ends when the guest
shuts down, with every event, or else as other options say; virtme-ng goes on then. Events go to
standard output and what virtme-ng prints to standard error, unless -o names a file for the former.

Exit status: virtme-ng's own, which is that of its --exec (--exit-status); else as of `kprobe
trace`."""
_PROGRAM = "vng"
_INSTALL = "there is no vng here: pip install virtme-ng"
_END_S = 10.0
_POLL_S = 0.05


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    trace.add_tracing(parser)
    parser.set_defaults(
        boot=False,
        wait=True,
        rearm=False,
        follow=False,
        all_tasks=True,
        until_shutdown=True,
        has_console=True,
    )


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Run and trace; return the exit code."""
    from kprobes.cli.target import WaitedError

    words, args.command = args.command, ()
    program = shutil.which(_PROGRAM)
    if program is None:
        raise UnreachableError(_INSTALL)
    with tempfile.TemporaryDirectory(prefix="kprobes-vng-") as directory:
        stub = Path(directory, "gdb.sock")
        args.target, args.arch = f"qemu:{stub}", None
        begin = trace.prepared(args, out)
        command = [program, f"--qemu-opts=-gdb unix:{stub},server=on,wait=off", *words]
        with Stop() as stop, _running(command, is_quiet=args.output is None) as vng:
            args.has_ended = lambda: vng.poll() is not None
            try:
                code = begin(stop)
            except WaitedError:
                print_message("kprobe: virtme-ng ended before its kernel could be probed")
                code = 1
            while vng.poll() is None and not stop.is_asked:
                time.sleep(_POLL_S)
    if code or args.exit_status == "ignore" or stop.is_asked:
        return code
    # As the shell counts it.
    return vng.returncode if vng.returncode >= 0 else 128 - vng.returncode


@contextmanager
def _running(command: Sequence[str], *, is_quiet: bool) -> "Generator[subprocess.Popen[bytes]]":
    # In a process group of its own, all of which can be ended; which may read our terminal.
    terminal = sys.stdin.fileno() if sys.stdin.isatty() else None
    output = sys.stderr.fileno() if is_quiet else None
    vng = subprocess.Popen(command, stdout=output, process_group=0)
    try:
        if terminal is not None:
            _give(terminal, vng.pid)
            # It may have been stopped when it read too early.
            _signal(vng, signal.SIGCONT)
        yield vng
    finally:
        _end(vng)
        if terminal is not None:
            _give(terminal, os.getpgrp())


def _give(terminal: int, group: int) -> None:
    before = signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    with suppress(OSError):
        os.tcsetpgrp(terminal, group)
    signal.signal(signal.SIGTTOU, before)


def _end(vng: "subprocess.Popen[bytes]") -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        _signal(vng, number)
        with suppress(subprocess.TimeoutExpired):
            vng.wait(_END_S)
            return


def _signal(vng: "subprocess.Popen[bytes]", number: signal.Signals) -> None:
    if vng.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(vng.pid, number)
