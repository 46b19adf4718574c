"""Bytes of trace-cmd's files: numbers and strings in them, sections, options, compressed chunks.

Of version 7 they are as ``trace_dat`` says. No size in them is trusted: what is read at once is
bounded, and lies within the file.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO

import zstandard

from kprobes.errors import FormatError
from kprobes.formats.trace_dat import PartId

METADATA_MAX = 64 << 20
"""Bytes of a section, or of one text, but for the rings: of /proc/kallsyms there are 10 MB."""
_OPTIONS_MAX = 16 << 20
"""Bytes of all options; the longest are the maps of processes, and relations of clocks."""
_OPTIONS_COUNT = 1 << 16
_OPTIONS_SECTIONS = 1 << 10
_STRING_MAX = 1 << 12
_STRING_PART = 64
_SECTION_SIZE = 16
_COMPRESSED_SIZE = 8
_IS_COMPRESSED = 1
_DONE_SIZE = 8

Source = Callable[[int, int], bytes]
"""Returns so many bytes from a place on, or fewer where they end."""
FoundOption = tuple[int, bytes]


class Cursor:
    """A place in bytes, from which on they are read. FormatError where they end.

    Attributes:
        at: the place.
        end: of the bytes.
    """

    def __init__(self, source: Source, at: int, end: int, *, name: str) -> None:
        """Begin at a place.

        Args:
            source: of the bytes.
            at: the place, from the source's beginning.
            end: of the bytes that may be read.
            name: of them, for messages.
        """
        self._source = source
        self._name = name
        self.at = at
        self.end = end

    @property
    def left(self) -> int:
        """Bytes up to the end."""
        return self.end - self.at

    def take(self, size: int) -> bytes:
        """Return the next bytes."""
        if size > self.left:
            raise FormatError(f"{self._name} ends within what it has")
        if size > METADATA_MAX:
            raise FormatError(f"{size} bytes at once in {self._name}")
        data = self._source(self.at, size)
        if len(data) != size:
            raise FormatError(f"{self._name} ends within what it has")
        self.at += size
        return data

    def number(self, size: int) -> int:
        """Return the next number, of so many bytes."""
        return int.from_bytes(self.take(size), "little")

    def string(self) -> bytes:
        """Return the bytes up to the next NUL, which is passed over."""
        found = b""
        while len(found) < _STRING_MAX:
            part = self.take(min(_STRING_PART, max(self.left, 1)))
            text, nul, rest = part.partition(b"\0")
            found += text
            if nul:
                self.at -= len(rest)
                return found
        raise FormatError(f"a name of more than {_STRING_MAX} bytes in {self._name}")


def cursor_of(data: bytes, name: str) -> Cursor:
    """Return a cursor at the beginning of bytes.

    Args:
        data: the bytes.
        name: of them, for messages.
    """
    return Cursor(lambda at, size: data[at : at + size], 0, len(data), name=name)


class SectionFile:
    """A file, and what its sections are compressed by.

    Attributes:
        size: of it, bytes.
        compressor: ``none``, ``zlib`` or ``zstd``; others are an error once they are needed.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        """Take a file that can be read from any place."""
        self._file = file
        self.size = size
        self.compressor = "none"

    def read(self, at: int, size: int) -> bytes:
        """Return bytes from a place within the file on; fewer where it ends."""
        self._file.seek(at)
        return self._file.read(size)

    def cursor(self, at: int) -> Cursor:
        """Return a cursor that may go to the file's end."""
        return Cursor(self.read, at, self.size, name="the file")

    def section(self, at: int, part: PartId) -> Cursor:
        """Return what a section has, no longer compressed.

        Args:
            at: where its header is.
            part: what it should be.

        Raises:
            FormatError: it is something else, or damaged.
        """
        cursor, flags, size = self._header(at, part)
        name = f"the section {part.name}"
        if flags & _IS_COMPRESSED:
            return cursor_of(self._block(cursor, size), name)
        if size > cursor.left:
            raise FormatError(f"the file ends within {name}")
        return Cursor(self.read, cursor.at, cursor.at + size, name=name)

    def is_compressed(self, at: int) -> bool:
        """Find out whether a section of rings is compressed; FormatError where it is none."""
        _, flags, _ = self._header(at, PartId.BUFFER)
        return bool(flags & _IS_COMPRESSED)

    def _header(self, at: int, part: PartId) -> tuple[Cursor, int, int]:
        # What follows it, flags, size.
        cursor = self.cursor(at)
        if at > self.size - _SECTION_SIZE:
            raise FormatError(f"the section {part.name} begins after the end of the file")
        found = cursor.number(2)
        if found != part:
            raise FormatError(f"a section of number {found}, which should be {part.name}")
        flags = cursor.number(2)
        cursor.take(4)
        return cursor, flags, cursor.number(8)

    def _block(self, cursor: Cursor, room: int) -> bytes:
        stored, size = cursor.number(4), cursor.number(4)
        if size > METADATA_MAX or stored + _COMPRESSED_SIZE > room:
            raise FormatError(f"a section of {room} bytes with {stored} that become {size}")
        return self.decompressed(cursor.take(stored), size)

    def decompressed(self, stored: bytes, size: int) -> bytes:
        """Return what was compressed.

        Args:
            stored: the bytes in the file.
            size: how many they should become.

        Raises:
            FormatError: they do not.
        """
        decompress = _DECOMPRESS.get(self.compressor)
        if decompress is None:
            raise FormatError(f"sections that are compressed by {self.compressor!r}")
        try:
            found = decompress(stored, size)
        except (zlib.error, zstandard.ZstdError) as error:
            raise FormatError(f"bytes that cannot be decompressed: {error}") from error
        if len(found) != size:
            raise FormatError(f"{len(found)} bytes decompressed, not {size}")
        return found

    def options(self, at: int) -> Iterator[FoundOption]:
        """Yield the options of a section, and of those that follow it; FormatError."""
        seen: set[int] = set()
        while at:
            if at in seen or len(seen) == _OPTIONS_SECTIONS:
                raise FormatError("sections of options without an end")
            seen.add(at)
            cursor = self.section(at, PartId.OPTIONS)
            yield from each_option(cursor)
            done = cursor.take(cursor.number(4))
            at = int.from_bytes(done[:_DONE_SIZE], "little")


def each_option(cursor: Cursor) -> Iterator[FoundOption]:
    """Yield the options at a place, up to the one of number 0, of which the number is taken."""
    while part := cursor.number(2):
        yield part, cursor.take(cursor.number(4))


def bounded(options: Iterable[FoundOption]) -> Iterator[FoundOption]:
    """Yield options, of which there are not too many; FormatError."""
    total = 0
    for count, (part, data) in enumerate(options):
        total += len(data)
        if count == _OPTIONS_COUNT or total > _OPTIONS_MAX:
            raise FormatError("too many options")
        yield part, data


def _unzlib(stored: bytes, size: int) -> bytes:
    # One more than wanted: 0 stands for no bound.
    return zlib.decompressobj().decompress(stored, size + 1)


def _unzstd(stored: bytes, size: int) -> bytes:
    # What it says of itself is what would be allocated; trace-cmd's own say nothing.
    if zstandard.frame_content_size(stored) not in (-1, size):
        raise FormatError("bytes that tell two sizes of themselves")
    decompressor = zstandard.ZstdDecompressor(max_window_size=METADATA_MAX)
    return decompressor.decompress(stored, max_output_size=size)


_DECOMPRESS: dict[str, Callable[[bytes, int], bytes]] = {"zlib": _unzlib, "zstd": _unzstd}
