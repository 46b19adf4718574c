"""Statistics of events in memory that does not grow with their number: what a page shows of them.

Hits in bins of time, durations in logarithmic bins, the values that occur most often, the slowest
calls. Texts are those that a reader sees: the kernel's own, valid Unicode without control
characters, cut to ``TEXT`` characters.
"""

from collections import Counter
from collections.abc import Iterable
from math import ceil

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from kprobes.model.events import Batch, Column, Events
from kprobes.model.resolved import Field, RecordLayout, Storage
from kprobes.model.visible import visible
from kprobes.sinks.json import valid_text
from kprobes.sinks.names import Names, TraceSource
from kprobes.sinks.text import shown

BINS = 512
"""Of time: between half as many and all of them are in use."""
SLOWEST = 100
"""Calls of an event that are kept."""
FIELDS = 12
"""Of an event, whose values are counted."""
TEXT, ARGUMENTS = 120, 300
"""Characters of a text, and of a call's arguments."""
_VALUES = 1 << 10
_FINE = 8

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


def _edges() -> NDArray[np.int64]:
    # The fine bins that eight bars an octave begin at, as nearly as there are such.
    octave = np.round(256 * 2 ** (np.arange(8) / 8)).astype(np.int64)
    small = np.unique(np.round(2 ** (np.arange(64) / 8)).astype(np.int64))
    octaves = (np.arange(57)[:, None] << _FINE) + octave
    return np.concatenate([small, octaves.ravel()])


_EDGES = _edges()


class Durations:
    """Durations in bins of 1/256 of the power of two below them; less than 512 have one each.

    Attributes:
        count: how many there are.
        greatest: the longest one.
    """

    def __init__(self) -> None:
        self.count = self.greatest = 0
        self._counts = np.zeros(0, np.int64)

    def add(self, durations: NDArray[np.uint64]) -> None:
        """Count durations, shape (n,), n > 0."""
        # As a float the greatest of an octave may be rounded up to the next one: their bin is
        # the same.
        bits = np.frexp(durations.astype(np.float64))[1]
        shift = np.maximum(bits - 1 - _FINE, 0)
        fine = (shift << _FINE) + (durations >> shift.astype(np.uint64)).astype(np.int64)
        counts = np.bincount(fine, minlength=len(self._counts))
        counts[: len(self._counts)] += self._counts
        self._counts = counts
        self.count += len(durations)
        self.greatest = max(self.greatest, int(durations.max()))

    def percentile(self, percent: float) -> int:
        """Return the duration that so many are not longer than, within 0.2 % of it."""
        rank = max(ceil(self.count * percent / 100), 1)
        at = int(np.searchsorted(np.cumsum(self._counts), rank))
        return min(_begin(at) + (_begin(at + 1) - _begin(at)) // 2, self.greatest)

    def bars(self) -> tuple[list[int], list[int]]:
        """Return where each bar begins and how many durations it has, then the end and 0.

        There are eight for each doubling, from the first that has any to the last. There must be
        durations.
        """
        size = int(np.searchsorted(_EDGES, len(self._counts))) + 1
        padded = np.zeros(int(_EDGES[-1]) + 1, np.int64)
        padded[: len(self._counts)] = self._counts
        counts = np.add.reduceat(padded, _EDGES[:size])
        used = np.flatnonzero(counts)
        first, end = int(used[0]), int(used[-1]) + 1
        begins = [_begin(each) for each in _EDGES[first : end + 1].tolist()]
        return begins, [*counts[first:end].tolist(), 0]


def _begin(fine: int) -> int:
    shift = max((fine >> _FINE) - 1, 0)
    return (fine - (shift << _FINE)) << shift


class TopValues:
    """The values that occur most often, by Misra and Gries' algorithm; by their first bytes.

    Attributes:
        total: how many values there were.
        error: how much each count may be too low, as there were too many different values.
    """

    def __init__(self) -> None:
        self.total = self.error = 0
        self._counts: Counter[bytes] = Counter()

    def add(self, values: Iterable[bytes], counts: Iterable[int]) -> None:
        """Count values so many times."""
        for value, count in zip(values, counts, strict=True):
            self._counts[value[: _bytes(TEXT)]] += count
            self.total += count
        if len(self._counts) > 2 * _VALUES:
            # "Mergeable Summaries", Agarwal and others, PODS 2012.
            cut = sorted(self._counts.values(), reverse=True)[_VALUES]
            self.error += cut
            self._counts = Counter({v: n - cut for v, n in self._counts.items() if n > cut})

    def top(self, count: int) -> list[tuple[str, int]]:
        """Return so many at most as texts, the most frequent first."""
        return [(readable(value), n) for value, n in self._counts.most_common(count)]

    def __len__(self) -> int:
        """Return how many different ones are known."""
        return len(self._counts)


class SlowCall(Struct, frozen=True, kw_only=True):
    """A call that took long, to its return at ``ts``; ``args`` is the kernel's text of them."""

    duration: int
    ts: int
    cpu: int
    pid: int
    comm: str
    args: str


class EventSummary:
    """One event, of all functions that it is on.

    Attributes:
        layout: of one of them.
        definitions: of all of them.
        hits: how many there were.
        comms, functions, callers: how often each.
        fields: likewise, values by a field's name.
        durations: of a return probe that measures them, those that are known.
        slowest: the longest ones, from the longest on.
    """

    def __init__(self, layout: RecordLayout) -> None:
        self.layout = layout
        self.definitions: dict[str, None] = {}
        self.hits = 0
        self.comms, self.functions, self.callers = TopValues(), TopValues(), TopValues()
        self.fields: dict[str, TopValues] = {}
        self.durations = Durations()
        self.slowest: list[SlowCall] = []

    def add(self, batch: Batch, names: Names) -> None:
        """Take n > 0 events."""
        self.hits += len(batch)
        self.definitions.setdefault(batch.layout.definition)
        self.functions.add([batch.layout.function.encode(errors="surrogateescape")], [len(batch)])
        comms, counts = np.unique(batch.comm, return_counts=True)
        self.comms.add(comms.tolist(), counts.tolist())
        if batch.caller is not None:
            callers, counts = np.unique(batch.caller, return_counts=True)
            self.callers.add(names.callers(callers), counts.tolist())
        for i, field in enumerate(batch.layout.fields):
            values, faulted = batch.values[i], batch.faulted[i]
            if field.storage is Storage.DURATION:
                self._take_durations(batch, values, names)
            elif field.storage in (Storage.NUMBER, Storage.STRING):
                self._count(field, values, faulted, names)

    def _count(
        self, field: Field, values: Column, faulted: NDArray[np.bool_] | None, names: Names
    ) -> None:
        if field.name not in self.fields and len(self.fields) == FIELDS:
            return
        top = self.fields.setdefault(field.name, TopValues())
        if faulted is not None and faulted.any():
            top.add([b"(fault)"], [int(faulted.sum())])
            values = values[~faulted]
        if values.dtype == object:
            found = Counter(values.ravel().tolist())
            counts = list(found.values())
            unique = np.empty(len(found), object)
            unique[:] = list(found)
        else:
            unique, counted = np.unique(values, return_counts=True)
            counts = counted.tolist()
        form, columns = shown(replace(field, count=None), unique, None, names)
        top.add(map(form.__mod__, zip(*columns, strict=True)), counts)

    def _take_durations(self, batch: Batch, durations: Column, names: Names) -> None:
        # 0 is one that could not be measured.
        known = durations[durations > 0]
        if not len(known):
            return
        self.durations.add(known)
        shortest = self.slowest[-1].duration if len(self.slowest) == SLOWEST else 0
        rows = np.flatnonzero(durations > np.uint64(shortest))
        rows = rows[np.argsort(~durations[rows], kind="stable")[:SLOWEST]]
        if len(rows):
            calls = [*self.slowest, *_calls(batch.take(rows), durations[rows], names)]
            calls.sort(key=lambda call: -call.duration)
            self.slowest = calls[:SLOWEST]


def _calls(batch: Batch, durations: Column, names: Names) -> Iterable[SlowCall]:
    # A column that is empty, as there may be no other.
    form, columns = b"%b", [[b""] * len(batch)]
    for field, values, faulted in zip(
        batch.layout.fields, batch.values, batch.faulted, strict=True
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
        zip(*columns, strict=True),
        strict=True,
    )
    for duration, ts, cpu, pid, comm, args in rows:
        yield SlowCall(
            duration=duration,
            ts=ts,
            cpu=cpu,
            pid=pid,
            comm=readable(comm),
            args=readable(form % args, ARGUMENTS).strip(),
        )


class RecordingSummary:
    """All events of a kernel.

    Attributes:
        events: by group and name.
        timeline: their hits, and what was lost.
        lost: how many events by CPU.
        first, last: the times between which they are; meaningless where there are none.
    """

    def __init__(self, source: TraceSource) -> None:
        self._names = Names(replace(source, has_enum_names=True))
        self.events: dict[EventKey, EventSummary] = {}
        # Microseconds: what counts something else may count slowly.
        self.timeline = Timeline(1000 if source.has_ns else 1)
        self.lost: Counter[int] = Counter()
        self.first, self.last = 0, 0

    @property
    def hits(self) -> int:
        """How many events there were."""
        return sum(event.hits for event in self.events.values())

    def add(self, events: Events) -> None:
        """Take events, oldest first."""
        for index, batch in enumerate(events.batches):
            rows = events.row[events.batch == index]
            if len(rows):
                self._add(batch.take(rows))

    def _add(self, batch: Batch) -> None:
        first, last = int(batch.ts.min()), int(batch.ts.max())
        self.first = min(self.first, first) if self.events else first
        self.last = max(self.last, last)
        key = batch.layout.group, batch.layout.event
        if key not in self.events:
            self.events[key] = EventSummary(batch.layout)
        self.events[key].add(batch, self._names)
        self.timeline.add(key, batch.ts)

    def lose(self, cpu: int, count: int) -> None:
        """Be told that so many events were lost, after those that are here."""
        self.lost[cpu] += count
        if self.events:
            self.timeline.add(None, np.array([self.last], np.uint64), count)
