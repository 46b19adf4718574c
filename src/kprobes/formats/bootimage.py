"""Kernel files as they are booted: x86's bzImage, EFI's zboot, and arm64's flat Image.

bzImage (Documentation/arch/x86/boot.rst): a real-mode part of ``setup_sects + 1`` sectors,
then the protected-mode part in which the compressed vmlinux lies ``payload_offset`` bytes in.
Which compression it is, only its first bytes say. Debian's 5.10 and 6.1 use LZ4's legacy frame,
6.12 and 7.2 Zstandard; both need a library that Python 3.11 does not have itself.

zboot, of arm64 and others (drivers/firmware/efi/libstub/zboot-header.S):

    u32 "MZ\0\0"; char type[4] "zimg"; u32 payload_offset, payload_size; u32 reserved[2];
    char compression[];

The flat Image, which is read as an ELF file that loads the same:

    u32 code0, code1; u64 text_offset, image_size, flags, res2, res3, res4; u32 magic, res5;

Documentation/arch/arm64/booting.rst. The file has no addresses but in its relocations and in what
they relocate. Those of the plain kind fill in what is zero in the file (--no-apply-dynamic-relocs
in arch/arm64/Makefile):

    Elf64_Rela: u64 offset, u64 info, s64 addend                  // elf.h

The lowest that one of them computes is ``_text``, from which the kernel's symbols count. Where the
linker packs them (CONFIG_RELR), the places hold their addresses already, and the list is of words
that are even, the address of a place, or odd, a map of the 63 places after the last one that was
named (arch/arm64/kernel/pi/relocate.c). Then ``_text`` is where all those places hold addresses
of the image.
"""

import bz2
import importlib
import lzma
import struct
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from kprobes.errors import FormatError
from kprobes.formats import elf
from kprobes.units import U64

_ARM64_MAGIC, _ARM64_MAGIC_AT = b"ARM\x64", 56
_SIZE_AT, _FLAGS_AT = 16, 24
_BIG_ENDIAN = 1
_MAX_SIZE = 1 << 30
_RELATIVE = 1027
_ENTRY = 3
"""Words of an Elf64_Rela."""
_LEAST = 64
"""Entries of the shortest list that is believed."""
_MOST_LISTS = 16
"""Of the longest that may be packed: one is far longer than other tables are."""
_SAMPLES = 4096
_KERNEL = 1 << 63
"""Where the kernel's half of the addresses begins."""
_ALIGNMENT = 1 << 16

_Words = NDArray[np.uint64]


def is_arm64(data: bytes) -> bool:
    """Whether a file begins as an arm64 kernel does."""
    return data[_ARM64_MAGIC_AT:].startswith(_ARM64_MAGIC)


def parse_arm64(data: bytes) -> elf.Image:
    """Return what a file loads, its relocations done.

    Raises:
        FormatError: it is cut off, is big-endian, or does not say where it was linked.
    """
    size, flags = struct.unpack_from("<QQ", data, _SIZE_AT) if is_arm64(data) else (0, 0)
    if not 0 < len(data) <= _MAX_SIZE or (size and len(data) > size):
        raise FormatError("arm64 Image: it is longer than it says")
    if flags & _BIG_ENDIAN:
        raise FormatError("arm64 Image: big-endian kernels are not supported")
    start, words = _linked(np.frombuffer(data, "<u8", len(data) // 8).astype(np.uint64), size)
    done = words.tobytes() + data[len(words) * 8 :]
    # The vDSO's notes come before the kernel's own.
    ids = [value for _, value in elf.build_id_notes(done)]
    return elf.Image(
        machine=elf.EM_AARCH64,
        segments=(elf.Segment(addr=start, data=done),),
        build_id=ids[-1] if ids else b"",
    )


def _linked(words: _Words, size: int) -> tuple[int, _Words]:
    # Where the image was linked, and its words as they are there.
    # First: what cannot be packed is plain beside them, and says less.
    for places in islice(_packed(words), _MOST_LISTS):
        some = places[:: len(places) // _SAMPLES + 1]
        for start in _starts(places, 8 * len(words)):
            if _are_addresses(words[(some - np.uint64(start)) // np.uint64(8)], start, size):
                return start, words
    relocations = _relocations(words)
    if len(relocations):
        start = _lowest(relocations[:, 2])
        return start, _relocated(words, relocations, start)
    raise FormatError(
        "arm64 Image: no relocations (Elf64_Rela, Elf64_Relr) say where it was linked; "
        "give the vmlinux instead"
    )


def _relocations(words: _Words) -> _Words:
    # Shape (n, 3): the longest run of entries, which nothing names.
    found = np.flatnonzero(words == np.uint64(_RELATIVE))
    found = found[(found > 0) & (found < len(words) - 1)]
    ends = np.append(np.flatnonzero(np.diff(found) != _ENTRY), len(found) - 1)
    counts = np.diff(np.concatenate([[-1], ends]))
    if not len(found) or int(counts.max()) < _LEAST:
        return np.zeros((0, _ENTRY), np.uint64)
    longest = int(counts.argmax())
    first, count = int(found[ends[longest] - counts[longest] + 1]) - 1, int(counts[longest])
    return words[first : first + _ENTRY * count].reshape(-1, _ENTRY)


def _lowest(addends: _Words) -> int:
    kernel = addends[addends >= np.uint64(_KERNEL)]
    if not len(kernel):
        raise FormatError("arm64 Image: its relocations compute no address of a kernel")
    return int(kernel.min()) & -_ALIGNMENT & U64


def _packed(words: _Words) -> Iterator[_Words]:
    # The places that each list which may be packed names itself, the longest first: other tables
    # of addresses look like one.
    is_map = words & np.uint64(1) == np.uint64(1)
    is_place = (words >= np.uint64(_KERNEL)) & (words & np.uint64(7) == np.uint64(0))
    ends = np.flatnonzero(~np.concatenate([[False], is_map | is_place, [False]]))
    longest = np.argsort(np.diff(ends))[::-1]
    for first, stop in zip(ends[longest], ends[longest + 1] - 1, strict=True):
        if stop - first < _LEAST:
            return
        places = _rising(words[first:stop][is_place[first:stop]])
        if len(places) >= _LEAST:
            yield places


def _rising(places: _Words) -> _Words:
    # The addend of a plain relocation before the list may look as if it belonged to it.
    falls = np.flatnonzero(places[1:] <= places[:-1]) + 1
    edges = np.concatenate([[0], falls, [len(places)]])
    longest = int(np.diff(edges).argmax())
    return places[edges[longest] : edges[longest + 1]]


def _starts(places: _Words, size: int) -> range:
    # Where an image of this size may begin that has all these places.
    least = int(places[-1]) + 8 - size
    return range(least + -least % _ALIGNMENT, int(places[0]) + 1, _ALIGNMENT)


def _are_addresses(words: _Words, start: int, size: int) -> bool:
    # All are but what _rising() may have left of others.
    are_inside = (words >= np.uint64(start)) & (words - np.uint64(start) <= np.uint64(size))
    return int(np.count_nonzero(are_inside)) > 0.9 * len(words)


def _relocated(words: _Words, relocations: _Words, start: int) -> _Words:
    places = relocations[:, 0] - np.uint64(start)
    if np.any(places >= np.uint64(8 * len(words))) or np.any(places % np.uint64(8)):
        raise FormatError("arm64 Image: a relocation is outside of it")
    words[(places // np.uint64(8)).astype(np.intp)] = relocations[:, 2]
    return words


_SECTOR = 512
_BOOT_FLAG, _BOOT_FLAG_AT = b"\x55\xaa", 0x1FE
_MAGIC, _MAGIC_AT = b"HdrS", 0x202
_SETUP_SECTS_AT, _PAYLOAD_AT = 0x1F1, 0x248
_ZBOOT, _ZBOOT_AT = b"MZ\0\0zimg", 8
_LZ4_CHUNK = 8 << 20
"""Every chunk of a legacy frame but the last is this long, expanded."""


def unpack(data: bytes) -> bytes:
    """Return the kernel of a boot image; one that is not compressed comes back as it is.

    Raises:
        FormatError: neither, or damaged.
        TargetError: a library that its compression needs is not installed.
    """
    if _is_kernel(data):
        return data
    payload = _payload(data)
    for magic, expand in _COMPRESSIONS.items():
        if payload.startswith(magic):
            return _expanded(payload, expand)
    raise FormatError(f"boot image: unknown compression {payload[:4].hex()}")


def _is_kernel(data: bytes) -> bool:
    return data.startswith(elf.MAGIC) or is_arm64(data)


def _payload(data: bytes) -> bytes:
    # The compressed part, or a file that was compressed as a whole.
    if data.startswith(_ZBOOT):
        return _part(data, 0, _ZBOOT_AT)
    if data[_BOOT_FLAG_AT:].startswith(_BOOT_FLAG) and data[_MAGIC_AT:].startswith(_MAGIC):
        return _part(data, (data[_SETUP_SECTS_AT] + 1) * _SECTOR, _PAYLOAD_AT)
    if any(data.startswith(magic) for magic in _COMPRESSIONS):
        return data
    raise FormatError("neither a vmlinux nor a Linux boot image")


def _part(data: bytes, base: int, at: int) -> bytes:
    # u32 offset from the base, u32 size.
    if len(data) < at + 8:
        raise FormatError("boot image: cut off in its header")
    offset, size = struct.unpack_from("<II", data, at)
    start = base + offset
    if not size or start + size > len(data):
        raise FormatError("boot image: the kernel in it is cut off")
    return data[start : start + size]


def _expanded(payload: bytes, expand: Callable[[bytes], bytes]) -> bytes:
    try:
        data = expand(payload)
    except (zlib.error, lzma.LZMAError, OSError, EOFError, ValueError) as e:
        raise FormatError(f"boot image: damaged compressed data: {e}") from e
    if not _is_kernel(data):
        raise FormatError("boot image: no 64-bit kernel inside")
    return data


def _gzip(payload: bytes) -> bytes:
    return zlib.decompressobj(wbits=31).decompress(payload, _MAX_SIZE)


def _xz(payload: bytes) -> bytes:
    return lzma.LZMADecompressor(memlimit=_MAX_SIZE).decompress(payload, _MAX_SIZE)


def _bzip2(payload: bytes) -> bytes:
    return bz2.BZ2Decompressor().decompress(payload, _MAX_SIZE)


def _zstd(payload: bytes) -> bytes:
    import zstandard

    try:
        return zstandard.ZstdDecompressor().stream_reader(payload).read(_MAX_SIZE)
    except zstandard.ZstdError as e:
        raise ValueError(str(e)) from e


class _Lz4Block(Protocol):
    # lz4.block has no types of its own.
    LZ4BlockError: type[Exception]

    def decompress(self, source: bytes, *, uncompressed_size: int) -> bytes: ...


def _lz4(payload: bytes) -> bytes:
    # u32 magic, then per chunk u32 size and a raw block; the kernel's build appends the size
    # of the whole, which must not be taken for one more chunk.
    block = cast(_Lz4Block, importlib.import_module("lz4.block"))
    at, total, chunks = 4, 0, list[bytes]()
    while at + 8 <= len(payload) and total < _MAX_SIZE:
        (size,) = struct.unpack_from("<I", payload, at)
        source = payload[at + 4 : at + 4 + size]
        try:
            chunk = block.decompress(source, uncompressed_size=_LZ4_CHUNK)
        except block.LZ4BlockError as e:
            raise ValueError(str(e)) from e
        chunks.append(chunk)
        total, at = total + len(chunk), at + 4 + size
    return b"".join(chunks)


_COMPRESSIONS: dict[bytes, Callable[[bytes], bytes]] = {
    b"\x1f\x8b": _gzip,
    b"\xfd7zXZ": _xz,
    b"]\0\0": _xz,
    b"BZh": _bzip2,
    b"\x28\xb5\x2f\xfd": _zstd,
    b"\x02\x21\x4c\x18": _lz4,
}
