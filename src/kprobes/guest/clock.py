"""The clock of time stamps: the CPUs' counter by the kernel's own numbers, or a kernel's function.

A counter is turned into what the kernel's trace clock says, whether the kernel trusts it or not:

=============== ==================================================================================
local           sched_clock(): on x86 ``cyc2ns`` of the CPU, elsewhere ``cd``
global, perf    sched_clock_cpu(): the same, or timekeeping's time at the CPU's last tick and what
                sched_clock() has counted since, where the kernel does not trust its TSC
mono, mono_raw  ktime_get_mono_fast_ns(): timekeeping's time, drawn anew at each tick
x86-tsc         the counter itself
=============== ==================================================================================

    struct cyc2ns_data { u32 cyc2ns_mul; u32 cyc2ns_shift; u64 cyc2ns_offset; };
    struct cyc2ns { struct cyc2ns_data data[2]; seqcount_latch_t seq; };   // per CPU

arch/x86/kernel/tsc.c, cycles_2_ns: ns = offset + (cycles * mul >> shift), from data[seq & 1].

    struct clock_data {    // kernel/time/sched_clock.c, ``cd``
        seqcount_latch_t seq;
        struct clock_read_data read_data[2];
        ...
    };
    struct clock_read_data {
        u64 epoch_ns, epoch_cyc, sched_clock_mask, (*read_sched_clock)(void);
        u32 mult, shift;
    };

sched_clock(): ns = epoch_ns + (((cycles - epoch_cyc) & mask) * mult >> shift), from
read_data[seq & 1]. The line is drawn anew before the product could overflow, every hour at least.
"""

import struct
from collections.abc import Mapping, Sequence
from functools import partial
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from kprobes.arch.registry import machine
from kprobes.errors import MemoryFault, TargetError, UnknownTypeError, UsageError
from kprobes.guest.fitted_clock import (
    FittedClock,
    Points,
    counter_of,
    tick_points,
    timekeeper_points,
)
from kprobes.guest.guest import GuestMemory
from kprobes.guest.kernel_abi import first_of
from kprobes.guest.rings import MappedRange
from kprobes.model.clock import MAX_SHIFT, Line, Scale, Scales, Shifted, Unscaled, makes_sense
from kprobes.model.kernel import Kernel, Symbol
from kprobes.units import U64, Addr

X86_TSC = "x86-tsc"
"""The clock whose counts are not nanoseconds."""
_LOCAL = "local"
_CLOCKS: Mapping[str, tuple[str, ...]] = {
    _LOCAL: ("trace_clock_local", "sched_clock"),
    "global": ("trace_clock_global",),
    "perf": ("trace_clock",),
    "mono": ("ktime_get_mono_fast_ns",),
    "mono_raw": ("ktime_get_raw_fast_ns",),
    "boot": ("ktime_get_boot_fast_ns",),
    "tai": ("ktime_get_tai_fast_ns",),
    X86_TSC: ("trace_clock_x86_tsc",),
}
"""The kernel's names of its trace clocks, and its functions, the first that there is."""
_DIRECT = "the CPU's counter, read directly"
_TIMEKEEPERS = {"mono": "tk_fast_mono", "mono_raw": "tk_fast_raw"}
_STABLE = "__sched_clock_stable"
_COUNTERS = ("read_tsc", "arch_counter_read")
"""Functions by which timekeeping reads what probes record."""

_SEQ_SIZE = 8
_READ_DATA = struct.Struct("<QQQQII")
_CLOCK_SIZE = _SEQ_SIZE + 2 * _READ_DATA.size
_FUNCTIONS = ("sched_clock_noinstr", "sched_clock")
"""The first since 5949a68c7344 ("time/sched_clock: Provide sched_clock_noinstr()") (v6.5)."""
_LONGEST = 1024


class SchedClock:
    """The ``local`` trace clock of a kernel that scales its counter so.

    Implements ``ports.Clock``.
    """

    function: ClassVar[Addr | None] = None
    is_fit: ClassVar[bool] = True
    words: ClassVar[str] = _DIRECT

    def __init__(self, memory: GuestMemory, place: Addr) -> None:
        """Read the line at ``place``, the kernel's ``cd``.

        Raises:
            TargetError: the numbers make no sense.
        """
        self._window = MappedRange(memory, place, _CLOCK_SIZE)
        self.refresh()

    @property
    def tick_s(self) -> float:
        """How long a count is, in seconds."""
        return self.now.tick_s

    def refresh(self) -> None:
        """Read the line again: the guest draws it anew from time to time.

        Raises:
            TargetError: the numbers make no sense.
        """
        line, _ = _line(self._window.read(0, _CLOCK_SIZE).tobytes())
        if not makes_sense(line, cpus=1):
            raise TargetError("the guest's clock makes no sense; its memory is corrupted")
        self.now = line

    def ns(self, counter: NDArray[np.uint64], cpu: int) -> NDArray[np.uint64]:
        """Return nanoseconds for counts that were read on any CPU."""
        return self.now.ns(counter, cpu)


def find_line(memory: GuestMemory, kernel: Kernel) -> tuple[Addr, Line] | None:
    """Return where a kernel's line is, and the line, if its cycles are what probes record.

    ``cd`` is in few kernels' tables: it is what the function that uses it names.
    """
    counters = machine(kernel.arch).counters
    if not counters:
        return None
    for place in _named(memory, kernel):
        try:
            line, read = _line(memory.read(place, _CLOCK_SIZE))
        except MemoryFault:
            continue
        symbol = kernel.symbols.at(read)
        if symbol is None or symbol.addr != read:
            continue
        if symbol.name in counters and makes_sense(line, cpus=1):
            return Addr(place), line
    return None


def _named(memory: GuestMemory, kernel: Kernel) -> list[int]:
    symbols = (kernel.symbols.find(name) for name in _FUNCTIONS)
    function = next((symbol for symbol in symbols if symbol is not None), None)
    if function is None:
        return []
    code = memory.read(function.addr, min(function.size, _LONGEST))
    return list(dict.fromkeys(machine(kernel.arch).text.references(code, function.addr)))


def _line(data: bytes) -> tuple[Line, int]:
    # And the kernel's function that reads the cycles.
    latch = int.from_bytes(data[:4], "little") & 1
    ns, cycles, _, read, mult, shift = _READ_DATA.unpack_from(
        data, _SEQ_SIZE + latch * _READ_DATA.size
    )
    return Line(ns_at=ns, cycles=cycles, mult=mult, shift=shift), read


_DATA = struct.Struct("<IIQ")
_TRACE_CLOCK = struct.Struct("<QQi4x")
_MAX_CLOCKS = 32
_SIZE = 2 * _DATA.size + 4


class TscClock:
    """The ``local`` trace clock of a kernel that has a TSC. Implements ``ports.Clock``."""

    function: ClassVar[Addr | None] = None
    is_fit: ClassVar[bool] = True
    words: ClassVar[str] = _DIRECT

    def __init__(self, windows: Sequence[MappedRange]) -> None:
        """Read the scales in some windows, each on one CPU's ``struct cyc2ns``.

        Raises:
            TargetError: the numbers make no sense.
        """
        self._windows = windows
        self.refresh()

    @property
    def tick_s(self) -> float:
        """How long a count is, in seconds, on the first CPU."""
        return self.now.tick_s

    def refresh(self) -> None:
        """Read the scales again: the guest refines them in its first seconds.

        Raises:
            TargetError: the numbers make no sense.
        """
        scales = (_scale(window.read(0, _SIZE).tobytes()) for window in self._windows)
        self.now = Scales(of_cpus=tuple(scales))

    def ns(self, counter: NDArray[np.uint64], cpu: int) -> NDArray[np.uint64]:
        """Return nanoseconds for counts that were read on one CPU."""
        return self.now.ns(counter, cpu)


RawClock = TscClock | SchedClock
"""sched_clock() of a kernel that tells the time by the CPUs' counter."""


class OffsetClock:
    """A clock that is a number ahead of another one, which tells from when on it was trusted."""

    function: ClassVar[Addr | None] = None
    is_fit: ClassVar[bool] = True
    words: ClassVar[str] = _DIRECT

    def __init__(self, clock: RawClock, offset: MappedRange) -> None:
        """Read the number; errors as for the other clock."""
        self._clock, self._window = clock, offset
        self.refresh()

    @property
    def tick_s(self) -> float:
        """How long a count is, in seconds."""
        return self._clock.tick_s

    def refresh(self) -> None:
        """Read all numbers again; errors as for the other clock."""
        self._clock.refresh()
        self.now = Shifted(clock=self._clock.now, ahead=self._window.u64(0))

    def ns(self, counter: NDArray[np.uint64], cpu: int) -> NDArray[np.uint64]:
        """Return nanoseconds for counts that were read on one CPU, in a new array."""
        return self.now.ns(counter, cpu)


class CounterClock:
    """The counter itself, whose counts are not nanoseconds."""

    function: ClassVar[Addr | None] = None
    is_fit: ClassVar[bool] = True
    words: ClassVar[str] = _DIRECT
    now: ClassVar[Unscaled] = Unscaled()

    def __init__(self, clock: RawClock) -> None:
        """Count as a clock does."""
        self._clock = clock

    @property
    def tick_s(self) -> float:
        """How long a count is, in seconds."""
        return self._clock.tick_s

    def refresh(self) -> None:
        """Read the numbers again that ``tick_s`` goes by."""
        self._clock.refresh()

    def ns(self, counter: NDArray[np.uint64], cpu: int) -> NDArray[np.uint64]:
        """Return the counts."""
        del cpu
        return counter


class GuestClock:
    """A function of the kernel's, which is called at every hit.

    Attributes:
        function: its address.
    """

    is_fit: ClassVar[bool] = True
    tick_s: ClassVar[float] = 1e-9
    now: ClassVar[Unscaled] = Unscaled()

    def __init__(self, name: str, function: Addr) -> None:
        """Call a function that returns nanoseconds."""
        self.function: Addr | None = function
        self.words = f"{name}(), called at each hit, which takes longer than the CPU's counter"

    def refresh(self) -> None:
        """Do nothing."""

    def ns(self, counter: NDArray[np.uint64], cpu: int) -> NDArray[np.uint64]:
        """Return what was recorded: it is nanoseconds already."""
        del cpu
        return counter


AnyClock = TscClock | SchedClock | OffsetClock | FittedClock | CounterClock | GuestClock
"""What a recording may have.

All can ``refresh``, and have ``words`` for people, ``tick_s``, ``function``, which is None where
the counter is recorded, ``is_fit``, which says whether all CPUs' stamps are of one clock, and
``now``: the clock as a value, as it was read last.
"""


def open_clock(
    memory: GuestMemory, kernel: Kernel, bases: Sequence[int], name: str | None = None
) -> AnyClock:
    """Return a trace clock of a guest, by the CPUs' counter wherever that can tell it.

    Where the kernel's table has no names of data its trace clock is taken for the ``local`` one.

    Args:
        memory: of the guest.
        kernel: that runs there.
        bases: where each CPU's per-CPU memory begins.
        name: the kernel's name of it; by default the clock that its own trace has now.

    Raises:
        UsageError: it has no such clock.
        TargetError: its numbers make no sense, or it has no clock at all.
    """
    asked, name = name, current_clock(memory, kernel) if name is None else name
    raw = _open_raw(memory, kernel, bases)
    found = None if raw is None else _by_counter(memory, kernel, bases, name, raw)
    if found is not None:
        return found
    function = _function(kernel, name) if asked is None else check_clock(kernel, asked)
    if function is None:
        raise TargetError(f"kernel {kernel.release} has no {' or '.join(_CLOCKS[name])}")
    if name == X86_TSC:
        raise UsageError(f"the TSC of this guest is not what its kernel {kernel.release} uses")
    return GuestClock(function.name, function.addr)


def check_clock(kernel: Kernel, name: str) -> Symbol:
    """Return the function of a kernel that is one of its trace clocks.

    Raises:
        UsageError: it has no such clock, or one that neither counts nanoseconds nor is the TSC.
    """
    function = _function(kernel, name) if name in _CLOCKS else None
    if function is None:
        known = [each for each in _CLOCKS if _function(kernel, each) is not None]
        raise UsageError(
            f"no clock {name!r} in kernel {kernel.release}; there are: {', '.join(known)}"
        )
    return function


def _by_counter(
    memory: GuestMemory, kernel: Kernel, bases: Sequence[int], name: str, raw: RawClock
) -> AnyClock | None:
    offset = kernel.symbols.find("__sched_clock_offset")
    match name:
        case "local":
            return raw
        case "x86-tsc":
            return CounterClock(raw)
        case "global" | "perf" if _is_trusted(memory, kernel):
            ahead = None if offset is None else MappedRange(memory, offset.addr, 8)
            return raw if ahead is None else OffsetClock(raw, ahead)
        case "global" | "perf" | "mono" | "mono_raw":
            return _fitted(memory, kernel, bases, name, raw)
        case _:
            return None


def _fitted(
    memory: GuestMemory, kernel: Kernel, bases: Sequence[int], name: str, raw: RawClock
) -> FittedClock | None:
    try:
        points = _points(memory, kernel, bases, name, raw)
        clock = None if points is None else FittedClock(raw, points)
    except (MemoryFault, UnknownTypeError):
        # Another layout than that of kernels that we know.
        return None
    return clock if clock is not None and clock.is_fit else None


def _points(
    memory: GuestMemory, kernel: Kernel, bases: Sequence[int], name: str, raw: RawClock
) -> Points | None:
    find, types = kernel.symbols.find, kernel.types
    fast = find(_TIMEKEEPERS.get(name, ""))
    if types is None:
        return None
    if fast is not None and counter_of(memory, kernel, types, fast.addr) in _COUNTERS:
        return timekeeper_points(memory, types, fast.addr, partial(_at, raw))
    ticks, ahead = find("sched_clock_data"), find("__gtod_offset")
    if name == "mono_raw" or ticks is None or ahead is None or _is_trusted(memory, kernel):
        return None
    places = [(ticks.addr + base) & U64 for base in bases]
    return tick_points(memory, types, places, None if name == "mono" else ahead.addr)


def _is_trusted(memory: GuestMemory, kernel: Kernel) -> bool:
    # Where there is no such key the counter always is.
    return kernel.symbols.find(_STABLE) is None or _is_on(memory, kernel, _STABLE)


def _at(raw: RawClock, count: int) -> int:
    return int(raw.ns(np.array([count], np.uint64), 0)[0])


def _open_raw(memory: GuestMemory, kernel: Kernel, bases: Sequence[int]) -> RawClock | None:
    """Return sched_clock() where it is the CPUs' counter that it tells the time by."""
    if machine(kernel.arch).counters:
        found = find_line(memory, kernel)
        return None if found is None else SchedClock(memory, found[0])
    scale = kernel.symbols.find("cyc2ns")
    if scale is None or not _is_on(memory, kernel, "__use_tsc") or not _is_native(memory, kernel):
        return None
    return TscClock([MappedRange(memory, (scale.addr + base) & U64, _SIZE) for base in bases])


def _function(kernel: Kernel, name: str) -> Symbol | None:
    found = (kernel.symbols.find(each) for each in _CLOCKS[name])
    return next((symbol for symbol in found if symbol is not None), None)


def current_clock(memory: GuestMemory, kernel: Kernel) -> str:
    """Return the kernel's name of the clock that its own trace has now; ``local`` if unknown."""
    # The top instance's choice; "global" by default where the TSC is not trusted.
    #     static struct { u64 (*func)(void); const char *name; int in_ns; } trace_clocks[];
    trace, table = kernel.symbols.find("global_trace"), kernel.symbols.find("trace_clocks")
    if trace is None or table is None or kernel.types is None:
        return _LOCAL
    place = trace.addr + kernel.types.offset("trace_array", "clock_id")
    index = int.from_bytes(memory.read(place, 4), "little")
    if index >= _MAX_CLOCKS:
        return _LOCAL
    chosen, _, in_ns = _TRACE_CLOCK.unpack(
        memory.read(table.addr + index * _TRACE_CLOCK.size, _TRACE_CLOCK.size)
    )
    functions = ((name, _function(kernel, name)) for name in _CLOCKS)
    found = (name for name, each in functions if each is not None and each.addr == chosen)
    return next(found, _LOCAL) if in_ns else _LOCAL


def _is_on(memory: GuestMemory, kernel: Kernel, key: str) -> bool:
    symbol = kernel.symbols.find(key)
    # struct static_key { atomic_t enabled; ... };
    return symbol is not None and int.from_bytes(memory.read(symbol.addr, 4), "little") > 0


def _is_native(memory: GuestMemory, kernel: Kernel) -> bool:
    native = first_of(kernel, "native_sched_clock")
    key = kernel.symbols.find("__SCK__pv_sched_clock")
    if key is not None:
        return memory.u64(key.addr) == native
    # Before a0e2bf7cb700 ("x86/paravirt: Switch time pvops functions to use static_call()")
    # (v5.13).
    ops = kernel.symbols.find("pv_ops")
    if ops is None or kernel.types is None:
        return ops is None
    place = ops.addr + kernel.types.offset("paravirt_patch_template", "time.sched_clock")
    return memory.u64(place) == native


def _scale(data: bytes) -> Scale:
    latch = int.from_bytes(data[2 * _DATA.size :], "little") & 1
    mul, shift, offset = _DATA.unpack_from(data, latch * _DATA.size)
    if shift > MAX_SHIFT:
        raise TargetError(f"the guest's clock shifts by {shift} bits; its memory is corrupted")
    return Scale(mul=mul, shift=shift, offset=offset)
