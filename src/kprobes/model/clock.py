"""Clocks as values: what turns counts of a CPU's counter into nanoseconds, as it stood once.

Whoever reads a kernel's numbers makes a new value when they have changed. A recording keeps the
values beside the records, so that times can be told where that kernel is no more.
"""

from functools import cached_property

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

_LOW = np.uint64(0xFFFF_FFFF)
_NS_PER_S = 1_000_000_000
MAX_SHIFT = 32
"""A slope is a number of 32 bits over a power of two up to this."""
_FAR = 2.0**62

Counts = NDArray[np.uint64]


class Unscaled(Struct, frozen=True, kw_only=True, tag=True):
    """What is recorded is the time."""

    def ns(self, counter: Counts, cpu: int) -> Counts:
        """Return the counts, shape (n,), and no copy of them."""
        del cpu
        return counter


class Scale(Struct, frozen=True, kw_only=True):
    """One CPU's line from cycles to nanoseconds: ``offset + (cycles * mul >> shift)``."""

    mul: int
    shift: int
    offset: int


class Scales(Struct, frozen=True, kw_only=True, tag=True):
    """A line for each CPU, through the counter's zero."""

    of_cpus: tuple[Scale, ...]

    @property
    def tick_s(self) -> float:
        """How long a count is, in seconds, on the first CPU."""
        return self.of_cpus[0].mul / (1 << self.of_cpus[0].shift) / _NS_PER_S

    def ns(self, counter: Counts, cpu: int) -> Counts:
        """Return nanoseconds for n counts that were read on one CPU, in a new array (n,)."""
        scale = self.of_cpus[cpu]
        mul = np.uint64(scale.mul)
        # 64 by 32 bits in two halves, as mul_u64_u32_shr.
        high, low = counter >> np.uint64(32), counter & _LOW
        ns = (low * mul) >> np.uint64(scale.shift)
        ns += (high * mul) << np.uint64(32 - scale.shift)
        return ns + np.uint64(scale.offset)


class Line(Struct, frozen=True, kw_only=True, tag=True):
    """One line for all CPUs, through a point: ``ns + ((count - cycles) * mult >> shift)``."""

    ns_at: int
    cycles: int
    mult: int
    shift: int

    @property
    def rate(self) -> int:
        """Cycles per second."""
        return (_NS_PER_S << self.shift) // self.mult

    @property
    def tick_s(self) -> float:
        """How long a count is, in seconds."""
        return 1 / self.rate

    def ns(self, counter: Counts, cpu: int) -> Counts:
        """Return nanoseconds for n counts that were read on any CPU, in a new array (n,)."""
        del cpu
        # A count may be from before the line was drawn: it goes on to the left of its point.
        since = (counter - np.uint64(self.cycles)).astype(np.int64)
        passed = (since * np.int64(self.mult)) >> np.int64(self.shift)
        return np.uint64(self.ns_at) + passed.astype(np.uint64)


Scaled = Scales | Line


class Shifted(Struct, frozen=True, kw_only=True, tag=True):
    """A clock that is a number of nanoseconds ahead of another one."""

    clock: Scaled
    ahead: int

    def ns(self, counter: Counts, cpu: int) -> Counts:
        """Return nanoseconds for n counts that were read on one CPU, in a new array (n,)."""
        return self.clock.ns(counter, cpu) + np.uint64(self.ahead)


class Knot(Struct, frozen=True, kw_only=True, array_like=True):
    """Where time goes on by another slope: the place, what is added there, and the slope."""

    x: float
    y: float
    slope: float


class PiecewiseLinear(Struct, frozen=True, kw_only=True, tag=True, dict=True):
    """Another clock's time, and what is added to it: a line with knots.

    Attributes:
        clock: the other one.
        origin: a time of that clock: the zero of the knots' places.
        ahead: what is added everywhere, modulo 2**64.
        knots: by place, one at least.
    """

    clock: Scaled
    origin: int
    ahead: int
    knots: tuple[Knot, ...]

    def ns(self, counter: Counts, cpu: int) -> Counts:
        """Return nanoseconds for n counts that were read on one CPU, in a new array (n,)."""
        raw = self.clock.ns(counter, cpu)
        x = self.places(raw)
        at, y, slope = self._columns
        knot = np.maximum(np.searchsorted(at, x, side="right") - 1, 0)
        moved = np.rint(y[knot] + slope[knot] * (x - at[knot])).astype(np.int64)
        return raw + np.uint64(self.ahead) + moved.view(np.uint64)

    def places(self, raw: Counts) -> NDArray[np.float64]:
        """Return where n times of the other clock are on the line, in a new array (n,)."""
        return (raw - np.uint64(self.origin)).view(np.int64).astype(np.float64)

    @cached_property
    def _columns(self) -> NDArray[np.float64]:
        return np.array([(knot.x, knot.y, knot.slope) for knot in self.knots]).T


ClockValue = Unscaled | Scales | Line | Shifted | PiecewiseLinear


def makes_sense(clock: ClockValue, cpus: int) -> bool:
    """Whether a clock's numbers can be used for so many CPUs: whoever wrote them may be hostile."""
    match clock:
        case Unscaled():
            return True
        case Scales(of_cpus=found):
            return len(found) >= cpus and all(map(_is_scale, found))
        case Line():
            is_slope = 0 < clock.mult <= int(_LOW) and 0 <= clock.shift <= MAX_SHIFT
            return is_slope and _is_u64(clock.ns_at) and _is_u64(clock.cycles)
        case Shifted(clock=inner, ahead=ahead):
            return makes_sense(inner, cpus) and _is_u64(ahead)
        case PiecewiseLinear(clock=inner, knots=knots):
            places = [knot.x for knot in knots]
            return (
                makes_sense(inner, cpus)
                and _is_u64(clock.origin)
                and _is_u64(clock.ahead)
                and bool(knots)
                and places == sorted(places)
                and all(abs(n) < _FAR for knot in knots for n in (knot.x, knot.y, knot.slope))
            )


def _is_scale(scale: Scale) -> bool:
    is_slope = 0 <= scale.mul <= int(_LOW) and 0 <= scale.shift <= MAX_SHIFT
    return is_slope and _is_u64(scale.offset)


def _is_u64(value: int) -> bool:
    return 0 <= value < 1 << 64
