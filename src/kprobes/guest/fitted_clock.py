"""Timekeeping's clock as a line of the counter, fitted to points that the kernel leaves in memory.

At each tick the kernel notes what timekeeping says (by a HPET, say) and what its counter says:

    struct sched_clock_data {   // kernel/sched/clock.c, per CPU, while the TSC is not trusted
        u64 tick_raw;           // sched_clock()
        u64 tick_gtod;          // ktime_get_ns()
        u64 clock;
    };
    struct tk_fast {            // kernel/time/timekeeping.c
        seqcount_latch_t seq;
        struct tk_read_base base[2];    // base[seq & 1]: clock, cycle_last, shift, xtime_nsec, base
    };

The kernel's own clock goes on from the last of these points by its first idea of the counter's
rate, and steps at the next one. Here a line is laid through many: of the slopes of all pairs it
has the middle one, and of the distances that are left, too.

Times that were told once stay: where the line has moved, time goes on from the latest time told
a little faster or slower, until it is there. So it never steps, and never goes back.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.errors import MemoryFault
from kprobes.guest.guest import GuestMemory
from kprobes.guest.rings import MappedRange
from kprobes.model.clock import Knot, PiecewiseLinear, Scaled
from kprobes.model.kernel import Kernel, Types
from kprobes.units import U64, Addr

_INTERVAL_S = 0.01
_KEPT = 64
_APART_NS = 10_000_000
_SPAN_NS = 300_000_000
_STEER_NS = 250_000_000
_MAX_SLOPE = 1e-2
_MAX_DRIFT = 1e-3
"""Of the kernel's first idea of the rate: 5.5e-4 were seen where a guest booted beside others."""
_MAX_STEER = 0.5
_AHEAD_NS = 1_000_000_000
_UNFIT_NS = 1_000_000
"""By so much CPUs may differ: two readings of clocks may have an interrupt between them."""
_ENOUGH = 8


class Raw(Protocol):
    """The kernel's first idea of its counter's time."""

    @property
    def now(self) -> Scaled:
        """Its clock as a value, as the kernel's numbers were when they were read last."""
        ...

    def refresh(self) -> None:
        """Read the kernel's numbers again."""
        ...


class Point(Struct, frozen=True, kw_only=True):
    """What timekeeping said at a count.

    Attributes:
        cpu: whose tick it was.
        raw: ``Raw``'s nanoseconds of the count.
        ns: timekeeping's.
    """

    cpu: int
    raw: int
    ns: int


Points = Callable[[], Iterable[Point]]


def tick_points(
    memory: GuestMemory, types: Types, places: Sequence[int], offset: Addr | None
) -> Points:
    """Return what reads the last tick of each CPU.

    Args:
        memory: of the guest.
        types: of its kernel.
        places: of each CPU's ``struct sched_clock_data``.
        offset: of the u64 that the clock is ahead of timekeeping, or None for timekeeping's own.

    Raises:
        MemoryFault: one is not mapped.
    """
    name = "sched_clock_data"
    windows = [MappedRange(memory, place, types.size(name)) for place in places]
    raw, ns = types.offset(name, "tick_raw"), types.offset(name, "tick_gtod")
    ahead = None if offset is None else MappedRange(memory, offset, 8)

    def read() -> Iterable[Point]:
        more = 0 if ahead is None else ahead.u64(0)
        for cpu, window in enumerate(windows):
            found = window.u64(raw), window.u64(ns)
            # No tick yet, or one just now: between the two, which the kernel writes one by one.
            if all(found) and found == (window.u64(raw), window.u64(ns)):
                yield Point(cpu=cpu, raw=found[0], ns=found[1] + more & U64)

    return read


def timekeeper_points(
    memory: GuestMemory, types: Types, place: Addr, raw: Callable[[int], int]
) -> Points:
    """Return what reads the last tick that timekeeping had.

    Args:
        memory: of the guest.
        types: of its kernel.
        place: of a ``struct tk_fast``.
        raw: a count to ``Raw``'s nanoseconds.

    Raises:
        MemoryFault: it is not mapped.
    """
    window = MappedRange(memory, place, types.size("tk_fast"))
    size = types.size("tk_read_base")
    first = types.offset("tk_fast", "base")

    def value(data: bytes, member: str) -> int:
        at = types.offset("tk_read_base", member)
        return int.from_bytes(data[at : at + types.member_size("tk_read_base", member)], "little")

    def read() -> Iterable[Point]:
        before = window.u64(0)
        data = window.read(first + (before & 1) * size, size).tobytes()
        shift = value(data, "shift")
        if window.u64(0) == before and shift < 64:
            ns = value(data, "base") + (value(data, "xtime_nsec") >> shift)
            yield Point(cpu=0, raw=raw(value(data, "cycle_last")), ns=ns & U64)

    return read


def counter_of(memory: GuestMemory, kernel: Kernel, types: Types, place: Addr) -> str:
    """Return the name of the kernel's function that timekeeping reads its counter by.

    Args:
        memory: of the guest.
        kernel: that runs there.
        types: of it.
        place: of a ``struct tk_fast``.

    Returns:
        The name; "" if there is no such function.
    """
    try:
        base = place + types.offset("tk_fast", "base")
        clock = memory.u64(base + types.offset("tk_read_base", "clock"))
        symbol = kernel.symbols.at(memory.u64(clock + types.offset("clocksource", "read")))
    except MemoryFault:
        return ""
    return "" if symbol is None else symbol.name


class FittedClock:
    """A clock that timekeeping's points tell. Implements ``ports.Clock``.

    One thread at a time may ``refresh`` and take ``ns``; another may read ``tick_s``.

    Attributes:
        function: none of the kernel's is called at a hit.
        words: what it is, for people.
        is_fit: whether there are points, and those of all CPUs are of one clock.
    """

    function: ClassVar[Addr | None] = None
    words: ClassVar[str] = "the CPU's counter, fitted to what the kernel says at its ticks"

    def __init__(self, raw: Raw, points: Points) -> None:
        """Read the first points.

        Args:
            raw: the kernel's first idea of its counter's time.
            points: returns those of the last ticks.

        Raises:
            TargetError: the kernel's numbers make no sense.
        """
        self._raw, self._read = raw, points
        self._kept: deque[Point] = deque(maxlen=_KEPT)
        self._last: dict[int, Point] = {}
        self._origin = Point(cpu=0, raw=0, ns=0)
        self._knots: deque[Knot] = deque([Knot(x=0.0, y=0.0, slope=0.0)], maxlen=_KEPT)
        self._latest = -np.inf
        self._next_s = 0.0
        self.is_fit = False
        self.now = self._value()
        self.refresh()

    @property
    def tick_s(self) -> float:
        """How long a count is, in seconds."""
        return self._raw.now.tick_s

    def refresh(self) -> None:
        """Read what the last ticks were, not more often than is of use.

        Raises:
            TargetError: the kernel's numbers make no sense.
        """
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + _INTERVAL_S
        self._raw.refresh()
        if self._take(self._read()):
            self._steer()
        now = self._value()
        if now != self.now:
            self.now = now

    def ns(self, counter: NDArray[np.uint64], cpu: int) -> NDArray[np.uint64]:
        """Return nanoseconds for n counts that were read on one CPU, a copy of shape (n,)."""
        if len(counter):
            latest = self.now.places(self.now.clock.ns(counter.max(keepdims=True), cpu))
            self._latest = max(self._latest, float(latest[0]))
        return self.now.ns(counter, cpu)

    def _value(self) -> PiecewiseLinear:
        origin = self._origin
        return PiecewiseLinear(
            clock=self._raw.now,
            origin=origin.raw,
            ahead=origin.ns - origin.raw & U64,
            knots=tuple(self._knots),
        )

    def _take(self, points: Iterable[Point]) -> bool:
        # Keep those that are new and some way after the last; return whether there are any.
        found, apart = False, _APART_NS * len(self._last)
        for point in points:
            last = self._last.get(point.cpu)
            if last is None or point.raw - last.raw >= apart:
                self._last[point.cpu] = point
                self._kept.append(point)
                found = True
        return found

    def _place(self, point: Point) -> tuple[float, float]:
        x = _signed(point.raw - self._origin.raw)
        return float(x), float(_signed(point.ns - self._origin.ns) - x)

    def _line(self) -> tuple[float, float]:
        # Theil and Sen's: a third of the points may be wrong by any amount.
        x, y = np.array([self._place(point) for point in self._kept]).T
        distance = x[:, None] - x[None, :]
        is_far = distance > max(float(x.max() - x.min()) / 4, _SPAN_NS / 4)
        if len(x) < _ENOUGH or not is_far.any() or x.max() - x.min() < _SPAN_NS:
            newest = int(x.argmax())
            return 0.0, float(y[newest])
        slopes = (y[:, None] - y[None, :])[is_far] / distance[is_far]
        slope = float(np.clip(np.median(slopes), -_MAX_SLOPE, _MAX_SLOPE))
        return slope, float(np.median(y - slope * x))

    def _differ_ns(self, slope: float, offset: float) -> float:
        # By how much CPUs differ: of each the middle of its newest points' distances from the line.
        rest: list[float] = []
        for cpu, last in self._last.items():
            newest = [point for point in self._kept if point.cpu == cpu][-_ENOUGH:] or [last]
            places = map(self._place, newest)
            rest.append(float(np.median([y - offset - slope * x for x, y in places])))
        return max(rest) - min(rest)

    def _doubt_ns(self, slope: float) -> float:
        # What the ticks of CPUs that have slept may differ by, until the rate is known.
        counts = [point.raw for point in self._kept]
        return 0 if slope else _MAX_DRIFT * (max(counts) - min(counts))

    def _steer(self) -> None:
        if self._latest == -np.inf:
            # Nobody has been told a time: it may begin anywhere.
            self._origin = max(self._kept, key=lambda point: point.raw)
        slope, offset = self._line()
        self.is_fit = self._differ_ns(slope, offset) <= _UNFIT_NS + self._doubt_ns(slope)
        if self._latest == -np.inf:
            self._knots = deque([Knot(x=0.0, y=offset, slope=slope)], maxlen=_KEPT)
            return
        # A count that the guest made up must not bend time far away from here.
        at = min(self._latest, max(self._place(point)[0] for point in self._kept) + _AHEAD_NS)
        while len(self._knots) > 1 and self._knots[-1].x > at:
            self._knots.pop()
        last = self._knots[-1]
        at = max(at, last.x)
        y = last.y + last.slope * (at - last.x)
        error = offset + slope * at - y
        step = float(np.clip(error / _STEER_NS, -_MAX_STEER, _MAX_STEER))
        self._knots.append(Knot(x=at, y=y, slope=slope + step))
        if step:
            then = at + error / step
            self._knots.append(Knot(x=then, y=offset + slope * then, slope=slope))


def _signed(value: int) -> int:
    value &= U64
    return value - (1 << 64) if value >> 63 else value
