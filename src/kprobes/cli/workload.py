"""The command that a trace runs in the guest: its end ends the trace."""

import shlex
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from kprobes.errors import GuestGoneError, KprobesError
from kprobes.transport.agent import Command, Finished

if TYPE_CHECKING:
    from kprobes.transport.agent import Job

_KILL_S = 5.0


class Workload:
    """A command in a guest that we booted, waited for on the side."""

    def __init__(self, start: "Callable[[Command], Job]", words: Sequence[str]) -> None:
        """Start nothing yet.

        Args:
            start: starts a command in the guest.
            words: of the command; a single one is a line for the guest's shell.
        """
        self._start = start
        self._command = words[0] if len(words) == 1 else list(words)
        self._running: Job | None = None
        self._finished: Finished | None = None
        self._error: KprobesError | None = None
        self._was_killed = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._wait, name="kprobes-workload", daemon=True)

    @property
    def is_over(self) -> bool:
        """Whether it has ended, or can no longer be waited for."""
        return self._is_over.is_set()

    @property
    def status(self) -> int:
        """As the shell counts it; 0 where it has not ended by itself."""
        return 0 if self._finished is None or self._was_killed else self._finished.status

    def start(self) -> None:
        """Start it in the guest.

        Raises:
            TargetError: the guest did not.
        """
        self._running = self._start(self._command)
        self._thread.start()

    def finish(self) -> Finished | None:
        """Return how it ended, killing it if it has not; None when it cannot be known.

        Raises:
            KprobesError: the guest talks nonsense, or is gone.
        """
        if self._running is None:
            return None
        if not self.is_over:
            self._was_killed = True
            with suppress(GuestGoneError):
                self._running.kill()
        self._is_over.wait(_KILL_S)
        if self._error is not None:
            raise self._error
        return self._finished

    def ending(self, finished: Finished | None) -> str:
        """Return in words how it ended."""
        text = self._command if isinstance(self._command, str) else shlex.join(self._command)
        if finished is None:
            return f"{text}: did not end with the trace"
        if self._was_killed:
            return f"{text}: killed, because the trace was over"
        if finished.status > 128:
            return f"{text}: ended by signal {finished.status - 128}"
        return f"{text}: exit status {finished.status}"

    def _wait(self) -> None:
        assert self._running is not None
        try:
            self._finished = self._running.wait()
        except KprobesError as error:
            self._error = error
        finally:
            self._is_over.set()
