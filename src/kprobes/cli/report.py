"""``kprobe report``: print what a recording has, as ``kprobe trace`` would have printed it."""

import argparse
import sys
from decimal import Decimal
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kprobes.cli import counting, options, trace
from kprobes.cli.counting import Counting
from kprobes.cli.terminal import counted, print_message
from kprobes.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from kprobes.cli.output import Output
    from kprobes.cli.terminal import Stop
    from kprobes.model.events import Batch, Events
    from kprobes.open_recording import EventFile
    from kprobes.ports import Sink
    from kprobes.recording import RecordedBoot
    from kprobes.sinks.fields import Fields
    from kprobes.sinks.names import TraceSource

NAME = "report"
HELP = "print the events of a recording, or of a trace.dat"
USAGE = "kprobe report [options] [FILE...]"
EPILOG = """\
examples:
  kprobe report
  kprobe report reads.rec --format json --event 'read*' --comm cat
  kprobe report reads.rec --sort duration --top 20 --format table

--count KEY,... and --hist TRIGGER sum events up, as `kprobe count` and the kernel's hist triggers
do: --hist 'keys=comm,duration.log2:sort=comm'.

It prints what `kprobe trace` would have printed, with the same trace options (-O). Times are the
recording's own, in seconds; of several recordings, those of the first.

Exit status: 0 done, 1 the file is damaged (what is whole is printed) or no recording, 2 usage,
4 the filter is wrong."""
DEFAULT = Path("kprobe.rec")
_NS_PER_S = 10**9
_U64 = (1 << 64) - 1
_FINISH_S = 1.0
"""After Ctrl-C, for the rest of a pipe, whose writer ends, too. `Output` has more time."""
_NAMED = 4
"""Events that one message names."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    parser.add_argument(
        "file",
        nargs="*",
        type=Path,
        default=[DEFAULT],
        metavar="FILE",
        help="recordings, files of trace-cmd, copies of tracefs, or - for standard input (default: "
        f"{DEFAULT}); the events of several are put in one order of time",
    )
    forms = ("text", "json", "csv", "table", "hist", *counting.OF_STACKS)
    options.add_output(parser, forms=forms)
    trace.add_printing(parser)
    options.add_trace_options(parser, prints=True)
    parser.add_argument(
        "--no-pager", dest="pager", action="store_false", help="do not start a pager on a terminal"
    )
    group = parser.add_argument_group("what of it, and in which order (default: all, by time)")
    group.add_argument(
        "--sort", metavar="FIELD", help="by a number, greatest first: duration, an argument, pid"
    )
    group.add_argument(
        "--top", type=options.count, metavar="N", help="only the first N of that order, or entries"
    )
    group.add_argument(
        "--fields",
        type=lambda text: text.split(","),
        metavar="NAME,...",
        help="only these of the arguments",
    )
    _add_counting(parser)
    add_choice(parser)


def _add_counting(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("in place of events")
    counts = group.add_mutually_exclusive_group()
    counts.add_argument(
        "--count",
        type=counting.words,
        metavar="KEY,...",
        help="how many there are by comm, pid, cpu, function, stack, or arguments; up to three",
    )
    counts.add_argument(
        "--hist",
        metavar="TRIGGER",
        help="what a hist trigger of the kernel counts: keys=...:vals=...:sort=... if FILTER",
    )


def add_choice(parser: argparse.ArgumentParser) -> None:
    """Add which events are meant."""
    group = parser.add_argument_group("which events (default: all)")
    group.add_argument(
        "--event",
        action="append",
        metavar="NAME",
        help="of this name, or pattern, or GROUP/NAME; can be given again",
    )
    group.add_argument(
        "--comm",
        action="append",
        metavar="NAME",
        help="of tasks of this name, or pattern",
    )
    group.add_argument(
        "-p", "--pid", type=options.count, action="append", help="of tasks with this pid"
    )
    group.add_argument(
        "-C", "--cpu", type=options.cpus, metavar="LIST", help="on these CPUs: 0-2,5"
    )
    group.add_argument(
        "--from", dest="start", type=_time, default=0, metavar="TIME", help="not before this time"
    )
    group.add_argument(
        "--to", dest="stop", type=_time, default=_U64, metavar="TIME", help="not after this time"
    )
    group.add_argument(
        "--filter",
        metavar="EXPR",
        help="for which this holds, in the kernel's language for filters; `duration`, too",
    )


def add_file(parser: argparse.ArgumentParser) -> None:
    """Add the recording."""
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        default=DEFAULT,
        metavar="FILE",
        help=f"the recording, or - for standard input (default: {DEFAULT})",
    )


def _time(text: str) -> int:
    try:
        ns = int(Decimal(text) * _NS_PER_S)
    except (ArithmeticError, ValueError):
        ns = -1
    if not 0 <= ns <= _U64:
        raise argparse.ArgumentTypeError(f"invalid time: {text!r} (use seconds: 12.5)")
    return ns


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Print; return the exit code."""
    from kprobes.cli.output import check_apart, check_writable
    from kprobes.cli.pager import paged
    from kprobes.cli.terminal import Stop

    _check(args)
    if args.output is not None:
        for path in args.file:
            check_apart(path, args.output)
        check_writable(args.output)
    with paged(out, is_wanted=args.pager and args.output is None) as shown, Stop() as stop:
        if len(args.file) == 1:
            if is_piped := str(args.file[0]) == "-" and not sys.stdin.buffer.seekable():
                stop.defer(at_most_s=_FINISH_S)
            check = _go_on if is_piped else stop.check
            return _report(args, args.file[0], (shown, stop), check)
        from kprobes.cli.report_several import report_several

        return report_several(args, shown, stop)


def _check(args: argparse.Namespace) -> None:
    is_counting = args.count is not None or args.hist is not None
    options.check_text_options(args)
    if is_counting and args.text_options:
        raise UsageError(f"-O {args.text_options[0]} is for events, not for --count and --hist")
    if args.top is not None and args.sort is None and not is_counting:
        raise UsageError("--top needs --sort: of which field the greatest are")
    if args.format in ("hist", *counting.OF_STACKS) and not is_counting:
        raise UsageError(f"--format {args.format} is for --count and --hist")
    if args.count is not None:
        counting.check_form(args.format, args.count, has_top=args.top is not None)
    if is_counting and args.format == "table":
        raise UsageError("--format table is for events; --count and --hist are one as text")
    if is_counting and (args.sort or args.fields) is not None:
        raise UsageError("--sort and --fields are for events; a hist trigger has sort=, vals=")
    if is_counting and len(args.file) > 1:
        raise UsageError("--count and --hist are of one recording")


def _go_on() -> None:
    pass


def _report(
    args: argparse.Namespace,
    path: Path,
    to: "tuple[BinaryIO, Stop]",
    check: "Callable[[], None]",
) -> int:
    from kprobes.cli.output import Output, open_output
    from kprobes.open_recording import opened_recording
    from kprobes.sinks import REBOOT_MARKS
    from kprobes.sinks.fields import Fields

    (out, stop), fields = to, Fields(args.fields)
    with opened_recording(path) as recording:
        for number, boot in enumerate(recording.boots()):
            choice = Choice(args, boot.source)
            stream = out if args.output is None else open_output(args.output, goes_on=number > 0)
            output = Output(
                stream, _sink_of(args, boot, fields), is_ours=stream is not out, stop=stop
            )
            if number and args.format in REBOOT_MARKS:
                output.mark = REBOOT_MARKS[args.format](boot.kernel.release)
            print_events(args, output, map(choice.of, boot.rounds), check)
            choice.check()
            if output.is_gone:
                return 0
        fields.check()
        if args.format == "text":
            _tell_unprinted(recording)
        return problems(path, recording)


def _tell_unprinted(recording: "EventFile") -> None:
    from kprobes.sinks.print_fmt import PrintedEvent

    layouts = [layout for layout in recording.layouts.values() if layout.print_fmt]
    reasons = {layout.event: PrintedEvent(layout).unknown for layout in layouts}
    shown = [f"{event} ({reason})" for event, reason in sorted(reasons.items()) if reason]
    if shown:
        several = "" if len(shown) <= _NAMED else ", ..."
        print_message(
            f"kprobe: printed by their fields, for what is not known of their print fmt: "
            f"{', '.join(shown[:_NAMED])}{several}"
        )


def print_events(
    args: argparse.Namespace,
    output: "Output",
    rounds: "Iterable[Events]",
    check: "Callable[[], None]",
) -> None:
    """Print events, in the order that is asked for.

    Args:
        args: the options.
        output: where they go; it is closed.
        rounds: that are meant, oldest first.
        check: raises what ends it, between any two of them.
    """
    try:
        output.begin()
        for events in rounds if args.sort is None else _sorted(args, rounds, check):
            output.write(events)
            check()
            if output.is_gone:
                break
    finally:
        output.close()
    output.check()


def _sorted(
    args: argparse.Namespace, rounds: "Iterable[Events]", check: "Callable[[], None]"
) -> "Iterator[Events]":
    from kprobes.ordering import GreatestFirst

    greatest = GreatestFirst(args.sort, args.top)
    for events in rounds:
        greatest.take(events)
        check()
    yield greatest.ordered()
    if greatest.left_out:
        print_message(f"kprobe: {counted(greatest.left_out, 'event')} without {args.sort}")


def source_of(args: argparse.Namespace, boot: "RecordedBoot") -> "TraceSource":
    """Return what sinks need to know, with how values are to be printed."""
    from msgspec.structs import replace

    from kprobes.model.text_options import text_options

    return replace(
        boot.source,
        has_enum_names=args.enum,
        has_wide_numbers=args.json_numbers == "number",
        options=text_options(args.text_options),
    )


def _sink_of(
    args: argparse.Namespace, boot: "RecordedBoot", fields: "Fields"
) -> "Callable[[BinaryIO], Sink]":
    from kprobes.sinks import FORMATS

    source = source_of(args, boot)
    if args.count is not None or args.hist is not None:
        from kprobes.cli.histograms import HistogramSink
        from kprobes.model.hist import trigger_text

        trigger = args.hist if args.count is None else trigger_text(args.count)
        shown = counting.shown_of(args)
        return lambda stream: HistogramSink(stream, source, Counting(trigger=trigger, shown=shown))
    make = FORMATS[args.format]
    return lambda stream: fields.of(make(stream, source))


def problems(path: Path, recording: "EventFile") -> int:
    """Tell what is wrong with a recording that was read; return the exit code."""
    if recording.damaged:
        print_message(
            f"kprobe: {path}: {counted(recording.damaged, 'damaged place')}; what is whole was read"
        )
    if recording.left_out:
        print_message(f"kprobe: {path}: not read: instance {', '.join(recording.left_out)}")
    if recording.lost:
        print_message(
            f"kprobe: {counted(recording.lost, 'event')} lost when it was recorded: rings were full"
        )
    return 1 if recording.damaged else 0


class Choice:
    """The events of one boot that the options of ``add_choice`` mean."""

    def __init__(self, args: argparse.Namespace, source: "TraceSource") -> None:
        from kprobes.column_filter import ColumnFilter

        self._args = args
        self._filter = None if args.filter is None else ColumnFilter(args.filter, source)

    def of(self, events: "Events") -> "Events":
        """Return those that are meant, in their order."""
        from kprobes.model.events import kept_of

        events = kept_of(events, [_wanted(self._args, batch) for batch in events.batches])
        return events if self._filter is None else self._filter.passed(events)

    def check(self) -> None:
        """Raise at the end what is wrong with the filter, if no event could be asked."""
        if self._filter is not None:
            self._filter.check()


def _wanted(args: argparse.Namespace, batch: "Batch") -> "NDArray[np.bool_]":
    import numpy as np

    name = batch.layout.event, f"{batch.layout.group}/{batch.layout.event}"
    is_named = args.event is None or any(fnmatchcase(n, p) for n in name for p in args.event)
    mask = (batch.ts >= np.uint64(args.start)) & (batch.ts <= np.uint64(args.stop)) & is_named
    if args.pid is not None:
        mask &= np.isin(batch.pid, args.pid)
    if args.cpu is not None:
        mask &= np.isin(batch.cpu, [cpu for part in args.cpu for cpu in part])
    if args.comm is not None:
        names, which = np.unique(batch.comm, return_inverse=True)
        texts = (bytes(each).decode(errors="surrogateescape") for each in names.tolist())
        mask &= np.array([any(fnmatchcase(t, p) for p in args.comm) for t in texts])[which]
    return mask
