"""The last events and the end of the kernel's log, for ``kprobe trace --until-panic``."""

from collections import deque
from typing import TYPE_CHECKING

import numpy as np
from msgspec.structs import replace

from kprobes.cli.terminal import counted, print_bytes, print_message
from kprobes.errors import TargetError
from kprobes.model.events import Events
from kprobes.ports import Sink

if TYPE_CHECKING:
    from kprobes.open import AnySession

_FEW = 1000
"""Events that are copied, as they are few of all that was drained with them."""
_OF_ONE = 2048
"""Bytes of each drain's events besides their columns, about."""


class LastEvents:
    """Keeps the last events, and passes them on at the end. Implements ``ports.Sink``."""

    def __init__(self, sink: Sink, *, most: int) -> None:
        """Keep about ``most`` bytes of events, the latest drain's in any case."""
        self._sink, self._most = sink, most
        self._kept: deque[tuple[Events, int]] = deque()
        self._size = 0

    def write(self, events: Events) -> None:
        """Keep events, and let the oldest go."""
        if len(events) < _FEW:
            copies = tuple(batch.take(np.arange(len(batch))) for batch in events.batches)
            events = replace(events, batches=copies)
        size = events.nbytes + _OF_ONE
        self._kept.append((events, size))
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
