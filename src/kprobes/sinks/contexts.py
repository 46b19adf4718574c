"""Tasks, CPUs and contexts of events, as they are shown: they repeat, and are shown once each."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from kprobes.model.definition import TGID
from kprobes.model.events import Batch, Column

_REMEMBERED = 1 << 14
_INFO = np.dtype(
    [("comm", "S16"), ("pid", "<i4"), ("cpu", "<u4"), ("context", "<u4"), ("tgid", "<i4")]
)
_KEY = f"V{_INFO.itemsize}"
_RUN = 4
"""Events of one task in a row, on average, from which on they are taken together."""


class ContextInfo(NamedTuple):
    """Where an event happened; ``tgid`` is 0 where its record does not have it."""

    comm: bytes
    pid: int
    cpu: int
    context: int
    tgid: int


class ContextTexts(dict[bytes, bytes]):
    """What is shown of a task, its CPU and its context, by their bytes; remembered, as it repeats.

    A key of bytes is made and found in half of the time of a tuple.
    """

    def __init__(self, show: Callable[[ContextInfo], bytes]) -> None:
        """Have them be shown by a function."""
        super().__init__()
        self._show = show

    def __missing__(self, key: bytes) -> bytes:
        """Return what is shown for the first time."""
        text = self[key] = self._show(ContextInfo(*np.frombuffer(key, _INFO).tolist()[0]))
        return text

    def of(self, batch: Batch) -> list[bytes]:
        """Return what is shown of each event."""
        if len(self) > _REMEMBERED:
            self.clear()
        keys = np.empty(len(batch), _INFO)
        keys["comm"], keys["pid"] = batch.comm, batch.pid
        keys["cpu"], keys["context"] = batch.cpu, batch.context
        keys["tgid"] = _tgids(batch)
        words = keys.view(np.uint64).reshape(len(keys), _INFO.itemsize // 8)
        # Events of a task follow each other: then one look-up is for all of them.
        begins = np.flatnonzero((words[1:] != words[:-1]).any(axis=1)) + 1
        if len(begins) > len(keys) // _RUN:
            return list(map(self.__getitem__, keys.view(_KEY).tolist()))
        begins = np.concatenate([[0], begins])[: len(keys)]
        found = np.empty(len(begins), object)
        found[:] = list(map(self.__getitem__, keys[begins].view(_KEY).tolist()))
        return found.repeat(np.diff(begins, append=len(keys))).tolist()


def _tgids(batch: Batch) -> Column | int:
    fields = zip(batch.layout.fields, batch.values, strict=True)
    return next((values for field, values in fields if field.name == TGID), 0)
