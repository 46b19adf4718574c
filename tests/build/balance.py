"""Entries and returns of functions, held against each other: is every return there?

Only who was inside when recording began returns without an entry, once, and before all else;
only who is inside when it ends has an entry without a return, and that is the last.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.model.events import Batch, Events

_MOST_EARLY = 2
"""A call of a task, and one of an interrupt on top of it."""
Numbers = NDArray[np.int64]


class Balance(Struct, frozen=True, kw_only=True):
    """What entries and returns of some functions add up to.

    Attributes:
        reached: functions that were entered.
        entries: records of them.
        returns: records of these.
        begun_before: returns of calls that had begun before.
        inside: entries of calls that had not returned when it ended.
        wrong: in words, what does not add up.
    """

    reached: frozenset[str]
    entries: int
    returns: int
    begun_before: int
    inside: int
    wrong: tuple[str, ...]


def balance(recorded: Iterable[Events], pairs: Mapping[str, tuple[str, str]]) -> Balance:
    """Hold the entries and returns of one recording against each other.

    Args:
        recorded: with nothing lost.
        pairs: by function, its entry's and its return's event.
    """
    names = list(pairs)
    numbers = {event: (n, step) for n, p in enumerate(pairs.values()) for event, step in _steps(p)}
    rows = np.concatenate([_rows(events, numbers) for events in recorded if len(events)])
    order = np.lexsort((rows[:, 1], rows[:, 0]))
    rows = rows[order]
    borders = np.flatnonzero((np.diff(rows[:, :2], axis=0) != 0).any(axis=1)) + 1
    before = inside = 0
    wrong: list[str] = []
    for group in np.split(rows, borders):
        early, late, what = _insn_verdict(group[:, 2])
        before, inside = before + early, inside + late
        if what:
            wrong.append(f"{names[group[0, 0]]}, task {group[0, 1]}: {what}")
    entered = rows[rows[:, 2] > 0]
    numbered: list[int] = np.unique(entered[:, 0]).tolist()
    return Balance(
        reached=frozenset(names[n] for n in numbered),
        entries=len(entered),
        returns=len(rows) - len(entered),
        begun_before=before,
        inside=inside,
        wrong=tuple(wrong),
    )


def _steps(pair: tuple[str, str]) -> Iterator[tuple[str, int]]:
    yield pair[0], 1
    yield pair[1], -1


def _rows(events: Events, numbers: Mapping[str, tuple[int, int]]) -> Numbers:
    # Function, whose call it is, and 1 for an entry or -1 for a return; in the order of time.
    rows = np.empty((len(events), 3), np.int64)
    for n, batch in enumerate(events.batches):
        chosen = events.batch == n
        function, step = numbers[batch.layout.event]
        rows[chosen, 0] = function
        rows[chosen, 1] = _whose(batch)[events.row[chosen]]
        rows[chosen, 2] = step
    return rows


def _whose(batch: Batch) -> Numbers:
    # Interrupts run on top of a task and end before it goes on. Idle tasks have no pid.
    pid, cpu = batch.pid.astype(np.int64), batch.cpu.astype(np.int64)
    return np.where(pid != 0, pid, -1 - cpu)


def _insn_verdict(steps: Numbers) -> tuple[int, int, str]:
    depths = np.cumsum(steps)
    early = -min(0, int(depths.min()))
    late = int(depths[-1]) + early
    if early > _MOST_EARLY or (early and steps[0] > 0):
        return early, late, f"{early} returns without an entry among {len(steps)} records"
    if late and steps[-1] < 0:
        return early, late, f"{late} entries without a return among {len(steps)} records"
    return early, late, ""
