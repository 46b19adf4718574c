"""Variables of a small library that has debug information: types, and where they are."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest

from kprobes.dwarf.libdw import Dwarf
from kprobes.dwarf.lines import read_function
from kprobes.dwarf.source import DwarfSource, open_source
from kprobes.errors import FormatError, TargetError
from kprobes.formats import elf
from kprobes.model.source import Location, LocationKind, Variable
from tests.build.objects import FOLDER
from tests.dwarf.test_lines import ALL, GCC, address, line_of


@pytest.fixture(params=ALL)
def path(request: pytest.FixtureRequest) -> Path:
    return FOLDER / request.param


@pytest.fixture
def source(path: Path) -> DwarfSource:
    return open_source([FOLDER / "entries.c", path], "x86_64", "6.1.0", b"")


def at_line(path: Path, source: DwarfSource, words: str) -> Mapping[str, Variable]:
    """Return what is in scope at the first place of a line."""
    function = read_function(Dwarf(path), address(path, "looks"))
    assert function is not None
    (line,) = [each for each in function.lines if each.line == line_of(words)]
    return {each.name: each for each in source.variables(line.addrs[0])}


def test_parameters_are_in_registers_at_the_entry(path: Path, source: DwarfSource) -> None:
    found = {each.name: each for each in source.variables(address(path, "looks"))}

    thing, text, count = found["thing"], found["text"], found["count"]
    assert thing.location == Location(kind=LocationKind.REGISTER, register="di")
    assert (thing.type, thing.struct, thing.is_pointer) == ("struct thing *", "thing", True)
    assert text.location == Location(kind=LocationKind.REGISTER, register="si")
    assert (text.type, text.is_pointer, text.struct) == ("const char *", True, "")
    assert count.location == Location(kind=LocationKind.REGISTER, register="dx")
    assert count.spec is not None
    assert count.spec.base == "u16"
    assert not any(name in found for name in ("counter", "value"))


@pytest.mark.parametrize("path", GCC, indirect=True)
def test_what_is_on_the_stack_is_so_far_from_its_pointer(path: Path, source: DwarfSource) -> None:
    entry = {each.name: each for each in source.variables(address(path, "looks"))}
    flags = at_line(path, source, "if (outside(&flags, count))")["flags"]

    assert flags.location is not None
    assert (flags.location.kind, flags.location.register) == (LocationKind.MEMORY, "sp")
    assert (flags.type, flags.spec) == ("struct flags", None)
    # Below the caller's, before there is a frame.
    assert entry["flags"].location is not None
    assert entry["flags"].location.number < 0 < flags.location.number


@pytest.mark.parametrize("path", GCC, indirect=True)
def test_in_an_inlined_function_its_callers_variables_are_there_too(
    path: Path, source: DwarfSource
) -> None:
    # Its code begins where it is called.
    found = at_line(path, source, "sum += twice(count)")

    assert list(found)[:2] == ["value", "doubled"]
    # Of the line that calls it its own come first.
    function = read_function(Dwarf(path), address(path, "looks"))
    assert function is not None
    line = line_of("sum += twice(count)")
    (addr,) = next(each.addrs for each in function.lines if each.line == line)
    assert [each.name for each in source.variables(addr, line)][-2:] == ["value", "doubled"]
    assert {"thing", "text", "count", "flags", "sum"} <= set(found)
    assert found["sum"].spec is not None
    assert found["sum"].spec.base == "s32"


def test_what_cannot_be_read_says_why_and_where_it_can(path: Path, source: DwarfSource) -> None:
    entry = {each.name: each for each in source.variables(address(path, "looks"))}
    loop = at_line(path, source, "sum += outside(text + at, 1)")

    assert entry["sum"].location is None
    assert entry["sum"].why == "it is optimised out"
    assert all(low >= address(path, "looks") for low, _ in entry["sum"].ranges)
    assert entry["sum"].ranges
    assert loop["text"].location is None
    assert loop["text"].why == "only its value at the function's entry is known"
    # Ranges do not touch: those that do are one.
    ranges = entry["thing"].ranges
    assert all(high < low for (_, high), (low, _) in pairwise(ranges))


def test_variables_of_the_file_are_where_their_symbols_are(path: Path, source: DwarfSource) -> None:
    data = path.read_bytes()
    symbols = elf.global_data(lambda at, size: data[at : at + size])

    found = {each.name: each.location for each in source.externs(address(path, "looks"))}

    where = Location(kind=LocationKind.STATIC, number=symbols["counter"])
    assert found["counter"] == where


def test_constants_are_their_values(path: Path, source: DwarfSource) -> None:
    at = at_line(path, source, "for (int at = 0")["at"]

    assert at.location == Location(kind=LocationKind.CONSTANT, number=0)


def test_what_gcc_has_left_out_has_its_sign_only_where_it_is_said() -> None:
    path = FOLDER / "constants.so"
    source = open_source([path], "x86_64", "6.1.0", b"")

    bits = {
        each.name: each.location.number % (1 << 8 * each.spec.size)
        for each in source.variables(address(path, "sums.constprop.0"))
        if each.spec and each.location and each.location.kind is LocationKind.CONSTANT
    }

    assert bits == {"size": 128, "step": (1 << 32) - 128, "part": 0xFF, "large": 0xFEDCBA98}


def test_a_function_of_arm64_begins_before_it_does_to_gcc() -> None:
    path = FOLDER / "lines-arm64.so"
    source, addr = open_source([path], "aarch64", "6.1.0", b""), address(path, "looks")

    function = source.function(addr)
    at_entry, after = source.variables(addr), source.variables(addr + 12)

    assert function is not None
    assert function.lines[0].addrs[0] == addr + 12
    assert at_entry == after
    registers = {each.name: each.location.register for each in at_entry if each.location}
    assert {name: registers[name] for name in ("thing", "text", "count")} == {
        "thing": "x0",
        "text": "x1",
        "count": "x2",
    }


def test_clangs_static_variables_are_found() -> None:
    path = FOLDER / "lines-clang.so"
    dwarf = Dwarf(path)
    (counter,) = (
        die
        for unit in dwarf.units()
        for die in dwarf.children(unit)
        if dwarf.name(die) == "counter"
    )

    (op,) = dwarf.location(counter, 0x02, address(path, "looks")) or []

    assert op.atom == 0x03
    at = next(
        each.data[op.number - each.addr :]
        for each in elf.parse(path.read_bytes()).segments
        if 0 <= op.number - each.addr < len(each.data)
    )
    # int counter = 5
    assert at[:4] == b"\5\0\0\0"


def test_sections_are_found_and_damage_is_told(tmp_path: Path) -> None:
    path = FOLDER / "lines-5.so"
    dwarf = Dwarf(path)
    addr = address(path, "looks")
    text = dwarf.section(".text")
    assert addr in text
    # The last function ends it.
    assert text.stop - addr < 400
    assert (len(dwarf.section(".debug_info")), len(dwarf.section(".tex"))) == (0, 0)

    data = bytearray(path.read_bytes())
    data[62:64] = b"\xff\x00"
    damaged = tmp_path / "damaged"
    damaged.write_bytes(data)
    with pytest.raises((FormatError, TargetError)):
        open_source([damaged], "x86_64", "6.1.0", b"")


def test_addresses_are_moved_and_nothing_else() -> None:
    high, slide = 0xFFFF_FFFF_8200_0000, 0x1000
    kinds = (LocationKind.STATIC, LocationKind.PER_CPU, LocationKind.ADDRESS)
    for kind in kinds:
        assert Location(kind=kind, number=high).moved(slide).number == high + slide
    # x86 before 6.15 links what each CPU has at 0.
    per_cpu = Location(kind=LocationKind.PER_CPU, number=0x3100)
    constant = Location(kind=LocationKind.CONSTANT, number=-1)
    assert (per_cpu.moved(slide), constant.moved(slide)) == (per_cpu, constant)
    static = Location(kind=LocationKind.ADDRESS, number=high)
    memory = Location(kind=LocationKind.MEMORY, number=-8, operands=(static,))
    total = Location(kind=LocationKind.COMPUTED, operands=(memory, constant))

    variable = Variable(name="a", type="int", location=total, ranges=((high, high + 4),))
    moved = variable.moved(slide)

    assert moved.location is not None
    assert moved.location.operands[0].number == -8
    assert moved.location.operands[0].operands[0].number == high + slide
    assert moved.location.operands[1] == constant
    assert moved.ranges == ((high + slide, high + slide + 4),)


def test_another_builds_debug_information_is_not_taken(path: Path) -> None:
    with pytest.raises(TargetError, match=r"build 0102: give its vmlinux by --vmlinux"):
        open_source([path], "x86_64", "6.1.0", b"\x01\x02")
    with pytest.raises(TargetError, match=r"kernel 6\.1\.0, build unknown"):
        open_source([FOLDER / "nosuch"], "x86_64", "6.1.0", b"")
