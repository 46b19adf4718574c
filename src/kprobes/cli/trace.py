"""``kprobe trace``: arm definitions, print their events as they come, and put everything back."""

import argparse
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from kprobes.cli import options
from kprobes.cli.actions import DisabledAction, FilterAction, TriggerAction
from kprobes.cli.options import check_command, choose_target, is_host
from kprobes.errors import DefinitionError, UsageError

if TYPE_CHECKING:
    from kprobes.cli.terminal import Stop


class Given(NamedTuple):
    """Definitions as text, with what was given for all of them."""

    words: list[str]
    filter: str = ""
    triggers: tuple[str, ...] = ()
    is_enabled: bool = True
    text: str = ""


def grouped(
    words: Sequence[str],
    filters: Mapping[int, str],
    triggers: Mapping[int, tuple[str, ...]],
    disabled: Collection[int] = (),
) -> list[Given]:
    """Return definitions with what was given for them, those in a row with the same together.

    Args:
        words: the definitions.
        filters: by their index.
        triggers: likewise; no two definitions share one.
        disabled: the indices of those that are.
    """
    found: list[Given] = []
    for index, word in enumerate(words):
        chosen, fired = filters.get(index, ""), triggers.get(index, ())
        given = Given([word], chosen, fired, index not in disabled)
        if found and not fired and found[-1][1:] == given[1:]:
            found[-1].words.append(word)
        else:
            found.append(given)
    return found


NAME = "trace"
HELP = "arm probes and print their events"
USAGE = "kprobe trace [options] [DEFINITION [--filter EXPR] [--trigger TEXT]...]... [-- COMMAND...]"
EPILOG = """\
examples:
  kprobe trace 'p:open do_sys_openat2 path=+0($arg2):ustring' -- ls /
  kprobe trace 'r:read vfs_read got=$retval:s64' --filter 'got > 4096' -- dd if=/bin/busybox bs=64k
  kprobe trace -t qemu:localhost:1234 @probes.txt --duration 10s -o out.txt

A definition is what the kernel's kprobe_events file takes, or dynamic_events:
  p[:[GROUP/]EVENT] FUNCTION [NAME=FETCH[:TYPE]]...         at its entry
  r[N][:[GROUP/]EVENT] FUNCTION [NAME=FETCH[:TYPE]]...      at its return, $retval what it returns
  t[:[GROUP/]EVENT] TRACEPOINT [NAME=FETCH[:TYPE]]...       at a tracepoint
FETCH is %REG, $argN, $stack, $stackN, $comm, @SYMBOL[+OFF], @ADDR, \\NUMBER or +|-[u]OFF(FETCH);
TYPE is u8..u64, s8..s64, x8..x64, char, string, ustring, symbol, symstr, a bit-field or an array of
them. FUNCTION may be a pattern such as vfs_*. The whole language: docs/reference/language.md.
A file for --python has handlers such as
  @kernel.entry("do_sys_openat2")
  def opened(dfd, filename, how): print(filename.string(), hex(how.flags))
which docs/howto/handlers.md describes.
A filter is what the kernel's filter files take: FIELD OPERATOR VALUE, joined by && || ! and ().
A trigger is what its trigger files take: COMMAND[:COUNT] [if FILTER], or hist:keys=..., whose
tables are shown at the end: docs/howto/triggers.md.

Ctrl-C finishes cleanly, a second one ends at once. Exit status: COMMAND's own (--exit-status), else
0 done, 1 error, 2 usage, 3 target unreachable, 4 definition rejected, 6 events not written, or lost
or missed under --strict, 130 interrupted before anything was armed, or twice."""
_ONLY = "record only hits of tasks %s; can be given again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add_begin(parser)
    add_tracing(parser)


def add_begin(parser: argparse.ArgumentParser) -> None:
    """Add which kernel is traced, and from when on."""
    options.add_target(parser)
    parser.add_argument(
        "--boot",
        action="store_true",
        help="arm before the initcalls of the guest that is booted, and record all tasks",
    )
    parser.add_argument(
        "--wait", action="store_true", help="wait for the target, and arm before its initcalls"
    )
    parser.add_argument(
        "--rearm",
        action="store_true",
        help="when the guest is rebooted, or started again, go on with it; --wait is included",
    )
    parser.add_argument(
        "--follow",
        action="store_true",
        help="record only what COMMAND and its children do, from its exec on: the default with a "
        "COMMAND, but for --pid and --tgid",
    )
    parser.add_argument("--all-tasks", action="store_true", help="record all tasks, also with one")
    options.add_boot(parser)


def add_tracing(parser: argparse.ArgumentParser) -> None:
    """Add what every trace has, whatever guest it is of."""
    add_probing(parser, prints=True)
    add_triggers(parser)
    options.add_symfs(parser)
    _add_limit(parser)
    _add_output(parser)


def add_probing(parser: argparse.ArgumentParser, *, prints: bool = False) -> None:
    """Add what is common to traces and recordings, whatever guest they are of.

    Args:
        parser: of a command.
        prints: whether it prints events.
    """
    _add_probes(parser)
    parser.set_defaults(
        command=(),
        filters={},
        triggers={},
        disabled=frozenset(),
        tracing_off=False,
        pause_timeout=None,
        symfs=None,
        until_shutdown=False,
        has_ended=_never,
        has_console=False,
        counting=None,
        recording=None,
        snapshot=None,
        rotate=None,
        max_size=None,
        listen=None,
    )
    options.add_recording(parser)
    options.add_trace_options(parser, records=True, prints=prints)
    parser.add_argument(
        "--duration", type=options.duration, metavar="TIME", help="stop after TIME: 10s, 500ms, 2m"
    )
    _add_choice(parser)
    _add_rings(parser)
    options.add_limits(parser)
    options.add_kernel_files(parser)
    options.add_quiet(parser)


def _add_probes(parser: argparse.ArgumentParser) -> None:
    options.add_definitions(parser)
    parser.add_argument(
        "--filter",
        action=FilterAction,
        metavar="EXPR",
        help="record only hits for which this holds: of the definition before it, which is all of "
        "a @FILE or of a pattern; once for each",
    )
    parser.add_argument(
        "--python",
        type=Path,
        metavar="FILE",
        help="run this file first: its handlers are called at hits (kernel, Kprobe are defined)",
    )


def add_triggers(parser: argparse.ArgumentParser) -> None:
    """Add what hits do besides being recorded."""
    parser.add_argument(
        "--trigger",
        action=TriggerAction,
        metavar="TEXT",
        help="do something at hits of the definition before it, COMMAND[:COUNT] [if FILTER]: "
        "traceon, traceoff, stop, pause, stacktrace, snapshot, enable_event:GROUP:EVENT, "
        "disable_event, enable_hist, disable_hist; or hist:keys=...; can be given again",
    )
    parser.add_argument(
        "--pause-timeout",
        type=options.duration,
        metavar="TIME",
        help="how long a trigger pause stops the guest if no debugger lets it run (default: 60s)",
    )
    parser.add_argument(
        "--disabled",
        action=DisabledAction,
        nargs=0,
        help="define what is before it disabled: a trigger enable_event, or --control, enables it",
    )
    parser.add_argument(
        "--tracing-off",
        action="store_true",
        help="record nothing until a trigger traceon turns tracing on",
    )


def _never() -> bool:
    return False


def _add_limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-events", type=options.count, metavar="N", help="stop after N events")
    parser.add_argument(
        "--until-panic",
        type=options.size,
        metavar="SIZE",
        help="keep only the last SIZE of events, and print them, and the kernel's log, when the "
        "guest panics, hangs or ends, or the trace does",
    )
    parser.add_argument(
        "--hang-timeout",
        type=options.duration,
        metavar="TIME",
        help="with --until-panic: a CPU whose interrupts are off for so long hangs (default: 10s)",
    )


def _add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-p", "--pid", type=options.count, action="append", help=_ONLY % "with this pid"
    )
    parser.add_argument(
        "--tgid", type=options.count, action="append", help=_ONLY % "of this process (its pid)"
    )
    parser.add_argument(
        "--comm", action="append", metavar="NAME", help=_ONLY % "of this name (or pattern)"
    )
    parser.add_argument(
        "-C", "--cpu", type=options.cpus, metavar="LIST", help="record only hits on these: 0-2,5"
    )
    parser.add_argument(
        "--control",
        metavar="fifo:CTL[,ACK]",
        help="take operations from this named pipe, a line each, and answer them in ACK: enable, "
        "disable, delete EVENT; define DEFINITION; filter EVENT EXPRESSION; evlist, hist, ping, "
        "stop",
    )
    options.add_exit_status(parser)


def _add_output(parser: argparse.ArgumentParser) -> None:
    options.add_output(parser)
    add_printing(parser)


def add_printing(parser: argparse.ArgumentParser) -> None:
    """Add how values are printed."""
    parser.add_argument(
        "--json-numbers",
        choices=("string", "number"),
        default="string",
        help="64-bit arguments in JSON: many readers round such numbers (default: string)",
    )
    parser.add_argument(
        "--enum", action="store_true", help="print enums by name, where the kernel prints numbers"
    )


def _add_rings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-m",
        "--buffer-size",
        type=options.ring_size,
        metavar="SIZE",
        help="of each CPU's ring, a power of two, or rounded up to one (default: up to 16M)",
    )
    parser.add_argument(
        "-k",
        "--clock",
        metavar="NAME",
        help="of time stamps: local, global, mono, boot, x86-tsc, ... (default: of a guest that of "
        "its own trace, of this machine local)",
    )
    parser.add_argument(
        "--ready",
        metavar="FD|FILE",
        help="write the line `ready` there when everything is armed: to this descriptor, or a file "
        "that appears then",
    )
    parser.add_argument(
        "--summary",
        type=_summary,
        default=("text", None),
        metavar="FORM[:FILE]",
        help="what is told at the end, as text (default), json or the kernel's kprobe_profile, on "
        "standard error or in a file",
    )
    parser.add_argument("--strict", action="store_true", help="exit 6 when an event is missing")


SUMMARIES = ("text", "json", "kprobe_profile")
"""What ``--summary`` may be."""


def _summary(text: str) -> tuple[str, Path | None]:
    form, _, path = text.partition(":")
    if form not in SUMMARIES:
        raise argparse.ArgumentTypeError(f"invalid form: {form!r} ({', '.join(SUMMARIES)})")
    return form, Path(path) if path else None


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Trace; return the exit code."""
    args.follow = is_following(args)
    choose_target(args)
    if not is_host(args):
        check_command(args)
    return prepared(args, out)(None)


def prepared(args: argparse.Namespace, out: BinaryIO) -> "Callable[[Stop | None], int]":
    """Return what traces and returns the exit code; all that can be said before is checked.

    It is given the user's wish to stop, if that is to end more than the trace.

    Raises:
        UsageError: options that make no sense, or a file that cannot be read or written.
        DefinitionError: a definition is wrong whatever the kernel.
    """
    from kprobes.cli.definitions import add_place, read_script
    from kprobes.cli.files import check_ready
    from kprobes.cli.output import check_writable

    is_served = args.listen is not None and args.control is None
    if not (args.definitions or args.python is not None or is_served):
        raise UsageError("nothing to trace: give a definition, or --python FILE")
    if args.hang_timeout is not None and args.until_panic is None:
        raise UsageError("--hang-timeout is for --until-panic SIZE")
    if args.cpu is not None and args.python is not None:
        raise UsageError("--cpu is for definitions, not for the handlers of --python")
    options.check_text_options(args)
    options.check_symfs(args)
    texts = _given(args)
    if args.output is not None:
        check_writable(args.output)
    if args.ready is not None:
        check_ready(args.ready)
    script = None if args.python is None else read_script(args.python)
    # The engine takes a third of a second to import: what is wrong so far is said before.
    from kprobes.cli.tracing import trace

    def begin(stop: "Stop | None") -> int:
        try:
            return trace(args, texts, out, script, stop)
        except DefinitionError as error:
            add_place(error, args.definitions)
            raise

    return begin


def _given(args: argparse.Namespace) -> list[Given]:
    from kprobes.cli.definitions import read_definitions
    from kprobes.lang.trigger import parse_trigger
    from kprobes.model.trigger import Command
    from kprobes.transport.qemu_command import DEFAULT_ARCH

    arch = DEFAULT_ARCH if args.target is None and args.arch is None else args.arch
    groups = grouped(args.definitions, filters_of(args), args.triggers, args.disabled)
    texts = [each._replace(text=read_definitions(each.words, arch=arch)) for each in groups]
    triggers = [parse_trigger(text).trigger for given in texts for text in given.triggers]
    is_open = args.control is not None or args.python is not None
    if args.tracing_off and not is_open and all(e.command is not Command.TRACEON for e in triggers):
        raise UsageError("--tracing-off: nothing turns tracing on; give a --trigger traceon")
    return texts


def filters_of(args: argparse.Namespace) -> dict[int, str]:
    """Return the filters by the index of their definition, ``--cpu`` among them."""
    if args.cpu is None:
        return args.filters
    terms = (
        f"CPU >= {each[0]} && CPU <= {each[-1]}" if len(each) > 1 else f"CPU == {each[0]}"
        for each in args.cpu
    )
    chosen = " || ".join(terms)
    filters = (args.filters.get(at, "") for at in range(len(args.definitions)))
    return {at: f"({own}) && ({chosen})" if own else chosen for at, own in enumerate(filters)}


def is_following(args: argparse.Namespace) -> bool:
    """Whether only what the command does is to be recorded.

    Raises:
        UsageError: it is wanted, and there is no command, or all tasks are wanted, too.
    """
    if args.follow and args.all_tasks:
        raise UsageError("--follow and --all-tasks exclude each other")
    if args.follow and not args.command:
        raise UsageError("--follow is for a command: kprobe trace ... -- COMMAND")
    # Who names tasks means those, and not the command's.
    others = args.all_tasks or args.pid or args.tgid or args.boot
    return args.follow or bool(args.command and not others)
