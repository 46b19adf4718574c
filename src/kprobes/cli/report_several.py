"""``kprobe report`` of several recordings: their events in one order of time."""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from typing import BinaryIO

from kprobes.cli.output import Output, open_output
from kprobes.cli.report import Choice, print_events, problems, source_of
from kprobes.cli.several import named, shifts_of
from kprobes.cli.terminal import Stop
from kprobes.errors import UsageError
from kprobes.model.events import Events
from kprobes.open_recording import opened_recording
from kprobes.recording import RecordedBoot
from kprobes.sinks import LINES
from kprobes.sinks.fields import Fields
from kprobes.sinks.several import SeveralSink
from kprobes.timeline import Shift, in_one_order, shifted


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
    paths = named(args.file)
    shifts = shifts_of(paths, stop)
    with ExitStack() as files:
        recordings = {name: files.enter_context(opened_recording(p)) for name, p in paths.items()}
        boots = {name: next(recording.boots()) for name, recording in recordings.items()}
        _print(args, boots, shifts, (out, stop))
        return max(problems(paths[name], recording) for name, recording in recordings.items())


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
    print_events(args, output, in_one_order(list(map(events_of, boots))), stop.check)
    for choice in choices.values():
        choice.check()
    fields.check()
