"""Events as columns: what a drained ring becomes, and all that a sink sees."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kprobes.model.layout import RecordLayout

Column = NDArray[Any]
_STRING = 40
"""Bytes of a ``bytes`` object beside its own."""
Rows = slice | NDArray[np.integer[Any]] | NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """``n`` events of one layout. Every array has shape (n,) unless said otherwise.

    Attributes:
        layout: what the events are.
        ts: uint64, nanoseconds of the guest's trace clock.
        cpu: uint16.
        pid: int32.
        context: uint32, the CONTEXT_* bits of ``model.layout``.
        comm: S16, the task's name at the hit.
        values: per field, in layout order: numbers in the field's own dtype; a duration as
            uint64 ns; strings as object arrays of ``bytes`` without NUL, None where the fetch
            faulted. Array fields have the shape (n, count).
        faulted: per field: a bool array, or None for a field that cannot fault. It has the
            shape (n,), but (n, count) for an array of strings. A duration of 0 is one that could
            not be measured.
        caller: uint64, where a return probe's calls came from; None for other probes.
    """

    layout: RecordLayout
    ts: NDArray[np.uint64]
    cpu: NDArray[np.uint16]
    pid: NDArray[np.int32]
    context: NDArray[np.uint32]
    comm: Column
    values: tuple[Column, ...]
    faulted: tuple[NDArray[np.bool_] | None, ...]
    caller: NDArray[np.uint64] | None = None

    def __len__(self) -> int:
        """Return the number of events."""
        return len(self.ts)

    @property
    def nbytes(self) -> int:
        """About how many bytes it keeps: all that its columns are views of, and its strings."""
        columns = (self.ts, self.cpu, self.pid, self.context, self.comm, *self.values)
        kept = {id(owner): owner.nbytes for owner in map(_owner, columns)}
        return sum(kept.values()) + sum(map(_strings, self.values))

    def take(self, rows: Rows) -> "Batch":
        """Return some rows: views for a slice, copies for indices or a mask."""
        return Batch(
            layout=self.layout,
            ts=self.ts[rows],
            cpu=self.cpu[rows],
            pid=self.pid[rows],
            context=self.context[rows],
            comm=self.comm[rows],
            values=tuple(values[rows] for values in self.values),
            faulted=tuple(None if mask is None else mask[rows] for mask in self.faulted),
            caller=None if self.caller is None else self.caller[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Events:
    """Batches of several events with the order that time puts them in.

    Attributes:
        batches: at most one per layout.
        batch: uint16 (n,), for each event in time order its index in ``batches``.
        row: uint32 (n,), and its row there.
    """

    batches: tuple[Batch, ...]
    batch: NDArray[np.uint16]
    row: NDArray[np.uint32]

    def __len__(self) -> int:
        """Return the number of events."""
        return len(self.batch)

    @property
    def nbytes(self) -> int:
        """About how many bytes it keeps; see ``Batch.nbytes``."""
        own = self.batch.nbytes + self.row.nbytes
        return own + sum(batch.nbytes for batch in self.batches)


def _owner(column: Column) -> Column:
    while isinstance(column.base, np.ndarray):
        column = column.base
    return column


def _strings(column: Column) -> int:
    if column.dtype != object:
        return 0
    strings: list[bytes | None] = column.ravel().tolist()
    return len(strings) * _STRING + sum(map(len, filter(None, strings)))
