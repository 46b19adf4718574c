"""The kernel's own line from a counter to nanoseconds, where one line holds for all CPUs.

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
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kprobes.arch.registry import machine
from kprobes.drivers.guest.memory import GuestMemory
from kprobes.drivers.guest.rings import Window
from kprobes.errors import MemoryFault, TargetError
from kprobes.model.kernel import Kernel
from kprobes.units import Addr

_SEQ_SIZE = 8
_DATA = struct.Struct("<QQQQII")
_SIZE = _SEQ_SIZE + 2 * _DATA.size
_FUNCTIONS = ("sched_clock_noinstr", "sched_clock")
"""The first since 5949a68c7344 ("time/sched_clock: Provide sched_clock_noinstr()") (v6.5)."""
_LONGEST = 1024
_MAX_SHIFT = 32
_NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
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
        self._window = Window(memory, place, _SIZE)
        self.refresh()

    def refresh(self) -> None:
        """Read the line again: the guest draws it anew from time to time.

        Raises:
            TargetError: the numbers make no sense.
        """
        line = _line(self._window.read(0, _SIZE).tobytes())
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
            line = _line(memory.read(place, _SIZE))
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
    ns, cycles, _, read, mult, shift = _DATA.unpack_from(data, _SEQ_SIZE + latch * _DATA.size)
    return Line(ns=ns, cycles=cycles, mult=mult, shift=shift, read=read)


def _makes_sense(line: Line) -> bool:
    return line.mult > 0 and line.shift <= _MAX_SHIFT
