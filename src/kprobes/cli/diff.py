"""``kprobe diff``: what has changed between two recordings, and what of it is noise."""

import argparse
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from msgspec import Struct
from msgspec.structs import asdict

from kprobes.cli import options, stats
from kprobes.cli.report import add_choice
from kprobes.cli.stats import number_text, right, share_text, text_of
from kprobes.cli.terminal import Stop, aligned, json_lines, write_text
from kprobes.errors import UsageError

if TYPE_CHECKING:
    from kprobes.statistics import Distribution, EventStatistics, FrequentValues, Statistics

NAME = "diff"
HELP = "say what has changed from one recording to another"
USAGE = "kprobe diff [options] A B"
EPILOG = """\
examples:
  kprobe diff kprobe.rec reads.rec
  kprobe diff kprobe.rec reads.rec --event 'read*' --comm cat
  kprobe diff kprobe.rec reads.rec --format json

How often each event happened in a second, durations, and what callers, symbols and texts only one
of the two has; of what has changed most clearly first. Ratios are of B to A, with intervals of
99 %; "noise" is what may have been chance. Hits in bursts are taken into account.

Exit status: 0 done, whatever has changed, 1 a file is damaged (what is whole is compared) or no
recording, 2 usage, 4 the filter is wrong."""
PERCENTILES = (50, 99)
_CHANCE = 0.01
"""What is as improbable as this is no noise."""
_MAX_ROWS = 20
_LEAST_PLAIN, _MOST_PLAIN = 0.1, 1000
_SYMBOLS = ("caller", "symbol", "symstr", "stacktrace")
_ABSENCES = ("new", "gone")
_NS_PER_S = 10**9
_RATE_HEAD = ("EVENT", "A/S", "B/S", "RATIO", "99 % INTERVAL", "CHANGE")
_DURATION_HEAD = ("DURATION", "A", "B", "RATIO", "99 % INTERVAL", "CHANGE")
_VALUE_HEAD = ("FIELD", "HITS", "SHARE", "CHANGE", "VALUE")
_MAX_LOG = 300.0
_PLACE = re.compile(rb"\+0x[0-9a-f]+(/0x[0-9a-f]+)?")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    for name in ("before", "after"):
        which = "AB"[name == "after"]
        parser.add_argument(
            name, type=Path, metavar=which, help="a recording, or - for standard input"
        )
    options.add_format(parser)
    add_choice(parser)


def run(args: argparse.Namespace, out: BinaryIO) -> int:
    """Compare, and print it; return the exit code."""
    paths = args.before, args.after
    if all(str(path) == "-" for path in paths):
        raise UsageError("only one of two recordings can be standard input")
    with Stop() as stop:
        before, after = (stats.read_statistics(path, args, stop) for path in paths)
    shown = _as_json if args.format == "json" else _as_text
    which = [(args.before, *before[:2]), (args.after, *after[:2])]
    write_text(out, shown(compare(before[0], after[0]), which))
    return max(before[2], after[2])


class Ratio(Struct, frozen=True, kw_only=True):
    """How many times as large a figure is as another.

    Attributes:
        value: of the two as they were measured.
        low, high: between which it lies; None is no limit.
    """

    value: float
    low: float | None
    high: float | None

    @property
    def significance(self) -> float:
        """Return how far it is from 1, by how far its limit on that side is from it.

        Both are of logarithms; above 1 the two are distinguishable from noise.
        """
        near = self.low if self.value >= 1 else self.high
        if near is None or self.value == 1:
            return 0.0
        half = abs(math.log(self.value / near))
        return abs(math.log(self.value)) / half if half else math.inf


class Rate(Struct, frozen=True, kw_only=True):
    """Hits in a time.

    Attributes:
        hits: how many.
        dispersion: of their counts; see ``statistics.TimeBins``.
        span_ns: in which they were counted; 0 where that is not known.
    """

    hits: int
    dispersion: float
    span_ns: int

    @property
    def per_s(self) -> float | None:
        """Hits a second."""
        return self.hits * _NS_PER_S / self.span_ns if self.span_ns else None


def ratio_of_rates(before: Rate, after: Rate) -> Ratio:
    """Return by which factor a rate has changed; both have hits.

    The logarithm of a count has about the variance dispersion / count.
    """
    from kprobes.statistics import Z

    value = (after.hits * before.span_ns) / (before.hits * after.span_ns)
    variance = before.dispersion / before.hits + after.dispersion / after.hits
    factor = math.exp(min(Z * math.sqrt(variance), _MAX_LOG))
    return Ratio(value=value, low=value / factor, high=value * factor)


def ratio_of_percentiles(
    before: "Distribution", after: "Distribution", percent: int
) -> Ratio | None:
    """Return by which factor a percentile of durations has changed; None where there are none.

    The interval is made of both's: MOVER, Zou and Donner, Statistics in Medicine 27 (2008), of
    logarithms.

    Args:
        before: of numbers above 0.
        after: likewise.
        percent: which percentile.
    """
    old, new = before.percentile(percent), after.percentile(percent)
    if not old or not new:
        return None
    (old_low, old_high), (new_low, new_high) = before.interval(percent), after.interval(percent)
    value = new / old
    down = _distance((new, new_low), (old, old_high))
    up = _distance((new, new_high), (old, old_low))
    return Ratio(
        value=value,
        low=None if down is None else value / math.exp(down),
        high=None if up is None else value * math.exp(up),
    )


def _distance(one: tuple[float, float | None], other: tuple[float, float | None]) -> float | None:
    # Of the logarithms of a ratio and its limit.
    logs = [math.log(limit / value) for value, limit in (one, other) if limit]
    return math.hypot(*logs) if len(logs) == 2 else None


class Difference(Struct, frozen=True, kw_only=True):
    """What has become of one figure, or of one value of a field.

    Attributes:
        name: of the event, its field, or the percentile of that.
        word: what has become of it.
        significance: above 1 it is no noise.
        before, after: the figure; None where it is not known.
        ratio: of the two, or None.
        value: that came or went; with its type, how often it is there, and all of the field's.
    """

    name: str
    word: str
    significance: float
    before: float | None = None
    after: float | None = None
    ratio: Ratio | None = None
    value: tuple[bytes, str, int, int] | None = None

    @property
    def is_noise(self) -> bool:
        """Whether it may have been chance."""
        return self.significance <= 1


class Differences(Struct, frozen=True, kw_only=True):
    """What two recordings differ in, the clearest first.

    Attributes:
        rates: of each event.
        durations: each percentile of each that both have.
        values: that one of them lacks, of fields of events that both have.
    """

    rates: list[Difference]
    durations: list[Difference]
    values: list[Difference]


def compare(before: "Statistics", after: "Statistics") -> Differences:
    """Return what two recordings differ in."""
    names = stats.names_of({**before.events, **after.events}.values())
    both = [
        (name, before.events[key], after.events[key])
        for key, name in names.items()
        if key in before.events and key in after.events
    ]
    rates = (_rates(name, _rate(before, key), _rate(after, key)) for key, name in names.items())
    return Differences(
        rates=_sorted(rates),
        durations=_sorted(each for events in both for each in _durations(*events)),
        values=_sorted(each for events in both for each in _values(*events)),
    )


def _sorted(changes: Iterable[Difference]) -> list[Difference]:
    return sorted(changes, key=lambda each: (-each.significance, each.name, each.value or ()))


def _rate(found: "Statistics", key: tuple[str, str]) -> Rate:
    event, span_ns = found.events.get(key), found.span_ns if found.has_ns else 0
    if event is None:
        return Rate(hits=0, dispersion=1, span_ns=span_ns)
    return Rate(hits=event.hits, dispersion=event.dispersion(span_ns), span_ns=span_ns)


def _rates(name: str, before: Rate, after: Rate) -> Difference:
    ratio, significance, word = None, 0.0, ""
    is_timed = bool(before.span_ns and after.span_ns)
    if before.hits and after.hits:
        ratio = ratio_of_rates(before, after) if is_timed else None
        word, significance = _verdict(ratio, "more", "less")
    else:
        word, here, there = ("new", after, before) if after.hits else ("gone", before, after)
        if is_timed:
            significance = _absence(here.hits / here.dispersion, here.span_ns, there.span_ns)
    return Difference(
        name=name,
        word=word,
        significance=significance,
        before=before.per_s,
        after=after.per_s,
        ratio=ratio,
    )


def _verdict(ratio: Ratio | None, more: str, less: str) -> tuple[str, float]:
    if ratio is None:
        return "unknown", 0.0
    if ratio.significance <= 1:
        return "noise", ratio.significance
    return more if ratio.value > 1 else less, ratio.significance


def _absence(count: float, here: float, there: float) -> float:
    # That of so many, who may be anywhere, all are here, has the probability
    # (here / (here + there)) ** count. Its logarithm by that of what is no chance.
    return count * math.log1p(there / here) / -math.log(_CHANCE)


def _durations(
    name: str, before: "EventStatistics", after: "EventStatistics"
) -> Iterator[Difference]:
    for key, field in before.fields.items():
        other = after.fields.get(key)
        if not field.is_duration or other is None:
            continue
        if field.numbers is not None and other.numbers is not None:
            for percent in PERCENTILES:
                ratio = ratio_of_percentiles(field.numbers, other.numbers, percent)
                word, significance = _verdict(ratio, "slower", "faster")
                yield Difference(
                    name=f"{name}.{field.name} p{percent}",
                    word=word,
                    significance=significance,
                    before=field.numbers.percentile(percent),
                    after=other.numbers.percentile(percent),
                    ratio=ratio,
                )


def _values(name: str, before: "EventStatistics", after: "EventStatistics") -> Iterator[Difference]:
    others = {(each.name, each.kind): each.values for each in stats.named_values(after)}
    for each in stats.named_values(before):
        values, other = each.values, others.get((each.name, each.kind))
        if other is not None:
            for word, here, there in (("gone", values, other), ("new", other, values)):
                for value, count in _only(here, there, each.kind):
                    yield Difference(
                        name=f"{name}.{each.name}",
                        word=word,
                        significance=_absence(count, here.total, there.total),
                        value=(value, each.kind, count, here.total),
                    )


def _only(
    here: "FrequentValues", there: "FrequentValues", kind: str
) -> Iterator[tuple[bytes, int]]:
    # Of values that were forgotten nobody can say that they are not there.
    if not here.total or not there.total or not there.is_exact:
        return
    known = _by_function(there) if kind in _SYMBOLS else there.counts
    own = _by_function(here) if kind in _SYMBOLS else here.counts
    yield from ((value, count) for value, count in own.items() if value not in known)


def _by_function(values: "FrequentValues") -> Counter[bytes]:
    # Where in a function something is differs from kernel to kernel.
    counts: Counter[bytes] = Counter()
    for value, count in values.counts.items():
        counts[_PLACE.sub(b"", value)] += count
    return counts


def _as_text(changes: Differences, which: "Sequence[tuple[Path, Statistics, str]]") -> str:
    heads = [
        [(letter, str(path)), *((" ", " ".join(row)) for row in stats.sum_up(found, release))]
        for letter, (path, found, release) in zip("AB", which, strict=True)
    ]
    parts = [aligned(row for rows in heads for row in rows)]
    for head, found in ((_RATE_HEAD, changes.rates), (_DURATION_HEAD, changes.durations)):
        if found:
            rows = [_figures_row(each, is_duration=head is _DURATION_HEAD) for each in found]
            parts.append(_table(head, rows, range(1, 5)))
    if changes.values:
        parts.append(_table(_VALUE_HEAD, list(map(_value_row, changes.values)), range(1, 3)))
    return "\n".join(parts)


def _table(head: Sequence[str], rows: list[tuple[str, ...]], columns: range) -> str:
    more = len(rows) - _MAX_ROWS
    note = f"... and {more:,} more, less clear: --format json has all\n" if more > 0 else ""
    return aligned(right([head, *rows[:_MAX_ROWS]], columns)) + note


def _figures_row(change: Difference, *, is_duration: bool) -> tuple[str, ...]:
    figures = (change.before, change.after)
    before, after = (number_text(each, is_duration=is_duration) for each in figures)
    ratio = change.ratio
    if ratio is None:
        return change.name, before, after, "-", "-", _word(change)
    limits = f"{_factor(ratio.low)} to {_factor(ratio.high)}"
    return change.name, before, after, _factor(ratio.value), limits, _word(change)


def _factor(value: float | None) -> str:
    if value is None:
        return "?"
    return f"{value:.2f}" if _LEAST_PLAIN <= value < _MOST_PLAIN else f"{value:.2g}"


def _value_row(change: Difference) -> tuple[str, ...]:
    value, kind, count, whole = change.value or (b"", "", 0, 1)
    shown = text_of(value, kind)
    return change.name, f"{count:,}", share_text(count, whole), _word(change), shown


def _word(change: Difference) -> str:
    return (
        f"{change.word}, or noise" if change.word in _ABSENCES and change.is_noise else change.word
    )


def _as_json(changes: Differences, which: "Sequence[tuple[Path, Statistics, str]]") -> str:
    before, after = (
        {"file": str(path)} | stats.summary_object(found, release) for path, found, release in which
    )
    return json_lines(
        [
            {
                "before": before,
                "after": after,
                "rates": list(map(_figures_object, changes.rates)),
                "durations": list(map(_figures_object, changes.durations)),
                "values": list(map(_value_object, changes.values)),
            }
        ]
    )


def _figures_object(change: Difference) -> dict[str, Any]:
    ratio = change.ratio
    return {
        "name": change.name,
        "before": change.before,
        "after": change.after,
        "ratio": None if ratio is None else asdict(ratio),
        "change": change.word,
        "is_noise": change.is_noise,
    }


def _value_object(change: Difference) -> dict[str, Any]:
    value, _, count, whole = change.value or (b"", "", 0, 1)
    return {
        "field": change.name,
        "value": value.decode(errors="surrogateescape"),
        "change": change.word,
        "hits": count,
        "share": count / whole,
        "is_noise": change.is_noise,
    }
