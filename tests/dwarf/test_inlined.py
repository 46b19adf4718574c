"""Copies of an inlined function in a small library: where they begin, their lines."""

from pathlib import Path
from typing import cast

import pytest
from msgspec import Struct

from kprobes.dwarf import inlined
from kprobes.dwarf.libdw import Dwarf
from kprobes.dwarf.lines import read_function
from kprobes.dwarf.source import DwarfSource, open_source
from kprobes.dwarf.variables import Scope, read_variables
from kprobes.model.source import LocationKind
from tests.build.objects import FOLDER
from tests.dwarf.test_lines import ALL, GCC, address, line_of

_DECLARED = "static inline __attribute__((always_inline)) int twice"


@pytest.fixture(params=ALL)
def path(request: pytest.FixtureRequest) -> Path:
    return FOLDER / request.param


@pytest.fixture
def source(path: Path) -> DwarfSource:
    return open_source([path], "x86_64", "6.1.0", b"")


@pytest.mark.parametrize("path", GCC, indirect=True)
def test_a_function_is_wherever_it_is_inlined(path: Path, source: DwarfSource) -> None:
    (twice,) = source.inlined("twice")

    assert (Path(twice.file).name, twice.line) == ("source.c", line_of(_DECLARED))
    first, second = twice.copies
    function = read_function(Dwarf(path), address(path, "looks"))
    assert function is not None
    calls = [line_of("sum += twice(count)"), line_of("return twice(sum)")]
    lines = {line: each.line for each in function.lines for line in each.addrs}
    before = [max(addr for addr in lines if addr <= copy) for copy in (first, second)]
    assert [lines[addr] for addr in before] == calls


def test_its_lines_are_those_of_all_copies(source: DwarfSource) -> None:
    (twice,) = source.inlined("twice")
    lines = {each.line: each.addrs for each in source.inlined_lines("twice", twice)}

    at = lines[line_of("int doubled = value * 2")]
    assert len(at) == 2
    assert all(low <= addr for low, addr in zip(twice.copies, at, strict=True))


def test_its_variables_come_before_its_callers(source: DwarfSource) -> None:
    (twice,) = source.inlined("twice")

    for addr in twice.copies:
        found = source.variables(addr, twice.line, "twice")
        assert [each.name for each in found][:2] == ["value", "doubled"]
        assert [each.name for each in found if each.is_parameter] == ["value"]
        own = [each.name for each in source.variables(addr) if each.is_parameter]
        assert own == ["thing", "text", "count"]
        assert {"thing", "text", "count", "flags", "sum"} <= {each.name for each in found}
        assert found[0].location is not None
        assert found[0].location.kind in (LocationKind.REGISTER, LocationKind.COMPUTED)


class Tree(Struct, frozen=True):
    """An entry, and those inside it."""

    tag: int
    name: str
    inside: tuple["Tree", ...] = ()


class FakeDwarf:
    """One function; implements what ``read_variables`` asks for."""

    def __init__(self, function: Tree) -> None:
        self._function = function

    def unit_at(self, _: int) -> Tree:
        return Tree(0x11, "unit", (self._function,))

    def children(self, die: Tree) -> tuple[Tree, ...]:
        return die.inside

    def has(self, die: Tree, addr: int) -> bool:
        assert addr == 0x1000
        return bool(die.inside) and die.name != "later"

    def entry(self, die: Tree) -> int:
        return 0x1000 if die.inside else 0x2000

    def tag(self, die: Tree) -> int:
        return die.tag

    def name(self, die: Tree) -> str:
        return die.name

    def number(self, *_: object, is_signed: bool = False) -> int:
        # All variables are constants.
        return int(is_signed)

    def nothing(self, *_: object) -> None:
        return None

    reference = location = nothing

    def locations(self, *_: object) -> tuple[()]:
        return ()


@pytest.mark.parametrize(
    ("inlined", "first"),
    [("outer", ["a", "c", "b"]), ("inner", ["b", "a", "c"]), ("", ["b", "a", "c"])],
)
def test_of_two_that_begin_together_the_one_that_is_meant_comes_first(
    inlined: str, first: list[str]
) -> None:
    inner = Tree(0x1D, "inner", (Tree(0x05, "b"),))
    outer = Tree(0x1D, "outer", (Tree(0x05, "a"), inner))
    dwarf = cast("Dwarf", FakeDwarf(Tree(0x2E, "looks", (Tree(0x05, "c"), outer))))

    assert [
        each.name for each in read_variables(dwarf, (), range(0), Scope(0x1000, 0, inlined))
    ] == first


@pytest.mark.parametrize(("inlined", "first"), [("later", "b"), ("", "a"), ("deep", "d")])
def test_a_copy_may_begin_before_its_first_own_instruction(inlined: str, first: str) -> None:
    deep = Tree(0x1D, "deep", (Tree(0x05, "d"),))
    later = Tree(0x1D, "later", (Tree(0x05, "b"), deep))
    block = Tree(0x0B, "", (Tree(0x34, "a"),))
    own = (later,) if inlined == "deep" else (block, later)
    dwarf = cast("Dwarf", FakeDwarf(Tree(0x2E, "looks", (Tree(0x05, "c"), *own))))

    found = read_variables(dwarf, (), range(0), Scope(0x1000, 0, inlined))

    assert found[0].name == first


def test_a_name_that_is_not_inlined_has_no_copies(source: DwarfSource) -> None:
    assert [source.inlined(name) for name in ("looks", "twic", "twice2", "")] == [[], [], [], []]


def test_all_names_are_found(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inlined, "_ROOM", 1)

    assert inlined.read_inlined_names(Dwarf(path)) == {"twice"}


def test_more_copies_than_there_was_room_for_are_found(
    source: DwarfSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    (before,) = source.inlined("twice")
    monkeypatch.setattr(inlined, "_ROOM", 1)

    assert source.inlined("twice") == [before]
