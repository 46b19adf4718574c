"""Timekeeping's points to a line: how near it is, that it never goes back, and what is no clock."""

import struct
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kprobes.guest import fitted_clock
from kprobes.guest.fitted_clock import (
    FittedClock,
    Point,
    counter_of,
    tick_points,
    timekeeper_points,
)
from kprobes.model.clock import Line, Scaled
from kprobes.units import U64, Addr
from tests.build.guest import DATA, PERCPU, make_memory
from tests.build.kernel import TEXT, FakeTypes, make_kernel, symbol
from tests.build.timekeeping import TICKS, TIMEKEEPER

MS, S = 1_000_000, 1_000_000_000


class Counter:
    """A counter whose counts are nanoseconds by the kernel's first idea."""

    now: Scaled = Line(ns_at=0, cycles=0, mult=1, shift=0)

    def refresh(self) -> None:
        pass


class Guest:
    """A guest whose timekeeping runs by its own rate, and whose CPUs tick."""

    def __init__(self, *, start: int = 5 * S, ahead: int = -3 * S, ppm: float = 0) -> None:
        self.start, self.ahead, self.ppm = start, ahead, ppm
        self.now = start
        self.last: dict[int, Point] = {}

    def time(self, count: int) -> int:
        return round(count + self.ahead + (count - self.start) * self.ppm * 1e-6) & U64

    def tick(self, cpu: int, *, late: int = 0) -> None:
        self.last[cpu] = Point(cpu=cpu, raw=self.now, ns=(self.time(self.now) - late) & U64)

    def points(self) -> Iterable[Point]:
        return list(self.last.values())


@pytest.fixture(autouse=True)
def _looks_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitted_clock, "_INTERVAL_S", 0)


def fitted(guest: Guest) -> FittedClock:
    return FittedClock(Counter(), guest.points)


def told(clock: FittedClock, counts: Sequence[int], cpu: int = 0) -> list[int]:
    return clock.ns(np.array(counts, np.uint64), cpu).tolist()


def run(guest: Guest, clock: FittedClock, ms: int, *, late: Sequence[int] = (0,)) -> None:
    """Let two CPUs tick, each every 4 ms, and records be told of each ms."""
    for step in range(ms):
        guest.now += MS
        if step % 4 < 2:
            guest.tick(step % 4, late=late[step % len(late)])
        clock.refresh()
        told(clock, [guest.now])


@pytest.mark.parametrize("ahead", [-3 * S, 0, 7 * S])
@pytest.mark.parametrize("ppm", [-300, 0, 2.5, 300])
def test_after_a_second_it_is_what_timekeeping_says(ppm: float, ahead: int) -> None:
    guest = Guest(ppm=ppm, ahead=ahead)
    guest.tick(0)
    clock = fitted(guest)

    run(guest, clock, 2000)

    counts = [guest.now + more for more in (0, MS, 100 * MS)]
    for count, found in zip(counts, told(clock, counts), strict=True):
        assert abs(found - guest.time(count)) < 1000


def test_its_first_times_are_those_of_the_last_tick_of_all() -> None:
    guest = Guest(ppm=10)
    guest.tick(0)
    guest.now += 10 * S
    guest.tick(1)

    assert told(fitted(guest), [guest.now]) == [guest.time(guest.now)]


def test_ticks_whose_two_clocks_were_read_far_apart_do_not_count() -> None:
    guest = Guest(ppm=3)
    guest.tick(0)
    clock = fitted(guest)

    run(guest, clock, 3000, late=[0, 5 * MS, 0, 0, 0, 0, 0])

    assert abs(told(clock, [guest.now])[0] - guest.time(guest.now)) < 1000
    assert clock.is_fit


def test_where_timekeeping_jumps_time_goes_on_and_gets_there() -> None:
    guest = Guest()
    guest.tick(0)
    clock = fitted(guest)
    run(guest, clock, 1000)
    before = told(clock, [guest.now])[0]

    guest.ahead -= S // 2
    run(guest, clock, 20)
    soon = told(clock, [guest.now])[0]
    run(guest, clock, 5000)

    assert before <= soon <= before + 20 * MS
    assert abs(told(clock, [guest.now])[0] - guest.time(guest.now)) < 1000


def test_without_ticks_it_goes_on_as_fast_as_timekeeping_and_not_as_it_caught_up() -> None:
    guest = Guest()
    guest.tick(0)
    clock = fitted(guest)
    run(guest, clock, 1000)
    guest.ahead += 50_000
    run(guest, clock, 700)

    later = guest.now + 20 * S

    assert abs(told(clock, [later])[0] - guest.time(later)) < 100_000


moves = st.tuples(
    st.integers(1, 3 * S), st.integers(0, 1), st.integers(-10 * S, 10 * S), st.integers(0, 5 * MS)
)


@settings(deadline=None)
@given(st.lists(moves, min_size=2, max_size=30))
def test_whatever_timekeeping_does_no_time_is_before_one_that_was_told(
    done: list[tuple[int, int, int, int]],
) -> None:
    guest = Guest()
    guest.tick(0)
    clock = fitted(guest)
    found: dict[int, int] = {}

    for passed, cpu, jump, back in done:
        guest.now += passed
        guest.ahead += jump
        guest.tick(cpu)
        clock.refresh()
        # The other CPU's ring is read a little later, and has older records, too.
        for count in (guest.now - back, guest.now):
            found[count] = told(clock, [count], cpu)[0]

    first = found[min(found)]
    times = [(found[count] - first) & U64 for count in sorted(found)]
    assert times == sorted(times)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, U64), st.integers(0, U64))))
def test_no_points_that_a_guest_can_make_up_are_a_fault_of_ours(
    made_up: list[tuple[int, int, int]],
) -> None:
    guest = Guest()
    clock = fitted(guest)

    for cpu, raw, ns in made_up:
        guest.last[cpu] = Point(cpu=cpu, raw=raw, ns=ns)
        clock.refresh()
        assert len(told(clock, [raw, ns, 0, U64])) == 4


def test_a_count_that_was_made_up_bends_no_time() -> None:
    guest = Guest(ppm=20)
    guest.tick(0)
    clock = fitted(guest)
    told(clock, [U64 >> 1])

    run(guest, clock, 5000)

    assert abs(told(clock, [guest.now])[0] - guest.time(guest.now)) < 1000


def test_a_guest_that_has_not_ticked_has_no_such_clock() -> None:
    assert not fitted(Guest()).is_fit


@pytest.mark.parametrize(("apart", "is_fit"), [(100_000, True), (5 * MS, False)])
def test_counters_of_cpus_that_differ_are_no_clock(apart: int, *, is_fit: bool) -> None:
    guest = Guest()
    guest.tick(0)
    guest.now += 20 * MS
    guest.tick(1, late=apart)

    assert fitted(guest).is_fit is is_fit


@pytest.mark.parametrize(("ppm", "is_fit"), [(550, True), (-550, True), (5000, False)])
def test_a_cpu_that_has_slept_may_be_as_far_off_as_the_rate_may_be_wrong(
    ppm: float, *, is_fit: bool
) -> None:
    guest = Guest(ppm=ppm)
    guest.tick(0)
    guest.now += 20 * S
    guest.tick(1)

    assert fitted(guest).is_fit is is_fit


def test_counters_that_begin_to_differ_are_noticed() -> None:
    guest = Guest()
    guest.tick(0)
    guest.tick(1)
    clock = fitted(guest)
    run(guest, clock, 500)
    assert clock.is_fit

    for _ in range(30):
        guest.now += 30 * MS
        guest.tick(0)
        guest.tick(1, late=20 * MS)
        clock.refresh()

    assert not clock.is_fit


# What is read in the guest.

READ = TEXT + 0x700


def keeper(seq: int, *bases: tuple[int, int, int, int]) -> bytes:
    """Return a ``struct tk_fast`` of bases: cycle_last, shift, xtime_nsec, base."""
    packed = (struct.pack("<QQQIIQQQ", DATA + 0x200, 0, c, 1, s, x, b, 0) for c, s, x, b in bases)
    return struct.pack("<Q", seq) + b"".join(packed)


def test_ticks_are_read_of_each_cpu_that_had_one() -> None:
    memory, types = make_memory(), FakeTypes(TICKS)
    places = [base + 0x40 for base in PERCPU]
    memory.write(places[0], struct.pack("<QQQ", 0, 0, 0))
    memory.write(places[1], struct.pack("<QQQ", 7 * S, 2 * S, 1))
    memory.set_u64(DATA, -S & U64)

    ours = tick_points(memory, types, places, Addr(DATA))
    timekeeping = tick_points(memory, types, places, None)

    assert list(ours()) == [Point(cpu=1, raw=7 * S, ns=S)]
    assert list(timekeeping()) == [Point(cpu=1, raw=7 * S, ns=2 * S)]


@pytest.mark.parametrize(("seq", "expected"), [(2, (50, 2 * S + 3)), (3, (70, 4 * S))])
def test_timekeeping_s_last_tick_is_in_the_half_that_its_count_names(
    seq: int, expected: tuple[int, int]
) -> None:
    memory = make_memory()
    memory.write(DATA, keeper(seq, (25, 4, 3 << 4, 2 * S), (35, 0, 0, 4 * S)))

    points = timekeeper_points(memory, FakeTypes(TIMEKEEPER), Addr(DATA), lambda count: 2 * count)

    assert list(points()) == [Point(cpu=0, raw=expected[0], ns=expected[1])]


def test_a_shift_beyond_reason_tells_no_time() -> None:
    memory = make_memory()
    memory.write(DATA, keeper(0, (25, 64, 0, 0), (35, 0, 0, 0)))

    assert list(timekeeper_points(memory, FakeTypes(TIMEKEEPER), Addr(DATA), int)()) == []


@pytest.mark.parametrize(("read", "name"), [(READ, "read_tsc"), (READ + 0x900, ""), (1, "")])
def test_what_timekeeping_reads_is_the_function_of_its_clock(read: int, name: str) -> None:
    memory, types = make_memory(), FakeTypes(TIMEKEEPER)
    memory.write(DATA, keeper(0, (25, 4, 0, 0), (35, 0, 0, 0)))
    memory.set_u64(DATA + 0x200, read)
    kernel = make_kernel([symbol("read_tsc", READ)], types=types)

    assert counter_of(memory, kernel, types, Addr(DATA)) == name


def test_a_clock_that_is_mapped_nowhere_reads_nothing() -> None:
    memory, types = make_memory(), FakeTypes(TIMEKEEPER)
    memory.write(DATA, bytes(120))

    assert counter_of(memory, make_kernel([], types=types), types, Addr(DATA)) == ""
