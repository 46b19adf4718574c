"""Pages taken out of the kernel's rings on the side: no ring waits until they are decoded."""

import threading

from kprobes.errors import KprobesError
from kprobes.model.host_pages import Pages
from kprobes.transport.tracefs_pages import Rings

_BUSY_S = 0.001
_IDLE_S = 0.02
_ROOM = 64 << 20
"""Bytes of pages that may wait to be decoded. Beyond, the rings fill, and the kernel counts."""


class Collector:
    """A thread that empties rings, all of them in every round, from the first ``take`` on.

    That thread alone reads the rings, until ``stop`` has joined it; what it found, and how it
    ended, is under ``_lock``.
    """

    def __init__(self, rings: Rings, *, room: int = _ROOM) -> None:
        """Empty rings, until ``room`` bytes of pages wait to be taken."""
        self._rings = rings
        self._room = room
        self._lock = threading.Lock()
        self._held: list[Pages] = []
        self._has_looked = False
        self._error: KprobesError | None = None
        self._is_broken = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kprobes-pages", daemon=True)

    def take(self) -> list[Pages] | None:
        """Return what whole rounds have brought, None when none was done since the last time.

        Raises:
            TargetError: the rings are gone; all that was read before was taken.
        """
        if self._thread.ident is None and not self._stopping.is_set():
            self._thread.start()
        with self._lock:
            if self._has_looked:
                taken, self._held, self._has_looked = self._held, [], False
                return taken
            if self._error is not None:
                raise self._error
            if self._is_broken:
                raise KprobesError("reading the rings ended by an error of our own")
            return None

    def stop(self) -> None:
        """End the thread and look once more; ``take`` gives the rest."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._look()

    def _run(self) -> None:
        pause = _BUSY_S
        try:
            while not self._stopping.wait(pause):
                if self._has_room():
                    pause = _BUSY_S if self._look() else min(2 * pause, _IDLE_S)
        except BaseException:
            self._is_broken = True
            raise

    def _has_room(self) -> bool:
        with self._lock:
            return sum(pages.data.nbytes for pages in self._held) < self._room

    def _look(self) -> bool:
        found: list[Pages] = []
        error = None
        try:
            found.extend(self._rings.read())
        except KprobesError as e:
            error = e
            self._stopping.set()
        with self._lock:
            self._held += found
            self._has_looked = self._has_looked or error is None or bool(found)
            self._error = error
        return bool(found)
