"""Samples of a figure to what can be said of it: its median, and the interval that this lies in.

The interval is between two of the samples, so that it supposes nothing of how they are distributed:
each lies below the true median as often as a coin shows heads. Reading: David and Nagaraja, Order
Statistics, 7.1.
"""

from collections.abc import Sequence
from math import comb, inf
from statistics import median

from msgspec import Struct

_CONFIDENCE = 0.95


class Spread(Struct, frozen=True):
    """A figure, by samples that do not depend on each other; there is at least one."""

    samples: Sequence[float]

    @property
    def value(self) -> float:
        """The median."""
        return median(self.samples)

    @property
    def low(self) -> float:
        """The lower end of where the true median is, nineteen times out of twenty."""
        return sorted(self.samples)[_outside(len(self.samples))]

    @property
    def high(self) -> float:
        """The upper end. Of fewer than six samples both ends are theirs, and that is less sure."""
        return sorted(self.samples)[-1 - _outside(len(self.samples))]

    @property
    def is_told(self) -> bool:
        """Whether it is more than what it differs by, and so to be told from nothing."""
        return self.low > 0 and self.high - self.low <= self.value


def ratio_of(peer: Spread, ours: Spread) -> Spread | None:
    """Return how many times ours the peer's is, or None where ours cannot be told from nothing.

    They are compared sample by sample, as these were measured together.
    """
    if not ours.is_told:
        return None
    pairs = zip(peer.samples, ours.samples, strict=True)
    return Spread([theirs / own if own > 0 else inf for theirs, own in pairs])


def _outside(n: int) -> int:
    # So many samples on each side may be left out: of n coins so few or fewer show heads once in
    # forty times.
    at, chance = 0, 0.5**n
    while chance + comb(n, at + 1) * 0.5**n <= (1 - _CONFIDENCE) / 2:
        at += 1
        chance += comb(n, at) * 0.5**n
    return at
