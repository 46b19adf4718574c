"""``kprobe stats``: what a recording's events are like, in numbers."""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from msgspec import Struct

from kprobes.cli import options
from kprobes.cli.report import Choice, add_choice, add_file, problems
from kprobes.cli.terminal import Stop, aligned, counted, json_lines, write_text

if TYPE_CHECKING:
    from kprobes.statistics import (
        Distribution,
        EventStatistics,
        FieldStatistics,
        FrequentValues,
        Statistics,
    )

NAME = "stats"
HELP = "say what the events of a recording are like, in numbers"
USAGE = "kprobe stats [options] [FILE]"
EPILOG = """\
examples:
  kprobe stats
  kprobe stats reads.rec --event 'read*' --top 10
  kprobe stats reads.rec --filter 'cpu == 0' --format json

Rates are by the time from the first to the last event of the recording, or what --from and --to
leave of it. Percentiles are exact while a field has at most 4,096 different values, then within
1 %. Counts with a + are what there is at least, of fields that have more than 512 different texts.

Exit status: 0 done, 1 the file is damaged (what is whole is counted) or no recording, 2 usage,
4 the filter is wrong."""
PERCENTILES = (50, 90, 99)
_MAX_EVENTS = 20
_EVENT_HEAD = ("EVENT", "HITS", "SHARE", "RATE/S", "TASKS")
_NUMBER_HEAD = ("FIELD", "MIN", "MEAN", *(f"P{each}" for each in PERCENTILES), "MAX", "FAULTS")
_VALUE_HEAD = ("FIELD", "HITS", "SHARE", "VALUE")
_FEW = 32
"""A field of numbers has frequent ones if so few are different."""
_WIDE = 10
"""Digits, with their commas, that a column of numbers has room for."""
_MOST_TENTHS = 1000
_MAX_TEXT = 48
_STRINGS = ("string", "ustring", "char")
_UNITS = ((10**9, "s"), (10**6, "ms"), (10**3, "us"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add_file(parser)
    options.add_format(parser)
    parser.add_argument(
        "--top",
        type=options.count,
        default=5,
        metavar="N",
        help="so many of the most frequent values of each field (default: 5)",
    )
    add_choice(parser)


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Count, and print it; return the exit code."""
    with Stop() as stop:
        found, release, status = read_statistics(args.file, args, stop)
    shown = _as_json if args.format == "json" else _as_text
    write_text(out, shown(found, release, args.top))
    return status


def read_statistics(
    path: Path, args: argparse.Namespace, stop: Stop
) -> tuple["Statistics", str, int]:
    """Return the statistics of a recording, its kernel's release and the exit code.

    Args:
        path: of the recording.
        args: with the options of ``add_choice``.
        stop: what may end it.
    """
    from kprobes.open_recording import opened_recording
    from kprobes.statistics import Statistics

    found, release = Statistics(), ""
    with opened_recording(path) as recording:
        for boot in recording.boots():
            choice, release = Choice(args, boot.source), release or boot.kernel.release
            found.begin(boot.source)
            for events in boot.rounds:
                found.cover(events, start=args.start, stop=args.stop)
                found.add(choice.of(events))
                found.lost += sum(count for _, count in boot.new_lost())
                stop.check()
            found.finish()
            choice.check()
        return found, release, problems(path, recording)


def by_hits(found: "Statistics") -> "list[EventStatistics]":
    """Return the events, those with the most hits first."""
    return sorted(found.events.values(), key=lambda each: (-each.hits, each.group, each.event))


def names_of(events: "Iterable[EventStatistics]") -> dict[tuple[str, str], str]:
    """Return what each event is called: with its group where it is not the only one of its name."""
    every = list(events)
    names = [each.event for each in every]
    return {
        (each.group, each.event): each.event
        if names.count(each.event) == 1
        else f"{each.group}/{each.event}"
        for each in every
    }


def sum_up(found: "Statistics", release: str) -> list[tuple[str, str]]:
    """Return rows on a recording as a whole."""
    boots = f", {counted(found.boots, 'boot')}" if found.boots > 1 else ""
    span = f" in {found.span_ns / 10**9:.6f} s" if found.has_ns else ""
    lost = f", {found.lost:,} lost" if found.lost else ""
    return [
        ("kernel", f"Linux {release}{boots}"),
        ("events", f"{found.hits:,}{span}{lost}"),
    ]


def right(rows: Sequence[Sequence[str]], columns: range) -> list[tuple[str, ...]]:
    """Return rows whose words in some columns end below each other."""
    widths = {at: max(len(row[at]) for row in rows) for at in columns}
    return [
        tuple(word.rjust(widths[at]) if at in columns else word for at, word in enumerate(row))
        for row in rows
    ]


def number_text(value: float | None, *, is_duration: bool = False, is_hex: bool = False) -> str:
    """Return a number in few characters, a duration in ns with its unit; - for None.

    Args:
        value: the number.
        is_duration: whether it is nanoseconds.
        is_hex: whether the field's numbers are written so.
    """
    if value is None:
        return "-"
    if is_duration:
        return _duration(value)
    if is_hex:
        return f"{round(value):#x}"
    is_whole = isinstance(value, int) or abs(value) >= _MOST_TENTHS
    text = f"{value:,.0f}" if is_whole else f"{value:,.1f}"
    return text if len(text) <= _WIDE else f"{value:.3e}"


def _duration(ns: float) -> str:
    size, unit = next(((size, unit) for size, unit in _UNITS if ns >= size), (1, "ns"))
    count = ns / size
    digits = 0 if size == 1 or count >= 100 else 1 if count >= 10 else 2
    return f"{count:,.{digits}f} {unit}"


def share_text(part: float, whole: float) -> str:
    """Return how much of a whole something is, in percent."""
    return f"{100 * part / whole:.1f} %"


def text_of(value: bytes, kind: str) -> str:
    """Return a value as a user reads it on one line, without the middle of a long one."""
    text = value.decode(errors="surrogateescape")
    if len(text) > _MAX_TEXT:
        half = _MAX_TEXT // 2
        text = f"{text[:half]}...{text[-half:]}"
    return f'"{text}"' if kind in _STRINGS else text


class NamedValues(Struct, frozen=True, kw_only=True):
    """Values that are counted one by one.

    Attributes:
        name, kind: of a field, and its type; or what of an event they are, as both.
        values: they themselves.
        faulted: how many more could not be read.
    """

    name: str
    kind: str
    values: "FrequentValues"
    faulted: int = 0


def named_values(event: "EventStatistics") -> list[NamedValues]:
    """Return what is counted by name: tasks, callers, functions and fields."""
    own = {"comm": event.comms, "caller": event.callers, "function": event.functions}
    return [
        *(NamedValues(name=name, kind=name, values=own[name]) for name in own if own[name].total),
        *(
            NamedValues(name=each.name, kind=each.type, values=each.texts, faulted=each.faulted)
            for each in event.fields.values()
            if each.numbers is None
        ),
    ]


def _as_text(found: "Statistics", release: str, top: int) -> str:
    events, names = by_hits(found), names_of(found.events.values())
    shown = events[:_MAX_EVENTS]
    parts = [aligned(sum_up(found, release))]
    if shown:
        rows = [_event_row(each, found, names[each.group, each.event]) for each in shown]
        parts.append(aligned(right([_EVENT_HEAD, *rows], range(1, 5))))
    if len(events) > len(shown):
        more = counted(len(events) - len(shown), "event")
        parts.append(f"... and {more} with fewer hits: --event chooses, --format json has all\n")
    labels = [(each, names[each.group, each.event]) for each in shown]
    numbers = [row for each, name in labels for row in _number_rows(each, name)]
    values = [row for each, name in labels for row in _value_rows(each, name, top)]
    if numbers:
        parts.append(aligned(right([_NUMBER_HEAD, *numbers], range(1, 8))))
    if values:
        parts.append(aligned(right([_VALUE_HEAD, *values], range(1, 3))))
    return "\n".join(parts)


def _event_row(event: "EventStatistics", found: "Statistics", name: str) -> tuple[str, ...]:
    rate = found.rate(event.hits)
    share = share_text(event.hits, found.hits)
    tasks = f"{event.tasks:,}{'' if event.has_all_tasks else '+'}"
    return name, f"{event.hits:,}", share, number_text(rate), tasks


def _number_rows(event: "EventStatistics", name: str) -> Iterator[tuple[str, ...]]:
    for field in event.fields.values():
        numbers = field.numbers
        if numbers is not None and not _is_addresses(field, numbers):
            shown = (number_text(each, **_form(field)) for each in _figures(numbers))
            yield f"{name}.{field.name}", *shown, f"{field.faulted:,}"


def _figures(numbers: "Distribution") -> tuple[float | None, ...]:
    percentiles = (numbers.percentile(each) for each in PERCENTILES)
    is_some = numbers.count > 0
    return (
        numbers.least if is_some else None,
        numbers.mean,
        *percentiles,
        numbers.most if is_some else None,
    )


def _form(field: "FieldStatistics") -> dict[str, bool]:
    return {"is_duration": field.is_duration, "is_hex": field.type.startswith("x")}


def _is_addresses(field: "FieldStatistics", numbers: "Distribution") -> bool:
    return field.type.startswith("x") and len(f"{numbers.most:#x}") > _WIDE


def _value_rows(event: "EventStatistics", name: str, top: int) -> Iterator[tuple[str, ...]]:
    for field in event.fields.values():
        if field.numbers is not None:
            yield from _frequent_numbers(field, field.numbers, f"{name}.{field.name}", top)
    for each in named_values(event):
        if each.values is not event.functions or len(each.values.counts) > 1:
            yield from _frequent_values(each, f"{name}.{each.name}", top)


def _frequent_values(named: NamedValues, label: str, top: int) -> Iterator[tuple[str, ...]]:
    values, whole = named.values, named.values.total + named.faulted
    more = "" if values.is_exact else "+"
    rows = [
        (f"{count:,}{more}", share_text(count, whole), text_of(value, named.kind))
        for value, count in values.most_frequent(top)
    ]
    if named.faulted:
        rows.append((f"{named.faulted:,}", share_text(named.faulted, whole), "(fault)"))
    for at, row in enumerate(rows):
        yield "" if at else label, *row


def _frequent_numbers(
    field: "FieldStatistics", numbers: "Distribution", label: str, top: int
) -> Iterator[tuple[str, ...]]:
    if _is_few(field, numbers):
        for at, (number, count) in enumerate(numbers.most_frequent(top)):
            shown = number_text(number, **_form(field))
            share = share_text(count, numbers.count + field.faulted)
            yield "" if at else label, f"{count:,}", share, shown
    elif _is_addresses(field, numbers):
        span = f"{numbers.least:#x} to {numbers.most:#x}"
        yield label, f"{numbers.count:,}", "", span


def _as_json(found: "Statistics", release: str, top: int) -> str:
    return json_lines([summary_object(found, release) | {"events": _events(found, top)}])


def summary_object(found: "Statistics", release: str) -> dict[str, Any]:
    """Return what is known of a recording as a whole."""
    return {
        "release": release,
        "boots": found.boots,
        "hits": found.hits,
        "lost": found.lost,
        "span_ns": found.span_ns if found.has_ns else None,
    }


def _events(found: "Statistics", top: int) -> list[dict[str, Any]]:
    return [
        {
            "event": each.event,
            "group": each.group,
            "hits": each.hits,
            "share": each.hits / found.hits,
            "rate_hz": found.rate(each.hits),
            "tasks": each.tasks,
            "has_all_tasks": each.has_all_tasks,
            "comms": _values_object(each.comms, top),
            "functions": _values_object(each.functions, top),
            "callers": _values_object(each.callers, top) if each.callers.total else None,
            "fields": [_field_object(field, top) for field in each.fields.values()],
        }
        for each in by_hits(found)
    ]


def _field_object(field: "FieldStatistics", top: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "name": field.name,
        "type": field.type,
        "is_duration": field.is_duration,
        "faulted": field.faulted,
    }
    numbers = field.numbers
    if numbers is None:
        return found | {"numbers": None, "values": _values_object(field.texts, top, field.faulted)}
    least, mean, *percentiles, most = _figures(numbers)
    figures = {"count": numbers.count, "min": least, "mean": mean, "max": most}
    figures |= {f"p{each}": value for each, value in zip(PERCENTILES, percentiles, strict=True)}
    figures |= {"is_exact": numbers.is_exact, "different": numbers.different}
    pairs = numbers.most_frequent(top) if _is_few(field, numbers) else None
    whole = numbers.count + field.faulted
    return found | {"numbers": figures, "values": pairs and _pairs(pairs, whole, is_exact=True)}


def _is_few(field: "FieldStatistics", numbers: "Distribution") -> bool:
    # Of durations it is chance which are the same.
    different = numbers.different
    return not field.is_duration and different is not None and different <= _FEW


def _values_object(values: "FrequentValues", top: int, faulted: int = 0) -> dict[str, Any]:
    pairs = [
        (value.decode(errors="surrogateescape"), count)
        for value, count in values.most_frequent(top)
    ]
    return _pairs(pairs, values.total + faulted, is_exact=values.is_exact)


def _pairs(pairs: Sequence[tuple[object, int]], whole: int, *, is_exact: bool) -> dict[str, Any]:
    top = [{"value": value, "hits": count, "share": count / whole} for value, count in pairs]
    return {"is_exact": is_exact, "top": top}
