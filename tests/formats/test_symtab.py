"""Symbol tables of ELF files, and of text as nm prints it."""

import struct
from contextlib import suppress
from itertools import product

import pytest

from kprobes.errors import FormatError
from kprobes.formats.kallsyms import SymbolTable
from kprobes.formats.strtab import Names
from kprobes.formats.symtab import from_elf, from_text
from tests.build.elf import Elf, ElfSymbol

TEXT, DATA = 0xFFFF_FFFF_8100_0000, 0xFFFF_FFFF_8200_0000
MAP = b"""\
0000000000001000 D per_cpu_word
ffffffff81000000 T _stext
ffffffff81000010 t vfs_read
ffffffff82000000 R linux_banner
"""


def rows(table: SymbolTable) -> list[tuple[int, str, bytes]]:
    names = Names(table.blob, table.starts)
    found = zip(table.addrs.tolist(), table.types.decode(), range(len(names)), strict=True)
    return [(addr, letter, names.name(number)) for addr, letter, number in found]


def elf(*symbols: ElfSymbol) -> bytes:
    return Elf(symbols=symbols).data


def test_text_has_an_address_a_letter_and_a_name_a_line() -> None:
    assert rows(from_text(MAP)) == [
        (0x1000, "D", b"per_cpu_word"),
        (TEXT, "T", b"_stext"),
        (TEXT + 0x10, "t", b"vfs_read"),
        (DATA, "R", b"linux_banner"),
    ]


@pytest.mark.parametrize("text", [b"c1000000 T _stext\n", b"no\n", MAP + b"\n"])
def test_text_that_is_no_symbols_is_an_error(text: bytes) -> None:
    with pytest.raises(FormatError, match="not symbols of a 64-bit kernel"):
        from_text(text)


def test_an_elf_files_symbols_are_sorted_and_have_nm_s_letters() -> None:
    data = elf(
        ElfSymbol(name="banner", addr=DATA, section=".rodata", is_global=True),
        ElfSymbol(name="vfs_read", addr=TEXT + 16, section=".text", is_global=True),
        ElfSymbol(name="helper", addr=TEXT, section=".text"),
        ElfSymbol(name="weak", addr=TEXT + 32, section=".text", is_weak=True),
        ElfSymbol(name="counter", addr=DATA + 64, section=".data"),
        ElfSymbol(name="zeros", addr=DATA + 128, section=".bss"),
        ElfSymbol(name="weak_data", addr=DATA + 160, section=".data", is_weak=True),
    )

    found = from_elf(data)

    assert found is not None
    assert rows(found) == [
        (TEXT, "t", b"helper"),
        (TEXT + 16, "T", b"vfs_read"),
        (TEXT + 32, "W", b"weak"),
        (DATA, "R", b"banner"),
        (DATA + 64, "d", b"counter"),
        (DATA + 128, "b", b"zeros"),
        (DATA + 160, "V", b"weak_data"),
    ]


def test_what_the_kernel_shows_no_names_for_is_left_out() -> None:
    data = elf(
        ElfSymbol(name="$x", addr=TEXT, section=".text"),
        ElfSymbol(name=".Lhere", addr=TEXT, section=".text"),
        ElfSymbol(name="__crc_vfs_read", addr=5, section="absolute", is_global=True),
        ElfSymbol(name="local_absolute", addr=5, section="absolute"),
        ElfSymbol(name="nowhere", addr=0, section="undefined", is_global=True),
        ElfSymbol(name="file.c", addr=TEXT, section="absolute", kind=4),
        ElfSymbol(name="", addr=TEXT, section=".text", kind=3),
        ElfSymbol(name="phys_startup", addr=5, section="absolute", is_global=True),
    )

    found = from_elf(data)

    assert found is not None
    assert rows(found) == [(5, "A", b"phys_startup")]


def test_a_stripped_file_has_none() -> None:
    assert from_elf(Elf(symbols=None).data) is None


def test_what_is_no_elf_or_damaged_is_an_error() -> None:
    data = bytearray(elf(ElfSymbol(name="vfs_read", addr=TEXT, section=".text")))
    (table,) = struct.unpack_from("<Q", data, 40)

    with pytest.raises(FormatError, match="not a 64-bit"):
        from_elf(b"MZ" + bytes(100))
    with pytest.raises(FormatError, match="damaged"):
        from_elf(bytes(data[: table + 70]))
    with pytest.raises(FormatError, match="damaged"):
        from_elf(bytes(data[:50]))


def test_any_change_of_a_byte_is_an_error_or_a_table() -> None:
    data = elf(
        ElfSymbol(name="vfs_read", addr=TEXT, section=".text"),
        ElfSymbol(name="banner", addr=DATA, section=".rodata"),
    )

    for at, value in product(range(len(data)), (0, 0x7F, 0xFF)):
        with suppress(FormatError):
            from_elf(data[:at] + bytes([value]) + data[at + 1 :])
