"""Statements about a figure from its samples."""

from math import comb, inf

import pytest

from bench.spread import Spread, ratio_of


@pytest.mark.parametrize(
    ("samples", "ends"),
    [
        ([7.0], (7, 7)),
        ([5.0, 1, 4, 2, 3, 6], (1, 6)),
        ([float(n) for n in range(9)], (1, 7)),
        ([float(n) for n in range(12)], (2, 9)),
        ([float(n) for n in range(25)], (7, 17)),
    ],
)
def test_an_interval_is_between_two_samples(
    samples: list[float], ends: tuple[float, float]
) -> None:
    assert (Spread(samples).low, Spread(samples).high) == ends


@pytest.mark.parametrize("n", range(6, 40))
def test_it_holds_the_true_median_nineteen_times_out_of_twenty_and_is_the_least_that_does(
    n: int,
) -> None:
    found = Spread([float(at) for at in range(n)])

    def chance(outside: int) -> float:
        return 1 - 2 * sum(comb(n, heads) for heads in range(outside + 1)) / 2**n

    assert found.high == n - 1 - found.low
    assert chance(int(found.low)) >= 0.95 > chance(int(found.low) + 1)


def test_one_wild_sample_of_many_changes_little() -> None:
    samples = [float(n) for n in range(100, 112)]

    wild = Spread([*samples[:-1], 9e9])

    assert (wild.value, wild.low, wild.high) == (105.5, 102, 109)


@pytest.mark.parametrize(
    ("samples", "is_told"),
    [
        ([9.0, 10, 11], True),
        ([5.0, 10, 15], True),
        ([5.0, 10, 16], False),
        ([0.0, 1, 1], False),
        ([-980.0, -30, 694], False),
        ([-12.0, -11, -10], False),
    ],
)
def test_a_figure_is_told_from_nothing_where_it_is_more_than_it_differs_by(
    samples: list[float], *, is_told: bool
) -> None:
    assert Spread(samples).is_told is is_told


def test_figures_are_compared_sample_by_sample() -> None:
    # Of samples that are as unlike each other, but agree in how many times one is the other.
    ours, peer = Spread([10.0, 12, 14]), Spread([100.0, 120, 140])

    ratio = ratio_of(peer, ours)

    assert ratio is not None
    assert (ratio.value, ratio.low, ratio.high) == (10, 10, 10)


def test_what_cannot_be_told_from_nothing_has_no_ratio() -> None:
    assert ratio_of(Spread([7000.0, 7100]), Spread([-1.0, 3])) is None


def test_a_sample_of_nothing_is_no_bound() -> None:
    ours = Spread([-1.0, *[10.0] * 8])

    ratio = ratio_of(Spread([100.0] * 9), ours)

    assert ratio is not None
    assert (max(ratio.samples), ratio.high, ratio.low) == (inf, 10, 10)
