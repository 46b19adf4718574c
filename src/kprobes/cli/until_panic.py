"""The last events and the end of the kernel's log, for ``kprobe trace --until-panic``."""

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from kprobes.cli.terminal import counted, print_bytes, print_message
from kprobes.errors import TargetError
from kprobes.model.events import Batch, Events
from kprobes.ports import Sink

if TYPE_CHECKING:
    from kprobes.open import AnySession

_FEW = 1000
"""Events that are copied, as they are few of all that was drained with them."""
_PARTS = 8
"""At least so many parts make up what is kept: a single drain may bring more than that."""
_OF_ONE = 2048
"""Bytes of each drain's events besides their columns, about."""


class LastEvents:
    """Keeps the last events, and passes them on at the end. Implements ``ports.Sink``."""

    def __init__(self, sink: Sink, *, most: int) -> None:
        """Keep about ``most`` bytes of events, the latest in any case."""
        self._sink, self._most = sink, most
        self._kept: deque[tuple[Events, int]] = deque()
        self._size = 0

    def write(self, events: Events) -> None:
        """Keep events, and let the oldest go."""
        for part in _parts(events, self._most // _PARTS):
            size = part.nbytes + _OF_ONE
            self._kept.append((part, size))
            self._size += size
            while self._size > self._most and len(self._kept) > 1:
                self._size -= self._kept.popleft()[1]

    def pass_on(self) -> None:
        """Write what is kept, and keep it no more."""
        while self._kept:
            self._sink.write(self._kept.popleft()[0])
        self._size = 0

    def close(self) -> None:
        """Do nothing: who closes what comes after it passes on first."""


def _parts(events: Events, most: int) -> Iterator[Events]:
    # Copies, where the whole keeps more than that, or the bytes of much else.
    count, size = len(events), events.nbytes
    if count >= _FEW and size <= most:
        yield events
        return
    step = max(count if size <= most else count * most // size, 1)
    for start in range(0, count, step):
        yield _copied(events, slice(start, start + step))


def _copied(events: Events, own: slice) -> Events:
    which, row = events.batch[own], events.row[own].copy()
    batches: list[Batch] = []
    for index, batch in enumerate(events.batches):
        is_its = which == index
        batches.append(batch.take(row[is_its]))
        row[is_its] = np.arange(len(batches[-1]))
    return replace(events, batches=tuple(batches), batch=which.copy(), row=row)


class EndOfLog:
    """The kernel's log from some moment on."""

    def __init__(self, session: "AnySession") -> None:
        """Begin with what is logged from now on; it may be that nothing can be read."""
        self._session = session
        self._first = 0
        self._why = ""
        try:
            self._first = session.live.log(most=1)[-1].seq + 1
        except IndexError:
            pass
        except TargetError as error:
            self._why = str(error)

    def show(self) -> None:
        """Print it as ``dmesg`` does, or why it cannot be read."""
        try:
            records = () if self._why else self._session.log(self._first)
        except TargetError as error:
            self._why = str(error)
            records = ()
        if self._why:
            print_message(f"kprobe: {self._why}")
            return
        earlier = records[0].seq - self._first if records else 0
        if earlier:
            print_message(f"... {counted(earlier, 'message')} before these")
        print_bytes(b"\n".join(line for each in records for line in each.lines()))
