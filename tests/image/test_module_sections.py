"""Sections of a module by its symbols and notes, and which build it is."""

import pytest
from msgspec.structs import replace

from kprobes.errors import FormatError, MemoryFault
from kprobes.formats.elf import LoadedSection
from kprobes.image.module_sections import (
    build_ids,
    loaded_module,
    noted_sections,
    places_of_sections,
)
from kprobes.image.symbols import SymbolMap
from tests.build.kernel import FakeTypes, make_kernel
from tests.build.loaded_module import (
    BUILD_ID,
    DATA,
    NOTE,
    NOTES,
    PER_CPU,
    TEXT,
    ModuleMemory,
    loaded,
)
from tests.image.test_symbols import table

SECTIONS = [
    LoadedSection(name=".text", size=0x40, symbols={"serves": 0, "helps": 0x20}),
    LoadedSection(name=".init.text", size=0x42, symbols={"begins": 0}),
    LoadedSection(name=".data", size=4, symbols={"limit": 0}),
    LoadedSection(name=".data..percpu", size=8, symbols={"calls": 0}),
    LoadedSection(name=".rodata.str1.1", size=9, symbols={}),
]


def test_a_section_is_where_its_symbols_say() -> None:
    assert places_of_sections(SECTIONS, loaded(), {}) == {
        ".text": range(TEXT, TEXT + 0x40),
        ".data": range(DATA, DATA + 4),
        ".data..percpu": range(PER_CPU, PER_CPU + 8),
    }
    moved = loaded({"helps": TEXT + 0x20})
    assert places_of_sections(SECTIONS, moved, {}) == {".text": range(TEXT, TEXT + 0x40)}


def test_symbols_that_are_elsewhere_are_of_another_build() -> None:
    with pytest.raises(FormatError, match=r"its \.text is another than that of the loaded module"):
        places_of_sections(SECTIONS, loaded({"serves": TEXT, "helps": TEXT + 0x24}), {})
    with pytest.raises(FormatError, match="it has no symbol of the loaded module"):
        places_of_sections(SECTIONS, loaded({"other": TEXT}), {})


def test_a_name_of_two_symbols_says_nothing() -> None:
    module = loaded({"serves": TEXT, "helps": TEXT + 0x24})
    rows = [(TEXT, "t", "serves"), (TEXT + 8, "t", "helps"), (TEXT + 0x30, "t", "helps")]
    twins = type(module)(name="module", table=table(rows), ranges=module.ranges)

    assert places_of_sections(SECTIONS, twins, {}) == {".text": range(TEXT, TEXT + 0x40)}


def test_a_name_of_two_sections_says_nothing() -> None:
    twins = [*SECTIONS, LoadedSection(name=".data", size=8, symbols={})]

    assert ".data" not in places_of_sections(twins, loaded(), {".data": DATA})


RODATA = NOTES + 0x100
RECORD, ATTRS, LIST, NAMES = NOTES + 0x200, NOTES + 0x300, NOTES + 0x380, NOTES + 0xFE0
OFFSETS = {
    "module.sect_attrs": (0x10, 8),
    "module.percpu": (0x18, 8),
    "module_sect_attrs.grp.bin_attrs": (0x20, 8),
    "bin_attribute.attr.name": (0, 8),
    "bin_attribute.private": (0x18, 8),
}


class NotedMemory:
    """A page, with what the kernel notes of three sections; their names end it."""

    def __init__(self, place: int) -> None:
        words = {RECORD + 0x10: ATTRS, RECORD + 0x18: PER_CPU, ATTRS + 0x20: LIST}
        notes = {".rodata": RODATA, ".init.text": TEXT + 0x100_0000, "__bug": TEXT + 0x10}
        self.data = bytearray(0x1000)
        at = NAMES
        for number, (name, addr) in enumerate(notes.items()):
            attribute = NOTES + 0x400 + number * 0x40
            words |= {LIST + 8 * number: attribute, attribute: at, attribute + place: addr}
            self.data[at - NOTES : at - NOTES + len(name)] = name.encode()
            at += len(name) + 1
        for addr, word in words.items():
            self.data[addr - NOTES : addr - NOTES + 8] = word.to_bytes(8, "little")

    def read(self, addr: int, size: int) -> bytes:
        if not 0 <= addr - NOTES <= addr + size - NOTES <= len(self.data):
            raise MemoryFault(addr, size)
        return bytes(self.data[addr - NOTES :][:size])


@pytest.mark.parametrize("place", [0x38, 0x18], ids=["address", "private"])
def test_what_has_no_names_is_where_the_kernel_notes_it(place: int) -> None:
    own = {"module_sect_attr.address": (place, 8)} if place == 0x38 else {}
    module = replace(loaded(), record=RECORD)

    noted = noted_sections(NotedMemory(place), FakeTypes(OFFSETS | own), module)

    # What is there no more has a note, too.
    assert noted == {".data..percpu": PER_CPU, ".rodata": RODATA, "__bug": TEXT + 0x10}
    sections = [*SECTIONS[:1], LoadedSection(name=".rodata", size=16, symbols={})]
    assert places_of_sections(sections, module, noted) == {
        ".text": range(TEXT, TEXT + 0x40),
        ".rodata": range(RODATA, RODATA + 16),
    }


def test_where_nothing_is_noted_nothing_is_known() -> None:
    memory, module = NotedMemory(0x18), replace(loaded(), record=RECORD)
    types = FakeTypes(OFFSETS)

    assert noted_sections(memory, None, module) == {}
    assert noted_sections(memory, FakeTypes({}), module) == {}
    assert noted_sections(memory, types, loaded()) == {}
    memory.data[RECORD + 0x10 - NOTES] ^= 0x80
    assert noted_sections(memory, types, module) == {}


def test_the_build_is_what_its_notes_say() -> None:
    assert build_ids(ModuleMemory(), loaded()) == {BUILD_ID}
    assert build_ids(ModuleMemory(b""), loaded()) == frozenset()


def test_of_a_hostile_module_some_is_read_and_some_builds_are_asked_for() -> None:
    read = list[int]()

    class Endless:
        def read(self, addr: int, size: int) -> bytes:
            read.append(size)
            return (NOTE[:-8] + addr.to_bytes(8, "little")).ljust(size, b"\0")

    module = replace(loaded(), ranges=((TEXT, TEXT + (1 << 32)),))

    assert len(build_ids(Endless(), module)) == 16
    assert sum(read) == 64 << 20


def test_modules_are_those_that_are_loaded() -> None:
    module = loaded()
    symbols = SymbolMap(table([(TEXT, "T", "_text")]), [module])
    kernel = replace(make_kernel([]), symbols=symbols)

    assert loaded_module(kernel, "module") is module
    assert loaded_module(kernel, "other") is None
    assert loaded_module(make_kernel([]), "module") is None
