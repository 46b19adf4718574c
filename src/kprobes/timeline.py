"""Several recordings in one order of time.

Each has a clock of its own. What they have in common is the real time of the machine that recorded
them: every look at the rings tells between which two moments its records were made, and each of
those bounds what is between both clocks. The narrowest bounds are what is known.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from kprobes.model.events import Batch, Events

_DRIFT = 200e-6
"""What two clocks run apart by at most: those of machines by less than 100 ppm."""
_SPAN = 10**8
"""Nanoseconds of a clock of which one bound is kept."""
_LATEST = 1 << 61
"""Nanoseconds, 73 years: a file may say anything."""


class RealTime(Struct, frozen=True, kw_only=True, eq=False):
    """How a clock and CLOCK_REALTIME belong together.

    Attributes:
        times: int64 (k,), ascending, of the clock, in ns.
        offsets: int64 (k,), what is added there; in between, in proportion.
        error: by how many ns a moment may be wrong.
    """

    times: NDArray[np.int64]
    offsets: NDArray[np.int64]
    error: int


class Bounds:
    """What looks at the rings tell of the offset of their clock to real time.

    Of each tenth of a second of the clock the narrowest are kept.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[int, int, int]] = []

    def add(self, first: int, last: int, since_ns: int, until_ns: int) -> None:
        """Take what one look has found.

        Args:
            first: time of its first record, in ns of their clock.
            last: of its last one.
            since_ns: after which moment they were made, by CLOCK_REALTIME.
            until_ns: before which moment.
        """
        first, last, since, until = (min(n, _LATEST) for n in (first, last, since_ns, until_ns))
        low, high = since - first, until - last
        at, before_low, before_high = self._kept[-1] if self._kept else (-_SPAN, 0, 0)
        both = max(low, before_low), min(high, before_high)
        if first - at < _SPAN and both[0] <= both[1]:
            self._kept[-1] = at, *both
        else:
            self._kept.append((first, low, high))

    def real_time(self) -> RealTime | None:
        """Return how both belong together; None where nothing was found."""
        if not self._kept:
            return None
        kept = np.array(self._kept, np.int64)
        kept = kept[np.argsort(kept[:, 0], kind="stable")]
        times, least, most = kept.T
        # Each bound is one of all other moments, too, as far as clocks can have run apart by then.
        apart = ((times - times[0]) * _DRIFT).astype(np.int64)
        low = np.maximum.accumulate(least + apart) - apart
        low = np.maximum(low, np.maximum.accumulate((least - apart)[::-1])[::-1] + apart)
        high = np.minimum.accumulate(most - apart) + apart
        high = np.minimum(high, np.minimum.accumulate((most + apart)[::-1])[::-1] - apart)
        error = int(np.abs(high - low).max() + 1) // 2 + int(_DRIFT * _SPAN)
        return RealTime(times=times, offsets=low + (high - low) // 2, error=error)


class Shift(Struct, frozen=True, kw_only=True, eq=False):
    """From one recording's clock to another's.

    Attributes:
        source, to: of both clocks.
    """

    source: RealTime
    to: RealTime

    @property
    def ns(self) -> int:
        """What is added in the middle of the recording."""
        middle = self.source.times[len(self.source.times) // 2 : len(self.source.times) // 2 + 1]
        return int(self._offsets(middle)[0])

    @property
    def error(self) -> int:
        """By how many ns a moment may be wrong."""
        return self.source.error + self.to.error

    def apply(self, ts: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return times of the other clock, uint64 (n,), a copy; none is before 0."""
        times = ts.astype(np.int64)
        return np.maximum(times + self._offsets(times), 0).astype(np.uint64)

    def _offsets(self, times: NDArray[np.int64]) -> NDArray[np.int64]:
        own = _between(times, self.source.times, self.source.offsets)
        # The other's offset where its clock stands then.
        guess = times + own - self.to.offsets[0]
        return own - _between(guess, self.to.times, self.to.offsets)


def _between(
    at: NDArray[np.int64], times: NDArray[np.int64], offsets: NDArray[np.int64]
) -> NDArray[np.int64]:
    # Floats have no room for a date in ns.
    first = offsets[0]
    more = cast("Any", np.interp)(at - times[0], times - times[0], offsets - first)
    return first + more.astype(np.int64)


def shift_between(source: RealTime, to: RealTime) -> Shift | None:
    """Return what brings times of one clock to the other; None if they may well be the same.

    Two recordings of one boot of a kernel have one clock.
    """
    shift = Shift(source=source, to=to)
    return None if abs(shift.ns) <= shift.error else shift


def shifted(rounds: Iterator[Events], shift: Shift | None) -> Iterator[Events]:
    """Yield events with the times of another clock; the rest is the same."""
    for events in rounds:
        yield events if shift is None else replace(events, batches=_shifted(events.batches, shift))


def _shifted(batches: tuple[Batch, ...], shift: Shift) -> tuple[Batch, ...]:
    return tuple(replace(batch, ts=shift.apply(batch.ts)) for batch in batches)


class _Stream:
    # One recording's events that are still to be shown.
    def __init__(self, rounds: Iterator[Events]) -> None:
        self._rounds = rounds
        self._held: list[tuple[Events, NDArray[np.uint64]]] = []
        self.last = 0
        self.is_over = False

    def pull(self) -> None:
        events = next(self._rounds, None)
        if events is None:
            self.is_over = True
        elif len(events):
            times = _times(events)
            self.last = max(self.last, int(times.max()))
            self._held.append((events, times))

    def before(self, horizon: int | None) -> Iterator[tuple[Events, NDArray[np.uint64]]]:
        rest: list[tuple[Events, NDArray[np.uint64]]] = []
        for events, times in self._held:
            # One of the same time may still come.
            cut = len(times)
            if horizon is not None:
                cut = int(np.searchsorted(times, np.uint64(horizon), side="left"))
            if cut:
                yield events.cut(slice(0, cut)), times[:cut]
            if cut < len(events):
                rest.append((events.cut(slice(cut, None)), times[cut:]))
        self._held = rest


def in_one_order(streams: Sequence[Iterator[Events]]) -> Iterator[Events]:
    """Yield the events of several recordings by time, those of one time in the streams' order.

    Of each stream no more is held than what comes before the next of the others.
    """
    every = [_Stream(rounds) for rounds in streams]
    while going := [each for each in every if not each.is_over]:
        min(going, key=lambda each: each.last).pull()
        horizon = min((each.last for each in every if not each.is_over), default=None)
        ready = [part for each in every for part in each.before(horizon)]
        if ready:
            yield _joined(ready)


def _joined(parts: Sequence[tuple[Events, NDArray[np.uint64]]]) -> Events:
    starts = np.cumsum([0, *(len(events.batches) for events, _ in parts)])
    which = [
        events.batch + np.uint16(start) for start, (events, _) in zip(starts, parts, strict=False)
    ]
    order = np.argsort(np.concatenate([times for _, times in parts]), kind="stable")
    return Events(
        batches=tuple(batch for events, _ in parts for batch in events.batches),
        batch=np.concatenate(which)[order],
        row=np.concatenate([events.row for events, _ in parts])[order],
    )


def _times(events: Events) -> NDArray[np.uint64]:
    # In the order of time, which stays so where clocks run apart.
    times = np.empty(len(events), np.uint64)
    for index, batch in enumerate(events.batches):
        own = events.batch == index
        times[own] = batch.ts[events.row[own]]
    return np.maximum.accumulate(times)
