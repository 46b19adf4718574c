"""Merger of the streams of several CPUs into one, in the order of time, while they go on.

A record is reserved before it is stamped, so once a round of draining has seen all heads,
every event stamped before the round began is either drained or stands in a ring uncommitted.
With M the latest time of the round before, events up to M can have no earlier one missing,
unless a CPU's ring is blocked by an uncommitted record: then that record is later than what
was drained from the ring before it.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.model.events import NO_EVENTS, Batch, Column, Events
from kprobes.model.strings import Strings, joined
from kprobes.ring.chunk import Decoded


def join(batches: Sequence[Batch]) -> Batch:
    """Return all rows of batches of one layout, in their order; of several without places."""
    if len(batches) == 1:
        return batches[0]
    return Batch(
        layout=batches[0].layout,
        ts=np.concatenate([batch.ts for batch in batches]),
        cpu=np.concatenate([batch.cpu for batch in batches]),
        pid=np.concatenate([batch.pid for batch in batches]),
        context=np.concatenate([batch.context for batch in batches]),
        comm=np.concatenate([batch.comm for batch in batches]),
        columns=tuple(
            _join_columns(columns)
            for columns in zip(*(batch.columns for batch in batches), strict=True)
        ),
        faulted=tuple(
            _join_masks(masks) for masks in zip(*(batch.faulted for batch in batches), strict=True)
        ),
        caller=_join_callers(batches),
    )


def _join_columns(columns: Sequence[Column | Strings]) -> Column | Strings:
    strings = [column for column in columns if isinstance(column, Strings)]
    if len(strings) == len(columns):
        return joined(strings)
    return np.concatenate([column for column in columns if not isinstance(column, Strings)])


def _join_callers(batches: Sequence[Batch]) -> NDArray[np.uint64] | None:
    known = [batch.caller for batch in batches if batch.caller is not None]
    return np.concatenate(known) if known else None


def _join_masks(masks: tuple[NDArray[np.bool_] | None, ...]) -> NDArray[np.bool_] | None:
    known = [mask for mask in masks if mask is not None]
    return np.concatenate(known) if known else None


_FOREVER = (1 << 64) - 1


class _Held(Struct, frozen=True, kw_only=True, eq=False):
    batch: Batch
    round: int
    first: int
    last: int


class Merger:
    """Takes what each round of draining found, gives what is safe to show.

    Attributes:
        late: events that came out after a later one had, because a CPU was blocked for longer
            than ``patience`` rounds.
    """

    def __init__(self, *, patience: int = 16) -> None:
        """Hold no event for more than ``patience`` rounds after the one that brought it."""
        self._patience = patience
        self._held: list[_Held] = []
        self._round = 0
        self._previous = 0  # latest time of all rounds before this one
        self._drained: dict[int, int] = {}  # latest time by CPU
        self._shown = 0
        self.late = 0

    def push(self, decoded: Iterable[Decoded]) -> Events:
        """Take one round, all CPUs of it, each in ring order, and return what is safe.

        A CPU whose ring was empty need not be named.
        """
        self._round += 1
        blocked: dict[int, bool] = {}
        latest = self._previous
        for part in decoded:
            blocked[part.cpu] = part.is_blocked
            for batch in part.batches:
                held = self._take(batch)
                latest = max(latest, held.last)
                self._drained[part.cpu] = max(self._drained.get(part.cpu, 0), held.last)
        horizon = self._horizon(cpu for cpu, is_blocked in blocked.items() if is_blocked)
        self._previous = latest
        return self._release(horizon)

    def finish(self) -> Events:
        """Return everything that is still held."""
        return self._release(_FOREVER)

    def _take(self, batch: Batch) -> _Held:
        held = _held(batch, self._round)
        self._held.append(held)
        return held

    def _horizon(self, blocked: Iterable[int]) -> int:
        safe = min([self._previous, *(self._drained.get(cpu, 0) for cpu in blocked)])
        overdue = self._round - self._patience
        return max([safe, *(held.last for held in self._held if held.round <= overdue)])

    def _release(self, horizon: int) -> Events:
        ready: list[Batch] = []
        kept: list[_Held] = []
        for held in self._held:
            released, rest = _split(held, horizon)
            if released is not None:
                ready.append(released)
            if rest is not None:
                kept.append(rest)
        self._held = kept
        events = in_order(ready)
        self._count_late(events)
        return events

    def _count_late(self, events: Events) -> None:
        for batch in events.batches:
            self.late += int(np.count_nonzero(batch.ts < self._shown))
        self._shown = max([self._shown, *(int(batch.ts.max()) for batch in events.batches)])


def in_order(batches: Iterable[Batch]) -> Events:
    """Put batches into the order of time, those of a layout as one.

    Events of a CPU with the same time keep the order of its ring: a counter may be coarser than
    what is recorded, and that of QEMU stands still before its CPUs do when a guest is stopped.
    """
    parts: dict[int, list[Batch]] = defaultdict(list)
    for batch in batches:
        if len(batch):
            parts[batch.layout.event_id].append(batch)
    ordered = [parts[event_id] for event_id in sorted(parts)]
    if not ordered:
        return NO_EVENTS
    whole = tuple(map(join, ordered))
    lengths = [len(batch) for batch in whole]
    which = np.repeat(np.arange(len(whole), dtype=np.uint16), lengths)
    rows = np.concatenate([np.arange(n, dtype=np.uint32) for n in lengths])
    ts = np.concatenate([batch.ts for batch in whole])
    if len(whole) == 1 and _is_sorted(ts):
        return Events(batches=whole, batch=which, row=rows)
    order = np.argsort(ts, kind="stable")
    sorted_ts = ts[order]
    is_same = sorted_ts[1:] == sorted_ts[:-1]
    if is_same.any():
        at = np.flatnonzero(np.append(is_same, False) | np.append(False, is_same))
        same = order[at]
        order[at] = same[np.lexsort((_places(ordered)[same], ts[same]))]
    return Events(batches=whole, batch=which[order], row=rows[order])


def gathered(rounds: Sequence[Events]) -> Events:
    """Return events that follow each other as one, copies, in their order."""
    if len(rounds) == 1:
        return rounds[0]
    places: dict[int, int] = {}
    parts: list[list[Batch]] = []
    lengths: list[int] = []
    which, rows = [np.empty(0, np.uint16)], [np.empty(0, np.uint32)]
    for events in rounds:
        own = np.zeros(len(events.batches), np.uint16)
        starts = np.zeros(len(events.batches), np.uint32)
        for at, each in enumerate(events.batches):
            # One that was defined anew may have the number of another.
            place = places.setdefault(id(each.layout), len(parts))
            if place == len(parts):
                parts.append([])
                lengths.append(0)
            own[at], starts[at] = place, lengths[place]
            parts[place].append(each)
            lengths[place] += len(each)
        which.append(own[events.batch])
        rows.append(starts[events.batch] + events.row)
    return Events(
        batches=tuple(map(join, parts)), batch=np.concatenate(which), row=np.concatenate(rows)
    )


def _places(parts: Iterable[Sequence[Batch]]) -> NDArray[np.uint64]:
    places = (batch.place for part in parts for batch in part)
    return np.concatenate([place for place in places if place is not None])


def _held(batch: Batch, number: int) -> _Held:
    return _Held(batch=batch, round=number, first=int(batch.ts.min()), last=int(batch.ts.max()))


def _split(held: _Held, horizon: int) -> tuple[Batch | None, _Held | None]:
    if held.last <= horizon:
        return held.batch, None
    if held.first > horizon:
        return None, held
    ts = held.batch.ts
    if _is_sorted(ts):
        cut = int(np.searchsorted(ts, np.uint64(horizon), side="right"))
        rest = held.batch.take(slice(cut, None))
        return held.batch.take(slice(0, cut)), _held(rest, held.round)
    is_ready = ts <= np.uint64(horizon)
    return held.batch.take(is_ready), _held(held.batch.take(~is_ready), held.round)


def _is_sorted(ts: NDArray[np.uint64]) -> bool:
    return bool((ts[1:] >= ts[:-1]).all())
