"""Entries and returns of functions, held against each other: is every return there?

Only who was inside when recording began returns without an entry, and what its task did before
that it did deeper in its stack. Only who is inside when it ends has an entry without a return, and
all that its task did afterwards it did deeper.
"""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.model.events import Batch, Events
from kprobes.model.resolved import (
    CONTEXT_HARDIRQ,
    CONTEXT_IRQS_ON,
    CONTEXT_NMI,
    CONTEXT_SERVING_SOFTIRQ,
)

STACK = "stack=$stack"
"""What each of the probes fetches."""
_STACK_SIZE = 1 << 14
"""Of a task's stack and of an interrupt's, on both architectures."""
_CONTEXTS = CONTEXT_IRQS_ON | CONTEXT_HARDIRQ | CONTEXT_NMI | CONTEXT_SERVING_SOFTIRQ
_ON_THEIR_WAY = 2
"""Of a task and of a softirq: hits recorded at last, when what interrupted them is over."""
_FUNCTION, _WHOSE, _STEP, _ADDR, _CONTEXT = range(5)
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
        recorded: with nothing lost, and with ``STACK`` in each.
        pairs: by function, its entry's and its return's event.
    """
    names = list(pairs)
    numbers = {event: (n, step) for n, p in enumerate(pairs.values()) for event, step in _steps(p)}
    rows = np.concatenate([_rows(events, numbers) for events in recorded if len(events)])
    rows = rows[np.argsort(rows[:, _WHOSE], kind="stable")]
    before = inside = 0
    wrong: list[str] = []
    for task in np.split(rows, _borders(rows[:, _WHOSE])):
        heights = _heights(task)
        early = _Unpaired.of(task[:, _FUNCTION], -task[:, _STEP], heights)
        late = _Unpaired.of(
            task[::-1, _FUNCTION], task[::-1, _STEP], heights[::-1], passed=_ON_THEIR_WAY
        )
        before, inside = before + early.count, inside + late.count
        whose = f"task {task[0, _WHOSE]}"
        wrong += [f"{names[n]}, {whose}: a return without an entry" for n in early.wrong]
        wrong += [f"{names[n]}, {whose}: an entry without a return" for n in late.wrong]
    entered = rows[rows[:, _STEP] > 0]
    numbered: list[int] = np.unique(entered[:, _FUNCTION]).tolist()
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
    # Function, whose call it is, 1 for an entry or -1 for a return, where its stack is, and the
    # context; in the order of time.
    rows = np.empty((len(events), 5), np.int64)
    for n, batch in enumerate(events.batches):
        chosen = events.batch == n
        at = events.row[chosen]
        rows[chosen, _FUNCTION], rows[chosen, _STEP] = numbers[batch.layout.event]
        rows[chosen, _WHOSE] = _whose(batch)[at]
        rows[chosen, _ADDR] = _stack(batch)[at].view(np.int64)
        rows[chosen, _CONTEXT] = batch.context[at]
    return rows


def _whose(batch: Batch) -> Numbers:
    # Interrupts run on top of a task and end before it goes on. Idle tasks have no pid.
    pid, cpu = batch.pid.astype(np.int64), batch.cpu.astype(np.int64)
    return np.where(pid != 0, pid, -1 - cpu)


def _stack(batch: Batch) -> NDArray[np.uint64]:
    number = [field.name for field in batch.layout.fields].index(STACK.partition("=")[0])
    return batch.values[number]


def _borders(column: Numbers) -> NDArray[np.intp]:
    return np.flatnonzero(np.diff(column)) + 1


def _heights(task: Numbers) -> Numbers:
    # How near to the first call: an interrupt's stack is deeper than the task's.
    # A task of which only interrupts were seen has none of its own.
    stacks, within = np.divmod(task[:, _ADDR], _STACK_SIZE)
    own = stacks[task[:, _CONTEXT] & _CONTEXTS == CONTEXT_IRQS_ON][:1]
    return within + np.where(stacks == own, _STACK_SIZE, 0) if len(own) else within


class _Unpaired(Struct, frozen=True):
    """Returns without an entry; or, in a recording read backwards, entries without a return.

    Attributes:
        count: how many.
        wrong: functions of those that some other record of their task rules out.
    """

    count: int
    wrong: tuple[int, ...]

    @classmethod
    def of(
        cls, functions: Numbers, closes: Numbers, heights: Numbers, *, passed: int = 0
    ) -> "_Unpaired":
        """Find them among one task's records.

        Args:
            functions: shape (n,), what each record is of.
            closes: 1 for the end of a call, -1 for its beginning.
            heights: of the stack; greater is nearer to the task's first call.
            passed: how many of the first records rule nothing out.
        """
        order = np.argsort(functions, kind="stable")
        groups = np.split(order, _borders(functions[order]))
        is_alone = np.zeros(len(functions), np.bool_)
        for group in groups:
            is_alone[group] = np.diff(_highest(np.cumsum(closes[group])), prepend=0) > 0
        paired = np.where(is_alone, 0, heights)
        paired[:passed] = 0
        # A call that ends in a jump returns from where the other does.
        is_wrong = _before(paired) > heights
        for group in groups:
            is_wrong[group] |= _before(paired[group]) >= heights[group]
        wrong: list[int] = functions[is_wrong & is_alone].tolist()
        return cls(int(is_alone.sum()), tuple(wrong))


def _highest(values: Numbers) -> Numbers:
    return np.maximum.accumulate(np.maximum(values, 0))


def _before(values: Numbers) -> Numbers:
    # The greatest of all before each.
    return np.concatenate(([0], _highest(values)[:-1]))
