"""Counts and histograms of hits: short words to the kernel's hist trigger, for all who count."""

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

from msgspec import Struct
from msgspec.structs import replace

from kprobes.cli import options, trace
from kprobes.cli.terminal import write_text
from kprobes.errors import UsageError
from kprobes.model.hist import STACK, USER_STACK

if TYPE_CHECKING:
    from kprobes.model.definition import Definition

OF_STACKS = ("folded", "speedscope")
FORMS = ("text", "hist", "json", "csv", *OF_STACKS)
TOP = 20
DEFAULTS: Mapping[str, Any] = {
    "max_events": None,
    "until_panic": None,
    "hang_timeout": None,
    "json_numbers": "string",
    "enum": False,
}
"""Options of ``kprobe trace`` that what counts has not."""
_INTERVAL_S = 1.0
_EXTREMES = (".min", ".max")


class Shown(Struct, frozen=True, kw_only=True):
    """How a histogram is shown.

    Attributes:
        form: one of ``FORMS``.
        top: so many entries are shown, the first ones; None for all.
        interval_s: it is shown so often; 0 for at the end only.
        is_delta: whether what is shown was counted since the time before.
        bounds: of the buckets that are shown one by one: what is less, and what is not less, is
            one each; or None.
    """

    form: str = "text"
    top: int | None = None
    interval_s: float = 0.0
    is_delta: bool = False
    bounds: tuple[int, int] | None = None


class Counting(Struct, frozen=True, kw_only=True):
    """What a trace counts in place of printing events.

    Attributes:
        trigger: the hist trigger's text.
        shown: how it is shown.
    """

    trigger: str
    shown: Shown


def words(text: str) -> list[str]:
    """Return what stands between commas."""
    found = text.split(",")
    if "" in found:
        raise argparse.ArgumentTypeError(f"invalid list: {text!r} (use comm,pid)")
    return found


def add_by(parser: argparse.ArgumentParser, default: str) -> None:
    """Add by what hits are told apart."""
    parser.add_argument(
        "--by",
        type=words,
        metavar="KEY,...",
        help="comm, pid, cpu, function, stack, ustack, or an argument, as `flags`, `size.log2` or "
        f"`size/1000`; up to three (default: {default})",
    )


def definitions_of(args: argparse.Namespace) -> "Sequence[Definition]":
    """Return the definitions, as far as that needs no kernel; standard input is read for good.

    Raises:
        UsageError: there is none.
        DefinitionError: one is wrong.
    """
    from kprobes.cli.definitions import parsed, read_texts

    if not args.definitions:
        raise UsageError("nothing to count: give a definition")
    if "-" in args.definitions:
        args.definitions = tuple(
            read_texts([word])[0].text if word == "-" else word for word in args.definitions
        )
    return parsed(args.definitions)


def want_duration(args: argparse.Namespace, words: Iterable[str]) -> None:
    """Have durations recorded, as of ``--call-duration``, where a field is one.

    Args:
        args: of ``add_arguments``.
        words: fields, with modifiers or without.

    Raises:
        UsageError: nothing that is defined has one.
    """
    from kprobes.model.definition import DURATION, Kind

    if all(DURATION not in re.split(r"\W", word) for word in words):
        return
    definitions = definitions_of(args)
    if any(arg.name == DURATION for each in definitions for arg in each.args):
        return
    if all(each.kind is not Kind.RETURN for each in definitions):
        raise UsageError("only returns have a duration: define one (r FUNCTION)")
    args.call_duration = True


def add_size(parser: argparse.ArgumentParser) -> None:
    """Add how large the table is."""
    parser.add_argument(
        "--size",
        type=options.count,
        metavar="N",
        help="entries of the table, 128 to 131072; how much of the guest's memory it takes is told "
        "at the beginning (default: 16384, by function alone 65536)",
    )


def add_shown(parser: argparse.ArgumentParser) -> None:
    """Add how what was counted is shown."""
    options.add_output(parser, forms=FORMS)
    parser.add_argument(
        "--top", type=options.count, metavar="N", help=f"only the first N (default: {TOP} as text)"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what all commands have that count the hits of a running kernel."""
    trace.add_begin(parser)
    trace.add_probing(parser)
    add_shown(parser)
    add_size(parser)
    options.add_symfs(parser)
    parser.add_argument(
        "--interval",
        type=options.duration,
        metavar="TIME",
        help="show what was counted so far so often (default: each second on a terminal, else at "
        "the end)",
    )
    parser.add_argument(
        "--delta",
        action="store_true",
        help="show what was counted since the last time, and how many hits a second that were",
    )
    parser.add_argument(
        "--print-trigger",
        action="store_true",
        help="print the kernel's hist trigger that this stands for, and end",
    )
    parser.set_defaults(**DEFAULTS)


def shown_of(args: argparse.Namespace, *, bounds: tuple[int, int] | None = None) -> Shown:
    """Return how the options want it.

    Args:
        args: of ``add_shown``.
        bounds: see ``Shown``.
    """
    top = args.top if args.top or args.format != "text" else TOP
    return Shown(form=args.format, top=top, bounds=bounds)


def live_shown_of(
    args: argparse.Namespace, out: BinaryIO, *, bounds: tuple[int, int] | None = None
) -> Shown:
    """Return how the options want it of a running kernel.

    Args:
        args: of ``add_arguments``.
        out: standard output.
        bounds: see ``Shown``.

    Raises:
        UsageError: what is new each time is to be shown, and there is one time only.
    """
    is_live = args.output is None and args.format == "text" and out.isatty()
    interval_s = args.interval or (_INTERVAL_S if is_live else 0.0)
    if args.delta and not interval_s:
        raise UsageError("--delta needs --interval TIME: since when")
    extremes = (each for each in getattr(args, "vals", None) or () if each.endswith(_EXTREMES))
    if args.delta and (extreme := next(extremes, None)):
        raise UsageError(f"--delta is not for {extreme}, which is of all hits since the beginning")
    shown = shown_of(args, bounds=bounds)
    return replace(shown, interval_s=interval_s, is_delta=args.delta)


def check_form(form: str, by: Sequence[str], *, has_top: bool) -> None:
    """Refuse what a form cannot show.

    Args:
        form: one of ``FORMS``.
        by: keys that are counted by.
        has_top: whether only the first entries are wanted.

    Raises:
        UsageError: it cannot.
    """
    if has_top and form == "hist":
        raise UsageError("--top is not for --format hist, which is the whole table")
    if form in OF_STACKS and STACK not in by:
        raise UsageError(f"--format {form} is of stacks: count --by stack")


def run(args: argparse.Namespace, out: BinaryIO, counting: Counting) -> int:
    """Count, and show it; return the exit code.

    Args:
        args: the options.
        out: standard output.
        counting: what is counted.
    """
    by: Sequence[str] = args.by or ()
    check_form(args.format, by, has_top=counting.shown.top is not None)
    args.stacktrace = args.stacktrace or STACK in by
    args.userstacktrace = args.userstacktrace or USER_STACK in by
    if args.summary[0] == "kprobe_profile":
        raise UsageError("--summary kprobe_profile is of events: here the table has the counts")
    if args.print_trigger:
        write_text(out, f"{counting.trigger}\n")
        return 0
    args.counting = counting
    return trace.run(args, out)
