"""Files of trace-cmd of both versions, written by the letter of their specifications."""

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import zstandard

from kprobes.formats import trace_dat
from kprobes.formats.ring_page import HEADER_EVENT, PAGE, header_page
from kprobes.formats.trace_dat import PartId

FORMAT = """name: {0}
ID: {1}
format:
\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;
\tfield:unsigned char common_flags;\toffset:2;\tsize:1;\tsigned:0;
\tfield:unsigned char common_preempt_count;\toffset:3;\tsize:1;\tsigned:0;
\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;

\tfield:u64 a;\toffset:8;\tsize:8;\tsigned:0;

print fmt: "%Lu", REC->a
"""
"""An event's, to be formatted with its name and number."""

Option = tuple[int, bytes]
Compress = Callable[[bytes], bytes]


def _zstd(data: bytes) -> bytes:
    # As trace-cmd does: the frame does not say its size.
    return zstandard.ZstdCompressor(write_content_size=False).compress(data)


COMPRESSORS: Mapping[str, Compress | None] = {"none": None, "zlib": zlib.compress, "zstd": _zstd}


@dataclass(kw_only=True)
class Rings:
    """An instance, and by CPU its pages, of which a compressed chunk has so many."""

    name: str = ""
    clock: str = "local"
    pages: dict[int, bytes] = field(default_factory=dict[int, bytes])
    page_size: int = 4096
    chunk_pages: int = 10


@dataclass(kw_only=True)
class Written:
    """What is in a file. ``rings`` has the main instance first."""

    cpus: int = 4
    page: str = field(default_factory=lambda: header_page(is_char_signed=True))
    ftrace: Sequence[str] = (FORMAT.format("print", 5),)
    events: Mapping[str, Sequence[str]] = field(
        default_factory=lambda: {
            "sched": [FORMAT.format("one", 70), FORMAT.format("two", 71)],
            "mine": [FORMAT.format("three", 72)],
        }
    )
    kallsyms: bytes = b"ffffffff81000000 T _text\nffffffff81000100 t x\t[mod]\n"
    printk: bytes = b'0xffffffff81000200 : "one\\n"\n'
    cmdlines: bytes = b"7 a task\n8 other\n"
    options: Sequence[Option] = ()
    rings: Sequence[Rings] = (Rings(),)

    def parts(self) -> dict[PartId, bytes]:
        """Return the parts that both versions have, in the order of version 6."""
        texts = [text.encode() for text in self.ftrace]
        sized = b"".join(struct.pack("<Q", len(text)) + text for text in texts)
        return {
            PartId.HEADER_INFO: trace_dat.header_info(self.page, HEADER_EVENT),
            PartId.FTRACE_EVENTS: struct.pack("<I", len(texts)) + sized,
            PartId.EVENT_FORMATS: trace_dat.event_formats(self.events),
            PartId.KALLSYMS: trace_dat.kallsyms(self.kallsyms),
            PartId.PRINTK: struct.pack("<I", len(self.printk)) + self.printk,
            PartId.CMDLINES: trace_dat.cmdlines(self.cmdlines),
        }


def beginning(version: int, *, endian: int = 0, long_size: int = 8) -> bytes:
    """Return what both versions begin with.

    Args:
        version: of the file.
        endian: 1 is big.
        long_size: bytes of a program's ``long``.
    """
    head = b"\x17\x08\x44tracing%d\0" % version
    return head + struct.pack("<BBI", endian, long_size, PAGE.size)


def options_of(options: Sequence[Option]) -> bytes:
    """Return options without an end."""
    return b"".join(struct.pack("<HI", part, len(data)) + data for part, data in options)


def version_6(file: Written) -> bytes:
    """Return a file of version 6."""
    data = beginning(6) + b"".join(file.parts().values()) + struct.pack("<I", file.cpus)
    data += b"options  \0" + options_of(file.options)
    # Where the others' tables are is known later.
    places: list[int] = []
    for each in file.rings[1:]:
        option = options_of([(PartId.BUFFER, bytes(8) + each.name.encode() + b"\0")])
        places.append(len(data) + 6)
        data += option
    data += options_of([(PartId.TRACE_CLOCK, b"")]) + struct.pack("<H", 0)
    for number, each in enumerate(file.rings):
        if number:
            at = places[number - 1]
            data = data[:at] + struct.pack("<Q", len(data)) + data[at + 8 :]
        data = _with_rings_6(data, each, file.cpus)
    return data


def _with_rings_6(data: bytes, rings: Rings, cpus: int) -> bytes:
    clock = f"[{rings.clock}]".encode()
    table = len(data) + 10
    after = struct.pack("<Q", len(clock)) + clock
    data += b"flyrecord\0" + bytes(16 * cpus) + after
    rows = b""
    for cpu in range(cpus):
        data += bytes(-len(data) % 4096)
        pages = rings.pages.get(cpu, b"")
        rows += struct.pack("<QQ", len(data), len(pages))
        data += pages
    return data[:table] + rows + data[table + len(rows) :]


def version_7(file: Written, compressor: str = "none", *, plain: Sequence[int] = ()) -> bytes:
    """Return a file of version 7, with options in three sections, and the rings at its end.

    Args:
        file: what is in it.
        compressor: one of ``COMPRESSORS``.
        plain: parts that are not compressed all the same; BUFFER stands for the rings.
    """
    compress = COMPRESSORS[compressor]
    begin = beginning(7) + compressor.encode() + b"\0" + b"1\0"
    data = begin + bytes(8)
    found: list[Option] = []
    for part, text in file.parts().items():
        found.append((part, struct.pack("<Q", len(data))))
        data += _section(part, text, None if part in plain else compress)
    buffers, after = len(data), len(data)
    data += _buffers([(bytes(8), _told(each, [(0, 0)] * len(each.pages))) for each in file.rings])
    for options in (found, list(file.options)):
        done = (PartId.OPTIONS, struct.pack("<Q", after))
        after, of_options = len(data), None if PartId.OPTIONS in plain else compress
        data += _section(PartId.OPTIONS, options_of([*options, done]), of_options)
    places: list[tuple[bytes, bytes]] = []
    for each in file.rings:
        at = struct.pack("<Q", len(data))
        data, told = _with_rings_7(data, each, None if PartId.BUFFER in plain else compress)
        places.append((at, told))
    section = _buffers(places)
    data = data[:buffers] + section + data[buffers + len(section) :]
    return begin + struct.pack("<Q", after) + data[len(begin) + 8 :]


def _buffers(found: Sequence[tuple[bytes, bytes]]) -> bytes:
    # The section of these options, the last one of the chain.
    options = [(int(PartId.BUFFER), at + told) for at, told in found]
    return _section(PartId.OPTIONS, options_of([*options, (PartId.OPTIONS, bytes(8))]), None)


def _told(rings: Rings, places: Sequence[tuple[int, int]]) -> bytes:
    names = rings.name.encode() + b"\0" + rings.clock.encode() + b"\0"
    rows = (
        struct.pack("<IQQ", cpu, *place) for cpu, place in zip(rings.pages, places, strict=True)
    )
    return names + struct.pack("<II", rings.page_size, len(places)) + b"".join(rows)


def _section(part: int, data: bytes, compress: Compress | None) -> bytes:
    if compress is not None:
        stored = compress(data)
        data = struct.pack("<II", len(stored), len(data)) + stored
    return struct.pack("<HHIQ", part, compress is not None, 0, len(data)) + data


def _with_rings_7(data: bytes, rings: Rings, compress: Compress | None) -> tuple[bytes, bytes]:
    # The file with their section, and what its option has after the place of that.
    begin = len(data)
    data += bytes(16)
    places: list[tuple[int, int]] = []
    for pages in rings.pages.values():
        data += bytes(-len(data) % 4096)
        stored = (
            pages
            if compress is None
            else _chunks(pages, compress, rings.page_size * rings.chunk_pages)
        )
        places.append((len(data), len(stored)))
        data += stored
    size = len(data) - begin - 16
    head = struct.pack("<HHIQ", PartId.BUFFER, compress is not None, 0, size)
    return data[:begin] + head + data[begin + 16 :], _told(rings, places)


def _chunks(pages: bytes, compress: Compress, size: int) -> bytes:
    # ``size`` bytes become one.
    parts = [pages[at : at + size] for at in range(0, len(pages), size)]
    stored = [(compress(part), len(part)) for part in parts]
    each = (struct.pack("<II", len(data), became) + data for data, became in stored)
    return struct.pack("<I", len(parts)) + b"".join(each)
