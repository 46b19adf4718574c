"""What tasks were called when they were hit, from what the kernel tells of new names.

Its own trace shows a task by the last name noted for its pid; here a name counts from its time on.
Told are ``task:task_newtask`` and ``task:task_rename``, whose records lie in the same rings.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kprobes.model.batch import Batch, Column
from kprobes.model.layout import COMM_SIZE

PID_LIMIT = (1 << 22) + 1
"""No pid is larger: PID_MAX_LIMIT of include/linux/threads.h."""

UNKNOWN = b"<...>"
"""What the kernel's trace prints for a task that nobody has a name of."""

_COMM = f"S{COMM_SIZE}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Naming:
    """A task got a name.

    Attributes:
        old: what it was called, or None for a new task.
    """

    pid: int
    ts: int
    old: bytes | None
    new: bytes


class TaskNames:
    """The names of all tasks of a machine over a while.

    Args:
        known: by pid, from the beginning.
        ask: names by pid as the kernel has them now, for a pid that nothing else told of.
    """

    def __init__(self, known: Mapping[int, bytes], ask: Callable[[], Mapping[int, bytes]]) -> None:
        self._ask = ask
        self._table: list[bytes] = [b""]
        self._numbers: dict[bytes, int] = {b"": 0}
        # By pid the number of a name; untouched parts of it take no memory.
        self._slots = np.zeros(PID_LIMIT, np.int32)
        self._is_renamed = np.zeros(PID_LIMIT, np.bool_)
        self._recent: dict[int, list[Naming]] = defaultdict(list)
        for pid, name in known.items():
            self._set(pid, name)

    def note(self, namings: Iterable[Naming]) -> None:
        """Take names in any order; they count from their times on."""
        for naming in namings:
            self._recent[naming.pid].append(naming)
            self._is_renamed[naming.pid] = True

    def of(self, batch: Batch) -> Column:
        """Return the comm column of a batch, whose pids are below ``PID_LIMIT``."""
        # Tasks hit in bursts, so the first of every run of one pid is looked at.
        heads = np.flatnonzero(np.diff(batch.pid, prepend=-1))
        pids = batch.pid[heads]
        is_renamed = self._is_renamed[pids]
        self._learn(pids[(self._slots[pids] == 0) & ~is_renamed])
        lengths = np.diff(np.append(heads, len(batch)))
        comm = np.repeat(np.array(self._table, _COMM)[self._slots[pids]], lengths)
        if is_renamed.any():
            self._rename(comm, batch, np.flatnonzero(np.repeat(is_renamed, lengths)))
        idle = np.flatnonzero(batch.pid == 0)
        comm[idle] = [b"swapper/%d" % cpu for cpu in batch.cpu[idle].tolist()]
        return comm

    def settle(self, horizon: int) -> None:
        """Forget the times of names up to ``horizon``: no older event will be asked for."""
        for pid, namings in list(self._recent.items()):
            namings.sort(key=_time)
            old = [naming for naming in namings if naming.ts <= horizon]
            if old:
                self._set(pid, old[-1].new)
                del namings[: len(old)]
            if not namings:
                del self._recent[pid]
                self._is_renamed[pid] = False

    def _rename(self, comm: Column, batch: Batch, rows: NDArray[np.int64]) -> None:
        rows = rows[np.argsort(batch.pid[rows], kind="stable")]
        pids = batch.pid[rows]
        heads = np.flatnonzero(np.diff(pids, prepend=-1))
        for own in np.split(rows, heads[1:]):
            pid = int(batch.pid[own[0]])
            namings = sorted(self._recent[pid], key=_time)
            first = namings[0].old
            before = self._table[int(self._slots[pid])] if first is None else first
            names = np.array([before or UNKNOWN, *(naming.new for naming in namings)], _COMM)
            times = np.array([naming.ts for naming in namings], np.uint64)
            comm[own] = names[np.searchsorted(times, batch.ts[own], side="right")]

    def _learn(self, pids: NDArray[np.int32]) -> None:
        if not len(pids):
            return
        saved = self._ask()
        for pid in set(pids.tolist()):
            self._set(pid, saved.get(pid, UNKNOWN))

    def _set(self, pid: int, name: bytes) -> None:
        if name not in self._numbers:
            self._numbers[name] = len(self._table)
            self._table.append(name)
        self._slots[pid] = self._numbers[name]


def _time(naming: Naming) -> int:
    return naming.ts
