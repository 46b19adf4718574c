"""Draining on the side: in order, to the end, and errors come through."""

import sys
import threading
from collections import deque
from typing import cast

import pytest

from kprobes.drivers.guest.pump import ThreadPump
from kprobes.drivers.guest.recorder import Recorder
from kprobes.errors import RingError, TargetError
from kprobes.model.batch import Events
from tests.build.events import Row, make_batch, make_events
from tests.build.ring import make_layout
from tests.build.waiting import becomes_true

LAYOUT = make_layout(1)


class FakeRecorder:
    """Gives what a test puts in, then nothing, then an error if there is one."""

    def __init__(self, error: Exception | None = None) -> None:
        self.todo: deque[Events] = deque()
        self.error = error
        self.threads: set[int] = set()

    def drain(self) -> Events:
        self.threads.add(threading.get_ident())
        if self.todo:
            return self.todo.popleft()
        if self.error is not None:
            raise self.error
        return make_events([])


def _events(ts: int) -> Events:
    return make_events([make_batch(LAYOUT, [Row(ts=ts)])])


def _take_all(pump: ThreadPump, count: int) -> list[int]:
    found: list[int] = []

    def are_all_there() -> bool:
        events = pump.take(0.1)
        found.extend(events.batches[0].ts.tolist() if events is not None else [])
        return len(found) >= count

    assert becomes_true(are_all_there)
    return found


def test_events_come_in_order_from_a_thread_of_their_own() -> None:
    recorder = FakeRecorder()
    recorder.todo.extend(_events(ts) for ts in range(20))

    pump = ThreadPump(cast("Recorder", recorder))
    found = _take_all(pump, 20)
    pump.stop()

    assert found == list(range(20))
    assert threading.get_ident() not in recorder.threads


def test_what_was_taken_before_the_end_can_still_be_had() -> None:
    recorder = FakeRecorder()
    recorder.todo.extend(_events(ts) for ts in range(3))
    pump = ThreadPump(cast("Recorder", recorder))
    assert becomes_true(lambda: not recorder.todo)

    pump.stop()

    assert _take_all(pump, 3) == [0, 1, 2]
    assert pump.take(0) is None


def test_nothing_is_nothing() -> None:
    pump = ThreadPump(cast("Recorder", FakeRecorder()))

    assert pump.take(0.01) is None
    pump.stop()


@pytest.mark.parametrize("error", [TargetError("gone"), RingError("a head")])
def test_an_error_comes_after_all_events(error: Exception) -> None:
    recorder = FakeRecorder(error)
    recorder.todo.append(_events(7))
    pump = ThreadPump(cast("Recorder", recorder))

    assert _take_all(pump, 1) == [7]
    with pytest.raises(type(error)):
        _take_all(pump, 1)
    pump.stop()


def test_threads_take_turns_sooner_only_while_there_is_a_pump() -> None:
    before = sys.getswitchinterval()
    pump = ThreadPump(cast("Recorder", FakeRecorder()))
    during = sys.getswitchinterval()

    pump.stop()

    assert during < before
    assert sys.getswitchinterval() == before
