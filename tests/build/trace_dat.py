"""Reader of trace-cmd's files, section by section and record by record, by their own formats."""

import re
import struct
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import zstandard
from numpy.typing import NDArray

from kprobes.formats.ftrace import parse_event, parse_page, read_pages
from kprobes.model.events import EventField, EventFormat, Locator

Value = int | bytes | list[int]


@dataclass
class Section:
    """One section, no longer compressed; that of the rings is as it is."""

    id: int
    data: bytes


@dataclass
class Dat:
    """What is in a file.

    ``options`` has the data of all options by number; ``pages`` those of each CPU.
    """

    page_size: int
    compressor: bytes
    options: dict[int, list[bytes]] = field(default_factory=lambda: defaultdict(list))
    sections: dict[int, bytes] = field(default_factory=dict[int, bytes])
    pages: dict[int, NDArray[np.uint8]] = field(default_factory=dict[int, NDArray[np.uint8]])
    offsets: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def texts(self) -> list[tuple[str, str]]:
        """The group and the text of each event's format."""
        data, at = self.sections[18], 4
        found: list[tuple[str, str]] = []
        for _ in range(_u32(data, 0)):
            end = data.index(b"\0", at)
            group, at = data[at:end].decode(), end + 5
            for _ in range(_u32(data, end + 1)):
                size = _u64(data, at)
                found.append((group, data[at + 8 : at + 8 + size].decode()))
                at += 8 + size
        return found

    @property
    def kallsyms(self) -> list[str]:
        """The lines of its symbols."""
        return self.sections[19][4:].decode().splitlines()

    @property
    def cmdlines(self) -> bytes:
        """The names of its tasks."""
        return self.sections[21][8:]

    def events(self) -> Iterator[dict[str, Value | str]]:
        """Yield the events of each CPU: their fields, and ``ts``, ``cpu`` and ``event``."""
        formats = {form.number: form for form in (parse_event(text) for _, text in self.texts)}
        page = parse_page(_texts_of(self.sections[16])["header_page"])
        for cpu, pages in self.pages.items():
            records = read_pages(pages, page)
            flat = pages.tobytes()
            columns = (records.at.tolist(), records.sizes.tolist(), records.ts.tolist())
            for at, size, ts in zip(*columns, strict=True):
                data = flat[at : at + size]
                form = formats[int.from_bytes(data[:2], "little")]
                yield {"event": form.name, "cpu": cpu, "ts": ts, **_values(form, data)}

    @property
    def lost(self) -> int:
        """How many events its pages say are missing."""
        page = parse_page(_texts_of(self.sections[16])["header_page"])
        return sum(read_pages(pages, page).lost for pages in self.pages.values())


def read_dat(data: bytes) -> Dat:
    """Read a whole file, as the specification of version 7 says."""
    assert data[:12] == b"\x17\x08\x44tracing7\0"[:12]
    assert data[12:14] == b"\0\x08"
    (page_size,) = struct.unpack_from("<I", data, 14)
    compressor, version, rest = data[18:].split(b"\0", 2)
    dat = Dat(page_size=page_size, compressor=compressor)
    start = 18 + len(compressor) + len(version) + 2
    assert data[start:] == rest
    options = _section(data, _u64(data, start))
    assert options.id == 0
    for number, found in _options(options.data):
        dat.options[number].append(found)
        if number >= 16:
            section = _section(data, _u64(found, 0))
            assert section.id == number
            dat.sections[number] = section.data
    (buffer,) = dat.options[3]
    for cpu, offset, size in _cpus(buffer):
        dat.offsets[cpu] = offset
        dat.pages[cpu] = _pages(data[offset : offset + size], page_size)
    return dat


def clock_of(buffer: bytes) -> tuple[bytes, bytes]:
    """Return the instance and the clock of a BUFFER option."""
    name, clock, _ = buffer[8:].split(b"\0", 2)
    return name, clock


def _section(data: bytes, at: int) -> Section:
    number, flags, _, size = struct.unpack_from("<HHIQ", data, at)
    body = data[at + 16 : at + 16 + size]
    assert len(body) == size
    return Section(number, _uncompressed(body)[0] if flags else body)


def _uncompressed(data: bytes) -> tuple[bytes, bytes]:
    # What stands there, and what comes after it.
    stored, size = struct.unpack_from("<II", data)
    found = zstandard.ZstdDecompressor().decompress(data[8 : 8 + stored])
    assert len(found) == size
    return found, data[8 + stored :]


def _options(data: bytes) -> Iterator[tuple[int, bytes]]:
    while data:
        number, size = struct.unpack_from("<HI", data)
        assert len(data) >= 6 + size
        if number == 0:
            assert data[6:] == bytes(8)
            return
        yield number, data[6 : 6 + size]
        data = data[6 + size :]
    raise AssertionError("options without an end")


def _cpus(buffer: bytes) -> Iterator[tuple[int, int, int]]:
    name, clock = clock_of(buffer)
    at = 8 + len(name) + len(clock) + 2
    assert len(buffer) == at + 8 + 20 * _u32(buffer, at + 4)
    for i in range(_u32(buffer, at + 4)):
        yield struct.unpack_from("<IQQ", buffer, at + 8 + 20 * i)


def _pages(data: bytes, page_size: int) -> NDArray[np.uint8]:
    count, data, found = _u32(data, 0), data[4:], b""
    for _ in range(count):
        chunk, data = _uncompressed(data)
        found += chunk
    assert not data
    return np.frombuffer(found, np.uint8).reshape(-1, page_size)


def _texts_of(data: bytes) -> dict[str, str]:
    # HEADER_INFO.
    found: dict[str, str] = {}
    while data:
        name, rest = data.split(b"\0", 1)
        size = _u64(rest, 0)
        found[name.decode()], data = rest[8 : 8 + size].decode(), rest[8 + size :]
    return found


def _values(form: EventFormat, data: bytes) -> dict[str, Value]:
    return {each.name: _value(each, data) for each in (*form.common, *form.fields)}


def _value(each: EventField, data: bytes) -> Value:
    where = data[each.offset : each.end]
    if each.locator is Locator.DATA:
        size, offset = divmod(_u32(where, 0), 1 << 16)[0], _u32(where, 0) & 0xFFFF
        text = data[offset : offset + size]
        assert text.endswith(b"\0"), (each, text)
        return text[:-1]
    count = re.search(r"\[(\d+)\]", each.type)
    if count is None:
        return int.from_bytes(where, "little", signed=each.is_signed)
    size = each.size // int(count[1])
    ones = (where[i : i + size] for i in range(0, each.size, size))
    return [int.from_bytes(one, "little", signed=each.is_signed) for one in ones]


def _u32(data: bytes, at: int) -> int:
    return struct.unpack_from("<I", data, at)[0]


def _u64(data: bytes, at: int) -> int:
    return struct.unpack_from("<Q", data, at)[0]
