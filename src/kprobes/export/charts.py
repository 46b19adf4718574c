"""Charts of events for Plotly, and what they need beside statistics, in memory that does not grow.

Hits are in bins of time, durations in bars, and of calls the slowest ones are kept. Texts are those
that a reader sees: the kernel's own, valid Unicode without control characters, cut to ``TEXT``
characters.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from math import log10
from re import sub
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from kprobes.model.events import Batch, Column, Events
from kprobes.model.resolved import Storage
from kprobes.model.visible import visible
from kprobes.native.lines import Cells, listed
from kprobes.sinks.json import valid_text
from kprobes.sinks.names import Names, TraceSource
from kprobes.sinks.text import shown
from kprobes.statistics import BUCKETS, Distribution, Statistics

BINS = 512
"""Of time: between half as many and all of them are in use."""
SLOWEST = 100
"""Calls of an event that are kept."""
PERCENTILES = (50, 90, 99)
"""Of durations and numbers."""
TEXT, ARGUMENTS = 120, 300
"""Characters of a text, and of a call's arguments."""

_NS_PER_S = 10**9
_GAP, _AXIS = 20, 62
"""Heights in a chart of rows: of the name above each, of the axis below all."""

Figure = dict[str, Any]
"""Of Plotly: traces as ``data``, axes and more as ``layout``. A trace's ``meta`` is its color."""
EventKey = tuple[str, str]
"""An event's group and name."""


def readable(text: bytes | str, most: int = TEXT) -> str:
    """Return a text of the kernel's as one can see it, cut where it is too long."""
    # What is cut off first is not seen afterwards.
    found = visible(text if isinstance(text, str) else valid_text(text[: _bytes(most)]))
    return found if len(found) <= most else found[: most - 1] + "…"


def _bytes(characters: int) -> int:
    # That have more characters, however they are encoded.
    return 4 * (characters + 1)


class Timeline:
    """Hits by time, in bins of one width for all rows, which doubles when they do not suffice.

    A bin begins at a multiple of its width, so that times need not come in order.

    Attributes:
        rows: counts by event, and of lost ones by None, int64 (``BINS``,).
    """

    def __init__(self, unit: int) -> None:
        """Begin with bins of ``unit``, which is 1 or more."""
        self.rows: dict[EventKey | None, NDArray[np.int64]] = {}
        self._unit, self._shift = unit, 0
        self._low = self._high = 0

    @property
    def width(self) -> int:
        """Of a bin."""
        return self._unit << self._shift

    @property
    def start(self) -> int:
        """Where the first bin begins."""
        return (self._low >> self._shift) * self.width

    @property
    def last(self) -> int:
        """The time of the last hit, rounded down to the unit."""
        return self._high * self._unit

    @property
    def used(self) -> int:
        """How many bins there are up to the last hit."""
        return (self._high >> self._shift) - (self._low >> self._shift) + 1

    def add(self, row: EventKey | None, ts: NDArray[np.uint64], weight: int = 1) -> None:
        """Count hits.

        Args:
            row: that they are of; it begins when it is new.
            ts: uint64 (n,), n > 0.
            weight: of each.
        """
        units = ts // np.uint64(self._unit)
        self._cover(int(units.min()), int(units.max()))
        bins = self._bins(units >> np.uint64(self._shift))
        found = self.rows.setdefault(row, np.zeros(BINS, np.int64))
        found += weight * np.bincount(bins, minlength=BINS)

    def _bins(self, bins: NDArray[np.uint64]) -> NDArray[np.intp]:
        return (bins - np.uint64(self._low >> self._shift)).astype(np.intp)

    def _cover(self, low: int, high: int) -> None:
        if self.rows:
            low, high = min(low, self._low), max(high, self._high)
        first, before = self._low >> self._shift, self._shift
        self._low, self._high = low, high
        while self.used > BINS:
            self._shift += 1
        if low >> self._shift == first and self._shift == before:
            return
        for row, counts in self.rows.items():
            at = np.flatnonzero(counts)
            old = np.uint64(first) + at.astype(np.uint64)
            moved = np.zeros(BINS, np.int64)
            np.add.at(moved, self._bins(old >> np.uint64(self._shift - before)), counts[at])
            self.rows[row] = moved


class SlowCall(Struct, frozen=True, kw_only=True):
    """A call that took long, to its return at ``ts``; ``args`` is the kernel's text of them."""

    duration: int
    ts: int
    cpu: int
    pid: int
    comm: str
    args: str


class SlowestCalls:
    """The calls of one event that took longest, at most ``SLOWEST``.

    Attributes:
        calls: from the longest on.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.calls: list[SlowCall] = []

    def add(self, batch: Batch, names: Names) -> None:
        """Look for them among events; those that are no calls, or were not measured, are none."""
        for field, durations in zip(batch.layout.fields, batch.values, strict=True):
            if field.storage is Storage.DURATION:
                self._add(batch, durations, names)

    def _add(self, batch: Batch, durations: Column, names: Names) -> None:
        # 0 is one that could not be measured.
        shortest = self.calls[-1].duration if len(self.calls) == SLOWEST else 0
        rows = np.flatnonzero(durations > np.uint64(shortest))
        rows = rows[np.argsort(~durations[rows], kind="stable")[:SLOWEST]]
        if len(rows):
            calls = [*self.calls, *_calls(batch.take(rows), durations[rows], names)]
            calls.sort(key=lambda call: -call.duration)
            self.calls = calls[:SLOWEST]


def _calls(batch: Batch, durations: Column, names: Names) -> Iterable[SlowCall]:
    form, columns = b"", list[Cells]()
    for field, values, faulted in zip(
        batch.layout.fields, batch.columns, batch.faulted, strict=True
    ):
        if field.storage is not Storage.DURATION:
            spec, found = shown(field, values, faulted, names)
            form += f" {field.name}=".replace("%", "%%").encode() + spec
            columns += found
    rows = zip(
        durations.tolist(),
        batch.ts.tolist(),
        batch.cpu.tolist(),
        batch.pid.tolist(),
        batch.comm.tolist(),
        listed(form, columns, len(batch)),
        strict=True,
    )
    for duration, ts, cpu, pid, comm, args in rows:
        yield SlowCall(
            duration=duration,
            ts=ts,
            cpu=cpu,
            pid=pid,
            comm=readable(comm),
            args=readable(args, ARGUMENTS).strip(),
        )


class RecordingSummary:
    """All that a page has of the events of a kernel.

    Attributes:
        statistics: their counts, and how long they took.
        timeline: their hits, and what was lost.
        definitions: of each event, by group and name, those of all functions that it is on.
        slowest: likewise.
        lost: how many events by CPU.
    """

    def __init__(self, source: TraceSource) -> None:
        """Begin with no events."""
        self.statistics = Statistics()
        self.statistics.begin(source)
        # Microseconds: what counts something else may count slowly.
        self.timeline = Timeline(1000 if source.has_ns else 1)
        self.definitions: dict[EventKey, dict[str, None]] = {}
        self.slowest: dict[EventKey, SlowestCalls] = {}
        self.lost: Counter[int] = Counter()
        self._names = Names(replace(source, has_enum_names=True))

    def add(self, events: Events) -> None:
        """Take events, oldest first."""
        chosen = _alone(events)
        self.statistics.cover(chosen)
        self.statistics.add(chosen)
        for batch in chosen.batches:
            key = batch.layout.group, batch.layout.event
            self.timeline.add(key, batch.ts)
            self.definitions.setdefault(key, {}).setdefault(batch.layout.definition)
            self.slowest.setdefault(key, SlowestCalls()).add(batch, self._names)

    def lose(self, cpu: int, count: int) -> None:
        """Be told that so many events were lost, after those that are here."""
        self.lost[cpu] += count
        if self.timeline.rows:
            self.timeline.add(None, np.array([self.timeline.last], np.uint64), count)


def _alone(events: Events) -> Events:
    # Batches of nothing else: what was not chosen has no part in the time, either.
    batches: list[Batch] = []
    which, rows = np.empty_like(events.batch), np.empty_like(events.row)
    for index, batch in enumerate(events.batches):
        is_its = events.batch == index
        own = events.row[is_its]
        if len(own):
            which[is_its], rows[is_its] = len(batches), np.arange(len(own))
            batches.append(batch.take(own))
    return Events(batches=tuple(batches), batch=which, row=rows)


class Times:
    """How times and durations are written: of clocks that count no nanoseconds as they are.

    Attributes:
        axis: what is said of an axis of times.
    """

    def __init__(self, *, has_ns: bool) -> None:
        """Write those of one clock."""
        self._has_ns = has_ns
        self.axis: Figure = {"ticksuffix": "s"} if has_ns else {"tickformat": ","}

    def at(self, time: int) -> float:
        """Return where on an axis a time or a duration is."""
        return time / _NS_PER_S if self._has_ns else float(time)

    def log_axis(self, low: int, high: int) -> Figure:
        """Return a logarithmic axis of durations in a range."""
        # Plotly's own ticks have no unit between powers of ten.
        ticks = _ticks(low, high)
        texts = [sub(r"\.0+ ", " ", self.duration(each)) for each in ticks]
        return {"type": "log", "tickvals": [*map(self.at, ticks)], "ticktext": texts}

    def text(self, time: int) -> str:
        """Return a time as ``kprobe report`` prints it, but with all digits."""
        return f"{time // _NS_PER_S}.{time % _NS_PER_S:09d}" if self._has_ns else f"{time}"

    def duration(self, duration: int) -> str:
        """Return a duration, in three digits and a unit."""
        if not self._has_ns:
            return f"{duration:,}"
        for unit, size in (("s", _NS_PER_S), ("ms", 10**6), ("µs", 1000)):
            if duration >= size:
                whole = duration / size
                # Three digits, but no fewer than there are before the point.
                return f"{whole:.{2 if whole < 10 else 1 if whole < 100 else 0}f} {unit}"
        return f"{duration} ns"


class ChartRow(Struct, frozen=True, kw_only=True):
    """One of several charts that stand above each other; ``height`` is in pixels."""

    label: str
    height: int
    axis: Figure
    traces: list[Figure]


def stacked(rows: Sequence[ChartRow], axis: Figure) -> Figure:
    """Return a figure of rows, the first one on top, that share the axis below them."""
    total = sum(row.height for row in rows)
    names = ["y", *(f"y{i}" for i in range(2, len(rows) + 1))]
    layout: Figure = {"height": total + _AXIS, "annotations": [], "hovermode": "closest"}
    layout["xaxis"] = {**axis, "anchor": names[-1], "nticks": 8}
    data: list[Figure] = []
    top = total
    for row, name in zip(rows, names, strict=True):
        domain = [(top - row.height) / total, (top - _GAP) / total]
        layout[f"yaxis{name[1:]}"] = {**row.axis, "domain": domain, "fixedrange": True}
        layout["annotations"].append(_label(row.label, f"{name} domain"))
        data += [trace | {"xaxis": "x", "yaxis": name} for trace in row.traces]
        top -= row.height
    return {"data": data, "layout": layout}


def _label(text: str, domain: str) -> Figure:
    return {
        "text": plotly_text(text),
        "xref": "paper",
        "x": 0,
        "xanchor": "left",
        "yref": domain,
        "y": 1,
        "yanchor": "bottom",
        "showarrow": False,
    }


def plotly_text(text: str) -> str:
    """Return a text for Plotly, which has tags and entities of its own."""
    return escape(text, quote=False)


def _ticks(low: int, high: int) -> list[int]:
    # Seven at most of 1, 2, 5, 10, ..., or of powers of ten, from low to high, which is 2**64.
    fine = [digit * 10**power for power in range(20) for digit in (1, 2, 5)]
    for step in (1, 3, 6, 9):
        found = [each for each in fine[::step] if low <= each <= high]
        if len(found) <= 7:
            return found
    return []


def counts_axis(most: int) -> Figure:
    """Return an axis for counts up to ``most``, without halves."""
    ticks = {"dtick": 1} if most < 4 else {"nticks": 4}
    return {"tickformat": "~s", "rangemode": "tozero", **ticks}


def area(timeline: Timeline, hits: NDArray[np.int64], times: Times) -> Figure:
    """Return hits in the bins of a timeline as a trace.

    Args:
        timeline: that they are of.
        hits: one of its rows, int64, shape (``BINS``,); it is only read.
        times: of its clock.
    """
    return {
        "type": "scatter",
        "mode": "lines",
        "line": {"shape": "hv", "width": 1},
        "fill": "tozeroy",
        "x0": times.at(timeline.start),
        "dx": times.at(timeline.width),
        "y": [*hits[: timeline.used].tolist(), 0],
        "hovertemplate": "%{y:,} from %{x:.6f} on<extra>%{fullData.name}</extra>",
    }


def points(calls: Sequence[SlowCall], times: Times) -> Figure:
    """Return calls as a trace, by their returns' times and how long they took."""
    return {
        "type": "scatter",
        "mode": "markers",
        "marker": {"size": 6, "opacity": 0.75},
        "cliponaxis": False,
        "x": [times.at(call.ts) for call in calls],
        "y": [times.at(call.duration) for call in calls],
        "customdata": [
            [
                times.duration(call.duration),
                plotly_text(f"{call.comm}-{call.pid}"),
                call.cpu,
                plotly_text(readable(call.args)),
                times.text(call.ts),
            ]
            for call in calls
        ],
        "hovertemplate": "<b>%{customdata[0]}</b> %{customdata[1]} on CPU %{customdata[2]}, "
        "returned at %{customdata[4]}<br>%{customdata[3]}<extra>%{fullData.name}</extra>",
    }


def percentiles(numbers: Distribution) -> list[int]:
    """Return those of ``PERCENTILES``; [] of no numbers."""
    found = (numbers.percentile(each) for each in PERCENTILES)
    return [each for each in found if each is not None]


_SMALL = BUCKETS.bit_length() - 1
"""Numbers of no more bits have buckets of their own."""


def _edges() -> NDArray[np.uint64]:
    # Eight for each doubling, as nearly as buckets begin there, or whole numbers.
    small = np.unique(np.round(2 ** (np.arange(8 * _SMALL) / 8))).astype(np.uint64)
    octave = np.round(BUCKETS * 2 ** (np.arange(8) / 8)).astype(np.uint64)
    octaves = octave << np.arange(64 - _SMALL, dtype=np.uint64)[:, None]
    return np.concatenate([small, octaves.ravel()])


_EDGES = _edges()


def bars(durations: Distribution) -> tuple[list[int], list[int]]:
    """Return where each bar begins and how many durations it has, then the end and 0.

    There are eight for each doubling, from the first that has any to the last. There must be
    durations, all of them above 0.
    """
    numbers, counts = durations.histogram()
    places = np.searchsorted(_EDGES, numbers, side="right") - 1
    first, end = int(places[0]), int(places[-1]) + 1
    found = np.zeros(end - first, np.int64)
    np.add.at(found, places - first, counts)
    begins: list[int] = [*_EDGES.tolist(), 1 << 64]
    return begins[first : end + 1], [*found.tolist(), 0]


def histogram(durations: Distribution, color: int, times: Times) -> Figure:
    """Return the bars of durations, with lines at their percentiles.

    Args:
        durations: one or more.
        color: of the event, its place among them.
        times: of its clock.
    """
    begins, counts = bars(durations)
    marks = list(zip((f"p{each}" for each in PERCENTILES), percentiles(durations), strict=True))
    return {
        "data": [
            {
                "type": "scatter",
                "mode": "lines",
                "line": {"shape": "hv", "width": 1.5},
                "fill": "tozeroy",
                "x": [times.at(each) for each in begins],
                "y": counts,
                "meta": f"c{color}",
                "hovertemplate": "%{y:,} calls from %{customdata} on<extra></extra>",
                "customdata": [*map(times.duration, begins)],
            }
        ],
        "layout": {
            "height": 230,
            "hovermode": "x",
            "xaxis": {**times.log_axis(begins[0], begins[-1]), "fixedrange": True},
            "yaxis": {**counts_axis(max(counts)), "fixedrange": True},
            "shapes": [_mark(times.at(value)) for _, value in marks],
            "annotations": [
                _percentile_label(name, times.at(value), i) for i, (name, value) in enumerate(marks)
            ],
        },
    }


def _mark(x: float) -> Figure:
    return {"type": "line", "x0": x, "x1": x, "yref": "paper", "y0": 0, "y1": 1}


def _percentile_label(name: str, x: float, place: int) -> Figure:
    # A logarithmic axis has an annotation's logarithm. One is below the other, as they may be
    # close.
    return {
        "text": name,
        "x": log10(x),
        "xanchor": "left",
        "yref": "paper",
        "y": 1.04 - 0.09 * place,
        "yanchor": "top",
        "showarrow": False,
    }
