"""Statistics of events by columns: how many there are, their values, and where percentiles lie.

What is kept does not grow with the number of events, but with that of their names and fields.
Intervals are of 99 %; the formulas are named where they stand.
"""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from kprobes.buckets import bucket_of
from kprobes.model.events import Batch, Column, Events
from kprobes.model.hist import PARTS_BITS
from kprobes.model.resolved import Field, RecordLayout, Storage
from kprobes.model.strings import Strings
from kprobes.ring.merge import join
from kprobes.sinks.names import Name, Names, TraceSource
from kprobes.units import U64

MAX_EXACT = 4096
"""So many different numbers of a field are counted one by one."""
ERROR = 1 / 128
"""Of a percentile of more of them, relative."""
BUCKETS = 1 << PARTS_BITS
"""For each power of two, that they are counted by."""
MAX_VALUES = 512
"""So many different texts of a field are counted exactly."""
MAX_TASKS = 1 << 14
"""So many different tasks are counted."""
Z = 2.5758293035489004
"""Standard deviations on each side that leave out 1 % of a normal distribution."""
_NS_PER_S = 10**9
_LOW = 0xFFFF_FFFF

_LAST = 64 * BUCKETS
"""The bucket that ends at 2**64; 0 is that of 0, and 1 that of 1."""


class Distribution:
    """Numbers of 64 bits: sum and extremes are exact, percentiles within ``ERROR``.

    While at most ``MAX_EXACT`` are different, each is counted by itself and percentiles are exact.
    Then it is a log-linear histogram, as HdrHistogram's, however they were added.

    Attributes:
        count: how many there are.
        total: their sum.
        least, most: of them; 0 where there are none.
    """

    def __init__(self, *, is_signed: bool) -> None:
        """Begin with none."""
        self.count = self.total = self.least = self.most = 0
        self._dtype = np.dtype(np.int64 if is_signed else np.uint64)
        self._zero = _LAST if is_signed else 0
        self._numbers: NDArray[Any] = np.empty(0, self._dtype)
        self._counts = np.empty(0, np.int64)
        self._is_exact = True

    @property
    def is_exact(self) -> bool:
        """Whether percentiles are exact."""
        return self._is_exact

    @property
    def mean(self) -> float | None:
        """Their mean, or None where there are none."""
        return self.total / self.count if self.count else None

    def add(self, values: NDArray[Any]) -> None:
        """Count numbers, shape (n,), of any size and the sign that was said; it is only read."""
        if not len(values):
            return
        wide = values.astype(self._dtype)
        least, most = int(wide.min()), int(wide.max())
        self.least = min(self.least, least) if self.count else least
        self.most = max(self.most, most) if self.count else most
        self.count += len(wide)
        self.total += _sum(wide)
        if not self._is_exact:
            self._counts += np.bincount(self._buckets(wide), minlength=len(self._counts))
            return
        numbers, counts = np.unique(wide, return_counts=True)
        self._numbers, self._counts = _merged(
            np.concatenate([self._numbers, numbers]), np.concatenate([self._counts, counts])
        )
        if len(self._numbers) > MAX_EXACT:
            self._begin_buckets()

    def percentile(self, percent: int) -> int | None:
        """Return the least number that ``percent`` % of them do not exceed; None of none.

        This is numpy's ``inverted_cdf``: a number that is one of them, where it is exact.
        """
        return self._at(max(-(-percent * self.count // 100), 1)) if self.count else None

    def interval(self, percent: int) -> tuple[float | None, float | None]:
        """Return between which numbers that percentile of their source lies; None is no limit.

        By ranks: Conover, Practical Nonparametric Statistics, 3.2, for numbers that do not depend
        on each other. The error of buckets is added.
        """
        share = percent / 100
        middle, half = self.count * share, Z * math.sqrt(self.count * share * (1 - share))
        low, high = math.ceil(middle - half), math.ceil(middle + half)
        return (
            self._limit(low, -1) if low >= 1 else None,
            self._limit(high, 1) if 1 <= high <= self.count else None,
        )

    def most_frequent(self, most: int) -> list[tuple[int, int]]:
        """Return the most frequent numbers and how often each is there; [] if not all are known."""
        if not self._is_exact:
            return []
        order = np.argsort(-self._counts, kind="stable")[:most]
        return list(zip(self._numbers[order].tolist(), self._counts[order].tolist(), strict=True))

    @property
    def different(self) -> int | None:
        """How many different numbers there are, or None where these were not kept."""
        return len(self._numbers) if self._is_exact else None

    def histogram(self) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return numbers in their order and how often each is there, copies of shape (n,).

        If not all are known, a number is that of its bucket which is nearest to 0.
        """
        if self._is_exact:
            return self._numbers.copy(), self._counts.copy()
        used = np.flatnonzero(self._counts)
        buckets = (used - self._zero).tolist()
        nearest = [_first(each) if each >= 0 else -_first(-each) for each in buckets]
        return np.array(nearest, self._dtype), self._counts[used]

    def _begin_buckets(self) -> None:
        counts = np.zeros(self._zero + _LAST + 1, np.int64)
        np.add.at(counts, self._buckets(self._numbers), self._counts)
        self._numbers, self._counts = self._numbers[:0], counts
        self._is_exact = False

    def _buckets(self, wide: NDArray[Any]) -> NDArray[np.int64]:
        return bucket_of(wide) + self._zero

    def _limit(self, rank: int, sign: int) -> float:
        number = self._at(rank)
        return number if self._is_exact else number + sign * abs(number) * ERROR

    def _at(self, rank: int) -> int:
        # The number of this rank, from 1.
        at = int(np.searchsorted(np.cumsum(self._counts), rank))
        if self._is_exact:
            return int(self._numbers[at])
        bucket = at - self._zero
        number = _middle(abs(bucket))
        return min(max(number if bucket >= 0 else -number, self.least), self.most)


def _sum(wide: NDArray[Any]) -> int:
    # The sum of the halves cannot overflow.
    return (int((wide >> 32).sum()) << 32) + int((wide & _LOW).sum())


def _merged(
    numbers: NDArray[Any], counts: NDArray[np.int64]
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    unique, which = np.unique(numbers, return_inverse=True)
    sums = np.zeros(len(unique), np.int64)
    np.add.at(sums, which, counts)
    return unique, sums


def _first(bucket: int) -> int:
    if not bucket:
        return 0
    power, part = divmod(bucket - 1, BUCKETS)
    return (BUCKETS + part) << power >> PARTS_BITS


def _middle(bucket: int) -> int:
    # From 64 on a bucket is 2**(power - 6) wide; below it has one whole number, its first.
    power = max(bucket - 1, 0) // BUCKETS
    return _first(bucket) + (1 << power >> PARTS_BITS + 1)


class FrequentValues:
    """Texts and how often they came: exactly while few are different, then at least.

    When there are more than ``MAX_VALUES``, the rarest are forgotten and as many of each other are
    taken away: Misra and Gries' summary, for counts that come many at once (Agarwal et al.,
    Mergeable Summaries, PODS 2012). So a count is too low by at most ``error``.

    Attributes:
        counts: of each that is known.
        total: how many there are.
        error: 0 while all are known; at most all counts by ``MAX_VALUES``.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self.counts: dict[bytes, int] = {}
        self.total = self.error = 0

    @property
    def is_exact(self) -> bool:
        """Whether all are known."""
        return not self.error

    def add(self, counts: Mapping[bytes, int]) -> None:
        """Count values as often as is said."""
        known = self.counts
        for value, count in counts.items():
            known[value] = known.get(value, 0) + count
        self.total += sum(counts.values())
        if len(known) <= MAX_VALUES:
            return
        numbers = np.fromiter(known.values(), np.int64, len(known))
        rarest = int(np.partition(numbers, -MAX_VALUES - 1)[-MAX_VALUES - 1])
        self.counts = {value: n - rarest for value, n in known.items() if n > rarest}
        self.error += rarest

    def most_frequent(self, most: int) -> list[tuple[bytes, int]]:
        """Return the most frequent values and how often each came, at least."""
        return sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))[:most]


_SLOTS = 64


class TimeBins:
    """Counts in equal parts of time, at most 64; the parts are doubled as it goes on."""

    def __init__(self) -> None:
        """Begin with parts of 1 us."""
        self._counts = np.zeros(_SLOTS, np.int64)
        self._bits = 10

    def add(self, times: NDArray[np.uint64]) -> None:
        """Count times since the beginning in ns, shape (n,); it is only read."""
        while int(times.max()) >> self._bits >= _SLOTS:
            self._counts = _halved(self._counts)
            self._bits += 1
        slots = (times >> np.uint64(self._bits)).astype(np.int64)
        self._counts += np.bincount(slots, minlength=_SLOTS)

    def dispersion(self, span_ns: int) -> float:
        """Return variance by mean of the counts in the parts of a time, but at least 1.

        It is 1 for hits that do not depend on each other (Poisson's), more for those in bursts:
        the factor of quasi-Poisson models (McCullagh and Nelder, Generalized Linear Models, 4.5),
        from means of batches in time.
        """
        counts, bits = self._counts, self._bits
        while span_ns >> bits > _SLOTS:
            counts, bits = _halved(counts), bits + 1
        parts = counts[: span_ns >> bits]
        if len(parts) < 2 or not parts.any():
            return 1.0
        return max(float(parts.var(ddof=1) / parts.mean()), 1.0)


def _halved(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.append(counts[::2] + counts[1::2], np.zeros(_SLOTS // 2, np.int64))


_TEXTS = (Storage.STRING, Storage.COMM, Storage.STACK)


class FieldStatistics:
    """Of one field's values; those of an array count one by one.

    Attributes:
        name, type: of the field, as of ``model.resolved.Field``.
        is_duration: whether its numbers are nanoseconds.
        numbers: None for texts, and for numbers that stand for a name: enums, characters, symbols.
        texts: of the others.
        faulted: how many could not be read, or not be measured.
    """

    def __init__(self, field: Field, names: Names) -> None:
        """Begin with no value."""
        self.name, self.type = field.name, field.type
        self.is_duration = field.storage is Storage.DURATION
        self.faulted = 0
        is_text = field.storage in _TEXTS or _name_of(field, names)
        self.numbers = None if is_text else Distribution(is_signed=field.is_signed)
        self.texts = FrequentValues()

    def add(self, field: Field, batch: Batch, index: int, names: Names) -> None:
        """Count the values of a batch.

        Args:
            field: of its layout.
            batch: any number of events.
            index: the field's place.
            names: of the kernel that they are of.
        """
        values, faulted = batch.columns[index], batch.faulted[index]
        if isinstance(values, Strings) or field.storage in _TEXTS:
            counts = _counted(values)
            self.faulted += counts.pop(None, 0)
            known = {text: count for text, count in counts.items() if text is not None}
            is_stack = field.storage is Storage.STACK
            named = {names.stack_text(s): n for s, n in known.items()} if is_stack else known
            self.texts.add(named)
            return
        if faulted is not None and faulted.any():
            self.faulted += int(np.count_nonzero(faulted))
            values = values[~faulted]
        if self.numbers is None:
            self.texts.add(_named(field, values.ravel(), names))
        else:
            self.numbers.add(values.ravel())


def _counted(values: Column | Strings) -> Counter[bytes | None]:
    if not isinstance(values, Strings):
        return Counter(values.ravel().tolist())
    codes, table = values.coded
    counts = np.bincount(codes, minlength=len(table)).tolist()
    return Counter(dict(zip(table, counts, strict=True)))


def _named(field: Field, values: Column, names: Names) -> Counter[bytes]:
    name = _name_of(field, names) or _plain
    counts: Counter[bytes] = Counter()
    for number, count in zip(*_unique(values), strict=True):
        counts[name(number)] += count
    return counts


def _unique(values: Column) -> tuple[list[int], list[int]]:
    numbers, counts = np.unique(values, return_counts=True)
    return numbers.tolist(), counts.tolist()


def _name_of(field: Field, names: Names) -> Name | None:
    match field.type:
        case "char":
            return lambda code: bytes((code,))
        case "symbol" | "symstr":
            return names.symbol
        case _:
            enumerator = names.enumerator_of(field)
            return (
                None if enumerator is None else lambda number: enumerator(number) or _plain(number)
            )


def _plain(number: int) -> bytes:
    return b"%d" % number


class EventStatistics:
    """Of all hits of one event, in whatever functions.

    Attributes:
        group, event: its names.
        hits: how many.
        comms, functions: of the hits' tasks and probes.
        callers: of a return probe; else empty.
        fields: by name, type and storage, in the order in which they came.
    """

    def __init__(self, layout: RecordLayout) -> None:
        """Begin with no hit."""
        self.group, self.event = layout.group, layout.event
        self.hits = 0
        self.comms, self.functions, self.callers = (FrequentValues() for _ in range(3))
        self.fields: dict[tuple[str, str, str], FieldStatistics] = {}
        self._timeline = TimeBins()
        self._pids: set[int] = set()

    @property
    def tasks(self) -> int:
        """How many tasks were hit, by pid; at least, if not ``has_all_tasks``."""
        return len(self._pids)

    @property
    def has_all_tasks(self) -> bool:
        """Whether there were fewer than ``MAX_TASKS``, after which no more are looked for."""
        return len(self._pids) < MAX_TASKS

    def dispersion(self, span_ns: int) -> float:
        """Return that of its hits in a recording of so many ns; see ``TimeBins``."""
        return self._timeline.dispersion(span_ns)

    def add(self, batch: Batch, times: NDArray[np.uint64], names: Names) -> None:
        """Count a batch's events.

        Args:
            batch: of the event, whole.
            times: of each since the recording's beginning, ns, shape (n,).
            names: of the kernel that it is of.
        """
        self.hits += len(batch)
        self._timeline.add(times)
        starts, lengths = _runs(batch)
        if self.has_all_tasks:
            self._pids.update(batch.pid[starts].tolist())
        comms: Counter[bytes] = Counter()
        for name, length in zip(batch.comm[starts].tolist(), lengths.tolist(), strict=True):
            comms[name] += length
        self.comms.add(comms)
        self.functions.add({batch.layout.function.encode(errors="surrogateescape"): len(batch)})
        if batch.caller is not None:
            addrs, counts = np.unique(batch.caller, return_counts=True)
            self.callers.add(dict(zip(names.callers(addrs), counts.tolist(), strict=True)))
        for index, field in enumerate(batch.layout.fields):
            if field.storage is not Storage.TEXT:
                key = field.name, field.type, field.storage.value
                if key not in self.fields:
                    self.fields[key] = FieldStatistics(field, names)
                self.fields[key].add(field, batch, index, names)


def _runs(batch: Batch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    # Tasks are hit in bursts, of which only the first event is looked at in Python: where each
    # begins, and how long it is.
    halves = np.ascontiguousarray(batch.comm).view(np.uint64).reshape(-1, 2)
    is_other = (halves[1:] != halves[:-1]).any(axis=1) | (batch.pid[1:] != batch.pid[:-1])
    starts = np.append(0, np.flatnonzero(is_other) + 1)
    return starts, np.diff(np.append(starts, len(batch)))


_HELD_EVENTS, _HELD_BYTES = 1 << 17, 1 << 26
"""So much is held, as columns are the faster the longer they are."""


class Statistics:
    """Of a recording's events, boot by boot and round by round.

    Attributes:
        boots: how many kernels were booted.
        lost: events that are not there, as a ring was full.
        has_ns: whether times are nanoseconds.
    """

    def __init__(self) -> None:
        """Begin with no events."""
        self.boots = self.lost = 0
        self.has_ns = True
        self._events: dict[tuple[str, str], EventStatistics] = {}
        self._held: dict[int, list[Batch]] = {}
        self._held_events = self._held_bytes = 0
        self._before_ns = 0
        self._first: int | None = None
        self._last = 0

    @property
    def events(self) -> Mapping[tuple[str, str], EventStatistics]:
        """What is known of each event, by group and name."""
        return self._events

    @property
    def hits(self) -> int:
        """All of them."""
        return sum(each.hits for each in self._events.values())

    @property
    def span_ns(self) -> int:
        """From the first to the last event of each boot, together."""
        return self._before_ns + (0 if self._first is None else self._last - self._first)

    def rate(self, hits: int) -> float | None:
        """Return how many a second these are, or None where the time is not known."""
        return hits * _NS_PER_S / self.span_ns if self.has_ns and self.span_ns else None

    def begin(self, source: TraceSource) -> None:
        """Expect the events of another boot; those before are finished."""
        self._before_ns, self._first = self.span_ns, None
        self._names = Names(replace(source, has_enum_names=True))
        self.has_ns = self.has_ns and source.has_ns
        self.boots += 1

    def cover(self, events: Events, *, start: int = 0, stop: int = U64) -> None:
        """Take the times of events for times of the recording, whether they are counted or not.

        Args:
            events: all of a round.
            start: what was before is not of interest.
            stop: nor what was later.
        """
        for batch in events.batches:
            first, last = max(int(batch.ts.min()), start), min(int(batch.ts.max()), stop)
            if first <= last:
                self._last = last if self._first is None else max(self._last, last)
                self._first = first if self._first is None else min(self._first, first)

    def add(self, events: Events) -> None:
        """Count events, which ``cover`` has seen; they may be held until ``finish``."""
        is_whole = len(events) == sum(map(len, events.batches))
        for index, batch in enumerate(events.batches):
            part = batch if is_whole else batch.take(events.row[events.batch == index])
            if len(part):
                self._held.setdefault(id(part.layout), []).append(part)
                self._held_events += len(part)
                self._held_bytes += part.nbytes
        if self._held_events > _HELD_EVENTS or self._held_bytes > _HELD_BYTES:
            self.finish()

    def finish(self) -> None:
        """Count what is held, by the names of the boot that is read."""
        held, self._held = self._held, {}
        self._held_events = self._held_bytes = 0
        for batches in held.values():
            batch = join(batches)
            key = batch.layout.group, batch.layout.event
            if key not in self._events:
                self._events[key] = EventStatistics(batch.layout)
            self._events[key].add(batch, self._since(batch.ts), self._names)

    def _since(self, ts: NDArray[np.uint64]) -> NDArray[np.uint64]:
        # A clock that makes no sense is none: nothing may overflow.
        before = min(self._before_ns, U64)
        first = np.uint64(self._first or 0)
        return np.minimum(np.maximum(ts, first) - first, np.uint64(U64 - before)) + np.uint64(
            before
        )
