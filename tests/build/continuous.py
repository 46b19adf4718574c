"""A loop in a guest that counts down call by call, and a recording in which no call is missing."""

import threading
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np

from kprobes.model.events import Counts, Events
from kprobes.open import GuestSession
from tests.build.dialect import DIALECTS
from tests.build.waiting import wait_until

CALL = "sched_get_priority_min"
TIMES = 200_000_000
COUNTED = {"amd64": "+112($arg1):u64", "arm64": "+0($arg1):u64"}
"""The first argument, in the pt_regs that a system call gets."""
_LEAST = {"amd64": 20_000, "arm64": 2_000}


class Continuous:
    """A sink that counts by how much more than one a task's numbers go down.

    Attributes:
        events: how many came.
        missing: how many did not.
        mistakes: where numbers go up, or stay.
    """

    def __init__(self) -> None:
        self.events = 0
        self.missing = 0
        self.mistakes: list[str] = []
        self._last: dict[tuple[str, int], int] = {}

    def write(self, events: Events) -> None:
        for number, batch in enumerate(events.batches):
            if batch.layout.event not in ("entered", "returned"):
                continue
            # In the order of time, whatever CPU a task was on.
            rows = events.row[events.batch == number]
            for pid in np.unique(batch.pid[rows]).tolist():
                values = batch.values[0][rows][batch.pid[rows] == pid].astype(np.int64)
                key = batch.layout.event, pid
                before = self._last.get(key, int(values[0]) + 1)
                steps = np.diff(np.concatenate(([before], values)))
                self.missing += int((-1 - steps).sum())
                if (steps >= 0).any():
                    at = int(np.flatnonzero(steps >= 0)[0])
                    self.mistakes.append(f"{key}: {steps[at]} at {values[at]}")
                self._last[key] = int(values[-1])
                self.events += len(values)

    def close(self) -> None:
        pass


@contextmanager
def recorded(session: GuestSession, arch: str) -> Generator[Continuous]:
    """Record what the loops do; at the end every call of theirs was recorded or counted."""
    function = f"{DIALECTS[arch].syscall}{CALL}"
    session.probe(
        f"p:entered {function} n={COUNTED[arch]}\nr:returned {function} n={COUNTED[arch]}"
    )
    sink, is_over = Continuous(), threading.Event()
    found: list[Counts] = []

    def stream() -> None:
        found.append(session.stream(sink, is_done=is_over.is_set))

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        assert wait_until(lambda: bool(session.driver.plans), 180) is not None
        yield sink
    finally:
        is_over.set()
        thread.join(180)
    (counts,) = found
    hits = {each.event: each for each in session.hits()}
    assert [hits[name].all_missed for name in ("entered", "returned")] == [0, 0]
    assert sink.mistakes == []
    # What a full ring loses is counted; of the other events, too.
    assert sink.missing <= counts.lost
    assert counts.lost or not sink.missing
    assert sink.events >= _LEAST[arch]
