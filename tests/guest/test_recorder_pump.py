"""Draining on the side: in order, to the end, and errors come through."""

import sys
import threading
import time
from collections import deque

import pytest

from kprobes.drain import DrainThread
from kprobes.errors import KprobesError, RingError, TargetError
from kprobes.model.events import Events
from tests.build.events import Row, make_batch, make_events
from tests.build.ring import make_layout
from tests.build.turns import short_switch_interval
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


class _Yielding(Events, frozen=True):
    """Events that let another thread have its turn whenever they are counted."""

    def __len__(self) -> int:
        time.sleep(0)
        return super().__len__()


def _events(ts: int) -> Events:
    return make_events([make_batch(LAYOUT, [Row(ts=ts)])])


def _take_all(drain: DrainThread, count: int) -> list[int]:
    found: list[int] = []

    def are_all_there() -> bool:
        events = drain.take(0.1)
        found.extend(events.batches[0].ts.tolist() if events is not None else [])
        return len(found) >= count

    assert becomes_true(are_all_there)
    return found


def test_events_come_in_order_from_a_thread_of_their_own() -> None:
    recorder = FakeRecorder()
    recorder.todo.extend(_events(ts) for ts in range(20))

    drain = DrainThread(recorder)
    found = _take_all(drain, 20)
    drain.stop()

    assert found == list(range(20))
    assert threading.get_ident() not in recorder.threads


def test_what_was_taken_before_the_end_can_still_be_had() -> None:
    recorder = FakeRecorder()
    recorder.todo.extend(_events(ts) for ts in range(3))
    drain = DrainThread(recorder)
    assert becomes_true(lambda: not recorder.todo)

    drain.stop()

    assert _take_all(drain, 3) == [0, 1, 2]
    assert drain.take(0) is None


def test_nothing_is_nothing() -> None:
    drain = DrainThread(FakeRecorder())

    assert drain.take(0.01) is None
    drain.stop()


@pytest.mark.parametrize("error", [TargetError("gone"), RingError("a head")])
def test_an_error_comes_after_all_events(error: Exception) -> None:
    recorder = FakeRecorder(error)
    recorder.todo.append(_events(7))
    drain = DrainThread(recorder)

    assert _take_all(drain, 1) == [7]
    with pytest.raises(type(error)):
        _take_all(drain, 1)
    drain.stop()


def test_threads_take_turns_sooner_only_while_there_is_a_pump() -> None:
    before = sys.getswitchinterval()
    drain = DrainThread(FakeRecorder())
    was_sooner = becomes_true(lambda: sys.getswitchinterval() < before)

    drain.stop()

    assert was_sooner
    assert sys.getswitchinterval() == before


def test_nothing_is_lost_between_threads_that_take_turns_all_the_time() -> None:
    recorder = FakeRecorder(TargetError("gone"))
    for plain in map(_events, range(500)):
        recorder.todo.append(_Yielding(batches=plain.batches, batch=plain.batch, row=plain.row))
    with short_switch_interval():
        drain = DrainThread(recorder)
        # A backlog first: it is looked through while it is taken.
        assert becomes_true(lambda: len(recorder.todo) <= 250)
        found = _take_all(drain, 500)
        with pytest.raises(TargetError):
            _take_all(drain, 1)
    drain.stop()

    assert found == list(range(500))


def test_no_more_bytes_wait_than_there_is_room_for() -> None:
    recorder = FakeRecorder(TargetError("drained to its end"))
    recorder.todo.extend(_events(ts) for ts in range(10))
    room = 3 * _events(0).nbytes
    most = 0

    drain = DrainThread(recorder, room=room)
    for ts in range(10):
        assert _take_all(drain, 1) == [ts]
        most = max(most, drain.waiting)
        threading.Event().wait(0.005)
    drain.stop()

    assert 0 < most <= room


def test_what_was_drained_before_something_else_failed_can_be_had() -> None:
    recorder = FakeRecorder()
    recorder.todo.append(_events(7))

    def fail() -> None:
        raise TargetError("the guest is gone")

    drain = DrainThread(recorder, [fail])

    assert _take_all(drain, 1) == [7]
    with pytest.raises(TargetError):
        _take_all(drain, 1)
    drain.stop()


def test_a_bug_while_draining_is_told_after_what_came_before() -> None:
    recorder = FakeRecorder(ZeroDivisionError("a bug"))
    recorder.todo.append(_events(7))
    told: list[threading.ExceptHookArgs] = []
    before, threading.excepthook = threading.excepthook, told.append
    try:
        drain = DrainThread(recorder)

        assert _take_all(drain, 1) == [7]
        with pytest.raises(KprobesError, match="error of our own"):
            _take_all(drain, 1)
        drain.stop()
    finally:
        threading.excepthook = before

    assert [args.exc_type for args in told] == [ZeroDivisionError]
