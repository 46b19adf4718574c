"""Histograms as a user reads them: bars, tables, JSON, CSV, and the kernel's own text.

A sink counts events as they come, and prints what it has each interval and at the end.
"""

import csv
import io
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any, BinaryIO

from kprobes.cli.counting import Counting, Shown
from kprobes.cli.stats import number_text, right, share_text, text_of
from kprobes.cli.terminal import aligned, counted, json_lines, print_message
from kprobes.column_hist import ColumnHist
from kprobes.errors import TargetError
from kprobes.flame_graph import FORMS as FLAMES
from kprobes.flame_graph import stacks_of
from kprobes.histogram import Histogram, symbol_name, syscall_name
from kprobes.model.events import Events
from kprobes.model.hist import HistField, HistKind, HistTrigger, Modifier
from kprobes.model.visible import visible
from kprobes.sinks.names import Names, TraceSource
from kprobes.units import U64, signed

_BUCKETED = (Modifier.LOG2, Modifier.BUCKETS)
_MOST_ROWS = 80
"""Of one distribution with its empty buckets; one with more is without them."""
_LEAST_BAR = 10
_UNITS = "KMGTPE"
_BITS = 64
_LEAST_S = 1e-9
_CLEAR = b"\x1b[H\x1b[2J"


class HistogramSink:
    """Counts events by a hist trigger, and shows them. Implements ``ports.Sink``."""

    def __init__(
        self,
        out: BinaryIO,
        source: TraceSource,
        counting: Counting,
        read: Callable[[], Histogram | None] | None = None,
    ) -> None:
        """Count nothing yet.

        Args:
            out: where it is shown.
            source: the kernel that events are of.
            counting: what is counted, and how it is shown.
            read: returns what a guest has counted itself; None where events come.
        """
        self._out = out
        self._read = read
        self._last: Histogram | None = None
        self._hist = ColumnHist(counting.trigger, source)
        self._shown = counting.shown
        self._is_live = out.isatty()
        self._due_s = math.inf
        self._shown_s = time.monotonic()
        self._before: Histogram | None = None

    def write(self, events: Events) -> None:
        """Count events; show what there is when an interval is over, also without any."""
        now = time.monotonic()
        if self._due_s == math.inf and self._shown.interval_s:
            self._due_s = now + self._shown.interval_s
            self._shown_s = now
        if len(events):
            self._hist.take(events)
        if now >= self._due_s:
            self._due_s += self._shown.interval_s * math.ceil(
                (now - self._due_s) / self._shown.interval_s + 1e-9
            )
            self._show()

    def close(self) -> None:
        """Show what was counted.

        Raises:
            DefinitionError: the trigger is wrong for all events that came.
        """
        self._hist.check()
        # Not in the place of what was shown: a command's own words may be there.
        self._is_live = False
        self._show(is_last=True)

    def _show(self, *, is_last: bool = False) -> None:
        histogram = self._histogram()
        if histogram is None:
            if not self._is_live:
                print_message("kprobe: there was no event that could be counted")
            return
        if self._is_live and self._shown.interval_s:
            self._out.write(_CLEAR)
        # People want to see at the end how many there were in all.
        if self._shown.is_delta and not (is_last and self._shown.form == "text"):
            histogram, seconds = self._delta(histogram)
        else:
            seconds = None
        self._out.write(shown_text(histogram, self._shown, seconds=seconds))
        self._out.flush()

    def _delta(self, histogram: Histogram) -> tuple[Histogram, float]:
        before, self._before = self._before, histogram
        then_s, self._shown_s = self._shown_s, time.monotonic()
        return histogram if before is None else histogram - before, self._shown_s - then_s

    def _histogram(self) -> Histogram | None:
        if self._read is None:
            return self._hist.histogram()
        # Of a guest that is gone, as it was read last.
        with suppress(TargetError):
            self._last = self._read()
        return self._last


def shown_text(histogram: Histogram, shown: Shown, *, seconds: float | None = None) -> bytes:
    """Return a sorted histogram in one of the forms.

    Args:
        histogram: any.
        shown: the form, and how much of it.
        seconds: in which it was counted, where that is to be told.
    """
    match shown.form:
        case "hist":
            return histogram.text()
        case "json":
            took = {} if seconds is None else {"seconds": round(seconds, 6)}
            return json_lines([as_object(histogram, shown.top) | took]).encode()
        case "csv":
            return _csv(histogram.take(slice(0, shown.top)))
        case form if form in FLAMES:
            return FLAMES[form](stacks_of(histogram.take(slice(0, shown.top))))
        case _:
            text = _text(histogram, seconds, Names(histogram.source), shown)
            return text.encode(errors="surrogateescape")


def _text(histogram: Histogram, seconds: float | None, names: Names, shown: Shown) -> str:
    has_bars = histogram.trigger.keys[-1].modifier in _BUCKETED and not histogram.trigger.vals
    if has_bars:
        body = _bars(histogram, names, shown)
    else:
        body = _table(histogram, seconds, names, shown.top)
    return body + _totals(histogram, seconds)


def _totals(histogram: Histogram, seconds: float | None) -> str:
    when = "" if seconds is None else f" in {seconds:.2f} s"
    parts = [counted(histogram.hits, "hit") + when, f"{len(histogram):,} entries"]
    if len(histogram) == 1:
        parts[1] = "1 entry"
    if histogram.dropped:
        parts.append(f"{histogram.dropped:,} hits dropped: the table is full")
    if histogram.unmeasured:
        parts.append(f"{histogram.unmeasured:,} without a duration")
    return f"\n{', '.join(parts)}\n"


def _key_texts(histogram: Histogram, at: int, names: Names) -> list[str]:
    # What a person reads of one key of each entry.
    field = histogram.trigger.keys[at]
    values = histogram.keys[at].tolist()
    if field.kind is HistKind.TEXT:
        return [text_of(value, "comm" if field.name == "comm" else "string") for value in values]
    if field.kind is HistKind.STACK:
        return [_decoded(names.key_text(field, stack)) for stack in values]
    if field.modifier is Modifier.EXECNAME:
        pairs = zip(histogram.comms.tolist(), values, strict=True)
        return [f"{_decoded(comm)}[{pid}]" for comm, pid in pairs]
    if field.modifier is Modifier.SYSCALL:
        return [f"{syscall_name(number, histogram.source)}[{number}]" for number in values]
    show = _number_form(field, names)
    return list(map(show, values))


def _is_in_ns(field: HistField) -> bool:
    return field.kind is HistKind.DURATION and field.modifier is not Modifier.USECS


def _number_form(field: HistField, names: Names) -> Callable[[int], str]:
    is_duration = _is_in_ns(field)
    match field.modifier:
        case Modifier.SYM:
            return lambda value: _decoded(symbol_name(value, names))
        case Modifier.SYM_OFFSET:
            return lambda value: _decoded(names.symbol(value))
        case Modifier.HEX:
            return lambda value: f"{value:#x}"
        case Modifier.LOG2:
            return lambda value: _log2_label(value, field, is_duration=is_duration)
        case Modifier.BUCKETS:
            return lambda value: _bucket_label(value, field, is_duration=is_duration)
        case _ if is_duration:
            return lambda value: number_text(value, is_duration=True)
        case _:
            return lambda value: str(signed(value) if field.is_signed else value)


def _log2_label(power: int, field: HistField, *, is_duration: bool) -> str:
    # A bucket ends with its power of two, and does not have that of the bucket before.
    if power == _BITS and field.is_signed:
        return "< 0"
    if power == 0:
        return f"[0, {_size(1, is_duration=is_duration)}]"
    low, high = (_size(1 << each, is_duration=is_duration) for each in (power - 1, power))
    return f"({low}, {high}]"


def _bucket_label(low: int, field: HistField, *, is_duration: bool) -> str:
    low = signed(low) if field.is_signed else low
    # Numbers without a sign are what is divided: the last bucket below 0 ends there.
    end = min(low + field.width, 0) if low < 0 else low + field.width
    if is_duration:
        least, most = (number_text(each, is_duration=True) for each in (low, end))
        return f"[{least}, {most})"
    return f"[{low}, {end})"


def _size(number: int, *, is_duration: bool) -> str:
    if is_duration:
        return number_text(number, is_duration=True)
    thousands = (number.bit_length() - 1) // 10
    return f"{number >> 10 * thousands}{_UNITS[thousands - 1] if thousands else ''}"


def _decoded(text: bytes) -> str:
    return text.decode(errors="surrogateescape")


def _bars(histogram: Histogram, names: Names, shown: Shown) -> str:
    *by, last = range(len(histogram.keys))
    labels = [*zip(*(_key_texts(histogram, at, names) for at in by), strict=True)]
    if not by:
        labels = [()] * len(histogram)
    field = histogram.trigger.keys[last]
    # By the keys themselves: several may have one label.
    found = [*zip(*(histogram.keys[at].tolist() for at in by), strict=True)] or labels
    groups: dict[tuple[Any, ...], tuple[tuple[str, ...], dict[int, int]]] = {}
    pairs = zip(histogram.keys[last].tolist(), histogram.hitcount.tolist(), strict=True)
    for key, label, (bucket, hits) in zip(found, labels, pairs, strict=True):
        groups.setdefault(key, (label, {}))[1][bucket] = hits
    most_first = sorted(groups.values(), key=lambda item: -sum(item[1].values()))
    chosen = most_first[: shown.top]
    parts = [_distribution(buckets, field, names, shown.bounds) for _, buckets in chosen]
    width = shutil.get_terminal_size().columns
    keys = histogram.trigger.keys[:-1]
    text = "\n".join(
        _heading(keys, label) + _drawn(rows, field.name, width)
        for (label, _), rows in zip(chosen, parts, strict=True)
    )
    rest = len(most_first) - len(chosen)
    return text + (f"\n... and {rest:,} more\n" if rest else "")


def _heading(keys: Sequence[HistField], label: Sequence[str]) -> str:
    pairs = (f"{key.name}: {text}" for key, text in zip(keys, label, strict=True))
    return f"{visible(', '.join(pairs))}\n" if keys else ""


def _distribution(
    buckets: Mapping[int, int], field: HistField, names: Names, bounds: tuple[int, int] | None
) -> list[tuple[str, int]]:
    # Rows from the least bucket to the greatest one, with those between that are empty; numbers
    # below 0 first.
    label = _number_form(field, names)
    is_log2 = field.modifier is Modifier.LOG2
    end = U64 + 1 if not field.is_signed else _BITS if is_log2 else 1 << (_BITS - 1)
    below = [(label(at), hits) for at, hits in sorted(buckets.items()) if at >= end]
    low, high = (0, end) if bounds is None else bounds
    inside = {at: hits for at, hits in buckets.items() if low <= at < min(high, end)}
    rows: list[tuple[str, int]] = []
    if inside:
        step = 1 if is_log2 else field.width
        first, last = min(inside), max(inside)
        is_dense = last - first < _MOST_ROWS * step
        shown = range(first, last + step, step) if is_dense else sorted(inside)
        rows = [(label(at), inside.get(at, 0)) for at in shown]
    less = sum(hits for at, hits in buckets.items() if at < low)
    more = sum(hits for at, hits in buckets.items() if high <= at < end)
    before = [(f"< {low}", less)] if less else []
    return [*below, *before, *rows, *([(f">= {high}", more)] if more else [])]


def _drawn(rows: Sequence[tuple[str, int]], name: str, width: int) -> str:
    texts = [(label, f"{hits:,}") for label, hits in rows]
    first = max([len(name), *(len(label) for label, _ in texts)])
    second = max([len("hits"), *(len(hits) for _, hits in texts)])
    room = max(width - first - second - 5, _LEAST_BAR)
    most = max((hits for _, hits in rows), default=0)
    lines = [f"{name:>{first}}  {'hits':>{second}}\n"]
    for (label, text), (_, hits) in zip(texts, rows, strict=True):
        bar = "#" * (-(-hits * room // most) if most else 0)
        lines.append(f"{label:>{first}}  {text:>{second}} |{bar:<{room}}|\n")
    return "".join(lines)


def _table(histogram: Histogram, seconds: float | None, names: Names, top: int | None) -> str:
    trigger, whole = histogram.trigger, histogram.hits
    rate = [] if seconds is None else ["HITS/S"]
    shown = histogram.take(slice(0, top))
    vals = [_value_texts(histogram, at)[:top] for at in range(len(trigger.vals))]
    named = [*shown.columns().items()][1 + len(trigger.keys) + len(trigger.vals) :]
    vals += [[f"{number:,}" for number in column.tolist()] for _, column in named]
    tracked = [name.upper() for name, _ in named]
    head = ["HITS", *rate, "SHARE", *_heads(trigger.vals), *tracked]
    count = len(head)
    head += [key.name.upper() for key in trigger.keys]
    keys = [_key_texts(shown, at, names) for at in range(len(trigger.keys))]
    counts: list[int] = shown.hitcount.tolist()
    numbers = [[f"{each:,}" for each in counts], [share_text(each, whole) for each in counts]]
    if seconds is not None:
        numbers.insert(1, [f"{each / max(seconds, _LEAST_S):,.0f}" for each in counts])
    rows = [head]
    for row in zip(*numbers, *vals, *keys, strict=True):
        rows += _with_frames(trigger, [*row])
    text = aligned(right(rows, range(count)))
    rest = len(histogram) - len(shown)
    return text + (f"... and {rest:,} more\n" if rest else "")


def _heads(vals: Sequence[HistField]) -> Iterator[str]:
    # A field is named once where the next value is of it, too: a terminal has 80 columns.
    before = ""
    for val in vals:
        text = val.text
        yield (text[len(val.name) :] if val.name == before and text != val.name else text).upper()
        before = val.name


def _with_frames(trigger: HistTrigger, row: list[str]) -> Iterator[list[str]]:
    # A stack takes as many lines as it has frames.
    first = len(row) - len(trigger.keys)
    cells = [[cell] for cell in row]
    for at, key in enumerate(trigger.keys, first):
        if key.kind is HistKind.STACK:
            cells[at] = row[at].split(" <- ")
    yield from map(list, zip_longest(*cells, fillvalue=""))


def _value_texts(histogram: Histogram, at: int) -> list[str]:
    field = histogram.trigger.vals[at]
    is_hex = field.modifier is Modifier.HEX
    numbers: list[float] = histogram.value(at).tolist()
    if field.modifier is Modifier.PERCENT:
        whole = sum(numbers) or 1
        return [share_text(number, whole) for number in numbers]
    return [number_text(n, is_duration=_is_in_ns(field), is_hex=is_hex) for n in numbers]


def as_object(histogram: Histogram, top: int | None = None) -> dict[str, Any]:
    """Return a histogram for JSON, its first entries or all."""
    trigger, rows = histogram.trigger, _rows(histogram.take(slice(0, top)))
    return {
        **({"event": histogram.event} if histogram.event else {}),
        "trigger": trigger.text,
        "hits": histogram.hits,
        "dropped": histogram.dropped,
        "unmeasured": histogram.unmeasured,
        "entries": [dict(zip(("keys", "hitcount", "vals"), row, strict=True)) for row in rows],
    }


def _rows(histogram: Histogram) -> Iterator[tuple[dict[str, Any], int, dict[str, Any]]]:
    columns = {name: column.tolist() for name, column in histogram.columns().items()}
    hits = columns.pop("hitcount")
    count = len(histogram.keys)
    trigger = histogram.trigger
    fields = (*trigger.keys, *trigger.vals, *trigger.tracked)
    for name, field in zip(columns, fields, strict=True):
        if field.modifier is Modifier.HEX:
            columns[name] = [f"{number & U64:#x}" for number in columns[name]]
    for number, values in zip(hits, zip(*columns.values(), strict=True), strict=True):
        named = [*zip(columns, values, strict=True)]
        yield dict(named[:count]), number, dict(named[count:])


def _csv(histogram: Histogram) -> bytes:
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(histogram.columns())
    for own, hits, values in _rows(histogram):
        writer.writerow([*own.values(), hits, *values.values()])
    return out.getvalue().encode()
