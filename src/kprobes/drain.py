"""Draining on the side: a thread that takes records out of the rings while others format them.

Nothing but a ring's size stands between a burst of hits and lost records, so taking bytes out
never waits for whoever prints them.

What a recording counted, by probe.

How soon a thread of ours gets its turn.

With Python's usual 5 ms a single drain, which gives the lock up for every copy, took up to 105 ms,
and rings ran over.
"""

import ctypes
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

from kprobes.errors import KprobesError
from kprobes.lang.listing import place_as_given
from kprobes.model.events import Counts, Events, Hits
from kprobes.model.resolved import Resolved
from kprobes.ports import Sink

_TICK_S = 0.05


def hits_of(
    probes: Mapping[int, Resolved], counts: Counts, over_limit: Collection[int]
) -> list[Hits]:
    """Return every probe's numbers.

    Args:
        probes: by event id, those of modules that are gone included.
        counts: of the recording.
        over_limit: the ids of events that were disabled, as they have passed a limit.
    """
    return [
        _hits(probes[number], counts, is_over_limit=number in over_limit)
        for number in sorted(probes)
    ]


def _hits(probe: Resolved, counts: Counts, *, is_over_limit: bool) -> Hits:
    number = probe.layout.event_id
    return Hits(
        event=probe.layout.event,
        event_id=number,
        function=place_as_given(probe.definition),
        recorded=counts.recorded.get(number, 0),
        missed=counts.missed.get(number, 0),
        nmissed=counts.nmissed.get(number, 0),
        is_over_limit=is_over_limit,
    )


_SWITCH_S = 0.0005
_PR_SET_TIMERSLACK = 29
_lock = threading.Lock()
_usual: list[float] = []


@contextmanager
def short_switch_interval() -> Generator[None]:
    """Let threads take turns quickly inside; the last one who leaves puts things back."""
    with _lock:
        _usual.append(sys.getswitchinterval())
        sys.setswitchinterval(min(_SWITCH_S, _usual[0]))
    try:
        yield
    finally:
        with _lock:
            first = _usual[0]
            _usual.pop()
            if not _usual:
                sys.setswitchinterval(first)


def sleep_exactly() -> None:
    """Have this thread's sleeps last what they are told to: by default Linux adds 50 us."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


_BUSY_S = 0.001
_IDLE_S = 0.02
ROOM = 64 << 20
"""Bytes of events that may wait for whoever writes them."""


def nothing() -> None:
    """Do nothing between two looks."""


class Drain(Protocol):
    """Where a recording's events come from."""

    def take(self, timeout_s: float) -> Events | None:
        """Return the next events, or None when none came in time.

        Raises:
            KprobesError: what went wrong while draining.
        """
        ...

    def stop(self) -> None:
        """Drain no more; what was taken can still be had with ``take``."""
        ...


class Recorder(Protocol):
    """What reads rings."""

    def drain(self) -> Events:
        """Return what is safe to show of all that was recorded so far."""
        ...


def timer(timeout_s: float | None) -> Callable[[], bool]:
    """Return what tells whether so many seconds have passed from now on; never, with None."""
    until = math.inf if timeout_s is None else time.monotonic() + timeout_s
    return lambda: time.monotonic() >= until


def batches_of(
    drain: Drain, check: Callable[[], None], is_done: Callable[[], bool]
) -> Generator[Events]:
    """Yield events as they come.

    Args:
        drain: that they come through.
        check: raises what ended the recording, if something did; called often.
        is_done: whether it is over; likewise.
    """
    while not is_done():
        events = drain.take(_TICK_S)
        if events is not None:
            yield events
        check()


def finish(
    drain: Drain, sink: Sink, end: Callable[[], None], rest: Callable[[], Iterable[Events]]
) -> None:
    """Write what was recorded and not taken to a sink, at the end of a recording.

    Args:
        drain: that it comes through.
        sink: where it goes.
        end: disarms; nobody drains meanwhile.
        rest: what is left in the rings then.
    """
    drain.stop()
    try:
        end()
    finally:
        while (events := drain.take(0)) is not None:
            sink.write(events)
        for events in rest():
            sink.write(events)


class DrainThread:
    """Drains a recorder in a thread of its own until it is stopped.

    That thread alone drains; what it found, and how it ended, is under ``_lock``.
    """

    def __init__(
        self,
        recorder: Recorder,
        between: Sequence[Callable[[], None]] = (),
        at_end: Callable[[], None] = nothing,
        *,
        room: float = ROOM,
    ) -> None:
        """Start.

        Args:
            recorder: what is drained.
            between: are called after each look, in the pump's thread.
            at_end: is called after the last look.
            room: bytes of events that may wait to be taken. When they fill it nothing is drained:
                the rings fill, and what does not fit there is lost and counted there.
        """
        self._recorder = recorder
        self._between, self._at_end = between, at_end
        self._room = room
        self._lock = threading.Condition()
        self._ready: deque[tuple[Events, int]] = deque()
        self._waiting = 0
        self._error: KprobesError | None = None
        self._is_over = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kprobes-pump", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Bytes of events that wait to be taken."""
        with self._lock:
            return self._waiting

    def take(self, timeout_s: float) -> Events | None:
        """Return the next events, or None when none came in time.

        Raises:
            KprobesError: what went wrong while draining.
        """
        with self._lock:
            self._lock.wait_for(lambda: self._ready or self._is_over, timeout_s)
            if self._ready:
                events, size = self._ready.popleft()
                self._waiting -= size
                return events
            if self._error is not None:
                raise self._error
            if self._is_over and not self._stopping.is_set():
                raise KprobesError(
                    "draining ended by an error of our own; what came before is whole"
                )
            return None

    def stop(self) -> None:
        """End the thread; what it took can still be had with ``take``."""
        self._stopping.set()
        self._thread.join()
        self._at_end()

    def _run(self) -> None:
        try:
            # Whoever formats must let us have Python's lock soon.
            with short_switch_interval():
                self._drain()
        except KprobesError as error:
            self._error = error
        finally:
            with self._lock:
                self._is_over = True
                self._lock.notify_all()

    def _drain(self) -> None:
        pause = _BUSY_S
        while not self._stopping.wait(pause):
            if self.waiting >= self._room:
                continue
            events = self._recorder.drain()
            pause = _BUSY_S if len(events) else min(2 * pause, _IDLE_S)
            if len(events):
                self._add(events)
            for each in self._between:
                each()

    def _add(self, events: Events) -> None:
        size = events.nbytes
        with self._lock:
            self._ready.append((events, size))
            self._waiting += size
            self._lock.notify_all()
