"""Actions of hist triggers: of hits with the same keys some fields are kept, those of one hit.

ontrack_action() in kernel/trace/trace_events_hist.c.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.model.hist import Handler

Numbers = NDArray[np.uint64]
Rows = NDArray[np.int64]


class Tracked(Struct, frozen=True, kw_only=True, eq=False):
    """Of n hits, or of the hits that n entries keep. Every array has shape (n,).

    Attributes:
        numbers: that the action looks at; 0 of an entry that has kept nothing.
        when: each was, by any clock that goes up.
        saved: the other fields, uint64.
    """

    numbers: Numbers
    when: Numbers
    saved: tuple[Numbers, ...]

    def __len__(self) -> int:
        """Return n."""
        return len(self.numbers)

    def take(self, rows: Rows) -> "Tracked":
        """Return some by their indices, shape (m,); copies."""
        return Tracked(
            numbers=self.numbers[rows],
            when=self.when[rows],
            saved=tuple(each[rows] for each in self.saved),
        )


def nothing(count: int, saved: int) -> Tracked:
    """Return that of entries which have kept nothing, with so many fields."""
    return Tracked(
        numbers=np.zeros(count, np.uint64),
        when=np.zeros(count, np.uint64),
        saved=tuple(np.zeros(count, np.uint64) for _ in range(saved)),
    )


def joined(parts: Sequence[Tracked]) -> Tracked:
    """Return some, one after the other, in one."""
    return Tracked(
        numbers=np.concatenate([each.numbers for each in parts]),
        when=np.concatenate([each.when for each in parts]),
        saved=tuple(map(np.concatenate, zip(*(each.saved for each in parts), strict=True))),
    )


def kept(handler: Handler, before: Tracked, hits: Tracked, rows: Rows) -> Tracked:
    """Return what n entries keep after some hits.

    Args:
        handler: of the action.
        before: that they kept until then.
        hits: m of them, in any order.
        rows: the entry of each hit, shape (m,).
    """
    every = joined([before, hits])
    # What was kept before comes first, then the hits as they came.
    ages = np.append(np.zeros(len(before), np.int64), np.ones(len(hits), np.int64))
    entries = np.append(np.arange(len(before)), rows)
    order = np.lexsort((every.when, ages, entries))
    every, entries = every.take(order), entries[order]
    starts = np.searchsorted(entries, np.arange(len(before)))
    if handler is Handler.ON_MAX:
        most = np.maximum.reduceat(every.numbers, starts) if len(starts) else every.numbers
        is_kept = every.numbers == most[entries]
        places = np.flatnonzero(is_kept)
        # The first of those that are equal.
        return every.take(places[np.searchsorted(entries[places], np.arange(len(before)))])
    is_kept = np.append(True, every.numbers[1:] != every.numbers[:-1])[: len(every)]
    is_kept[starts] = True
    places = np.flatnonzero(is_kept)
    last = np.searchsorted(entries[places], np.arange(len(before)), side="right") - 1
    return every.take(places[last])
