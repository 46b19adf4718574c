"""Pages taken out of the kernel's rings on the side: no ring waits until they are decoded."""

import threading
from collections import deque

from kprobes.errors import KprobesError
from kprobes.model.host_pages import Pages
from kprobes.transport.tracefs_pages import Rings

_BUSY_S = 0.001
_IDLE_S = 0.02
_MOST_HELD = 1 << 30
"""Bytes of pages that wait to be decoded. Beyond, the rings fill, and the kernel counts."""


class Collector:
    """A thread that empties rings, all of them in every round, from the first ``take`` on."""

    def __init__(self, rings: Rings) -> None:
        self._rings = rings
        self._held: deque[Pages] = deque()
        self._lock = threading.Lock()
        self._has_looked = False
        self._error: KprobesError | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kprobes-pages", daemon=True)

    def take(self) -> list[Pages] | None:
        """Return what whole rounds have brought, None when none was done since the last time.

        Raises:
            TargetError: the rings are gone.
        """
        if self._thread.ident is None and not self._stopping.is_set():
            self._thread.start()
        with self._lock:
            if self._error is not None:
                raise self._error
            if not self._has_looked:
                return None
            self._has_looked = False
            taken = list(self._held)
            self._held.clear()
            return taken

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
        while not self._stopping.wait(pause):
            if sum(pages.data.nbytes for pages in list(self._held)) < _MOST_HELD:
                pause = _BUSY_S if self._look() else min(2 * pause, _IDLE_S)

    def _look(self) -> bool:
        try:
            found = list(self._rings.read())
        except KprobesError as error:
            self._error = error
            self._stopping.set()
            return False
        with self._lock:
            self._held += found
            self._has_looked = True
        return bool(found)
