r"""Files of trace-cmd, version 7: sections that options point to, compressed by zstd.

    struct file_header {             // little endian, as all of it
        char magic[10];              // 17 08 44 "tracing"
        char version[];              // "7\0"
        u8 is_big_endian, long_size;
        u32 page_size;
        char compressor[], its_version[];   // each with its NUL
        u64 options;                 // where the first section of options is
    };
    struct section {
        u16 id, flags;               // flags: 1 = compressed
        u32 description;             // in a section of strings; 0 where there is none
        u64 size;                    // bytes that follow
    };
    struct compressed {              // what follows in a compressed section
        u32 stored, size;            // bytes here, and of what they were
        u8 data[];
    };
    struct option { u16 id; u32 size; u8 data[]; };

The rings of a BUFFER section are compressed in chunks of whole pages: of each CPU a u32 count, then
so many ``struct compressed``. Documentation/trace-cmd/trace-cmd.dat.v7.5.txt of trace-cmd 3.4 has
all of it.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum

import numpy as np
import zstandard
from msgspec import Struct
from numpy.typing import NDArray

MAGIC = b"\x17\x08\x44tracing"
_LEVEL = 3
_SECTION = struct.Struct("<HHIQ")
_COMPRESSED = struct.Struct("<II")
_OPTION = struct.Struct("<HI")
_CPU = struct.Struct("<IQQ")
_TIME_SHIFT = struct.Struct("<QII")
_INTERPOLATE = 1
_IS_COMPRESSED = 1
_LONG_SIZE = 8


class PartId(IntEnum):
    """What a section has, or an option."""

    OPTIONS = 0
    DATE = 1
    CPU_STATISTICS = 2
    BUFFER = 3
    TRACE_CLOCK = 4
    UNAME = 5
    OFFSET = 7
    CPU_COUNT = 8
    VERSION = 9
    TRACE_ID = 11
    TIME_SHIFT = 12
    TSC2NSEC = 14
    HEADER_INFO = 16
    FTRACE_EVENTS = 17
    EVENT_FORMATS = 18
    KALLSYMS = 19
    PRINTK = 20
    CMDLINES = 21
    BUFFER_TEXT = 22


class CpuData(Struct, frozen=True, kw_only=True):
    """Where the pages of a CPU are in the file, with their count of chunks."""

    cpu: int
    offset: int
    size: int


Option = tuple[PartId, bytes]


def file_header(*, page_size: int, options: int) -> bytes:
    """Return what a file begins with, of the same length for any place of its options."""
    begin = MAGIC + b"7\0" + struct.pack("<BBI", 0, _LONG_SIZE, page_size)
    version = ".".join(map(str, zstandard.ZSTD_VERSION))
    return begin + b"zstd\0" + version.encode() + b"\0" + struct.pack("<Q", options)


def section(part: PartId, data: bytes) -> bytes:
    """Return a compressed section."""
    body = compressed(data)
    return _SECTION.pack(part, _IS_COMPRESSED, 0, len(body)) + body


def compressed(data: bytes) -> bytes:
    """Return what stands in a compressed section, or as one chunk of a CPU's pages."""
    stored = zstandard.ZstdCompressor(level=_LEVEL).compress(data)
    return _COMPRESSED.pack(len(stored), len(data)) + stored


def buffer_header(size: int) -> bytes:
    """Return what stands in front of the CPUs' chunks, which take so many bytes."""
    return _SECTION.pack(PartId.BUFFER, _IS_COMPRESSED, 0, size)


def options_section(options: Iterable[Option]) -> bytes:
    """Return the only section of options. It is not compressed: trace-cmd may append others."""
    last = PartId.OPTIONS, struct.pack("<Q", 0)
    body = b"".join(_OPTION.pack(part, len(data)) + data for part, data in (*options, last))
    return _SECTION.pack(PartId.OPTIONS, 0, 0, len(body)) + body


def u32_option(part: PartId, number: int) -> Option:
    """Return an option of one number."""
    return part, struct.pack("<I", number)


def u64_option(part: PartId, number: int) -> Option:
    """Return an option of one number; of a section's, it is the section's offset."""
    return part, struct.pack("<Q", number)


def text_option(part: PartId, text: str) -> Option:
    """Return an option of one text, which ends at its first NUL."""
    return part, _string(text)


def buffer_option(offset: int, *, clock: str, page_size: int, cpus: Sequence[CpuData]) -> Option:
    """Return the option that tells of the rings.

    Args:
        offset: of their section.
        clock: that their times are of.
        page_size: of their pages, bytes.
        cpus: those that have pages.
    """
    # The main instance has no name.
    head = struct.pack("<Q", offset) + b"\0" + _string(clock)
    each = (_CPU.pack(cpu.cpu, cpu.offset, cpu.size) for cpu in cpus)
    return PartId.BUFFER, head + struct.pack("<II", page_size, len(cpus)) + b"".join(each)


def time_shift_option(
    peer: int, times: NDArray[np.int64], offsets: NDArray[np.int64], *, cpus: int
) -> Option:
    """Return the option that brings this file's times to those of another one.

    Args:
        peer: the other's TRACE_ID.
        times: int64 (n,), of this file, ascending, none below 0.
        offsets: int64 (n,), what is added to them; in between in proportion, as outside between
            the last two of that side.
        cpus: that it holds for, from 0 on.
    """
    # By CPU: u32 count, s64 times[], offsets[], scalings[]; then by CPU s64 fraction_bits[]. A time
    # becomes (time * scaling >> fraction_bits) + offset.
    columns = (times, offsets, np.ones_like(times))
    each = struct.pack("<I", len(times)) + b"".join(
        each.astype("<i8").tobytes() for each in columns
    )
    head = _TIME_SHIFT.pack(peer, _INTERPOLATE, cpus)
    return PartId.TIME_SHIFT, head + each * cpus + bytes(8 * len(times)) * cpus


def header_info(page: str, event: str) -> bytes:
    """Return HEADER_INFO: the texts of ``header_page`` and ``header_event``."""
    return b"header_page\0" + _sized(page) + b"header_event\0" + _sized(event)


def event_formats(groups: Mapping[str, Sequence[str]]) -> bytes:
    """Return EVENT_FORMATS: by group, the texts of its events' ``format`` files."""
    found = [struct.pack("<I", len(groups))]
    for group, texts in groups.items():
        found += [_string(group), struct.pack("<I", len(texts)), *map(_sized, texts)]
    return b"".join(found)


def kallsyms(text: bytes) -> bytes:
    """Return KALLSYMS: lines as /proc/kallsyms has them."""
    return struct.pack("<I", len(text)) + text


def cmdlines(text: bytes) -> bytes:
    """Return CMDLINES: lines of a pid and its task's name."""
    return struct.pack("<Q", len(text)) + text


NOTHING = struct.pack("<I", 0)
"""FTRACE_EVENTS or PRINTK of which there are none."""


def _string(text: str) -> bytes:
    return text.encode(errors="surrogateescape") + b"\0"


def _sized(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data
