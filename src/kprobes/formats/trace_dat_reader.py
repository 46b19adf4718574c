"""Reader of trace-cmd's files, of versions 6 and 7, little endian, of kernels of 64 bits.

    struct file_6 {                  // after magic, "6\\0", endian, long_size, page_size
        char name[];                 // "header_page\\0"
        u64 size; char text[size];
        char name[];                 // "header_event\\0"
        u64 size; char text[size];
        u32 count;                   // of formats of the group ftrace
        struct { u64 size; char text[size]; } formats[count];
        u32 groups;
        struct {
            char name[];
            u32 count;
            struct { u64 size; char text[size]; } formats[count];
        } formats[groups];
        u32 size; char kallsyms[size];
        u32 size; char printk_formats[size];
        u64 size; char cmdlines[size];
        u32 cpus;
        char begin[10];              // "options  \\0"; or what follows them, if there are none
        struct { u16 id; u32 size; char data[size]; } options[];   // then the id 0
        char begin[10];              // "flyrecord\\0"; "latency  \\0": text follows
        struct { u64 offset, size; } rings[cpus];
        u64 size; char clock[size];  // "[local]", if there was an option TRACE_CLOCK
    };

A BUFFER option of version 6 leads to another "flyrecord" with its table. Version 7 has the same
parts in sections: see ``trace_dat``. All of it is in Documentation/trace-cmd/trace-cmd.dat.v6.5.txt
of trace-cmd 3.4.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import BinaryIO

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from kprobes.errors import FormatError
from kprobes.formats.ftrace import PageFormat, parse_page
from kprobes.formats.trace_dat import MAGIC, PartId
from kprobes.formats.trace_dat_options import (
    FoundOptions,
    Place,
    RingPlaces,
    checked_cpus,
    read_options,
    selected_clock,
    text_of,
)
from kprobes.formats.trace_dat_sections import METADATA_MAX, Cursor, SectionFile, each_option

_VERSIONS = ("6", "7")
_LATENCY = "a latency report of trace-cmd, which is text already"
_DEFAULT_CLOCK = "local"
_LONG = 8
_NAMES_MAX = 16 << 20
"""Bytes of what becomes a table of names."""
_EVENTS_MAX = 1 << 16
"""The kernel's numbers of events have 16 bits."""
_PAGE_MIN, _PAGE_MAX = 1 << 12, 1 << 20
"""Bytes of a page of the ring: its count of them has 20 bits."""
_MARK_SIZE = 10
_OPTIONS, _RINGS, _TEXT = b"options", b"flyrecord", b"latency"
_CLOCK_MAX = 1 << 8
_INSTANCES_MAX, _RINGS_MAX = 1 << 10, 1 << 17
_COUNT_SIZE, _CHUNK_HEAD = 4, 8
_CHUNK_PAGES = 16
_CHUNK_MAX, _CHUNKS_MAX = 64 << 20, 1 << 30
"""Bytes of a decompressed chunk, and of one of each CPU: trace-cmd puts 10 pages into one."""
_COMM = re.compile(rb"^ *(\d{1,10}) (.*)$", re.MULTILINE)
_PRINTK = re.compile(rb'^ *0x([0-9a-f]{1,16}) : "(.*)"$', re.MULTILINE)
_ESCAPE = re.compile(rb'\\([nt"])')
_ESCAPED = {b"n": b"\n", b"t": b"\t", b'"': b'"'}

Bytes = NDArray[np.uint8]


class Buffer(Struct, frozen=True, kw_only=True):
    """The rings of an instance.

    Attributes:
        name: "" is the main one.
        clock: of its times: ``local``, ``global``, ``x86-tsc``, …
        page_size: of its sub-buffers, bytes.
        cpus: those that have pages, in the order of their numbers.
    """

    name: str
    clock: str
    page_size: int
    cpus: tuple[int, ...]


class TraceDat:
    """A file of trace-cmd. Its pages are read when they are asked for.

    Attributes:
        version: of the file, 6 or 7.
        page: how pages of the main instance lie in memory. Others differ in their size only.
        cpu_count: of the machine.
        release: of its kernel, as ``uname -r``; "" if not told.
        machine: as ``uname -m``; "" if not told.
        events: group and text of each event's ``format`` file, also those of the group ftrace.
        kallsyms: as /proc/kallsyms; b"" if not told.
        printk_formats: by address, the strings that trace_printk() tells the addresses of.
        comms: by pid, names of tasks.
        offset_ns: to be added to all times.
        tsc2nsec: factor, shift and offset from counts of the TSC to ns, if times are such.
        trace_id: of the recording; None if not told.
        time_shifts: to the times of files that were recorded with it.
        lost: by CPU, events that the kernel's statistics count as lost, of the first instance that
            has pages. Pages may tell of the same ones.
        buffers: the main instance's, then others'.
        is_cut: the file ended within pages that were read so far.
    """

    def __init__(self, file: BinaryIO) -> None:
        """Read all but the pages.

        Args:
            file: seekable, and open for as long as pages are read.

        Raises:
            FormatError: it is no such file, or of a machine that is not supported.
        """
        self._file = SectionFile(file, file.seek(0, 2))
        begin = self._file.cursor(0)
        self.version, page_size = _begin(begin)
        head = _Head(self._file, page_size)
        (head.read_6 if self.version == 6 else head.read_7)(begin)
        self._rings, options = head.rings(), head.options
        self.buffers = tuple(each.buffer for each in self._rings)
        self.page = replace(head.page, size=self.buffers[0].page_size)
        self.cpu_count = options.cpu_count or max(
            (cpu + 1 for buffer in self.buffers for cpu in buffer.cpus), default=0
        )
        self.release, self.machine = options.release, options.machine
        self.events = tuple(head.events)
        self.kallsyms = head.texts.get(PartId.KALLSYMS, b"")
        self.printk_formats = printk_formats_of(head.texts.get(PartId.PRINTK, b""))
        self.comms = comms_of(head.texts.get(PartId.CMDLINES, b""))
        self.offset_ns = options.offset_ns
        self.tsc2nsec = options.tsc2nsec
        self.trace_id = options.trace_id
        self.time_shifts = tuple(options.time_shifts)
        with_pages = next((each for each in self.buffers if each.cpus), self.buffers[0])
        self.lost = dict(options.lost.get(with_pages.name, {}))
        self.is_cut = False

    def pages(self, buffer: int, cpu: int, *, at_once: int) -> Iterator[Bytes]:
        """Yield a CPU's pages in the order of its ring, new arrays.

        Args:
            buffer: which one of ``buffers``.
            cpu: one of its ``cpus``.
            at_once: how many pages at most, of which each array has that many but the last one.

        Yields:
            Shape (n, ``page_size`` of the buffer).

        Raises:
            FormatError: they cannot be decompressed.
        """
        if at_once < 1:
            raise ValueError(f"{at_once} pages at once")
        rings = self._rings[buffer]
        place, size = rings.places[cpu], rings.buffer.page_size
        if rings.is_compressed:
            parts = self._decompressed(place[0], rings.chunk_max)
        else:
            parts = self._plain(place, at_once * size)
        held: list[Bytes] = []
        room = at_once
        for part in self._whole(parts, size):
            pages = np.frombuffer(part, np.uint8).reshape(-1, size)
            while len(pages) >= room:
                yield np.concatenate([*held, pages[:room]])
                held, pages, room = [], pages[room:], at_once
            held.append(pages)
            room -= len(pages)
        if room < at_once:
            yield np.concatenate(held)

    def _whole(self, parts: Iterator[bytes], size: int) -> Iterator[bytes]:
        # Up to the first one that ends within a page.
        for part in parts:
            whole = len(part) // size * size
            yield part[:whole]
            if whole < len(part):
                self.is_cut = True
                return

    def _plain(self, place: Place, part: int) -> Iterator[bytes]:
        at, size = place
        end = min(at + size, self._file.size)
        self.is_cut |= end < at + size
        for start in range(at, end, part):
            yield self._file.read(start, min(part, end - start))

    def _decompressed(self, at: int, most: int) -> Iterator[bytes]:
        # trace-cmd leaves their count out of the size that it tells: the count says where they end.
        cursor = self._file.cursor(at)
        left = cursor.number(4) if cursor.left >= _COUNT_SIZE else 1
        while left and cursor.left >= _CHUNK_HEAD:
            stored, size = cursor.number(4), cursor.number(4)
            if not 0 < size <= most:
                raise FormatError(f"a chunk of pages that becomes {size} bytes")
            if stored > cursor.left:
                break
            yield self._file.decompressed(cursor.take(stored), size)
            left -= 1
        self.is_cut |= left > 0


def comms_of(text: bytes) -> dict[int, bytes]:
    """Return by pid the names of tasks, from the lines of ``saved_cmdlines``."""
    return {int(pid): comm for pid, comm in _COMM.findall(_names(text))}


def printk_formats_of(text: bytes) -> dict[int, bytes]:
    """Return by address the strings in the lines of ``printk_formats``, as they are in memory."""
    # t_show() of kernel/trace/trace_printk.c; a backslash it leaves as it is.
    return {
        int(addr, 16): _ESCAPE.sub(lambda found: _ESCAPED[found[1]], string)
        for addr, string in _PRINTK.findall(_names(text))
    }


def _names(text: bytes) -> bytes:
    if len(text) > _NAMES_MAX:
        raise FormatError(f"names of {len(text)} bytes")
    return text


class _Rings(Struct, frozen=True, kw_only=True):
    # Of an instance, with where each CPU's pages are.
    buffer: Buffer
    places: Mapping[int, Place]
    is_compressed: bool

    @property
    def chunk_max(self) -> int:
        """Bytes that a chunk has at most, as one of each CPU may be held at once."""
        size = self.buffer.page_size * _CHUNK_PAGES
        return min(max(size, _CHUNKS_MAX // max(len(self.places), 1)), _CHUNK_MAX)


class _Head:
    # What is in front of the pages.

    def __init__(self, file: SectionFile, page_size: int) -> None:
        self._file = file
        self._page_size = page_size
        self._has_sections = False
        self._page: PageFormat | None = None
        self._tables: list[RingPlaces] = []
        self.options = FoundOptions()
        self.events: list[tuple[str, str]] = []
        self._events_size = 0
        self.texts: dict[PartId, bytes] = {}

    @property
    def page(self) -> PageFormat:
        """How pages lie in memory, but for their size."""
        if self._page is None:
            raise FormatError("a file of trace-cmd without its header_page")
        return self._page

    def read_6(self, cursor: Cursor) -> None:
        """Read what follows the beginning of a file of version 6."""
        for part, read in _PARTS.items():
            read(self, part, cursor)
        self.options.cpu_count = checked_cpus(cursor.number(4))
        main = self._table("", cursor, self.options)
        others = [each for each in self.options.instances if each.name]
        for each in _few(others):
            place = self._file.cursor(each.at)
            self._tables.append(self._table(each.name, place, FoundOptions()))
        self._tables.append(main)

    def read_7(self, cursor: Cursor) -> None:
        """Likewise, of version 7."""
        self._has_sections = True
        self._file.compressor = text_of(cursor.string())
        cursor.string()
        at = cursor.number(8)
        if not at:
            raise FormatError("a file of trace-cmd without options")
        read_options(self._file.options(at), self.options, is_sectioned=True)
        for part, place in self.options.sections.items():
            _PARTS[PartId(part)](self, PartId(part), self._file.section(place, PartId(part)))
        self._tables = self.options.instances
        if self.options.has_text and not self._tables:
            raise FormatError(_LATENCY)

    def rings(self) -> list[_Rings]:
        """Return those of all instances, the main one's first."""
        main = [each for each in self._tables if not each.name]
        others = [each for each in self._tables if each.name]
        none = RingPlaces(at=0, name="", clock="", page_size=0, places={})
        return [self._rings(each) for each in _few([*(main or [none])[-1:], *others])]

    def _rings(self, table: RingPlaces) -> _Rings:
        size = table.page_size or self._page_size
        if not self.page.data < size or not _PAGE_MIN <= size <= _PAGE_MAX or size & (size - 1):
            raise FormatError(f"pages of {size} bytes")
        buffer = Buffer(
            name=table.name,
            clock=table.clock or self.options.clock or _DEFAULT_CLOCK,
            page_size=size,
            cpus=tuple(sorted(table.places)),
        )
        is_compressed = self._has_sections and bool(table.places)
        is_compressed = is_compressed and self._file.is_compressed(table.at)
        return _Rings(buffer=buffer, places=table.places, is_compressed=is_compressed)

    def _table(self, name: str, cursor: Cursor, options: FoundOptions) -> RingPlaces:
        # Of version 6; with the options in front of it.
        mark = cursor.take(_MARK_SIZE)
        if mark.startswith(_OPTIONS):
            read_options(each_option(cursor), options, is_sectioned=False)
            mark = cursor.take(_MARK_SIZE)
        if mark.startswith(_TEXT):
            raise FormatError(_LATENCY)
        if not mark.startswith(_RINGS):
            raise FormatError(f"no rings: {mark!r}")
        rows = np.frombuffer(cursor.take(16 * self.options.cpu_count), "<u8").reshape(-1, 2)
        places = {cpu: (at, size) for cpu, (at, size) in enumerate(rows.tolist()) if size}
        clock = self._clock(cursor) if self.options.has_clock else ""
        return RingPlaces(at=0, name=name, clock=clock, page_size=0, places=places)

    def _clock(self, cursor: Cursor) -> str:
        # Not all that wrote the option wrote this, too.
        size = cursor.number(8) if cursor.left >= _LONG else 0
        return selected_clock(cursor.take(min(size, cursor.left, _CLOCK_MAX)))

    def read_page(self, _part: PartId, cursor: Cursor) -> None:
        """Read HEADER_INFO, of which the second text is the same for all kernels."""
        texts = {cursor.string(): cursor.take(cursor.number(8)) for _ in range(2)}
        page = parse_page(text_of(texts.get(b"header_page", b"")))
        if page.data - page.commit != _LONG:
            raise FormatError("a file of trace-cmd of a kernel of 32 bits: not supported")
        self._page = page

    def read_ftrace(self, _part: PartId, cursor: Cursor) -> None:
        """Read FTRACE_EVENTS."""
        self._read_group("ftrace", cursor)

    def read_events(self, _part: PartId, cursor: Cursor) -> None:
        """Read EVENT_FORMATS."""
        count = cursor.number(4)
        _check_events(count)
        for _ in range(count):
            self._read_group(text_of(cursor.string()), cursor)

    def read_text(self, part: PartId, cursor: Cursor) -> None:
        """Read one of the parts that are a text."""
        self.texts[part] = cursor.take(cursor.number(8 if part == PartId.CMDLINES else 4))

    def _read_group(self, group: str, cursor: Cursor) -> None:
        count = cursor.number(4)
        _check_events(len(self.events) + count)
        for _ in range(count):
            size = cursor.number(8)
            self._events_size += size
            if self._events_size > METADATA_MAX:
                raise FormatError(f"descriptions of events of {self._events_size} bytes")
            self.events.append((group, text_of(cursor.take(size))))


_PARTS: Mapping[PartId, Callable[[_Head, PartId, Cursor], None]] = {
    PartId.HEADER_INFO: _Head.read_page,
    PartId.FTRACE_EVENTS: _Head.read_ftrace,
    PartId.EVENT_FORMATS: _Head.read_events,
    PartId.KALLSYMS: _Head.read_text,
    PartId.PRINTK: _Head.read_text,
    PartId.CMDLINES: _Head.read_text,
}
"""In the order of version 6."""


def _begin(cursor: Cursor) -> tuple[int, int]:
    # Its version, and the size of the machine's pages.
    if cursor.left < len(MAGIC) or cursor.take(len(MAGIC)) != MAGIC:
        raise FormatError("not a file of trace-cmd")
    version = text_of(cursor.string())
    if version not in _VERSIONS:
        raise FormatError(f"a file of trace-cmd of version {version!r}: 6 and 7 are supported")
    if cursor.number(1):
        raise FormatError("a file of trace-cmd of a big-endian machine: not supported")
    # How long a ``long`` is for its programs; header_page tells of the kernel.
    cursor.take(1)
    return int(version), cursor.number(4)


def _check_events(count: int) -> None:
    if count > _EVENTS_MAX:
        raise FormatError(f"{count} events, more than the kernel has numbers for")


def _few(instances: list[RingPlaces]) -> list[RingPlaces]:
    if len(instances) > _INSTANCES_MAX or sum(len(each.places) for each in instances) > _RINGS_MAX:
        raise FormatError(f"the rings of {len(instances)} instances")
    return instances
