"""arm64's flat Image."""

import struct

import pytest

from kprobes.errors import FormatError
from kprobes.formats import bootimage, elf
from tests.build.elf import build_id_note, gzip

BASE = 0xFFFF_8000_0800_0000
SIZE = 0x4000
POINTERS = range(0x1000, 0x1000 + 8 * 100, 8)
"""Where the file has zeros that its relocations fill in."""


def image(*, flags: int = 0xA, size: int = SIZE, targets: int = 0, places: int = 0) -> bytes:
    data = bytearray(SIZE)
    struct.pack_into("<QQQ", data, 8, 0, size, flags)
    data[56:60] = b"ARM\x64"
    data[0x200:0x224] = build_id_note(b"vdso" * 5)
    data[0x300:0x324] = build_id_note(b"real" * 5)
    for n, place in enumerate(POINTERS):
        entry = BASE + place + places, 1027, BASE + 0x100 * n + targets
        struct.pack_into("<QQQ", data, 0x2000 + 24 * n, *entry)
    return bytes(data)


def test_it_is_where_its_relocations_say_and_has_what_they_fill_in() -> None:
    found = bootimage.parse_arm64(image())

    (segment,) = found.segments
    assert (found.machine, segment.addr, len(segment.data)) == (elf.EM_AARCH64, BASE, SIZE)
    words = [struct.unpack_from("<Q", segment.data, place)[0] for place in POINTERS]
    assert words == [BASE + 0x100 * n for n in range(len(POINTERS))]


PACKED = range(0x1000, 0x1000 + 0x40 * 100, 0x40)
"""Places of addresses that a packed list names itself: one more after each is in its map."""


def packed(*, targets: int = 0, before: tuple[int, ...] = (0,)) -> bytes:
    data = bytearray(image()[:0x1000].ljust(0x5000, b"\0"))
    struct.pack_into("<Q", data, 16, len(data))
    for n, place in enumerate(PACKED):
        struct.pack_into("<QQ", data, place, *[BASE + 0x80 * n + targets] * 2)
        # As the list, and longer, but what it names holds no addresses.
        struct.pack_into("<QQ", data, 0x2A00 + 16 * n, BASE + place + 8 * 3, BASE + place + 8 * 4)
    entries = [word for place in PACKED for word in (BASE + place, 0b11)]
    struct.pack_into(f"<{len(before)}Q", data, 0x4000, *before)
    struct.pack_into("<200Q", data, 0x4000 + 8 * len(before), *entries)
    return bytes(data)


@pytest.mark.parametrize("addend", [0, BASE + 0x100, BASE + 0x3000])
def test_packed_relocations_say_where_it_is_and_change_nothing(addend: int) -> None:
    """Plain ones that name symbols, or end in some address, are before them."""
    data = packed(before=(BASE + 0x2000, 257, addend))

    (segment,) = bootimage.parse_arm64(data).segments
    assert (segment.addr, segment.data) == (BASE, data)


@pytest.mark.parametrize("step", [-8, 8])
def test_a_file_of_nothing_but_addresses_is_refused_in_time(step: int) -> None:
    data = bytearray(1 << 22)
    for at in range(0x1000, len(data), 0x1000):
        page = [BASE + (at << 12) + 0x8800 + step * n for n in range(511)]
        struct.pack_into("<511Q", data, at, *page)
    data[:64] = image()[:64]
    struct.pack_into("<Q", data, 16, len(data))

    with pytest.raises(FormatError, match="no relocations"):
        bootimage.parse_arm64(bytes(data))


def test_plain_relocations_beside_packed_ones_do_not_say_where_it_is() -> None:
    plain = [word for n in range(100) for word in (BASE + 0x2000 + 8 * n, 1027, BASE + 0x30000)]
    data = bytearray(packed(before=(*plain, 0)))

    (segment,) = bootimage.parse_arm64(bytes(data)).segments

    assert segment.addr == BASE


def test_the_kernels_own_build_id_is_the_last() -> None:
    assert bootimage.parse_arm64(image()).build_id == b"real" * 5


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (image(flags=1), "big-endian"),
        (image(size=SIZE - 1), "longer than it says"),
        (image(places=SIZE), "a relocation is outside"),
        (image(targets=-BASE), "compute no address"),
        (image()[:0x2000], "no relocations"),
        (image()[:0x40], "no relocations"),
        (packed(targets=0x10000), "no relocations"),
        (packed()[:0x4000], "no relocations"),
    ],
)
def test_what_cannot_be_placed_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(FormatError, match=why):
        bootimage.parse_arm64(data)


def zboot(payload: bytes, *, size: int | None = None) -> bytes:
    length = len(payload) if size is None else size
    head = struct.pack("<4s4sIIII32s", b"MZ\0\0", b"zimg", 0x200, length, 0, 0, b"gzip\0")
    return head.ljust(0x200, b"\0") + payload


@pytest.mark.parametrize("file", [image(), gzip(image()), zboot(gzip(image()))])
def test_it_may_be_compressed_as_a_whole_or_for_efi(file: bytes) -> None:
    assert bootimage.unpack(file) == image()


def test_an_efi_image_that_is_cut_off_is_refused() -> None:
    with pytest.raises(FormatError, match="cut off"):
        bootimage.unpack(zboot(gzip(image()), size=1 << 20))
    with pytest.raises(FormatError, match="cut off in its header"):
        bootimage.unpack(zboot(gzip(image()))[:12])
