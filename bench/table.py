"""What a benchmark measured, as rows of one table."""

from collections.abc import Sequence
from dataclasses import dataclass

HEAD = ("", "measured", "goal", "peer", "ratio", "")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One measurement.

    Attributes:
        name: what was measured.
        figure: with its unit.
        goal: what was to be reached, or "".
        peer: what stands beside it: the same by somebody else, with its unit, or "".
        ratio: the peer's figure over ours, or "".
        is_met: whether the goal was reached; None where there is none.
    """

    name: str
    figure: str
    goal: str = ""
    peer: str = ""
    ratio: str = ""
    is_met: bool | None = None

    @property
    def cells(self) -> tuple[str, ...]:
        """What is printed, cell by cell."""
        verdict = {True: "met", False: "MISSED", None: ""}[self.is_met]
        return (self.name, self.figure, self.goal, self.peer, self.ratio, verdict)


def render(title: str, rows: Sequence[Row]) -> str:
    """Return the rows below a title, aligned."""
    lines = [HEAD, *(row.cells for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEAD))]
    return "\n".join([title, *(_line(line, widths) for line in lines)])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
    return ("  " + "  ".join(padded)).rstrip()


def times(ratio: float) -> str:
    """Return a ratio as it is printed."""
    return f"{ratio:,.0f}x" if ratio >= 100 else f"{ratio:.1f}x" if ratio >= 1 else f"{ratio:.2f}x"


def seconds(value: float) -> str:
    """Return a time in the unit that suits it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"
