"""Clocks as values: times of counts, and numbers that nobody should count by."""

import numpy as np
import pytest

from kprobes.model.clock import (
    ClockValue,
    Knot,
    Line,
    PiecewiseLinear,
    Scale,
    Scales,
    Shifted,
    Unscaled,
    makes_sense,
)

LINE = Line(ns_at=1000, cycles=100, mult=3, shift=1)
SCALES = Scales(of_cpus=(Scale(mul=1, shift=0, offset=5), Scale(mul=3, shift=1, offset=0)))
BENT = PiecewiseLinear(
    clock=LINE,
    origin=1000,
    ahead=7,
    knots=(Knot(x=0.0, y=0.0, slope=0.0), Knot(x=300.0, y=10.0, slope=0.5)),
)


@pytest.mark.parametrize(
    ("clock", "cpu", "told"),
    [
        (Unscaled(), 0, [0, 100, 500]),
        (LINE, 1, [850, 1000, 1600]),
        (SCALES, 0, [5, 105, 505]),
        (SCALES, 1, [0, 150, 750]),
        (Shifted(clock=LINE, ahead=9), 0, [859, 1009, 1609]),
        # 600 ns after the origin: 10 and half of what is beyond the second knot are added.
        (BENT, 0, [857, 1007, 1600 + 7 + 10 + 150]),
    ],
    ids=str,
)
def test_counts_become_times(clock: ClockValue, cpu: int, told: list[int]) -> None:
    counts = np.array([0, 100, 500], np.uint64)

    assert clock.ns(counts, cpu).tolist() == told
    assert makes_sense(clock, 2)


@pytest.mark.parametrize(
    "clock",
    [
        Line(ns_at=0, cycles=0, mult=0, shift=0),
        Line(ns_at=-1, cycles=0, mult=1, shift=0),
        Line(ns_at=0, cycles=0, mult=1, shift=33),
        Scales(of_cpus=()),
        Scales(of_cpus=(Scale(mul=1, shift=0, offset=0),)),
        Scales(of_cpus=(Scale(mul=1 << 40, shift=0, offset=0),) * 2),
        Shifted(clock=LINE, ahead=-1),
        Shifted(clock=Line(ns_at=0, cycles=0, mult=-1, shift=0), ahead=0),
        PiecewiseLinear(clock=LINE, origin=0, ahead=0, knots=()),
        PiecewiseLinear(
            clock=LINE, origin=0, ahead=0, knots=(Knot(x=float("inf"), y=0.0, slope=0.0),)
        ),
        PiecewiseLinear(
            clock=LINE, origin=0, ahead=0, knots=(Knot(x=0.0, y=float("nan"), slope=0.0),)
        ),
        PiecewiseLinear(
            clock=LINE,
            origin=0,
            ahead=0,
            knots=(Knot(x=1.0, y=0.0, slope=0.0), Knot(x=0.0, y=0.0, slope=0.0)),
        ),
    ],
    ids=str,
)
def test_numbers_that_cannot_be_make_no_sense(clock: ClockValue) -> None:
    assert not makes_sense(clock, 2)
