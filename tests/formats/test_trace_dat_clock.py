"""Times of trace-cmd's files, beside the same sums in Python's own numbers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprobes.errors import FormatError
from kprobes.formats.trace_dat_clock import TraceClock
from kprobes.formats.trace_dat_options import ClockSamples, TimeShift

_ALL = (1 << 64) - 1
_CPU = np.zeros(1, np.uint16)


def _samples(
    times: list[int], offsets: list[int], scalings: list[int] | None = None, bits: int | None = None
) -> ClockSamples:
    return ClockSamples(
        times=np.array(times, np.uint64),
        offsets=np.array(offsets, np.int64),
        scalings=np.array(scalings or [1] * len(times), np.uint64),
        fractions=None if bits is None else np.full(len(times), bits, np.uint64),
    )


def _shifted(ts: list[int], *cpus: ClockSamples, cpu: int = 0, is_interpolated: bool) -> list[int]:
    shift = TimeShift(peer=1, is_interpolated=is_interpolated, cpus=cpus)
    clock = TraceClock(None, shift, 0)
    return clock.apply(np.array(ts, np.uint64), np.full(len(ts), cpu, np.uint16)).tolist()


@given(
    st.integers(0, _ALL),
    st.integers(1, (1 << 32) - 1),
    st.integers(0, 32),
    st.integers(-(1 << 62), 1 << 62),
)
def test_counts_are_scaled_and_dated(count: int, factor: int, shift: int, offset: int) -> None:
    clock = TraceClock((factor, shift, 5), None, offset)

    (found,) = clock.apply(np.array([count], np.uint64), _CPU).tolist()

    high, low = (count >> 32) * factor << (32 - shift), (count & 0xFFFFFFFF) * factor >> shift
    assert found == (high + low + offset) & _ALL


def test_times_are_the_same_array_where_nothing_is_told() -> None:
    ts = np.array([1, 2], np.uint64)

    assert TraceClock(None, None, 0).apply(ts, np.zeros(2, np.uint16)) is ts


def test_one_sample_is_an_offset_for_all() -> None:
    assert _shifted([5, 500], _samples([100], [-3], [7], 1), is_interpolated=True) == [2, 497]


def test_offsets_are_on_a_line_between_samples_and_beyond_them() -> None:
    samples = _samples([100, 200, 400], [10, 20, 0])

    # Half of the distance is added before C divides towards zero.
    found = _shifted([50, 100, 150, 200, 300, 400, 500], samples, is_interpolated=True)

    assert found == [56, 110, 165, 220, 311, 401, 491]


def test_offsets_are_steps_where_the_file_says_so() -> None:
    samples = _samples([100, 200, 400], [10, -20, 0])

    assert _shifted([50, 150, 250, 399, 401], samples, is_interpolated=False) == [
        60, 160, 230, 379, 381,
    ]  # fmt: skip


def test_times_are_scaled_by_the_sample_before() -> None:
    samples = _samples([100, 200], [1, 1], [3, 5], 1)

    assert _shifted([100, 150], samples, is_interpolated=False) == [151, 226]


def test_each_cpu_has_samples_of_its_own_or_none() -> None:
    cpus = _samples([0], [1]), _samples([0], [2]), _samples([], [])

    assert _shifted([10], *cpus, cpu=1, is_interpolated=True) == [12]
    assert _shifted([10], *cpus, cpu=2, is_interpolated=True) == [10]
    assert _shifted([10], *cpus, cpu=3, is_interpolated=True) == [10]


@pytest.mark.parametrize(
    ("told", "cpus"),
    [
        ((0, 1, 0), ()),
        ((1 << 32, 1, 0), ()),
        ((1, 33, 0), ()),
        (None, (_samples([5, 5], [1, 1]),)),
        (None, (_samples([5, 4], [1, 1]),)),
        (None, (_samples([4, 5], [1, 1], [1, 1], 64),)),
    ],
)
def test_clocks_that_cannot_be_are_refused(
    told: tuple[int, int, int] | None, cpus: tuple[ClockSamples, ...]
) -> None:
    shift = TimeShift(peer=1, is_interpolated=True, cpus=cpus) if cpus else None

    with pytest.raises(FormatError, match="clock"):
        TraceClock(told, shift, 0)
