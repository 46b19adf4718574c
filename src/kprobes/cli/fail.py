"""``kprobe fail``: have calls of kernel functions fail, decided and counted in the guest."""

import argparse
import errno
import math
import re
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import BinaryIO, NamedTuple, TypedDict

from kprobes.cli import options
from kprobes.cli.options import check_command, choose_target, is_host
from kprobes.cli.terminal import aligned, print_message
from kprobes.errors import UsageError

NAME = "fail"
HELP = "have calls of kernel functions fail, or return what you say"
USAGE = "kprobe fail [options] 'FUNCTION returns VALUE [if FILTER]'... [-- COMMAND...]"
EPILOG = """\
examples:
  kprobe fail '__x64_sys_mkdir returns -ENOSPC' -- 'mkdir /a; mkdir /b'
  kprobe fail '__x64_sys_openat returns -ENOMEM if comm == "cat"' --every 2 -- cat /init /x
  kprobe fail -t qemu:localhost:1234 'do_sys_openat2 returns -5' --times 100 --force --duration 10s

VALUE is a number, or -NAME with the name of an errno. FILTER is what the kernel's filter files
take, on comm, pid, tgid, cpu and the function's own parameters. Calls are skipped by machine code
in the guest: the function does not run. Functions that are not system calls, and that the kernel
does not list as safe to skip (ALLOW_ERROR_INJECTION), need --force.

The numbers of calls seen and skipped are written at the end. Exit status: COMMAND's own, else
0 done, 1 error, 2 usage, 3 target unreachable, 4 function refused."""
_RULE = re.compile(r"\s*(?P<function>\S+)\s+returns\s+(?P<value>\S+)(?:\s+if\s+(?P<filter>.+))?\s*")
_POLL_S = 0.1


class Rule(NamedTuple):
    """Calls of one function that return a value.

    Attributes:
        text: as it was given.
        filter: that a call must pass, or "".
    """

    text: str
    function: str
    value: int
    filter: str


class Conditions(TypedDict):
    """Which of the calls that a rule is about are skipped; see ``OverrideOptions``."""

    every: int
    probability: float | None
    times: int | None
    force: bool


def rule(text: str) -> Rule:
    """Return what ``FUNCTION returns VALUE [if FILTER]`` says."""
    found = _RULE.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"invalid rule: {text!r} (use 'FUNCTION returns VALUE [if FILTER]')"
        )
    value = _value(found["value"])
    if value is None:
        raise argparse.ArgumentTypeError(
            f"invalid value: {found['value']!r} (use a number, or an errno such as -ENOMEM)"
        )
    return Rule(
        text=text.strip(), function=found["function"], value=value, filter=found["filter"] or ""
    )


def _value(text: str) -> int | None:
    name = text.removeprefix("-")
    if name.isupper() and name in errno.errorcode.values():
        return -int(getattr(errno, name)) if text.startswith("-") else None
    try:
        return int(text, 0)
    except ValueError:
        return None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument(
        "rules", nargs="+", type=rule, metavar="RULE", help="which calls return what"
    )
    parser.add_argument(
        "--every", type=options.count, default=1, metavar="N", help="only each N-th of those calls"
    )
    parser.add_argument(
        "--probability", type=float, metavar="P", help="only as many of them, from 0 to 1"
    )
    parser.add_argument(
        "--times", type=options.count, metavar="N", help="at most N calls of each function"
    )
    parser.add_argument(
        "--force", action="store_true", help="also functions that the kernel does not list"
    )
    parser.add_argument(
        "--duration", type=options.duration, metavar="TIME", help="stop after TIME: 10s, 500ms, 2m"
    )
    options.add_exit_status(parser)
    parser.set_defaults(command=())
    options.add_target(parser)
    options.add_kernel_files(parser)
    options.add_quiet(parser)
    options.add_boot(parser)


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Skip calls until it is over; return the exit code."""
    conditions = _conditions(args)
    from kprobes.cli.target import check_options, opened
    from kprobes.cli.terminal import Progress, Stop
    from kprobes.cli.workload import Workload

    check_options(args)
    with Stop() as stop, Progress(is_quiet=args.quiet) as progress, ExitStack() as undo:
        session = undo.enter_context(opened(args, stop=stop, progress=progress))
        workload = Workload(session.start, args.command) if args.command else None
        progress("arming")
        armed = [
            session.override(each.function, returns=each.value, filter=each.filter, **conditions)
            for each in args.rules
        ]
        progress.done()
        if workload is not None:
            workload.start()
        until = time.monotonic() + (args.duration or math.inf)
        while not stop.is_asked and time.monotonic() < until:
            if workload is not None and workload.is_over:
                break
            time.sleep(_POLL_S)
            session.driver.check()
        finished = workload.finish() if workload is not None else None
        if finished is not None:
            out.write(finished.output)
        if not args.quiet:
            _print_counts(args.rules, [(str(each.hits), str(each.skipped)) for each in armed])
            if workload is not None:
                print_message(workload.ending(finished))
        return workload.status if workload is not None and args.exit_status == "command" else 0


def _conditions(args: argparse.Namespace) -> Conditions:
    from kprobes.model.override import OverrideOptions

    choose_target(args)
    if is_host(args):
        raise UsageError("kprobe fail is for guests, not for this machine's own kernel")
    check_command(args)
    conditions = Conditions(
        every=args.every, probability=args.probability, times=args.times, force=args.force
    )
    OverrideOptions(**conditions)
    return conditions


def _print_counts(rules: Sequence[Rule], counts: list[tuple[str, str]]) -> None:
    rows = [(*row, rule.text) for row, rule in zip(counts, rules, strict=True)]
    print_message(aligned([("calls", "skipped", "rule"), *rows]))
