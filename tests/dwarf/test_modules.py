"""Debug information of objects, as modules are, where their sections were loaded."""

from collections.abc import Callable
from pathlib import Path

import pytest

from kprobes.dwarf.libdw import Dwarf
from kprobes.dwarf.source import DwarfSource
from kprobes.errors import FormatError
from kprobes.formats.elf import loaded_sections, noted_build_id
from kprobes.image.module_sections import places_of_sections
from kprobes.model.source import Location, LocationKind
from tests.build.loaded_module import BUILD_ID, DATA, PER_CPU, TEXT, loaded
from tests.build.objects import FOLDER, MODULE

ARCHS = {"module.ko": "x86_64", "module-arm64.ko": "aarch64"}
_SOURCE = MODULE.read_text().splitlines()


def line_of(words: str) -> int:
    (found,) = [number for number, text in enumerate(_SOURCE, start=1) if words in text]
    return found


@pytest.fixture(params=ARCHS)
def path(request: pytest.FixtureRequest) -> Path:
    return FOLDER / request.param


@pytest.fixture
def source(path: Path) -> DwarfSource:
    places = places_of_sections(loaded_sections(reader(path)), loaded(), {})
    return DwarfSource(Dwarf(path, places), ARCHS[path.name])


def reader(path: Path) -> Callable[[int, int], bytes]:
    data = path.read_bytes()
    return lambda at, size: data[at : at + size]


def test_sections_that_are_loaded_have_the_symbols_that_are_there_once(path: Path) -> None:
    found = {each.name: each for each in loaded_sections(reader(path))}

    assert found[".text"].symbols["serves"] == 0
    assert found[".init.text"].symbols["begins"] == 0
    assert found[".data..percpu"].symbols["calls"] == 0
    assert found[".data..percpu"].size == 8
    assert not any(name.startswith((".debug", ".symtab", ".rela")) for name in found)
    assert noted_build_id(reader(path)) == BUILD_ID


def test_what_is_linked_has_no_such_sections() -> None:
    assert loaded_sections(reader(FOLDER / "lines-5.so")) == []
    assert loaded_sections(reader(FOLDER / "module.c")) == []


@pytest.mark.parametrize("at", [0x28, 0x3C, 0x3E])
def test_damaged_sections_are_told(at: int) -> None:
    # Where they are, how many there are, and which has their names.
    data = bytearray((FOLDER / "module.ko").read_bytes())
    data[at : at + 2] = b"\xf1\xff"

    with pytest.raises(FormatError, match="damaged"):
        loaded_sections(lambda at, size: bytes(data[at : at + size]))


def test_lines_are_where_the_section_was_loaded(source: DwarfSource) -> None:
    function = source.function(TEXT)

    assert function is not None
    assert function.line == line_of("int serves(")
    assert all(TEXT <= addr < TEXT + 0xA0 for each in function.lines for addr in each.addrs)
    # One that is gone has the same line, too.
    inlined = line_of("int most = limit;")
    (line,) = source.file_lines("module.c", inlined, inlined)
    assert all(TEXT <= addr < TEXT + 0xA0 for addr in line.addrs)
    gone = line_of("return outside(&start")
    assert source.file_lines("module.c", gone, gone) == []


def test_copies_are_those_that_are_there(source: DwarfSource) -> None:
    (found,) = source.inlined("bounded")

    lines = source.inlined_lines("bounded", found)
    assert found.copies
    assert line_of("value = outside(&limit") in {each.line for each in lines}
    places = [*found.copies, *(addr for each in lines for addr in each.addrs)]
    assert all(TEXT <= addr < TEXT + 0xA0 for addr in places)
    assert source.inlined("nosuch") == []


def test_variables_are_where_their_sections_are(source: DwarfSource) -> None:
    entry = {each.name: each for each in source.variables(TEXT)}
    externs = {each.name: each for each in source.externs(TEXT)}

    assert entry["name"].location is not None
    assert entry["name"].location.kind is LocationKind.REGISTER
    assert all(TEXT <= start < end for start, end in entry["name"].ranges)
    assert externs["limit"].location == Location(kind=LocationKind.STATIC, number=DATA)
    assert externs["calls"].location == Location(kind=LocationKind.PER_CPU, number=PER_CPU)
    assert externs["start"].location is None
    assert (externs["state"].enum, externs["limit"].enum) == ("state", "")
    text, listed, grid = entry["name"], externs["list"], externs["grid"]
    assert [(each.is_pointer, each.is_array) for each in (text, listed, grid)] == [
        (True, False),
        (False, True),
        (False, True),
    ]
    assert [each.element and each.element.base for each in (text, listed)] == ["char", "s16"]
    assert [each.element_size for each in (text, listed, grid)] == [1, 2, 4]
    assert [each.counts for each in (text, listed, grid)] == [(), (4,), (2, 3)]
    assert (listed.type, grid.type) == ("short int [4]", "int [2][3]")
    assert externs["start"].why == "where its section was loaded is not known"


def test_frames_are_known_there(path: Path, source: DwarfSource) -> None:
    del source
    places = places_of_sections(loaded_sections(reader(path)), loaded(), {})
    dwarf = Dwarf(path, places)

    assert dwarf.frame(TEXT)
    assert dwarf.frame(TEXT - 0x10000) is None
    again = dwarf.reopened()
    dwarf.close()
    assert again.frame(TEXT)
    again.close()


def test_an_object_without_debug_information_is_refused() -> None:
    with pytest.raises(FormatError, match="no debug information"):
        Dwarf(FOLDER / "gcc-pg.o", {".text": range(TEXT, TEXT + 0x100)})
