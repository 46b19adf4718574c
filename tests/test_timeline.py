"""Clocks of several recordings, and their events in one order."""

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kprobes.model.events import Events, each_event
from kprobes.timeline import Bounds, RealTime, Shift, in_one_order, shift_between, shifted
from tests.build.events import Row, make_batch, make_events
from tests.build.ring import make_layout

S = 10**9
BEGAN = 1_700_000_000 * S
"""A date."""


def looked(clock_at: Callable[[int], int], *, seed: int, looks: int = 2000) -> RealTime:
    """Return what looks at hits tell of a clock that is a function of real time."""
    rng, bounds = random.Random(seed), Bounds()
    since = now = BEGAN
    for _ in range(looks):
        until = now + rng.randrange(1_000_000, 20_000_000)
        hits = sorted(rng.randrange(now, until) for _ in range(rng.randrange(3)))
        if hits:
            bounds.add(clock_at(hits[0]), clock_at(hits[-1]), since, until)
        since, now = now, until
    found = bounds.real_time()
    assert found is not None
    return found


@pytest.mark.parametrize("ahead", [0, 5 * S, -3 * S, 12_345_678])
@pytest.mark.parametrize("drift", [0, 20e-6, -50e-6])
def test_a_moment_is_found_within_what_is_said(ahead: int, drift: float) -> None:
    def first_clock(real: int) -> int:
        return real - BEGAN + 100 * S

    def other_clock(real: int) -> int:
        return real - BEGAN + 100 * S + ahead + int((real - BEGAN) * drift)

    to, source = looked(first_clock, seed=1), looked(other_clock, seed=2)
    moments = [BEGAN + at * S // 2 for at in range(1, 40)]

    found = Shift(source=source, to=to).apply(np.array([*map(other_clock, moments)], np.uint64))

    wrong = np.abs(found.astype(np.int64) - np.array([*map(first_clock, moments)]))
    error = Shift(source=source, to=to).error
    assert wrong.max() <= error < 5_000_000


def test_one_clock_is_not_shifted() -> None:
    to, source = (looked(lambda real: real - BEGAN, seed=seed) for seed in (3, 4))
    other = looked(lambda real: real - BEGAN + S, seed=5)

    assert shift_between(source, to) is None
    shift = shift_between(other, to)
    assert shift is not None
    assert abs(shift.ns + S) <= shift.error


def test_a_recording_without_events_tells_nothing() -> None:
    assert Bounds().real_time() is None


def test_what_a_file_says_of_its_times_may_be_anything() -> None:
    bounds = Bounds()
    bounds.add(0, 2**64 - 1, 2**64 - 1, 0)
    bounds.add(2**64 - 1, 0, 0, 2**64 - 1)

    found = bounds.real_time()

    assert found is not None
    assert Shift(source=found, to=found).apply(np.array([2**64 - 1], np.uint64)).shape == (1,)


def test_tenths_of_seconds_are_what_is_kept() -> None:
    bounds = Bounds()
    for at in range(5000):
        bounds.add(
            at * 1_000_000, at * 1_000_000, BEGAN + at * 1_000_000 - 5, BEGAN + at * 1_000_000
        )

    found = bounds.real_time()

    assert found is not None
    assert len(found.times) == 50
    assert found.error < 25_000


def stream(times: list[int], event: str, size: int) -> list[Events]:
    """Return rounds of events at such times."""
    layout = make_layout(1, ("u64",), event=event)
    parts = [times[at : at + size] for at in range(0, len(times), size)]
    return [
        make_events([make_batch(layout, [Row(ts=ts, values=(ts,)) for ts in part])])
        for part in parts
    ]


@pytest.mark.parametrize("seed", range(20))
def test_events_of_several_are_in_the_order_of_time(seed: int) -> None:
    rng = random.Random(seed)
    times = {
        name: sorted(rng.choices(range(1000), k=rng.choice((0, 1, 50, 400)))) for name in "abc"
    }
    streams = [stream(each, name, rng.randrange(1, 60)) for name, each in times.items()]

    rounds = list(in_one_order([iter(each) for each in streams]))

    found = [(event.ts, event.name) for events in rounds for event in each_event(events)]
    assert found == sorted((ts, name) for name, each in times.items() for ts in each)


def test_no_more_is_held_than_comes_before_the_others_next() -> None:
    pulled: list[int] = []

    def told(rounds: list[Events]) -> Iterator[Events]:
        for events in rounds:
            pulled.append(len(events))
            yield events

    several = in_one_order([told(stream([*range(1000)], "a", 10)), told(stream([5], "b", 1))])

    next(several)

    assert sum(pulled) <= 22


def test_shifted_events_are_those_that_were() -> None:
    to = RealTime(times=np.array([0]), offsets=np.array([BEGAN]), error=0)
    source = RealTime(times=np.array([0]), offsets=np.array([BEGAN - 7]), error=0)

    (events,) = shifted(iter(stream([5, 10, 20], "a", 3)), shift_between(source, to))

    assert [(e.ts, e.args["a0"]) for e in each_event(events)] == [(0, 5), (3, 10), (13, 20)]
