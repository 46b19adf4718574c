"""Compressed kernel files to the kernel inside: a vmlinux, or arm64's flat Image.

x86's bzImage (Documentation/arch/x86/boot.rst): a real-mode part of ``setup_sects + 1`` sectors,
then the protected-mode part in which the compressed vmlinux lies ``payload_offset`` bytes in.
Which compression it is, only its first bytes say. Debian's 5.10 and 6.1 use LZ4's legacy frame,
6.12 and 7.2 Zstandard; both need a library that Python 3.11 does not have itself.

EFI's, of arm64 and others (drivers/firmware/efi/libstub/zboot-header.S):

    u32 "MZ\0\0"; char type[4] "zimg"; u32 payload_offset, payload_size; u32 reserved[2];
    char compression[];
"""

import bz2
import importlib
import lzma
import struct
import zlib
from collections.abc import Callable
from typing import Protocol, cast

from kprobes.errors import FormatError
from kprobes.formats import arm64_image, elf

_SECTOR = 512
_BOOT_FLAG, _BOOT_FLAG_AT = b"\x55\xaa", 0x1FE
_MAGIC, _MAGIC_AT = b"HdrS", 0x202
_SETUP_SECTS_AT, _PAYLOAD_AT = 0x1F1, 0x248
_ZBOOT, _ZBOOT_AT = b"MZ\0\0zimg", 8
_MAX_SIZE = 1 << 30
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
    return data.startswith(elf.MAGIC) or arm64_image.is_image(data)


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
