"""Options of trace-cmd's files: what they tell of the machine, of its clocks and of its rings.

    struct buffer {                  // BUFFER of version 7; of version 6 it ends after the name
        u64 section;                 // of version 6, where the rings' table is
        char name[], clock[];        // each with its NUL; the main one has no name
        u32 page_size, count;
        struct { u32 cpu; u64 offset, size; } cpus[count];
    };
    struct time_shift {              // TIME_SHIFT
        u64 peer;                    // the TRACE_ID of the file whose times these become
        u32 flags, count;            // flags: 1 = between samples, offsets are on a line
        struct { u32 count; u64 time[count], offset[count], scaling[count]; } cpus[count];
        u64 fraction[];              // of each sample of each CPU; not in older files
    };

The texts are as trace-cmd 3.4 writes them: tracecmd/trace-record.c, lib/trace-cmd/trace-input.c.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from kprobes.errors import FormatError
from kprobes.formats.trace_dat import PartId
from kprobes.formats.trace_dat_sections import Cursor, FoundOption, bounded, cursor_of

CPUS_MAX = 1 << 13
"""The most that a kernel is built for: NR_CPUS of x86-64."""
_INTERPOLATED = 1
_NS_PER_US = 1000
_NUMBER = re.compile(rb"\s*([+-]?)(?:0x([0-9a-f]{1,16})|([0-9]{1,19}))(?![0-9a-z])", re.IGNORECASE)
_CLOCK = re.compile(rb"\[([\w-]+)\]")
_INSTANCE = re.compile(rb"\s*Buffer: ([^\n\0]*)")
_CPU = re.compile(rb"\s*CPU: (\d{1,5})\n")
_LOST = re.compile(rb"^(?:overrun|commit overrun|dropped events): (\d{1,19})\s", re.MULTILINE)
_CPU_PLACE = np.dtype([("cpu", "<u4"), ("offset", "<u8"), ("size", "<u8")])

Place = tuple[int, int]
"""Where a CPU's pages are in the file, and how many bytes they take there."""


class ClockSamples(Struct, frozen=True, kw_only=True, eq=False):
    """Relations of a CPU's times to the peer's, in the order of time, none of one time twice.

    Attributes:
        times: uint64 (n,), of this machine, when the relation was taken.
        offsets: int64 (n,), ns; a time becomes ``(time * scaling >> fraction) + offset``.
        scalings: uint64 (n,).
        fractions: uint64 (n,), or None: not told. Of one sample only the offset counts.
    """

    times: NDArray[np.uint64]
    offsets: NDArray[np.int64]
    scalings: NDArray[np.uint64]
    fractions: NDArray[np.uint64] | None


class TimeShift(Struct, frozen=True, kw_only=True, eq=False):
    """How times of this file become those of another one, which was recorded with it.

    Attributes:
        peer: the other's trace_id.
        is_interpolated: between two samples, the offset is on a line from one's to the other's.
        cpus: by CPU.
    """

    peer: int
    is_interpolated: bool
    cpus: tuple[ClockSamples, ...]


class RingPlaces(Struct, frozen=True, kw_only=True):
    """The rings of an instance, as a BUFFER option tells of them: version 6 only ``at``, ``name``.

    Attributes:
        at: where their section is, or their table.
        name: "" is the main one.
        clock: "" is not told.
        page_size: bytes.
        places: by CPU, of those that have pages.
    """

    at: int
    name: str
    clock: str
    page_size: int
    places: Mapping[int, Place]


class FoundOptions(Struct, kw_only=True):
    """What the options told so far.

    Attributes:
        has_clock: there was a TRACE_CLOCK, which may be empty.
        sections: where each one is.
        instances: in the order of the options.
        lost: by instance and CPU, events that the statistics tell of.
    """

    offset_ns: int = 0
    clock: str = ""
    has_clock: bool = False
    release: str = ""
    machine: str = ""
    cpu_count: int = 0
    trace_id: int | None = None
    tsc2nsec: tuple[int, int, int] | None = None
    has_text: bool = False
    sections: dict[int, int] = field(default_factory=dict[int, int])
    time_shifts: list[TimeShift] = field(default_factory=list[TimeShift])
    instances: list[RingPlaces] = field(default_factory=list[RingPlaces])
    lost: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    statistics_of: str = ""


def read_options(
    options: Iterable[FoundOption], found: FoundOptions, *, is_sectioned: bool
) -> None:
    """Note what options tell; those that are not known are passed over.

    Args:
        options: in the file's order, of which later ones replace earlier ones.
        found: what is told is noted there.
        is_sectioned: as they are from version 7 on.

    Raises:
        FormatError: they are not what they should be.
    """
    for part, data in bounded(options):
        cursor = cursor_of(data, f"option {part}")
        if part == PartId.BUFFER:
            found.instances.append(_instance(cursor, is_sectioned=is_sectioned))
        elif part in _SECTIONS:
            found.sections[part] = cursor.number(8)
        elif part in _READERS:
            _READERS[part](found, cursor)


def selected_clock(text: bytes) -> str:
    """Return the clock in brackets of a ``trace_clock`` file, or ""."""
    clock = _CLOCK.search(text)
    return "" if clock is None else clock[1].decode()


def checked_cpus(count: int) -> int:
    """Return a number of CPUs, or raise FormatError: no machine has that many."""
    if count > CPUS_MAX:
        raise FormatError(f"{count} CPUs")
    return count


def text_of(data: bytes) -> str:
    """Return text up to the first NUL; what is no UTF-8 is escaped."""
    return data.partition(b"\0")[0].decode(errors="backslashreplace")


def _instance(cursor: Cursor, *, is_sectioned: bool) -> RingPlaces:
    at, name = cursor.number(8), text_of(cursor.string())
    if not is_sectioned:
        return RingPlaces(at=at, name=name, clock="", page_size=0, places={})
    clock = cursor.string()
    page_size, count = cursor.number(4), checked_cpus(cursor.number(4))
    rows = np.frombuffer(cursor.take(count * _CPU_PLACE.itemsize), _CPU_PLACE)
    rows = np.sort(rows[rows["size"] > 0], order="cpu")
    cpus = rows["cpu"].tolist()
    if len(set(cpus)) < len(cpus) or (cpus and cpus[-1] >= CPUS_MAX):
        raise FormatError(f"pages of {len(cpus)} CPUs, up to number {cpus[-1]}")
    places = zip(rows["offset"].tolist(), rows["size"].tolist(), strict=True)
    return RingPlaces(
        at=at,
        name=name,
        clock=selected_clock(clock) or text_of(clock),
        page_size=page_size,
        places=dict(zip(cpus, places, strict=True)),
    )


def _date(found: FoundOptions, cursor: Cursor) -> None:
    found.offset_ns += _signed(cursor) * _NS_PER_US


def _offset(found: FoundOptions, cursor: Cursor) -> None:
    found.offset_ns += _signed(cursor)


def _signed(cursor: Cursor) -> int:
    # As strtoll() reads it.
    number = _NUMBER.match(cursor.take(cursor.left))
    if number is None:
        raise FormatError("an offset of times that is no number")
    sign, hexadecimal, decimal = number.groups()
    value = int(hexadecimal, 16) if hexadecimal else int(decimal)
    return -value if sign == b"-" else value


def _statistics(found: FoundOptions, cursor: Cursor) -> None:
    # Of the main instance at first. Of another one, its name is an option of its own before them.
    text = cursor.take(cursor.left)
    instance, cpu = _INSTANCE.match(text), _CPU.match(text)
    if instance is not None:
        found.statistics_of = text_of(instance[1])
    elif cpu is not None:
        lost = sum(map(int, _LOST.findall(text)))
        found.lost[found.statistics_of][int(cpu[1])] += lost


def _clock(found: FoundOptions, cursor: Cursor) -> None:
    found.has_clock, found.clock = True, selected_clock(cursor.take(cursor.left))


def _uname(found: FoundOptions, cursor: Cursor) -> None:
    # trace-cmd writes sysname, nodename, release and machine; we, without the name of a node.
    words = text_of(cursor.take(cursor.left)).split()
    if len(words) > 2:
        found.release, found.machine = words[1 + (len(words) > 3)], words[-1]


def _cpu_count(found: FoundOptions, cursor: Cursor) -> None:
    found.cpu_count = checked_cpus(cursor.number(4))


def _trace_id(found: FoundOptions, cursor: Cursor) -> None:
    found.trace_id = cursor.number(8)


def _tsc2nsec(found: FoundOptions, cursor: Cursor) -> None:
    found.tsc2nsec = cursor.number(4), cursor.number(4), cursor.number(8)


def _text(found: FoundOptions, _: Cursor) -> None:
    found.has_text = True


def _time_shift(found: FoundOptions, cursor: Cursor) -> None:
    peer, flags = cursor.number(8), cursor.number(4)
    columns: list[tuple[NDArray[np.uint64], ...]] = []
    for _ in range(checked_cpus(cursor.number(4))):
        count = cursor.number(4)
        columns.append(tuple(_numbers(cursor, count) for _ in range(3)))
    has_fractions = cursor.left > 0
    cpus = tuple(
        _samples(own, _numbers(cursor, len(own[0])) if has_fractions else None) for own in columns
    )
    is_interpolated = bool(flags & _INTERPOLATED)
    found.time_shifts.append(TimeShift(peer=peer, is_interpolated=is_interpolated, cpus=cpus))


def _samples(
    columns: tuple[NDArray[np.uint64], ...], fractions: NDArray[np.uint64] | None
) -> ClockSamples:
    # trace-cmd writes them in any order, and sorts them when it reads.
    times, order = np.unique(columns[0], return_index=True)
    return ClockSamples(
        times=times,
        offsets=columns[1][order].view(np.int64),
        scalings=columns[2][order],
        fractions=None if fractions is None else fractions[order],
    )


def _numbers(cursor: Cursor, count: int) -> NDArray[np.uint64]:
    return np.frombuffer(cursor.take(8 * count), "<u8")


_READERS: Mapping[int, Callable[[FoundOptions, Cursor], None]] = {
    PartId.DATE: _date,
    PartId.CPU_STATISTICS: _statistics,
    PartId.TRACE_CLOCK: _clock,
    PartId.UNAME: _uname,
    PartId.OFFSET: _offset,
    PartId.CPU_COUNT: _cpu_count,
    PartId.TRACE_ID: _trace_id,
    PartId.TIME_SHIFT: _time_shift,
    PartId.TSC2NSEC: _tsc2nsec,
    PartId.BUFFER_TEXT: _text,
}
_SECTIONS = frozenset(
    {
        PartId.HEADER_INFO,
        PartId.FTRACE_EVENTS,
        PartId.EVENT_FORMATS,
        PartId.KALLSYMS,
        PartId.PRINTK,
        PartId.CMDLINES,
    }
)
