"""Results of a benchmark, as rows of one table."""

from collections.abc import Callable, Sequence
from enum import StrEnum

from msgspec import Struct

from bench.spread import Spread, ratio_of

HEAD = ("", "measured", "goal", "peer", "ratio", "")


class Verdict(StrEnum):
    """Whether a goal was reached; nothing where there is none."""

    NONE = ""
    MET = "met"
    MISSED = "MISSED"
    UNTOLD = "not told"


class Row(Struct, frozen=True, kw_only=True):
    """One measurement.

    Attributes:
        name: what was measured.
        figure: with its unit.
        goal: what was to be reached, or "".
        peer: what stands beside it: the same by somebody else, with its unit, or "".
        ratio: the peer's figure over ours, or "".
        verdict: of the goal.
    """

    name: str
    figure: str
    goal: str = ""
    peer: str = ""
    ratio: str = ""
    verdict: Verdict = Verdict.NONE

    @property
    def cells(self) -> tuple[str, ...]:
        """What is printed, cell by cell."""
        return (self.name, self.figure, self.goal, self.peer, self.ratio, self.verdict)


def render(title: str, rows: Sequence[Row]) -> str:
    """Return the rows below a title, aligned."""
    lines = [HEAD, *(row.cells for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    return "\n".join([title, *(_line(line, widths) for line in lines)])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return ("  " + "  ".join(padded)).rstrip()


class Goal(Struct, frozen=True):
    """How many times ours the peer's figure is to be, and how that is said."""

    least: float
    words: str = ""

    def __str__(self) -> str:
        return self.words or f"{self.least:,g}x"


def compared(
    name: str, ours: Spread, peer: Spread, goal: Goal | None, *, show: Callable[[Spread], str]
) -> Row:
    """Return the row of two figures; of what cannot be told there is no ratio, and none is met."""
    ratio = ratio_of(peer, ours)
    return Row(
        name=name,
        figure=show(ours),
        goal=str(goal or ""),
        peer=show(peer),
        ratio=_untold(ours) if ratio is None else _ratio(ratio),
        verdict=_judged(ratio, goal),
    )


def verdict_of(is_met: bool | None) -> Verdict:
    """Return what is said of a goal that was reached or not, or of none."""
    return {True: Verdict.MET, False: Verdict.MISSED, None: Verdict.NONE}[is_met]


def _untold(ours: Spread) -> str:
    return "cannot be told from nothing" if ours.low <= 0 else "scatters by more than itself"


def _ratio(ratio: Spread) -> str:
    return f"{times(ratio.value)} [{times(ratio.low)} {times(ratio.high)}]"


def _judged(ratio: Spread | None, goal: Goal | None) -> Verdict:
    # Met only if it is so at the unfavourable end, and missed only if at the favourable one.
    if goal is None:
        return Verdict.NONE
    if ratio is None or ratio.low < goal.least <= ratio.high:
        return Verdict.UNTOLD
    return Verdict.MET if ratio.low >= goal.least else Verdict.MISSED


def ns(figure: Spread) -> str:
    """Return nanoseconds as they are printed."""
    return f"{figure.value:,.1f} ns [{figure.low:,.0f} {figure.high:,.0f}]"


def times(ratio: float) -> str:
    """Return a ratio as it is printed."""
    return f"{ratio:,.0f}x" if ratio >= 100 else f"{ratio:.1f}x" if ratio >= 1 else f"{ratio:.2f}x"


def seconds(value: float) -> str:
    """Return a time in the unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"
