"""The rings of a kernel's CPUs to one stream in the order of its own trace, while they go on.

Once a round of reading has seen all rings, every event stamped before it began is read. So with M
the latest time of the rounds before, events up to M have no earlier one missing. As in the
kernel's trace, events of the same time go by CPU and then as they stand in their ring.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.model.events import Batch, Events
from kprobes.native.library import function_for
from kprobes.ring.ftrace import HostDecoded
from kprobes.ring.merge import join


class _Stream(Struct, frozen=True, kw_only=True, eq=False):
    # Events as they were read. ``which`` is each one's batch, ``ts`` and ``cpu`` are its own.
    batches: tuple[Batch, ...]
    which: NDArray[np.uint16]
    ts: NDArray[np.uint64]
    cpu: NDArray[np.uint16]


_FOREVER = np.uint64((1 << 64) - 1)


class HostMerger:
    """Takes what each round of reading found, gives what is safe to show.

    Attributes:
        horizon: time up to which all was given.
    """

    def __init__(self) -> None:
        self._held: list[_Stream] = []
        self._latest = np.uint64(0)
        self.horizon = 0

    def push(self, decoded: Sequence[HostDecoded], until: int | None = None) -> Events:
        """Take one round, each CPU's pages in ring order, and return what is safe.

        Args:
            decoded: what it has found.
            until: up to which time nothing comes any more, where that is known.
        """
        horizon = self._latest if until is None else np.uint64(max(until, self.horizon))
        for part in decoded:
            stream = _stream(part)
            if len(stream.ts):
                self._held.append(stream)
                self._latest = max(self._latest, stream.ts.max())
        return self._release(horizon)

    def finish(self) -> Events:
        """Return everything that is still held."""
        return self._release(_FOREVER)

    def _release(self, horizon: np.uint64) -> Events:
        ready: list[_Stream] = []
        kept: list[_Stream] = []
        for stream in self._held:
            is_ready = stream.ts <= horizon
            count = int(np.count_nonzero(is_ready))
            if count == len(is_ready):
                ready.append(stream)
            elif not count:
                kept.append(stream)
            elif is_ready[:count].all():
                # As of one CPU: nothing is copied.
                first, rest = _cut(stream, count)
                ready.append(first)
                kept.append(rest)
            else:
                ready.append(_take(stream, is_ready))
                kept.append(_take(stream, ~is_ready))
        self._held = kept
        self.horizon = int(horizon)
        return _in_order(_joined(ready))


def _stream(decoded: HostDecoded) -> _Stream:
    return _Stream(batches=decoded.batches, which=decoded.which, ts=decoded.ts, cpu=decoded.cpu)


def _cut(stream: _Stream, count: int) -> tuple[_Stream, _Stream]:
    rows = np.bincount(stream.which[:count], minlength=len(stream.batches)).tolist()
    pairs = list(zip(stream.batches, rows, strict=True))
    first, rest = slice(0, count), slice(count, None)
    return (
        _Stream(
            batches=tuple(batch.take(slice(0, own)) for batch, own in pairs),
            which=stream.which[first],
            ts=stream.ts[first],
            cpu=stream.cpu[first],
        ),
        _Stream(
            batches=tuple(batch.take(slice(own, None)) for batch, own in pairs),
            which=stream.which[rest],
            ts=stream.ts[rest],
            cpu=stream.cpu[rest],
        ),
    )


def _take(stream: _Stream, is_taken: NDArray[np.bool_]) -> _Stream:
    batches = tuple(
        batch.take(is_taken[stream.which == index]) for index, batch in enumerate(stream.batches)
    )
    which, ts, cpu = stream.which[is_taken], stream.ts[is_taken], stream.cpu[is_taken]
    return _Stream(batches=batches, which=which, ts=ts, cpu=cpu)


def _joined(streams: Sequence[_Stream]) -> _Stream:
    # One batch per layout, those without a row left out.
    found: dict[int, list[Batch]] = {}
    for stream in streams:
        for batch in stream.batches:
            if len(batch):
                found.setdefault(batch.layout.event_id, []).append(batch)
    places = {event_id: index for index, event_id in enumerate(found)}
    which = [np.empty(0, np.uint16)]
    for stream in streams:
        own = [places.get(batch.layout.event_id, 0) for batch in stream.batches]
        which.append(np.array(own, np.uint16)[stream.which])
    return _Stream(
        batches=tuple(map(join, found.values())),
        which=np.concatenate(which),
        ts=np.concatenate([np.empty(0, np.uint64), *(stream.ts for stream in streams)]),
        cpu=np.concatenate([np.empty(0, np.uint16), *(stream.cpu for stream in streams)]),
    )


def _in_order(stream: _Stream) -> Events:
    rows = _rows(stream.which, len(stream.batches))
    order = _order(stream)
    if order is None:
        return Events(batches=stream.batches, batch=stream.which, row=rows)
    return Events(batches=stream.batches, batch=stream.which[order], row=rows[order])


def _rows(which: NDArray[np.uint16], count: int) -> NDArray[np.uint32]:
    if count == 1:
        return np.arange(len(which), dtype=np.uint32)
    rows = np.empty(len(which), np.uint32)
    place_all = function_for(len(which), "pages", "pages_places", 4)
    if place_all is not None:
        whole = np.ascontiguousarray(which)
        known = np.zeros(count, np.uint32)
        place_all(whole.ctypes.data, len(which), known.ctypes.data, rows.ctypes.data)
        return rows
    for index in range(count):
        own = np.flatnonzero(which == index)
        rows[own] = np.arange(len(own), dtype=np.uint32)
    return rows


def _order(stream: _Stream) -> NDArray[np.int64] | None:
    # Sorting by CPU first leaves one ascending run for each, which a stable sort only merges.
    by_cpu = None
    ts = stream.ts
    if (stream.cpu[1:] < stream.cpu[:-1]).any():
        by_cpu = np.argsort(stream.cpu, kind="stable")
        ts = ts[by_cpu]
    if (ts[1:] >= ts[:-1]).all():
        return by_cpu
    by_time = np.argsort(ts, kind="stable")
    return by_time if by_cpu is None else by_cpu[by_time]
