"""Frames of a recording: a checked header in front of bytes that may be compressed.

    struct file_header {             // little endian, as all of it
        char magic[8];               // "kprobes" and a line feed
        u32 version;                 // 1
        u32 reserved;
    };
    struct frame {
        char marker[4];              // 0xf5 and "KPR"
        u8 kind, flags;              // flags: 1 = zstd
        u16 reserved;
        u32 stored;                  // bytes that follow the header
        u32 size;                    // of them when they are no more compressed
        u32 crc;                     // CRC-32 of the header up to here, and of the bytes
    };

Frames follow each other to the end of the file. A reader passes over kinds that it does not know,
and over what is damaged to the marker of the next frame that is whole. What they have is in
docs/reference/formats/recording.md.
"""

import zlib
from enum import IntEnum
from struct import Struct as Packed

from msgspec import Struct

from kprobes.errors import FormatError

MAGIC = b"kprobes\n"
VERSION = 1
_FILE = Packed("<8sII")
HEADER_SIZE = _FILE.size
MARKER = b"\xf5KPR"
_FRAME = Packed("<4sBBHIII")
FRAME_SIZE = _FRAME.size
_ZSTD = 1
CHUNK = Packed("<HBBIQ")
"""In front of a chunk's records: cpu, flags, 0, limit, position."""
PAGES = Packed("<II")
"""In front of pages: how many, and bytes of each. Then two arrays of so many: u16 cpu, and u64, how
many bytes of a page's records were in an earlier one. Then the pages."""
CHUNK_IS_BLOCKED = 1
"""A chunk's flag: an uncommitted record stood after its records."""
MAX_SIZE = 64 << 20
"""Bytes of one frame, as they are stored and as they are read: a reader's memory has an end."""


class FrameKind(IntEnum):
    """What a frame has."""

    KERNEL = 1
    EVENTS = 2
    SYMBOLS = 3
    CLOCK = 4
    CHUNK = 5
    ROUND = 6
    END = 7
    INSTANCE = 8
    HOST_EVENTS = 9
    PAGES = 10
    CONTINUED = 11


class FrameHeader(Struct, frozen=True, kw_only=True):
    """What stands in front of a frame's bytes."""

    kind: int
    is_compressed: bool
    stored: int
    size: int
    crc: int
    head: bytes


def file_header() -> bytes:
    """Return what a recording begins with."""
    return _FILE.pack(MAGIC, VERSION, 0)


def check_file_header(data: bytes) -> None:
    """Find out whether this is how a recording begins that can be read.

    Raises:
        FormatError: it is not.
    """
    if data[: len(MAGIC)] != MAGIC:
        raise FormatError("not a recording of kprobe's")
    if len(data) < HEADER_SIZE:
        raise FormatError("a recording that ends in its header")
    _, version, _ = _FILE.unpack_from(data)
    if version != VERSION:
        raise FormatError(f"a recording of version {version}; this kprobe reads version {VERSION}")


def pack_frame(kind: FrameKind, data: bytes, *, level: int | None = None) -> bytes:
    """Return a frame.

    Args:
        kind: of what it has.
        data: what it has, ``MAX_SIZE`` bytes at most.
        level: of zstd's compression; None for none.
    """
    if len(data) > MAX_SIZE:
        raise ValueError(f"a frame of {len(data)} bytes")
    stored = data if level is None else _compressed(data, level)
    flags = 0 if level is None else _ZSTD
    if len(stored) >= len(data):
        stored, flags = data, 0
    head = _FRAME.pack(MARKER, kind, flags, 0, len(stored), len(data), 0)[:-4]
    crc = zlib.crc32(stored, zlib.crc32(head))
    return head + crc.to_bytes(4, "little") + stored


def _compressed(data: bytes, level: int) -> bytes:
    # Who only traces does without.
    import zstandard

    return zstandard.ZstdCompressor(level=level).compress(data)


def parse_frame_header(data: bytes) -> FrameHeader:
    """Return the header that ``FRAME_SIZE`` bytes are.

    Raises:
        FormatError: they are none.
    """
    marker, kind, flags, _, stored, size, crc = _FRAME.unpack(data)
    if marker != MARKER or max(stored, size) > MAX_SIZE or flags & ~_ZSTD:
        raise FormatError("no frame begins here")
    return FrameHeader(
        kind=kind,
        is_compressed=bool(flags & _ZSTD),
        stored=stored,
        size=size,
        crc=crc,
        head=data[:-4],
    )


def unpack_frame(header: FrameHeader, stored: bytes) -> bytes:
    """Return what a frame has.

    Args:
        header: of it.
        stored: the ``header.stored`` bytes after that.

    Raises:
        FormatError: they are not what was written.
    """
    if zlib.crc32(stored, zlib.crc32(header.head)) != header.crc:
        raise FormatError("a frame that is damaged")
    data = _decompressed(stored, header.size) if header.is_compressed else stored
    if len(data) != header.size:
        raise FormatError(f"a frame of {len(data)} bytes that should have {header.size}")
    return data


def _decompressed(stored: bytes, size: int) -> bytes:
    import zstandard

    try:
        # What it says of itself is what would be allocated.
        if zstandard.frame_content_size(stored) != size:
            raise FormatError("a frame that says two sizes of itself")
        return zstandard.ZstdDecompressor(max_window_size=MAX_SIZE).decompress(stored)
    except zstandard.ZstdError as error:
        raise FormatError(f"a frame that cannot be decompressed: {error}") from error
