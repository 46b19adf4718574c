"""``kprobe report`` of several recordings: their events in one order of time."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from kprobes.cli.output import Output, open_output
from kprobes.cli.report import Choice, print_events, problems, source_of
from kprobes.cli.terminal import Stop, counted, print_message
from kprobes.errors import UsageError
from kprobes.model.events import Events
from kprobes.recording import RecordedBoot, opened_recording
from kprobes.sinks import LINES
from kprobes.sinks.fields import Fields
from kprobes.sinks.several import SeveralSink
from kprobes.timeline import RealTime, Shift, in_one_order, shift_between, shifted

_NS_PER_S = 10**9


def report_several(args: argparse.Namespace, out: BinaryIO, stop: Stop) -> int:
    """Print them; return the exit code.

    Args:
        args: the options.
        out: where to, if no file is named.
        stop: of this process.

    Raises:
        UsageError: that cannot be done with these recordings, or in this form.
    """
    if args.format not in LINES:
        raise UsageError(f"--format {args.format} is for one recording; of several: text, json")
    names = _names(args.file)
    shifts = _shifts([_clock(path, stop) for path in args.file], names)
    with ExitStack() as files:
        recordings = [files.enter_context(opened_recording(path)) for path in args.file]
        boots = dict(zip(names, (next(each.boots()) for each in recordings), strict=True))
        _print(args, boots, shifts, (out, stop))
        pairs = zip(args.file, recordings, strict=True)
        return max(problems(path, recording) for path, recording in pairs)


def _names(paths: Sequence[Path]) -> list[str]:
    if any(str(path) == "-" for path in paths):
        raise UsageError("of several recordings none can be standard input: they are read twice")
    short = [path.name for path in paths]
    names = short if len(set(short)) == len(short) else list(map(str, paths))
    if len(set(names)) < len(names):
        raise UsageError("a recording is given twice")
    return names


def _clock(path: Path, stop: Stop) -> RealTime | None:
    found: list[RealTime | None] = []
    with opened_recording(path) as recording:
        for boot in recording.boots():
            for _ in boot.rounds:
                stop.check()
            found.append(recording.bounds.real_time())
    if len(found) != 1:
        raise UsageError(f"{path} has {counted(len(found), 'boot')}: it can only be printed alone")
    return found[0]


def _shifts(clocks: Sequence[RealTime | None], names: Sequence[str]) -> dict[str, Shift | None]:
    to = next((clock for clock in clocks if clock is not None), None)
    shifts: dict[str, Shift | None] = {}
    for name, clock in zip(names, clocks, strict=True):
        shift = None if clock is None or to is None else shift_between(clock, to)
        if shift is not None:
            by, error = shift.ns / _NS_PER_S, shift.error / _NS_PER_S
            print_message(f"kprobe: {name}: times are shifted by {by:+.6f} s, +-{error:.6f} s")
        shifts[name] = shift
    return shifts


def _print(
    args: argparse.Namespace,
    boots: dict[str, RecordedBoot],
    shifts: dict[str, Shift | None],
    to: tuple[BinaryIO, Stop],
) -> None:
    out, stop = to
    fields = Fields(args.fields)
    choices = {name: Choice(args, boot.source) for name, boot in boots.items()}
    owners: dict[int, str] = {}

    def events_of(name: str) -> Iterator[Events]:
        for events in shifted(boots[name].rounds, shifts[name]):
            owners.update((id(batch.layout), name) for batch in events.batches)
            yield choices[name].of(events)

    def sink(stream: BinaryIO) -> SeveralSink:
        make = LINES[args.format]
        sinks = {name: make(stream, source_of(args, boot)) for name, boot in boots.items()}
        return SeveralSink(stream, args.format, sinks, owners=owners, fields=fields)

    stream = out if args.output is None else open_output(args.output)
    output = Output(stream, sink, is_ours=stream is not out, stop=stop)
    print_events(args, output, in_one_order(list(map(events_of, boots))), stop)
    for choice in choices.values():
        choice.check()
    fields.check()
