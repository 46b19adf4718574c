"""Variables that another file has: where its symbols say, or for a module the kernel's."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kprobes.dwarf.libdw import Dwarf
from kprobes.dwarf.source import DwarfSource
from kprobes.errors import FormatError
from kprobes.formats import elf
from kprobes.model.source import Location, LocationKind
from tests.build.objects import FOLDER
from tests.dwarf.test_lines import address

ReadAt = Callable[[int, int], bytes]
LINKED, OBJECT = FOLDER / "externs.so", FOLDER / "externs.ko"
_SLIDE = 0x1000


def symbols(path: Path) -> dict[str, int]:
    with path.open("rb") as file:
        return elf.global_data(lambda at, size: os.pread(file.fileno(), size, at))


def test_those_of_a_linked_file_are_where_its_symbols_are() -> None:
    source = DwarfSource(Dwarf(LINKED), "x86_64")
    places = symbols(LINKED)

    found = {each.name: each for each in source.externs(address(LINKED, "sums"))}

    assert set(places) == {"total", "own", "words"}
    assert set(found) == {*places, "nowhere", "unused"}
    assert found["total"].location == Location(kind=LocationKind.STATIC, number=places["total"])
    assert found["words"].location == Location(kind=LocationKind.STATIC, number=places["words"])
    assert (found["words"].type, found["words"].is_array) == ("const char []", True)
    assert (found["total"].type, found["total"].why) == ("long int", "")
    assert found["nowhere"].location is None
    assert found["unused"].why == "it is optimised out"
    assert found["nowhere"].why == "another file has it, and no symbol its name"


def test_what_an_object_expects_of_others_is_known() -> None:
    data = OBJECT.read_bytes()

    assert elf.undefined(lambda at, size: data[at : at + size]) == {"nowhere"}


def test_what_is_asked_elsewhere_is_what_only_is_declared() -> None:
    asked = list[str]()
    there = Location.static(0x2000, range(0x2000, 0x3000))

    def elsewhere(name: str) -> Location:
        asked.append(name)
        return there

    source = DwarfSource(Dwarf(LINKED), "x86_64", elsewhere=elsewhere)

    found = {each.name: each.location for each in source.externs(address(LINKED, "sums"))}

    assert {*asked, "unused"} == {*found}
    assert {found[name] for name in asked} == {there}
    assert there.kind is LocationKind.PER_CPU
    assert Location.static(0x3000, range(0x2000, 0x3000)).kind is LocationKind.STATIC


@pytest.mark.parametrize("read", [elf.global_data, elf.undefined])
def test_damaged_symbols_are_told(read: Callable[[ReadAt], object]) -> None:
    data = bytearray(OBJECT.read_bytes())
    data[0x28:0x2A] = b"\xf1\xff"

    with pytest.raises(FormatError, match="damaged"):
        read(lambda at, size: bytes(data[at : at + size]))


def test_all_is_moved_with_a_symbol() -> None:
    source = DwarfSource(Dwarf(LINKED), "x86_64")
    start = address(LINKED, "sums")

    source.move("total", symbols(LINKED)["total"] + _SLIDE)
    with pytest.raises(FormatError, match="no symbol nosuch says where"):
        source.move("nosuch", 7)

    function = source.function(start + _SLIDE)
    assert function is not None
    assert start + _SLIDE in {addr for each in function.lines for addr in each.addrs}
