"""``kprobe info``: what a recording is of, from when, and how much is in it."""

import argparse
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, BinaryIO

from kprobes.cli import options
from kprobes.cli.report import add_file, problems
from kprobes.cli.terminal import aligned, counted, json_lines, write_text

if TYPE_CHECKING:
    from kprobes.model.recording import RecordedKernel
    from kprobes.open_recording import EventFile
    from kprobes.recording import RecordedBoot

NAME = "info"
HELP = "say what a recording has"
USAGE = "kprobe info [options] [FILE]"
EPILOG = """\
examples:
  kprobe info
  kprobe info reads.rec
  kprobe info reads.rec --format json

Exit status: 0 done, 1 the file is damaged or is no recording, 2 usage."""
_NS_PER_S = 10**9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add_file(parser)
    options.add_format(parser)


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Print it; return the exit code."""
    from kprobes.open_recording import opened_recording

    with opened_recording(args.file) as recording:
        for boot in recording.boots():
            span, here = _seen(boot)
            shown = _as_json if args.format == "json" else _as_text
            write_text(out, shown(boot.kernel, recording, (span, here)))
        return problems(args.file, recording)


_Span = tuple[int, int] | None


def _seen(boot: "RecordedBoot") -> "tuple[_Span, Counter[int]]":
    # The events' times, and how many this file has of each: of the session there may be others.
    times: list[tuple[int, int]] = []
    here: Counter[int] = Counter()
    for events in boot.rounds:
        for batch in events.batches:
            times.append((int(batch.ts.min()), int(batch.ts.max())))
            here[batch.layout.event_id] += len(batch)
    span = (min(first for first, _ in times), max(last for _, last in times)) if times else None
    return span, here


def _real(ns: int) -> str:
    try:
        return datetime.fromtimestamp(ns / _NS_PER_S, UTC).isoformat(" ", "milliseconds")
    except (OverflowError, ValueError, OSError):
        return "?"


def _as_text(
    kernel: "RecordedKernel", recording: "EventFile", seen: "tuple[_Span, Counter[int]]"
) -> str:
    (span, here), end = seen, recording.counted
    total = sum(end.counts.recorded.values())
    missed = sum(hits.all_missed for hits in end.hits)
    build = f", build id {kernel.build_id.hex()}" if kernel.build_id else ""
    rows = [
        ("kernel", f"Linux {kernel.release}, {kernel.arch}, {counted(kernel.cpus, 'CPU')}{build}"),
        ("target", kernel.target),
    ]
    if kernel.real_ns:
        when = f"{_real(kernel.real_ns)} to {_real(end.real_ns)}"
        rows.append(("recorded", f"{when}, by {kernel.writer}"))
    if span is not None:
        first, last = (f"{ns / _NS_PER_S:.6f}" if kernel.has_ns else f"{ns}" for ns in span)
        rows.append(("times", f"{first} to {last}"))
    others = f" of the {total:,} of its session" if total > here.total() else ""
    events = f"{here.total():,}{others}, {missed:,} missed, {end.counts.lost:,} lost"
    rows.append(("events", events))
    if end.pauses is not None:
        paused_s, stops = end.pauses
        rows.append(("paused", f"{paused_s * 1000:.1f} ms in {counted(stops, 'stop')}"))
    if end.why:
        rows.append(("ended", end.why))
    elif recording.continued:
        rows.append(("ended", f"it goes on in {recording.continued}"))
    elif recording.end is None:
        rows.append(("ended", "its writer was stopped; all that is there was read"))
    return aligned(rows) + aligned(_definitions(recording, here), indent="  ")


def _definitions(recording: "EventFile", here: "Counter[int]") -> list[tuple[str, ...]]:
    # Those of a pattern are one.
    found: dict[str, list[int]] = {}
    for number, layout in sorted(recording.layouts.items()):
        found.setdefault(layout.definition or layout.event, []).append(number)
    return [
        (
            f"{sum(here[number] for number in numbers):>9,}",
            definition,
            counted(len(numbers), "function") if len(numbers) > 1 else "",
        )
        for definition, numbers in found.items()
    ]


def _as_json(
    kernel: "RecordedKernel", recording: "EventFile", seen: "tuple[_Span, Counter[int]]"
) -> str:
    (span, here), end = seen, recording.counted
    row = {
        "release": kernel.release,
        "arch": kernel.arch,
        "build_id": kernel.build_id.hex() or None,
        "cpus": kernel.cpus,
        "target": kernel.target,
        "writer": kernel.writer,
        "began_ns": kernel.real_ns,
        "ended_ns": end.real_ns,
        "first_ns": None if span is None else span[0],
        "last_ns": None if span is None else span[1],
        "recorded": here.total(),
        "missed": sum(hits.all_missed for hits in end.hits),
        "lost": end.counts.lost,
        "is_ended": recording.end is not None,
        "why": end.why or None,
        "continued": recording.continued or None,
        "events": [
            {
                "event": layout.event,
                "group": layout.group,
                "where": layout.where,
                "definition": layout.definition,
                "recorded": here[number],
            }
            for number, layout in sorted(recording.layouts.items())
        ],
    }
    return json_lines([row])
