"""Functions and tables of ELF files that compilers made, beside what pyelftools reads."""

from random import Random

import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.sections import SymbolTableSection

from kprobes.arch.entry import MCOUNT_LOC, PATCHABLE
from kprobes.errors import FormatError
from kprobes.formats.elf_functions import ElfFunctions
from tests.build.objects import COMMANDS, FOLDER

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false


def read(name: str) -> ElfFunctions:
    return ElfFunctions((FOLDER / name).read_bytes())


@pytest.mark.parametrize("name", COMMANDS)
def test_functions_and_their_bytes_are_those_of_the_symbol_table(name: str) -> None:
    path, found = FOLDER / name, read(name)
    with path.open("rb") as file:
        elf = ELFFile(file)
        symbols = elf.get_section_by_name(".symtab")
        assert isinstance(symbols, SymbolTableSection)
        wanted = {
            each.name: (each["st_value"], each["st_size"], elf.get_section(each["st_shndx"]))
            for each in symbols.iter_symbols()
            if each["st_info"]["type"] == "STT_FUNC" and each["st_shndx"] != "SHN_UNDEF"
        }
        assert {each.name for each in found.functions()} == wanted.keys()
        for each in found.functions():
            value, size, section = wanted[each.name]
            assert (each.place[1], each.size, each.section) == (value, size, section.name)
            start = value - section["sh_addr"]
            code = section.data()[start : start + size]
            before, after = found.around(each.place, 8, size)
            assert (before, after) == (section.data()[max(start - 8, 0) : start], code)


@pytest.mark.parametrize(
    ("name", "table", "count"),
    [
        ("gcc-fentry.o", MCOUNT_LOC, 3),
        ("gcc-linked.so", MCOUNT_LOC, 3),
        ("gcc-patchable.o", PATCHABLE, 4),
        ("clang-patchable.o", PATCHABLE, 4),
        ("arm64-before.o", PATCHABLE, 4),
        ("gcc-pg.o", MCOUNT_LOC, 0),
    ],
)
def test_a_table_has_a_place_near_each_function_that_it_is_of(
    name: str, table: str, count: int
) -> None:
    found = read(name)
    places, functions = found.listed(table), list(found.functions())

    assert len(places) == count
    for section, at in places:
        assert any(each.place[0] == section and -8 <= at - each.place[1] <= 4 for each in functions)


def test_what_is_damaged_is_a_format_error() -> None:
    random = Random(1)
    for name in COMMANDS:
        data = (FOLDER / name).read_bytes()
        for cut in random.sample(range(len(data)), 40):
            _read_all(data[:cut])
        for _ in range(200):
            changed = bytearray(data)
            for _ in range(random.randint(1, 8)):
                changed[random.randrange(4, len(changed))] = random.randrange(256)
            _read_all(bytes(changed))


def _read_all(data: bytes) -> None:
    try:
        found = ElfFunctions(data)
    except FormatError:
        return
    for table in (MCOUNT_LOC, PATCHABLE):
        found.listed(table)
    for each in found.functions():
        found.around(each.place, 64, 64)
        found.symbol_of(each.place, 8)
        found.linkage(each.place[1])


def test_what_is_no_elf_file_is_said() -> None:
    with pytest.raises(FormatError, match="not a 64-bit little endian ELF file"):
        ElfFunctions(b"#!/bin/sh\n")
    with pytest.raises(FormatError, match="it has no sections"):
        ElfFunctions((FOLDER / "gcc-pg.o").read_bytes()[:60] + bytes(4))
