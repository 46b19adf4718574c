"""Which events have passed a limit, by what their hits took; and the thread that disables them."""

import threading
from collections.abc import Mapping

import numpy as np
import pytest

from kprobes.errors import GuestGoneError, TargetError, UsageError
from kprobes.limits import SAMPLE_S, LimitThread, LoadWindow
from kprobes.model.events import Loads
from kprobes.model.options import Limits

WAIT_S = 30


def loads(
    *hits: int, busy_s: tuple[float, ...] | None = None, site_s: tuple[float, ...] = ()
) -> Loads:
    if busy_s is None:
        return Loads(hits=np.array(hits, np.uint64))
    sites = np.array(site_s or [0.0] * len(hits))
    return Loads(hits=np.array(hits, np.uint64), code_s=np.array(busy_s), site_s=sites)


def passed(window: LoadWindow, *samples: Loads, step_s: float = SAMPLE_S) -> list[set[int]]:
    """Return what has passed a limit, sample by sample."""
    return [set(window.add(100 + n * step_s, each)) for n, each in enumerate(samples)]


@pytest.mark.parametrize("wrong", [0, -1, float("nan")])
def test_a_limit_that_nothing_can_keep_is_refused(wrong: float) -> None:
    for name in ("max_rate", "max_overhead", "max_pause_s"):
        with pytest.raises(UsageError, match="more than 0"):
            Limits(**{name: wrong})


def test_hits_are_counted_where_they_matter_only() -> None:
    assert not Limits().counts_hits
    assert not Limits(max_pause_s=0.01).counts_hits
    assert Limits(max_rate=5).counts_hits
    assert Limits(max_overhead=0.5).counts_hits


def test_a_burst_is_noticed_in_the_sample_after_it() -> None:
    window = LoadWindow(Limits(max_rate=10_000), cpus=2)

    assert passed(window, loads(7, 0), loads(497, 510), loads(990, 1020)) == [set(), {1}, {1}]


def test_what_was_hit_before_the_first_look_does_not_count() -> None:
    window = LoadWindow(Limits(max_rate=10), cpus=2)

    assert passed(window, loads(1000), loads(1010), loads(1010)) == [set(), set(), set()]


def test_a_few_hits_in_a_row_are_not_a_rate() -> None:
    window = LoadWindow(Limits(max_rate=100), cpus=2)

    # 99 hits in 50 ms, and no more in that second.
    assert passed(window, loads(0), *[loads(99)] * 30) == [set()] * 31


def test_a_low_limit_is_that_of_a_second() -> None:
    window = LoadWindow(Limits(max_rate=10), cpus=2)

    # One hit each 50 ms: the eleventh is one too many.
    found = passed(window, *(loads(n) for n in range(15)))
    assert found.index({0}) == 11

    slow = LoadWindow(Limits(max_rate=10), cpus=2)
    assert not any(passed(slow, *(loads(n // 3) for n in range(100))))


def test_an_event_that_has_come_meanwhile_has_begun_at_nothing() -> None:
    window = LoadWindow(Limits(max_rate=10_000), cpus=2)

    assert passed(window, loads(1), loads(1, 2, 600)) == [set(), {2}]


def test_the_dearest_are_disabled_until_the_rest_takes_less() -> None:
    window = LoadWindow(Limits(max_overhead=0.10), cpus=2)

    # Of 2 * 50 ms: 8 %, 1 %, 30 % and 7 %.
    found = passed(
        window,
        loads(0, 0, 0, 0, busy_s=(1.0, 1.0, 1.0, 1.0)),
        loads(1, 1, 1, 1, busy_s=(1.008, 1.001, 1.030, 1.007)),
    )
    assert found == [set(), {2, 0}]
    words = window.add(100 + 2 * SAMPLE_S, loads(1, 1, 1, 1, busy_s=(1.008, 1.001, 1.042, 1.007)))
    assert words == {
        2: "takes 12.00% of the CPUs' time, and all hits 12.00%, over the limit of 10.00%"
    }


def test_what_takes_no_more_than_the_limit_stays() -> None:
    window = LoadWindow(Limits(max_overhead=0.10), cpus=2)

    calm = loads(1, 1, busy_s=(0.004, 0.0059))
    assert passed(window, loads(0, 0, busy_s=(0.0, 0.0)), calm) == [set(), set()]


def test_a_hit_counts_by_what_it_takes_as_the_event_is_armed_now() -> None:
    window = LoadWindow(Limits(max_overhead=0.10), cpus=2)
    still = (0.0, 0.0)

    # A million hits of before count for nothing when their event becomes dearer.
    found = passed(
        window,
        loads(1_000_000, 0, busy_s=still, site_s=(50e-9, 0.0)),
        loads(1_000_000, 0, busy_s=still, site_s=(1230e-9, 0.0)),
        loads(1_010_000, 0, busy_s=still, site_s=(1230e-9, 0.0)),
    )
    assert found == [set(), set(), {0}]


def test_a_steady_rate_below_the_limit_is_none_above_it() -> None:
    window = LoadWindow(Limits(max_rate=10_000), cpus=2)

    found = passed(window, *(loads(int(9_700 * 0.053 * n)) for n in range(60)), step_s=0.053)
    assert not any(found)


def test_a_gap_between_samples_is_time_that_hits_had() -> None:
    window = LoadWindow(Limits(max_rate=1_000), cpus=2)

    assert not window.add(100.0, loads(0))
    assert not window.add(100.05, loads(20))
    assert not window.add(103.05, loads(1220))
    assert window.add(103.1, loads(1420))


def test_what_was_quiet_for_long_may_not_be_hit_more_often_for_that() -> None:
    window = LoadWindow(Limits(max_rate=1_000), cpus=2)
    # 75 hits in each sample are too few to tell a burst, and 1,500 a second.
    samples = [0] * 100 + [75 * n for n in range(30)]

    found = passed(window, *map(loads, samples))

    assert 100 < found.index({0}) < 120


def test_an_event_that_is_enabled_again_is_judged_by_what_comes_then() -> None:
    window = LoadWindow(Limits(max_rate=10), cpus=2)

    assert window.add(100.0, loads(0)) == {}
    assert set(window.add(100.05, loads(50))) == {0}
    assert not window.add(100.1, loads(50))
    assert not window.add(100.15, loads(58))
    assert set(window.add(100.2, loads(62))) == {0}


def test_events_may_become_fewer() -> None:
    window = LoadWindow(Limits(max_rate=10), cpus=2)

    assert passed(window, loads(0, 0, 0), loads(1), loads(1, 2, 3)) == [set(), set(), set()]


def test_a_clock_that_stands_is_no_time() -> None:
    window = LoadWindow(Limits(max_rate=10_000), cpus=2)

    assert passed(window, loads(0), loads(900), step_s=0) == [set(), set()]


class Table:
    """Events that are hit ever more often. Implements ``limits.Limited``."""

    def __init__(self, error: Exception | None = None) -> None:
        self.stopped: list[dict[int, str]] = []
        self.is_stopped = threading.Event()
        self.failed = threading.Event()
        self.error = error
        self._hits = 0

    def loads(self) -> Loads:
        self._hits += 0 if self.stopped else 1000
        return loads(0, self._hits)

    def stop_over_limit(self, events: Mapping[int, str]) -> list[str]:
        if self.error is not None:
            self.failed.set()
            raise self.error
        self.stopped.append(dict(events))
        self.is_stopped.set()
        return [f"event {number} {words}" for number, words in events.items()]


def test_the_thread_disables_and_tells() -> None:
    table, said = Table(), list[str]()
    thread = LimitThread(table, LoadWindow(Limits(max_rate=100), cpus=1), said.append)

    assert table.is_stopped.wait(WAIT_S)
    thread.stop()

    assert table.stopped[0].keys() == {1}
    assert said[0].startswith("event 1 is hit ")


def test_limits_that_are_not_kept_are_told_once_and_kept_again() -> None:
    told = threading.Event()
    said: list[str] = []

    def tell(words: str) -> None:
        said.append(words)
        told.set()

    table = Table(TargetError("no memory"))
    thread = LimitThread(table, LoadWindow(Limits(max_rate=100), cpus=1), tell)

    assert told.wait(WAIT_S)
    assert table.failed.wait(WAIT_S)
    table.error = None
    assert table.is_stopped.wait(WAIT_S)
    thread.stop()
    assert said[0] == "limits are not kept as long as this lasts: no memory"
    assert [words for words in said[1:] if not words.startswith("event 1 ")] == []


def test_in_a_guest_that_is_gone_no_limit_is_kept_and_nothing_told() -> None:
    said: list[str] = []
    table = Table(GuestGoneError("gone"))
    thread = LimitThread(table, LoadWindow(Limits(max_rate=100), cpus=1), said.append)

    assert table.failed.wait(WAIT_S)
    thread.stop()
    assert said == []
