"""Boot images to the vmlinux inside."""

import bz2
import importlib
import lzma
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kprobes.errors import FormatError
from kprobes.formats import bootimage
from tests.build.elf import bzimage, gzip, vmlinux

KERNEL = vmlinux([(0x1000, b"kernel text " * 1000)])


def xz(data: bytes) -> bytes:
    return lzma.compress(data)


def old_lzma(data: bytes) -> bytes:
    return lzma.compress(data, lzma.FORMAT_ALONE)


def zstd(data: bytes) -> bytes:
    library: Any = importlib.import_module("zstandard")
    return bytes(library.ZstdCompressor().compress(data))


def lz4(data: bytes) -> bytes:
    # The legacy frame, in chunks of 8 MiB.
    library: Any = importlib.import_module("lz4.block")
    out = b"\x02\x21\x4c\x18"
    for at in range(0, len(data), 8 << 20):
        block: bytes = library.compress(data[at : at + (8 << 20)], store_size=False)
        out += struct.pack("<I", len(block)) + block
    return out


@pytest.mark.parametrize(
    "compress",
    [gzip, xz, bz2.compress, zstd, lz4, old_lzma],
    ids=["gzip", "xz", "bzip2", "zstd", "lz4", "lzma"],
)
def test_every_compression_of_a_boot_image_is_undone(compress: Callable[[bytes], bytes]) -> None:
    assert bootimage.unpack(bzimage(compress(KERNEL))) == KERNEL


def test_an_lz4_kernel_of_several_chunks_is_whole() -> None:
    large = vmlinux([(0x1000, b"0123456789abcdef" * (9 << 16))])

    assert bootimage.unpack(bzimage(lz4(large))) == large


def test_a_vmlinux_is_what_it_is_and_a_compressed_one_too() -> None:
    assert bootimage.unpack(KERNEL) == KERNEL
    assert bootimage.unpack(gzip(KERNEL)) == KERNEL


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "neither"),
        (b"#!/bin/sh\n" * 100, "neither"),
        (bzimage(b"????" + bytes(100)), "unknown compression 3f3f3f3f"),
        (bzimage(gzip(KERNEL))[:2130], "cut off"),
        (bzimage(gzip(b"no kernel")), "no 64-bit kernel inside"),
        (bzimage(gzip(KERNEL))[:0x220], "cut off in its header"),
        (bzimage(b"\x1f\x8b" + b"\xff" * 500), "damaged"),
        (bzimage(b"\xfd7zXZ" + b"\xff" * 500), "damaged"),
        (bzimage(b"\x28\xb5\x2f\xfd" + b"\xff" * 500), "damaged"),
        (bzimage(b"\x02\x21\x4c\x18" + b"\xff" * 500), "damaged"),
    ],
)
def test_what_is_no_boot_image_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(FormatError, match=why):
        bootimage.unpack(data)


@settings(max_examples=80)
@given(place=st.integers(0), value=st.integers(0, 255))
def test_damage_is_a_format_error_or_a_kernel(place: int, value: int) -> None:
    image = bytearray(bzimage(gzip(vmlinux([(0x1000, b"small")]))))
    places = [0x1F1, *range(0x200, 0x210), *range(0x248, 0x250), *range(2112, len(image) - 512)]
    image[places[place % len(places)]] = value

    try:
        bootimage.unpack(bytes(image))
    except FormatError:
        return
