"""``kprobe repl``: drgn's shell on a guest, and drgn's scripts, with our probes beside them."""

import argparse
import runpy
import signal
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from kprobes.cli import options
from kprobes.errors import UsageError

if TYPE_CHECKING:
    from kprobes.open import GuestSession

NAME = "repl"
HELP = "look at a guest with drgn's shell and scripts, with probes and breakpoints beside them"
USAGE = "kprobe repl [options] [-e CODE | SCRIPT] [-- ARGUMENT...]"
EPILOG = """\
examples:
  kprobe repl -e 'print(find_task(prog, 1).comm)'
  kprobe repl -t qemu:localhost:1234 tasks.py
  kprobe repl --vmlinux /boot/vmlinuz -e 'print(per_cpu(prog["runqueues"], 0).curr.comm)'

Without code it is drgn's shell; code that is piped in is run. The guest needs no debug information.
`prog` is the kernel as drgn has it, and its helpers are there; `kernel` is our session with it, and
of that `probe`, `record`, `breakpoint`, and `run` for commands in a guest that is booted:
docs/howto/drgn.md. It needs drgn: pip install 'kprobes[drgn]'. For this machine's own kernel there
is `drgn` itself.

Exit status: that of the code; 1 it raised an exception, 2 usage, 3 target unreachable."""
_FROM_SESSION = ("probe", "record", "breakpoint", "run")
_PIPED = "<stdin>"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("script", metavar="SCRIPT", nargs="?", type=Path, help="run it")
    parser.set_defaults(command=())
    parser.add_argument("-e", "--exec", metavar="CODE", help="run this")
    options.add_target(parser)
    options.add_kernel_files(parser)
    options.add_quiet(parser)
    options.add_boot(parser)


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Run the shell, a script or code; return the exit code."""
    from kprobes.cli.options import is_host
    from kprobes.cli.target import check_options, opened
    from kprobes.cli.terminal import Progress, Stop

    del out
    _check_options(args)
    check_options(args)
    if is_host(args):
        raise UsageError("drgn looks at this machine's kernel by itself: run drgn")
    with (
        Stop() as stop,
        Progress(is_quiet=args.quiet) as progress,
        opened(args, stop=stop, progress=progress) as session,
    ):
        prog = session.drgn
        progress.done()
        with _as_in_python():
            if args.script is None and args.exec is None and sys.stdin.isatty():
                _shell(session)
                return 0
            from drgn import set_default_prog

            set_default_prog(prog)
            return _run_code(args, session)


def _check_options(args: argparse.Namespace) -> None:
    if args.exec is not None and args.script is not None:
        raise UsageError("-e and a script are both given: one of them is run")
    if args.script is not None and not args.script.is_file():
        raise UsageError(f"{args.script}: there is no such script")
    if args.command and args.exec is None and args.script is None:
        raise UsageError("arguments are for a script, or for code that -e gives")


@contextmanager
def _as_in_python() -> Generator[None]:
    # Ctrl-C ends what runs and not the shell; the others end the shell, and put the guest right.
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *_ENDS)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in _ENDS:
        if before[number] is not signal.SIG_IGN:
            signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_ENDS = (signal.SIGTERM, signal.SIGHUP)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    raise SystemExit(128 + number)


def _globals(session: "GuestSession", found: dict[str, Any]) -> dict[str, Any]:
    return found | {"kernel": session, **{name: getattr(session, name) for name in _FROM_SESSION}}


def _shell(session: "GuestSession") -> None:
    from drgn.cli import run_interactive, version_header

    words = f"Linux {session.kernel.release} ({session.kernel.arch})"
    run_interactive(
        session.drgn,
        banner_func=lambda banner: (
            f"{version_header()}\n{words}\n{banner}\n"
            f"Also: kernel, and of it {', '.join(_FROM_SESSION)}: help(kernel)"
        ),
        globals_func=lambda found: _globals(session, found),
    )


def _run_code(args: argparse.Namespace, session: "GuestSession") -> int:
    from drgn.cli import default_globals

    sys.argv = [str(args.script or ("-e" if args.exec is not None else "")), *args.command]
    try:
        if args.script is not None:
            sys.path.insert(0, str(args.script.resolve().parent))
            runpy.run_path(
                str(args.script),
                init_globals=_globals(session, {"prog": session.drgn}),
                run_name="__main__",
            )
        else:
            sys.path.insert(0, "")
            exec(_code(args), _globals(session, default_globals(session.drgn)))
    except Exception as error:  # noqa: BLE001 - code of the user's: anything
        traceback.print_exception(error.with_traceback(_own(error.__traceback__)))
        return 1
    return 0


def _code(args: argparse.Namespace) -> CodeType:
    text = args.exec if args.exec is not None else sys.stdin.read()
    return compile(text, "<string>" if args.exec is not None else _PIPED, "exec")


def _own(trace: TracebackType | None) -> TracebackType | None:
    # From the user's own code on.
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace
