"""``kprobe xray``: kernel text in the file and in memory, who changed it, where that leads."""

import argparse
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kprobes.cli import options
from kprobes.cli.terminal import write_text
from kprobes.errors import KprobesError, UsageError

if TYPE_CHECKING:
    # The engine takes a third of a second to import.
    from kprobes.cli.xray_print import Line
    from kprobes.guest.journal import Entry
    from kprobes.inspect.model import FunctionText
    from kprobes.inspect.subject import TextSnapshot
    from kprobes.model.kernel import Kernel
    from kprobes.open import GuestSession
    from kprobes.ports import Memory
    from kprobes.units import Addr

NAME = "xray"
HELP = "show kernel text as in the image and as in memory, and who changed it"
USAGE = "kprobe xray [options] PLACE [-- COMMAND...]"
EPILOG = """\
examples:
  kprobe xray -t qemu:localhost:1234 vfs_read+4
  kprobe xray do_sys_openat2 --arm 'p:open do_sys_openat2 path=+0($arg2):ustring'
  kprobe xray vfs_read --function --verdicts --image /boot/vmlinuz

PLACE is SYM, SYM+OFF, MODULE:SYM or an address; START-END or START:LENGTH for a range. A COMMAND
runs in the guest that is booted, before anybody looks. Nothing is written into a guest, but
with --arm: then our probe is armed while we look, and taken away again.
What the kernel's file holds is read from --vmlinux, else from where Debian has it if it is there
and of the same build. docs/howto/xray.md explains what is shown.

Exit status: 0 done, 1 error, 2 usage, 3 target unreachable, 4 the definition is rejected."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument("place", metavar="PLACE", help="what to look at")
    parser.set_defaults(command=())
    parser.add_argument("--function", action="store_true", help="the whole function")
    parser.add_argument(
        "--exits", action="store_true", help="the whole function, and every way out of it"
    )
    parser.add_argument(
        "--verdicts", action="store_true", help="say of each instruction if it may carry a probe"
    )
    parser.add_argument("--arm", metavar="DEFINITION", help="arm this probe while we look")
    options.add_strategy(parser)
    options.add_returns(parser)
    parser.add_argument("--syntax", choices=("att", "intel"), default="att")
    options.add_output(parser)
    parser.add_argument("--color", choices=("auto", "always", "never"), default="auto")
    parser.add_argument(
        "--image", type=Path, metavar="FILE", help="the kernel in a file, instead of a guest's"
    )
    options.add_target(parser)
    options.add_kernel_files(parser)
    options.add_quiet(parser)
    options.add_boot(parser)


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Look; return the exit code."""
    _check_options(args)
    with opened_snapshot(args) as snapshot:
        shown = _with_exits(args, snapshot) if args.exits else _shown(args, snapshot)
    _print(args, shown, out)
    return 0


def _shown(args: argparse.Namespace, snapshot: "TextSnapshot") -> "str | list[Line]":
    from kprobes.cli.xray_print import as_json, as_lines

    function_text = _read(args, snapshot)
    is_json = args.format == "json"
    return (
        as_json(function_text) if is_json else as_lines(function_text, has_verdicts=args.verdicts)
    )


def _with_exits(args: argparse.Namespace, snapshot: "TextSnapshot") -> "str | list[Line]":
    from kprobes.arch.insn import Syntax
    from kprobes.cli.xray_print import exits_as_json, exits_as_lines
    from kprobes.inspect.xray import exits_at, parts_at, xray

    subjects = parts_at(snapshot, _place(args, snapshot, "--exits"))
    parts = [xray(snapshot, subject, syntax=Syntax(args.syntax)) for subject in subjects]
    found = exits_at(snapshot, subjects[0].start)
    if args.format == "json":
        return exits_as_json(parts, found)
    return exits_as_lines(parts, found, has_verdicts=args.verdicts)


def _print(args: argparse.Namespace, shown: "str | list[Line]", out: BinaryIO) -> None:
    from kprobes.cli.xray_print import as_text

    if isinstance(shown, str):
        write_text(out, shown)
    elif args.color == "always" or (args.color == "auto" and out.isatty()):
        from kprobes.cli.xray_print import as_colors

        out.write(as_colors(shown).encode())
    else:
        write_text(out, as_text(shown))


def _check_options(args: argparse.Namespace) -> None:
    from kprobes.cli.options import GUEST, check_command
    from kprobes.cli.target import check_options

    if args.command and args.target is None:
        # It is for a guest that is booted.
        args.target = GUEST
    check_options(args)
    for name in ("strategy", "returns"):
        if getattr(args, name) != "auto" and args.arm is None:
            raise UsageError(f"--{name} says how --arm patches; nothing is armed")
    check_command(args)
    if args.image is None:
        return
    names = ("target", "vmlinux", "symbols", "module", "arm", *options.BOOT_OPTIONS)
    given = [name for name in names if getattr(args, name) is not None]
    if given:
        raise UsageError(f"--{given[0]} is for a guest; with --image there is none")
    if args.command:
        raise UsageError("a command is for a guest; with --image there is none")


def _read(args: argparse.Namespace, snapshot: "TextSnapshot") -> "FunctionText":
    from kprobes.arch.insn import Syntax
    from kprobes.cli.xray_print import read_place
    from kprobes.inspect.model import Subject
    from kprobes.inspect.xray import around, function_at, xray

    chosen = read_place(args.place, snapshot.kernel.symbols)
    if args.function:
        subject = function_at(snapshot, _place(args, snapshot, "--function"))
    elif chosen.stop is not None:
        subject = Subject(start=chosen.start, stop=chosen.stop)
    else:
        subject = around(snapshot, chosen.start)
    return xray(snapshot, subject, syntax=Syntax(args.syntax))


def _place(args: argparse.Namespace, snapshot: "TextSnapshot", option: str) -> "Addr":
    from kprobes.cli.xray_print import read_place

    chosen = read_place(args.place, snapshot.kernel.symbols)
    if chosen.stop is not None:
        raise UsageError(f"{option} is for a place, not for a range")
    return chosen.start


@contextmanager
def opened_snapshot(args: argparse.Namespace) -> "Generator[TextSnapshot]":
    """Open what the options name, to be looked at: a file, a guest, or this machine's own kernel.

    Errors are those of who reads files and attaches to guests.
    """
    from kprobes.cli.options import is_host
    from kprobes.cli.target import opened, this_kernel
    from kprobes.cli.terminal import Progress, Stop
    from kprobes.guest.attach import attach_readonly
    from kprobes.inspect.subject import snapshot_of_image

    if args.image is not None:
        yield snapshot_of_image(args.image)
        return
    if is_host(args):
        with this_kernel() as (memory, kernel):
            yield _of_guest(args, memory, kernel, target=args.target)
        return
    tracer = None if args.target is None or args.arm is not None else _tracer(args.target)
    if tracer is not None and tracer.window is not None:
        # It has the stub, which serves nobody else.
        with attach_readonly(tracer.window, args.symbols) as (memory, kernel):
            yield _of_guest(args, memory, kernel, target=tracer.target)
        return
    with (
        Stop() as stop,
        Progress(is_quiet=args.quiet) as progress,
        opened(args, stop=stop, progress=progress) as session,
        _prepared(args, session),
    ):
        yield _of_session(args, session)
        stop.check()


def _tracer(target: str) -> "Entry | None":
    from kprobes.guest.attach import tracer_at_work
    from kprobes.guest.journal import entries
    from kprobes.guest.recovery import of_target

    # Those that are broken are named when all that is armed is shown.
    return tracer_at_work(of_target(entries(lambda _: None), target))


@contextmanager
def _prepared(args: argparse.Namespace, session: "GuestSession") -> Generator[None]:
    from msgspec.structs import replace

    from kprobes.cli.terminal import print_bytes, print_message
    from kprobes.model.kernel import place_of

    if args.command:
        command = args.command[0] if len(args.command) == 1 else args.command
        print_bytes(session.run(command).output)
    if args.arm is None:
        yield
        return
    session.options = replace(
        session.options,
        strategy=options.strategy(args),
        return_method=options.return_method(args),
    )
    session.probe(args.arm)
    with session.recording():
        if not args.quiet and args.arm.startswith("r"):
            symbols = session.kernel.symbols
            places = [place_of(symbols, plan.site.addr) for plan in session.driver.plans]
            print_message(f"{args.arm}: armed at {', '.join(places)}")
        yield


def _of_session(args: argparse.Namespace, session: "GuestSession") -> "TextSnapshot":
    guest = session.driver.guest
    booted = session.machine.kernel if session.machine is not None else None
    return _of_guest(args, guest.memory, guest.kernel, target=guest.address, booted=booted)


def _of_guest(
    args: argparse.Namespace,
    memory: "Memory",
    kernel: "Kernel",
    *,
    target: str,
    booted: Path | None = None,
) -> "TextSnapshot":
    from kprobes.cli.options import is_host
    from kprobes.cli.words import print_broken
    from kprobes.guest.journal import entries
    from kprobes.guest.recovery import of_target
    from kprobes.inspect.subject import candidates, snapshot_of_guest

    broken: list[KprobesError] = []
    found = [] if is_host(args) else of_target(entries(broken.append), target)
    print_broken(broken)
    images = candidates(kernel, found, given=args.vmlinux or booted)
    return snapshot_of_guest(memory, kernel, images=images, entries=found)
