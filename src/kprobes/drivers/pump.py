"""Draining on the side: a thread that takes records out of the rings while others format them.

Nothing but a ring's size stands between a burst of hits and lost records, so taking bytes out
never waits for whoever prints them.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from kprobes.drivers.turns import soon
from kprobes.errors import KprobesError
from kprobes.model.batch import Events

_BUSY_S = 0.001
_IDLE_S = 0.02
_MOST_READY = 20_000_000


def nothing() -> None:
    """Do nothing between two looks."""


class Pump(Protocol):
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


class ThreadPump:
    """Drains a recorder in a thread of its own until it is stopped."""

    def __init__(self, recorder: Recorder, between: Callable[[], None] = nothing) -> None:
        self._recorder = recorder
        self._between = between
        self._ready: deque[Events] = deque()
        self._error: KprobesError | None = None
        self._arrived = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kprobes-pump", daemon=True)
        self._thread.start()

    def take(self, timeout_s: float) -> Events | None:
        """Return the next events, or None when none came in time.

        Raises:
            KprobesError: what went wrong while draining.
        """
        if not self._ready:
            self._arrived.wait(timeout_s)
            self._arrived.clear()
        if self._ready:
            return self._ready.popleft()
        if self._error is not None:
            raise self._error
        if not self._thread.is_alive() and not self._stopping.is_set():
            raise KprobesError("draining ended by an error of our own; what came before is whole")
        return None

    def stop(self) -> None:
        """End the thread; what it took can still be had with ``take``."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        # Whoever formats must let us have Python's lock soon.
        with soon():
            self._drain()

    def _drain(self) -> None:
        pause = _BUSY_S
        while not self._stopping.wait(pause):
            if sum(map(len, self._ready)) > _MOST_READY:
                # Whoever prints is too slow: the rings fill, and count what they drop.
                continue
            try:
                events = self._recorder.drain()
                self._between()
            except KprobesError as error:
                self._error = error
                self._arrived.set()
                return
            pause = _BUSY_S if len(events) else min(2 * pause, _IDLE_S)
            if len(events):
                self._ready.append(events)
                self._arrived.set()
