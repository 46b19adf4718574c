"""Events that are kept of a trace until the guest crashes, and the log that is shown then."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
from msgspec.structs import replace

from kprobes.cli.until_panic import EndOfLog, LastEvents
from kprobes.errors import TargetError
from kprobes.image.log import LogRecord
from kprobes.model.events import NO_EVENTS, Events
from kprobes.ring.merge import in_order
from tests.build.events import Row, make_batch, make_events
from tests.build.ring import make_layout

if TYPE_CHECKING:
    from kprobes.open import AnySession

LAYOUT = make_layout(1, event="a")


class Kept:
    def __init__(self) -> None:
        self.times: list[int] = []

    def write(self, events: Events) -> None:
        for batch in events.batches:
            self.times += batch.ts.tolist()

    def close(self) -> None:
        pass


def events(*times: int) -> Events:
    return make_events([make_batch(LAYOUT, [Row(ts=ts) for ts in times])])


def test_the_last_events_are_passed_on_at_the_end_and_only_then() -> None:
    kept = Kept()
    last = LastEvents(kept, most=10 * events(0).nbytes + 10 * 2048)
    for ts in range(100):
        last.write(events(ts))
        assert kept.times == []

    last.pass_on()
    last.pass_on()

    assert kept.times == list(range(90, 100))


def test_the_latest_event_is_kept_however_little_is_to_be() -> None:
    kept = Kept()
    last = LastEvents(kept, most=1)
    last.write(events(1, 2))
    last.write(events(3, 4, 5))

    last.pass_on()

    assert kept.times == [5]


def test_the_last_of_a_large_drain_are_kept_when_few_come_after_it() -> None:
    other = make_layout(2, event="b")
    even = make_batch(LAYOUT, [Row(ts=ts) for ts in range(0, 60_000, 2)])
    odd = make_batch(other, [Row(ts=ts) for ts in range(1, 60_000, 2)])
    kept = Kept()
    last = LastEvents(kept, most=256 << 10)
    last.write(in_order([even, odd]))
    last.write(events(60_000))

    last.pass_on()

    times = sorted(kept.times)
    assert times == list(range(times[0], 60_001))
    assert 1000 < len(times) < 10_000


def test_a_drain_may_have_brought_nothing() -> None:
    kept = Kept()
    last = LastEvents(kept, most=1000)
    last.write(events(1))
    last.write(NO_EVENTS)

    last.pass_on()

    assert kept.times == [1]


def test_few_events_do_not_keep_all_that_was_drained_with_them() -> None:
    kept = Kept()
    last = LastEvents(kept, most=100_000)
    for ts in range(20):
        drained = np.zeros(1_000_000, np.uint64)
        drained[7] = ts
        last.write(make_events([replace(make_batch(LAYOUT, [Row()]), ts=drained[7:8])]))

    last.pass_on()
    assert kept.times == list(range(20))


def test_large_drains_count_with_all_that_they_keep() -> None:
    kept = Kept()
    last = LastEvents(kept, most=100_000)
    last.write(events(*range(5000)))
    last.write(events(*range(5000, 10_000)))

    last.pass_on()
    assert kept.times == list(range(kept.times[0], 10_000))
    assert 1000 < len(kept.times) < 5000


class Session(SimpleNamespace):
    """Has a log, of which the first messages are old."""

    def __init__(self, records: Sequence[LogRecord], why: str = "") -> None:
        super().__init__(live=self)
        self.records, self.why = list(records), why

    def log(self, since: int = 0, *, most: int = 1000) -> list[LogRecord]:
        if self.why:
            raise TargetError(self.why)
        return [each for each in self.records if each.seq >= since][-most:]


def record(seq: int, text: bytes) -> LogRecord:
    return LogRecord(seq=seq, ts_ns=seq * 1_000_000_000, level=0, text=text)


def end_of_log(session: Session) -> EndOfLog:
    return EndOfLog(cast("AnySession", session))


def test_what_was_logged_since_is_shown(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    session = Session([record(7, b"booted")])
    end = end_of_log(session)
    session.records += [record(8, b"BUG: one\nmore"), record(9, b"Kernel panic")]

    end.show()

    assert capfdbinary.readouterr().err.splitlines() == [
        b"[    8.000000] BUG: one",
        b"[    8.000000] more",
        b"[    9.000000] Kernel panic",
    ]


def test_what_was_overwritten_meanwhile_is_counted(capfd: pytest.CaptureFixture[str]) -> None:
    session = Session([])
    end = end_of_log(session)
    session.records += [record(3, b"late")]

    end.show()

    assert capfd.readouterr().err == "... 3 messages before these\n[    3.000000] late\n"


@pytest.mark.parametrize("is_early", [True, False])
def test_a_log_that_cannot_be_read_is_told(
    is_early: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    session = Session([record(1, b"a")])
    if is_early:
        session.why = "it has no types"
    end = end_of_log(session)
    session.why = "it has no types"

    end.show()

    assert capfd.readouterr().err == "kprobe: it has no types\n"
