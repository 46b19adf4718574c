"""Words for figures and goals."""

import pytest

from bench.spread import Spread
from bench.table import Goal, Row, Verdict, compared, ns, render, verdict_of

_OURS = Spread([90.0, 100, 110])


def _row(peer: Spread, ours: Spread = _OURS, goal: Goal | None = None) -> Row:
    return compared("one register", ours, peer, goal, show=ns)


@pytest.mark.parametrize(
    ("peer", "verdict"),
    [
        ([2000.0, 2000, 2000], Verdict.MET),
        ([1100.0, 1000, 1100], Verdict.MET),
        ([900.0, 1000, 1099], Verdict.UNTOLD),
        ([899.0, 999, 1100], Verdict.UNTOLD),
        ([899.0, 999, 1099], Verdict.MISSED),
        ([-30.0, 20, 70], Verdict.MISSED),
    ],
)
def test_a_goal_is_met_or_missed_only_if_both_ends_say_so(
    peer: list[float], verdict: Verdict
) -> None:
    assert _row(Spread(peer), goal=Goal(10)).verdict is verdict


@pytest.mark.parametrize("goal", [Goal(10), Goal(0.8, "within 25 %")])
@pytest.mark.parametrize(
    ("ours", "words"),
    [
        ([-980.0, -698, 694], "cannot be told from nothing"),
        ([-1.0, 5, 8], "cannot be told from nothing"),
        ([20.0, 100, 180], "scatters by more than itself"),
    ],
)
def test_what_cannot_be_told_is_said_and_meets_no_goal(
    ours: list[float], words: str, goal: Goal
) -> None:
    row = _row(Spread([9000.0, 10000, 11000]), Spread(ours), goal)

    assert (row.ratio, row.verdict) == (words, "not told")


def test_a_ratio_is_printed_with_its_ends() -> None:
    row = _row(Spread([1800.0, 3000, 22000]), goal=Goal(20))

    assert row.cells == (
        "one register",
        "100.0 ns [90 110]",
        "20x",
        "3,000.0 ns [1,800 22,000]",
        "30.0x [20.0x 200x]",
        "met",
    )


def test_without_a_goal_nothing_is_said_of_one() -> None:
    row = _row(Spread([900.0, 1000, 1100]))

    assert (row.goal, row.ratio, row.verdict) == ("", "10.0x [10.0x 10.0x]", "")


def test_a_goal_may_have_words_of_its_own() -> None:
    assert [str(goal) for goal in (Goal(1 / 1.05, "no worse"), Goal(10_000))] == [
        "no worse",
        "10,000x",
    ]


@pytest.mark.parametrize(("is_met", "word"), [(True, "met"), (False, "MISSED"), (None, "")])
def test_what_has_no_spread_is_met_or_missed(word: str, *, is_met: bool | None) -> None:
    assert verdict_of(is_met) == word


def test_columns_are_aligned() -> None:
    rows = [
        Row(name="a", figure="1 ns", goal="2x", verdict=Verdict.MET),
        Row(name="bc", figure="10 ns"),
    ]

    lines = render("title", rows).splitlines()

    assert lines[0] == "title"
    assert lines[2].index("met") > lines[2].index("2x") > lines[2].index("1 ns")
    assert lines[2].index("1 ns") == lines[3].index("10 ns")
