"""Events to lines in the order of time, a window of them at once."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from kprobes.model.batch import Batch, Events

WINDOW = 1 << 12
"""Events formatted at once, some 3 ms of work: whoever drains the rings meanwhile waits that long
for Python's lock, which nobody gives up in the middle of a ``list(map(...))``."""

Format = Callable[[Batch], list[bytes]]
"""A batch to one line per row, newlines included."""


def in_order(events: Events, form: Format) -> Iterator[Iterable[bytes]]:
    """Format events, oldest first; every item has the lines of a window of them, one of each."""
    for start in range(0, len(events), WINDOW):
        which = events.batch[start : start + WINDOW]
        rows = events.row[start : start + WINDOW]
        yield _window(events.batches, which, rows, form)


def _window(
    batches: tuple[Batch, ...],
    which: NDArray[np.uint16],
    rows: NDArray[np.uint32],
    form: Format,
) -> Iterable[bytes]:
    lines: list[bytes] = []
    places = np.empty(len(which), np.int64)
    for index in np.flatnonzero(np.bincount(which)).tolist():
        is_its = which == index
        own = rows[is_its]
        places[is_its] = np.arange(len(lines), len(lines) + len(own))
        lines += form(batches[index].take(own))
    return map(lines.__getitem__, places.tolist())
