"""One event with its values by name, for programs that take them one by one."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kprobes.model.batch import Batch, Events


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One hit of a probe.

    Attributes:
        name, group: of its event.
        function: that was hit.
        ts: nanoseconds of the kernel's trace clock.
        cpu: that it happened on.
        pid, comm: of the task.
        args: values by name: numbers, ``str``, or lists of them; None for one that could not be
            read.
        caller: the address that a return probe's function returned to, else None.
    """

    name: str
    group: str
    function: str
    ts: int
    cpu: int
    pid: int
    comm: str
    args: dict[str, Any]
    caller: int | None = None

    def __getitem__(self, name: str) -> Any:
        """Return one value."""
        return self.args[name]


def each_event(events: Events, name: str | None = None) -> Iterator[Event]:
    """Yield events one by one, oldest first; those of one name if it is given."""
    batches: list[int] = events.batch.tolist()
    rows: list[int] = events.row.tolist()
    for batch, row in zip(batches, rows, strict=True):
        if name in (None, events.batches[batch].layout.event):
            yield _event(events.batches[batch], row)


def _event(batch: Batch, row: int) -> Event:
    layout = batch.layout
    return Event(
        name=layout.event,
        group=layout.group,
        function=layout.function,
        ts=int(batch.ts[row]),
        cpu=int(batch.cpu[row]),
        pid=int(batch.pid[row]),
        comm=_text(bytes(batch.comm[row])),
        args={field.name: _value(batch, i, row) for i, field in enumerate(layout.fields)},
        caller=None if batch.caller is None else int(batch.caller[row]),
    )


def _value(batch: Batch, i: int, row: int) -> Any:
    value, mask = batch.values[i][row], batch.faulted[i]
    if mask is not None and mask.ndim == 1 and mask[row]:
        return None
    if isinstance(value, np.ndarray):
        elements: list[Any] = value.tolist()
        return [_plain(each) for each in elements]
    return _plain(value.item() if isinstance(value, np.generic) else value)


def _plain(value: Any) -> Any:
    return _text(value) if isinstance(value, bytes) else value


def _text(value: bytes) -> str:
    return value.decode(errors="backslashreplace")
