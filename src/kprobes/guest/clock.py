"""The guest's trace clock: from raw counters by the kernel's own numbers, or by asking it.

    struct cyc2ns_data { u32 cyc2ns_mul; u32 cyc2ns_shift; u64 cyc2ns_offset; };
    struct cyc2ns { struct cyc2ns_data data[2]; seqcount_latch_t seq; };   // per CPU

arch/x86/kernel/tsc.c, cycles_2_ns: ns = offset + (cycles * mul >> shift), from data[seq & 1].

The kernel's own line from a counter to nanoseconds, where one line holds for all CPUs.

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
from collections.abc import Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.arch.registry import machine
from kprobes.errors import MemoryFault, TargetError
from kprobes.guest.guest import GuestMemory
from kprobes.guest.kernel_abi import first_of
from kprobes.guest.rings import MappedRange
from kprobes.model.kernel import Kernel
from kprobes.units import U64, Addr

_SEQ_SIZE = 8
_READ_DATA = struct.Struct("<QQQQII")
_CLOCK_SIZE = _SEQ_SIZE + 2 * _READ_DATA.size
_FUNCTIONS = ("sched_clock_noinstr", "sched_clock")
"""The first since 5949a68c7344 ("time/sched_clock: Provide sched_clock_noinstr()") (v6.5)."""
_LONGEST = 1024
_MAX_SHIFT = 32
_NS_PER_S = 1_000_000_000


class Line(Struct, frozen=True, kw_only=True):
    """From cycles to nanoseconds.

    Attributes:
        ns, cycles: a point of it.
        mult, shift: the slope is ``mult / 2**shift``.
        read: the kernel's function that reads the cycles.
    """

    ns: int
    cycles: int
    mult: int
    shift: int
    read: int

    @property
    def rate(self) -> int:
        """Cycles per second."""
        return (_NS_PER_S << self.shift) // self.mult


class SchedClock:
    """The ``local`` trace clock of a kernel that scales its counter so.

    Implements ``ports.Clock``.
    """

    def __init__(self, memory: GuestMemory, place: Addr) -> None:
        """Read the line at ``place``, the kernel's ``cd``.

        Raises:
            TargetError: the numbers make no sense.
        """
        self._window = MappedRange(memory, place, _CLOCK_SIZE)
        self.refresh()

    def refresh(self) -> None:
        """Read the line again: the guest draws it anew from time to time.

        Raises:
            TargetError: the numbers make no sense.
        """
        line = _line(self._window.read(0, _CLOCK_SIZE).tobytes())
        if not _makes_sense(line):
            raise TargetError("the guest's clock makes no sense; its memory is corrupted")
        self._line = line

    def ns(self, counter: NDArray[np.uint64], cpu: int) -> NDArray[np.uint64]:
        """Return nanoseconds for counts that were read on any CPU."""
        del cpu
        line = self._line
        # A count may be from before the line was drawn: it goes on to the left of its point.
        since = (counter - np.uint64(line.cycles)).astype(np.int64)
        passed = (since * np.int64(line.mult)) >> np.int64(line.shift)
        return np.uint64(line.ns) + passed.astype(np.uint64)


def find_line(memory: GuestMemory, kernel: Kernel) -> tuple[Addr, Line] | None:
    """Return where a kernel's line is, and the line, if its cycles are what probes record.

    ``cd`` is in few kernels' tables: it is what the function that uses it names.
    """
    counters = machine(kernel.arch).counters
    if not counters:
        return None
    for place in _named(memory, kernel):
        try:
            line = _line(memory.read(place, _CLOCK_SIZE))
        except MemoryFault:
            continue
        symbol = kernel.symbols.at(line.read)
        if symbol is None or symbol.addr != line.read:
            continue
        if symbol.name in counters and _makes_sense(line):
            return Addr(place), line
    return None


def _named(memory: GuestMemory, kernel: Kernel) -> list[int]:
    symbols = (kernel.symbols.find(name) for name in _FUNCTIONS)
    function = next((symbol for symbol in symbols if symbol is not None), None)
    if function is None:
        return []
    code = memory.read(function.addr, min(function.size, _LONGEST))
    return list(dict.fromkeys(machine(kernel.arch).text.references(code, function.addr)))


def _line(data: bytes) -> Line:
    latch = int.from_bytes(data[:4], "little") & 1
    ns, cycles, _, read, mult, shift = _READ_DATA.unpack_from(
        data, _SEQ_SIZE + latch * _READ_DATA.size
    )
    return Line(ns=ns, cycles=cycles, mult=mult, shift=shift, read=read)


def _makes_sense(line: Line) -> bool:
    return line.mult > 0 and line.shift <= _MAX_SHIFT


_DATA = struct.Struct("<IIQ")
_TRACE_CLOCK = struct.Struct("<QQi4x")
_MAX_CLOCKS = 32
_SIZE = 2 * _DATA.size + 4
_LOW = np.uint64(0xFFFF_FFFF)


class Scale(Struct, frozen=True, kw_only=True):
    """One CPU's line from cycles to nanoseconds."""

    mul: int
    shift: int
    offset: int


class TscClock:
    """The ``local`` trace clock of a kernel that trusts its TSC. Implements ``ports.Clock``."""

    def __init__(self, windows: Sequence[MappedRange]) -> None:
        """Read the scales in some windows, each on one CPU's ``struct cyc2ns``.

        Raises:
            TargetError: the numbers make no sense.
        """
        self._windows = windows
        self._scales: list[Scale] = []
        self.refresh()

    def refresh(self) -> None:
        """Read the scales again: the guest refines them in its first seconds.

        Raises:
            TargetError: the numbers make no sense.
        """
        self._scales = [_scale(window.read(0, _SIZE).tobytes()) for window in self._windows]

    def ns(self, counter: NDArray[np.uint64], cpu: int) -> NDArray[np.uint64]:
        """Return nanoseconds for counts that were read on one CPU."""
        scale = self._scales[cpu]
        mul = np.uint64(scale.mul)
        # 64 by 32 bits in two halves, as mul_u64_u32_shr.
        high, low = counter >> np.uint64(32), counter & _LOW
        ns = (low * mul) >> np.uint64(scale.shift)
        ns += (high * mul) << np.uint64(32 - scale.shift)
        return ns + np.uint64(scale.offset)


class GuestClock:
    """The trace clock of a kernel whose own function was called at the hit."""

    def refresh(self) -> None:
        """Do nothing."""

    def ns(self, counter: NDArray[np.uint64], cpu: int) -> NDArray[np.uint64]:
        """Return what was recorded: it is nanoseconds already."""
        del cpu
        return counter


AnyClock = TscClock | SchedClock | GuestClock
"""What a recording may have. All can ``refresh``."""


def open_clock(
    memory: GuestMemory, kernel: Kernel, bases: tuple[int, ...]
) -> TscClock | SchedClock:
    """Return the clock that turns raw counters into the guest's ``local`` trace clock.

    Args:
        memory: of the guest.
        kernel: that runs there.
        bases: where each CPU's per-CPU memory begins.

    Raises:
        TargetError: the kernel has no such clock, or its numbers make no sense.
    """
    if machine(kernel.arch).counters:
        found = find_line(memory, kernel)
        if found is None:
            raise TargetError(f"kernel {kernel.release} has no clock that only its counter tells")
        return SchedClock(memory, found[0])
    symbol = first_of(kernel, "cyc2ns")
    return TscClock([MappedRange(memory, (symbol + base) & U64, _SIZE) for base in bases])


def clock_function(memory: GuestMemory, kernel: Kernel) -> Addr | None:
    """Return the guest's trace clock when only calling it tells the time, else None.

    None is for the ``local`` clock of a kernel whose raw counter and line tell the same: on x86
    of one that trusts its TSC and is not under a paravirtual clock. Where the kernel's table has
    no names of data its trace clock is taken for the ``local`` one.
    """
    local = first_of(kernel, "trace_clock_local", "sched_clock")
    current = _trace_clock(memory, kernel) or local
    return None if current == local and _is_raw(memory, kernel) else current


def _trace_clock(memory: GuestMemory, kernel: Kernel) -> Addr | None:
    # The top instance's choice; "global" by default where the TSC is not trusted.
    #     static struct { u64 (*func)(void); const char *name; int in_ns; } trace_clocks[];
    trace, table = kernel.symbols.find("global_trace"), kernel.symbols.find("trace_clocks")
    if trace is None or table is None or kernel.types is None:
        return None
    place = trace.addr + kernel.types.offset("trace_array", "clock_id")
    index = int.from_bytes(memory.read(place, 4), "little")
    if index >= _MAX_CLOCKS:
        return None
    function, _, in_ns = _TRACE_CLOCK.unpack(
        memory.read(table.addr + index * _TRACE_CLOCK.size, _TRACE_CLOCK.size)
    )
    is_code = kernel.text[0] <= function < kernel.text[1]
    return Addr(function) if is_code and in_ns else None


def _is_raw(memory: GuestMemory, kernel: Kernel) -> bool:
    if machine(kernel.arch).counters:
        return find_line(memory, kernel) is not None
    return (
        kernel.symbols.find("cyc2ns") is not None
        and _is_on(memory, kernel, "__use_tsc")
        and _is_on(memory, kernel, "__sched_clock_stable")
        and _is_native(memory, kernel)
    )


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
    if shift > 32:
        raise TargetError(f"the guest's clock shifts by {shift} bits; its memory is corrupted")
    return Scale(mul=mul, shift=shift, offset=offset)
