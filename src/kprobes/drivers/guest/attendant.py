"""Whoever answers vCPUs that wait for Python: a thread that looks at the mailbox.

It looks all the time as long as hits come, then with naps between looks, and after a while with
longer ones. One vCPU is served at a time. A hit that a handler causes itself, or that comes while
one is slow, waits until its own deadline, goes on, and is counted.
"""

import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from kprobes.drivers.guest.mailbox import Mailbox
from kprobes.drivers.turns import sleep_exactly, soon
from kprobes.errors import KprobesError
from kprobes.model.upcall import Question, Waiting

_SPIN_S = 0.00005
"""Where every vCPU that waits has a CPU of the host's, whoever only spins gets a turn of
milliseconds taken away from it; whoever has slept is let in at once."""
_BUSY_S = 0.002
_NAP_S, _REST_S = 0.000001, 0.0002
_QUIET_S = 0.005
"""Without a question for so long, nobody is on the way to one: sites were put back before."""
_LEAVE_S = 1.0
_CHECK_S = 0.001
"""Between looks whether the mailbox is still ours."""


class Attendant:
    """Answers some questions until it is stopped.

    Attributes:
        served: hits that were answered.
        error: what ended it, or None: the guest is gone.
    """

    def __init__(self, mailbox: Mailbox, questions: Mapping[int, Question]) -> None:
        """Start: from now on vCPUs wait."""
        self.served = 0
        self.error: KprobesError | None = None
        self._mailbox = mailbox
        self._questions = questions
        self._last = self._checked = time.monotonic()
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._is_left = False
        mailbox.open()
        self._thread = threading.Thread(target=self._run, name="kprobes-attendant", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Answer who still asks, and then nobody any more; no site may lead here.

        A handler that does not end is left behind: what it answers is not heard.
        """
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_LEAVE_S)
        self._leave()

    def _run(self) -> None:
        try:
            with soon():
                sleep_exactly()
                while not self._is_done():
                    self._look()
        except KprobesError as error:
            self.error = error
        finally:
            self._leave()

    def _leave(self) -> None:
        with self._lock:
            if not self._is_left:
                self._is_left = True
                with suppress(KprobesError):
                    self._mailbox.close()

    def _is_done(self) -> bool:
        is_quiet = time.monotonic() > self._last + _QUIET_S
        return self._is_left or (self._stopping.is_set() and is_quiet)

    def _look(self) -> None:
        if time.monotonic() > self._checked + _CHECK_S:
            self._mailbox.check()
            self._checked = time.monotonic()
        self._mailbox.come_back()
        for slot in self._mailbox.asking():
            self._serve(slot)
            self._last = time.monotonic()
        quiet_s = time.monotonic() - self._last
        if quiet_s > _SPIN_S:
            time.sleep(_NAP_S if quiet_s < _BUSY_S else _REST_S)

    def _serve(self, slot: int) -> None:
        waiting = self._mailbox.read(slot)
        if waiting is None:
            return
        question, stack = self._questions.get(waiting.upcall), waiting.registers["sp"]
        try:
            if question is not None:
                question.serve(waiting)
        finally:
            # Below the stack are the words that it goes on with.
            waiting.registers["sp"] = max(waiting.registers["sp"], stack)
            self._answer(slot, waiting)

    def _answer(self, slot: int, waiting: Waiting) -> None:
        with self._lock:
            if not self._is_left:
                self._mailbox.answer(slot, waiting)
                self.served += 1
