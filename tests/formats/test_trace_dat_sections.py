"""Bytes that are read within bounds."""

import io
import struct
import zlib

import pytest
import zstandard

from kprobes.errors import FormatError
from kprobes.formats.trace_dat import PartId
from kprobes.formats.trace_dat_sections import METADATA_MAX, Cursor, SectionFile, cursor_of


def test_numbers_and_strings_follow_each_other() -> None:
    cursor = cursor_of(b"\1\2\0\0name\0" + b"x" * 300 + b"\0" + b"\xff" * 8, "these")

    assert cursor.number(4) == 0x201
    assert (cursor.string(), cursor.string()) == (b"name", b"x" * 300)
    assert cursor.number(8) == (1 << 64) - 1
    assert cursor.left == 0


@pytest.mark.parametrize("data", [b"", b"abc", b"x" * 5000, b"x" * 5000 + b"\0"])
def test_a_string_has_an_end(data: bytes) -> None:
    with pytest.raises(FormatError, match="these"):
        cursor_of(data, "these").string()


def test_what_is_beyond_the_end_is_not_read() -> None:
    asked: list[tuple[int, int]] = []

    def source(at: int, size: int) -> bytes:
        asked.append((at, size))
        return bytes(size)

    cursor = Cursor(source, 10, 20, name="these")
    with pytest.raises(FormatError, match="these"):
        cursor.take(11)
    with pytest.raises(FormatError, match="these"):
        Cursor(source, 0, 1 << 60, name="these").take(METADATA_MAX + 1)

    assert asked == []
    assert cursor.take(10) == bytes(10)


def test_a_source_may_end_before_it_should() -> None:
    with pytest.raises(FormatError, match="ends within"):
        Cursor(lambda _at, size: bytes(size - 1), 0, 100, name="these").take(5)


def file_of(data: bytes, compressor: str = "none") -> SectionFile:
    file = SectionFile(io.BytesIO(data), len(data))
    file.compressor = compressor
    return file


def section(part: int, data: bytes, *, flags: int = 0, size: int | None = None) -> bytes:
    return struct.pack("<HHIQ", part, flags, 7, len(data) if size is None else size) + data


def test_a_section_is_not_read_beyond_its_end() -> None:
    file = file_of(bytes(5) + section(PartId.KALLSYMS, b"abc") + b"more")

    cursor = file.section(5, PartId.KALLSYMS)

    assert (cursor.left, cursor.take(3)) == (3, b"abc")
    with pytest.raises(FormatError, match="KALLSYMS"):
        cursor.take(1)


@pytest.mark.parametrize("size", [4, (1 << 64) - 1])
def test_a_section_ends_within_the_file(size: int) -> None:
    file = file_of(section(PartId.KALLSYMS, b"abc", size=size))

    with pytest.raises(FormatError, match="ends within the section KALLSYMS"):
        file.section(0, PartId.KALLSYMS)


@pytest.mark.parametrize("at", [1, 19, 1 << 63, (1 << 64) - 1])
def test_a_section_begins_within_the_file(at: int) -> None:
    file = file_of(section(PartId.KALLSYMS, b""))

    with pytest.raises(FormatError, match="KALLSYMS begins after"):
        file.section(at, PartId.KALLSYMS)


def test_a_section_is_what_it_should_be() -> None:
    file = file_of(section(PartId.KALLSYMS, b"", flags=1))

    with pytest.raises(FormatError, match="number 19, which should be PRINTK"):
        file.section(0, PartId.PRINTK)
    with pytest.raises(FormatError, match="BUFFER"):
        file.is_compressed(0)


@pytest.mark.parametrize("flags", [0, 1, 2, 3])
def test_the_first_flag_says_whether_rings_are_compressed(flags: int) -> None:
    assert file_of(section(PartId.BUFFER, b"", flags=flags)).is_compressed(0) is bool(flags & 1)


COMPRESSED = {
    "zlib": zlib.compress(b"hello" * 100),
    "zstd": zstandard.ZstdCompressor().compress(b"hello" * 100),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_what_was_compressed_becomes_what_it_was(name: str) -> None:
    assert file_of(b"", name).decompressed(COMPRESSED[name], 500) == b"hello" * 100


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.parametrize("size", [0, 1, 499, 501, 1 << 20])
def test_it_becomes_as_much_as_is_said(name: str, size: int) -> None:
    with pytest.raises(FormatError, match=r"decompressed|two sizes"):
        file_of(b"", name).decompressed(COMPRESSED[name], size)


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.parametrize("keep", [0, 1, 5, 12])
def test_what_is_damaged_is_refused(name: str, keep: int) -> None:
    with pytest.raises(FormatError):
        file_of(b"", name).decompressed(COMPRESSED[name][:keep], 500)


def test_what_nobody_can_decompress_is_named() -> None:
    with pytest.raises(FormatError, match="compressed by 'lzo'"):
        file_of(b"", "lzo").decompressed(b"", 1)
    with pytest.raises(FormatError, match="compressed by 'none'"):
        file_of(b"").decompressed(b"", 1)


@pytest.mark.parametrize(("stored", "size"), [(93, 5), (5, METADATA_MAX + 1), (0xFFFFFFFF, 5)])
def test_a_compressed_section_has_room_for_what_it_says(stored: int, size: int) -> None:
    body = (struct.pack("<II", stored, size) + bytes(92))[:100]

    with pytest.raises(FormatError, match="a section of 100 bytes"):
        file_of(section(PartId.PRINTK, body, flags=1), "zlib").section(0, PartId.PRINTK)
