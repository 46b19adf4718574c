"""The ``kprobe`` command: parse, dispatch, show errors, and the exit codes (exit-status.md)."""

import argparse
import io
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import BinaryIO, NoReturn, TypeVar

from kprobes.cli import (
    check,
    convert,
    count,
    debuginfo,
    diff,
    doctor,
    fail,
    flame,
    gdbserver,
    guest,
    hist,
    info,
    lines,
    list,
    open,
    record,
    repl,
    report,
    restore,
    sites,
    stats,
    status,
    syscalls,
    targets,
    trace,
    vars,
    vng,
    xray,
)
from kprobes.cli.actions import Once
from kprobes.cli.files import UnwrittenError, WholeFile, own_streams
from kprobes.cli.terminal import print_message, status_of
from kprobes.errors import KprobesError

_Code = TypeVar("_Code", int, str | int | None)
COMMANDS: tuple[ModuleType, ...] = (
    trace,
    record,
    count,
    hist,
    flame,
    report,
    info,
    stats,
    diff,
    convert,
    open,
    vng,
    check,
    list,
    syscalls,
    lines,
    vars,
    debuginfo,
    xray,
    sites,
    repl,
    gdbserver,
    fail,
    guest,
    targets,
    status,
    restore,
    doctor,
)
_SAYING_THEMSELVES = frozenset({guest.NAME, status.NAME, restore.NAME})
"""Commands that need no word on what killed tracers left."""
_OPENING_THEMSELVES = frozenset(
    {trace.NAME, vng.NAME, gdbserver.NAME, report.NAME, count.NAME, hist.NAME, flame.NAME}
)
"""Commands that open their output when there is something to write, and write it bit by bit."""
_DESCRIPTION = (
    "Probe running Linux kernels: guests under QEMU, as they are, and this machine's own."
)
EPILOG = """\
examples:
  kprobe trace 'p:open do_sys_openat2 path=+0($arg2):ustring' -- ls /
  kprobe check 'p vfs_read file->f_mode' --image /boot/vmlinuz
  kprobe list -t qemu:localhost:1234 'do_sys_*' -v

`kprobe COMMAND --help` has more. Exit status: 0 done, 1 error, 2 usage, 3 target unreachable,
4 definition rejected, 5 a check found problems, 6 events not written, or lost or missed under
--strict, 130 interrupted; `kprobe trace ... -- COMMAND` else ends with COMMAND's own."""


_GUEST_LEFT = (
    "was killed, as was its guardian; that guest may stand still since: `kprobe restore` puts it "
    "right"
)
_MEMORY_LEFT = "has ended; that guest's memory is still allocated: `kprobe restore` frees it"
_EMPTY = re.compile(r"(--[a-z-]+=)?\s*")
_NEW_SPELLINGS = (
    (r"arguments?:? .*--duration\b(?!.*twice)", "--call-duration records how long calls take"),
    (r"unrecognized arguments: (qemu:\S+|host|guest|auto)", r"a target is named by -t \1"),
)
"""Messages that what the last version took leads to, and what to use instead."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    if argv is None and "_ARGCOMPLETE" in os.environ:
        from kprobes.cli.complete import complete

        complete(make_parsers()[0])
    words = [*(sys.argv[1:] if argv is None else argv)]
    out = own_streams() if argv is None else sys.stdout.buffer

    def act() -> int:
        args = _parse(words)
        if args.name not in _SAYING_THEMSELVES:
            _warn()
        return _run(args, out)

    before, threading.excepthook = threading.excepthook, _on_thread_error
    try:
        return guarded(act)
    finally:
        threading.excepthook = before


def _run(args: argparse.Namespace, out: BinaryIO) -> int:
    path = getattr(args, "output", None)
    if path is None or args.name in _OPENING_THEMSELVES:
        return args.run(args, out)
    from kprobes.cli.output import check_writable, open_output

    check_writable(path)
    # What the file holds stays until there is something else.
    results = io.BytesIO()
    code = args.run(args, results)
    with open_output(path) as file:
        file.write(results.getvalue())
    return code


def _warn() -> None:
    from kprobes.guest.journal import unfinished

    for entry in unfinished():
        from kprobes.guest.recovery import has_ended

        if not has_ended(entry):
            left = _MEMORY_LEFT if entry.has_only_memory else _GUEST_LEFT
            print_message(f"kprobe: process {entry.pid}, which used {entry.target}, {left}")


def guarded(act: Callable[[], int]) -> int:
    """Return what a function returns, or the exit code for what it raises, which is shown."""
    try:
        code = act()
    except KprobesError as error:
        code = _failed(error)
    except KeyboardInterrupt as error:
        code = _interrupted(*error.args)
    except BrokenPipeError:
        # The reader has what it wanted.
        code = 0
    except UnwrittenError as error:
        code = _unwritten(error)
    except SystemExit as error:
        # argparse has said why.
        sys.exit(_flushed(error.code))
    except Exception as error:  # noqa: BLE001 - the last line of defence: a bug of ours
        code = _broken(error)
    return _flushed(code)


def _parse(words: Sequence[str]) -> argparse.Namespace:
    if record.NAME not in words:
        return _parse_line(words)
    from kprobes.cli.record_several import split

    lines = split(words)
    if not lines:
        return _parse_line(words)
    every = [_parse_line(line) for line in lines]
    every[0].several = [*zip(lines, every, strict=True)]
    return every[0]


def _parse_line(words: Sequence[str]) -> argparse.Namespace:
    own, command, has_command = _split(words)
    # What other commands take is not needed to read this one.
    name = next((word for word in own if not word.startswith("-")), "")
    parser = make_parsers(name)[0]
    empty = next((at for at, word in enumerate(own) if _EMPTY.fullmatch(word)), None)
    if empty is not None:
        option = own[empty].strip() or "".join(own[max(empty - 1, 0) : empty])
        where = f"argument {option.rstrip('=')}: " if option.startswith("-") else "an argument "
        parser.error(f"{where}must not be empty")
    args, rest = parser.parse_known_args(own)
    if rest:
        args.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if has_command:
        if not hasattr(args, "command"):
            args.parser.error("no command can be given after '--'")
        if not command:
            args.parser.error("no command given after '--'")
        args.command = command
    return args


def _split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str], bool]:
    # argparse would take what stands after -- for more definitions.
    if "--" not in words:
        return words, (), False
    at = words.index("--")
    return words[:at], words[at + 1 :], True


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and what the last version's spelling has become."""
        matches = ((re.search(old, message), new) for old, new in _NEW_SPELLINGS)
        new = "".join(f"; {found.expand(new)}" for found, new in matches if found is not None)
        super().error(message + new)


class _Version(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        del namespace, values, option_string
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("kprobes")
        except PackageNotFoundError:
            found = "of an unknown version: not installed, but run from its source"
        sys.stdout.write(f"kprobe {found}\n")
        parser.exit()


class _JsonSchema(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        del namespace, values, option_string
        from importlib.resources import files

        # The package itself is not imported: that is numpy's tenth of a second.
        schema = files("kprobes") / "sinks" / "events.schema.json"
        sys.stdout.write(schema.read_text(encoding="utf-8"))
        parser.exit()


def make_parsers(name: str | None = None) -> Sequence[argparse.ArgumentParser]:
    """Return the parser of the command line, and after it that of each command.

    Args:
        name: the only command that has its arguments; None for all of them.
    """
    parser = _Parser(
        prog="kprobe",
        description=_DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    parser.add_argument(
        "--json-schema",
        action=_JsonSchema,
        nargs=0,
        help="show the JSON Schema of what commands print as JSON, and exit",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    made = [parser]
    for module in COMMANDS:
        own = commands.add_parser(
            module.NAME,
            usage=getattr(module, "USAGE", None),
            help=module.HELP,
            description=f"{module.HELP[0].upper()}{module.HELP[1:]}.",
            epilog=module.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        own.register("action", None, Once)
        own.register("action", "store", Once)
        if name in (None, module.NAME):
            module.add_arguments(own)
        own.set_defaults(run=module.run, name=module.NAME, parser=own)
        made.append(own)
    return made


def _failed(error: KprobesError) -> int:
    if _wants_traceback():
        traceback.print_exception(error)
    else:
        notes: Sequence[str] = getattr(error, "__notes__", ())
        where = f"\n  in {', '.join(reversed(notes))}" if notes else ""
        print_message(f"kprobe: {error}{where}")
    return error.exit_code


def _broken(error: BaseException) -> int:
    if _wants_traceback():
        traceback.print_exception(error)
    else:
        what = str(error).partition("\n")[0] or "no more is known"
        print_message(
            f"kprobe: internal error: {type(error).__name__}: {what}\n"
            "  KPROBES_TRACEBACK=1 in the environment shows where"
        )
    return 1


def _on_thread_error(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None:
        _broken(args.exc_value)


def _interrupted(number: int = signal.SIGINT) -> int:
    name = signal.Signals(number).name
    print_message("kprobe: interrupted" if number == signal.SIGINT else f"kprobe: ended by {name}")
    return status_of(number)


def _unwritten(error: OSError) -> int:
    print_message(f"kprobe: cannot write to standard output: {error.strerror}")
    return 1


def _flushed(code: _Code) -> _Code:
    error = _flush()
    if error is None or isinstance(error, BrokenPipeError):
        return code
    return code or _unwritten(error)


def _flush() -> OSError | None:
    try:
        sys.stdout.flush()
    except OSError as error:
        # What Python still holds for a reader that is gone would be complained about at the end.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        return error
    # argparse minds no error.
    file = sys.stdout.buffer
    return file.failed if isinstance(file, WholeFile) else None


def _wants_traceback() -> bool:
    return os.environ.get("KPROBES_TRACEBACK", "") not in ("", "0")


if __name__ == "__main__":
    sys.exit(main())
