"""Debug information that a test makes up: vfs_read begins in line 450, fdget is inlined."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import Struct

from kprobes.errors import DefinitionError
from kprobes.lang.listing import show
from kprobes.lang.parser import parse
from kprobes.model.definition import Definition, TypeWord
from kprobes.model.source import (
    Location,
    LocationKind,
    Piece,
    SourceFunction,
    SourceLine,
    Variable,
)
from kprobes.resolve.source_place import at_lines
from tests.build.kernel import TEXT, make_kernel, symbol

STATIC = 0xFFFFFFFF82000000
U32 = TypeWord(base="u32", size=4)
PLACES = {
    "count": Location(kind=LocationKind.REGISTER, register="dx"),
    "flags": Location(kind=LocationKind.MEMORY, register="sp", number=-8),
    "mask": Location(kind=LocationKind.CONSTANT, number=-1),
    "limit": Location(kind=LocationKind.STATIC, number=STATIC),
}


def _sum(base: Location, number: int) -> Location:
    constant = Location(kind=LocationKind.CONSTANT, number=number)
    return Location(kind=LocationKind.COMPUTED, operands=(base, constant))


def _read(base: Location, offset: int) -> Location:
    return Location(kind=LocationKind.MEMORY, number=offset, operands=(base,))


def variable(name: str, **others: Any) -> Variable:
    known: dict[str, Any] = {"type": "unsigned int", "spec": U32, "location": PLACES.get(name)}
    known["is_parameter"] = name in ("count", "file")
    return Variable(name=name, **(known | others))


VARIABLES = (
    *map(variable, PLACES),
    variable(
        "file",
        type="struct file *",
        struct="file",
        is_pointer=True,
        element_size=160,
        spec=TypeWord(base="x64", size=8),
        location=Location(kind=LocationKind.REGISTER, register="di"),
    ),
    variable(
        "name",
        type="const char *",
        is_pointer=True,
        spec=TypeWord(base="x64", size=8),
        location=Location(kind=LocationKind.REGISTER, register="si"),
    ),
    variable(
        "buffer",
        type="char [16]",
        spec=None,
        location=Location(kind=LocationKind.MEMORY, register="sp", number=16),
    ),
    variable(
        "state",
        type="struct file",
        struct="file",
        spec=None,
        location=Location(kind=LocationKind.MEMORY, register="sp", number=32),
    ),
    variable(
        "mode",
        type="enum mode",
        enum="mode",
        location=Location(kind=LocationKind.REGISTER, register="cx"),
    ),
    variable(
        "numbers",
        type="unsigned int [4]",
        spec=None,
        is_array=True,
        element=U32,
        element_size=4,
        counts=(4,),
        location=Location(kind=LocationKind.MEMORY, register="sp", number=64),
    ),
    variable(
        "argv",
        type="char **",
        is_pointer=True,
        spec=TypeWord(base="x64", size=8),
        element=TypeWord(base="x64", size=8),
        element_size=8,
        location=Location(kind=LocationKind.REGISTER, register="si"),
    ),
    variable(
        "files",
        type="struct file [2]",
        struct="file",
        spec=None,
        is_array=True,
        element_size=160,
        counts=(2,),
        location=Location(kind=LocationKind.STATIC, number=STATIC),
    ),
    variable(
        "where",
        type="struct path",
        struct="path",
        spec=None,
        location=None,
        why="it is in several places at once",
        pieces=(
            Piece(offset=0, size=8, location=Location(kind=LocationKind.REGISTER, register="r8")),
            Piece(offset=8, size=8, location=Location(kind=LocationKind.REGISTER, register="r9")),
        ),
    ),
    variable(
        "narrow",
        type="struct path",
        struct="path",
        spec=None,
        location=None,
        why="it is in several places at once",
        pieces=(
            Piece(offset=0, size=4, location=Location(kind=LocationKind.REGISTER, register="r8")),
        ),
    ),
    variable(
        "grid",
        type="int [2][3]",
        spec=None,
        is_array=True,
        element=TypeWord(base="s32", size=4),
        element_size=4,
        counts=(2, 3),
        location=Location(kind=LocationKind.STATIC, number=STATIC),
    ),
    variable(
        "table",
        type="struct file",
        struct="file",
        spec=None,
        location=Location(kind=LocationKind.STATIC, number=STATIC),
    ),
    variable(
        "next",
        type="struct file *",
        struct="file",
        is_pointer=True,
        spec=TypeWord(base="x64", size=8),
        location=_sum(PLACES["count"], 16),
    ),
    variable("far", location=_read(_sum(PLACES["count"], 16), 8)),
    variable("here", location=Location(kind=LocationKind.ADDRESS, number=STATIC)),
    variable(
        "gone",
        location=None,
        why="it is optimised out",
        ranges=((TEXT + 0x10, TEXT + 0x18),),
    ),
)


EXTERNS = (
    variable("total", location=Location(kind=LocationKind.STATIC, number=STATIC + 0x100)),
    variable("mine", location=Location(kind=LocationKind.PER_CPU, number=0x3100)),
    variable("its", location=Location(kind=LocationKind.PER_CPU, number=STATIC + 0x200)),
    variable(
        "queue",
        type="struct file",
        struct="file",
        spec=None,
        location=Location(kind=LocationKind.PER_CPU, number=0x3200),
    ),
    variable("count", location=Location(kind=LocationKind.STATIC, number=STATIC)),
    variable("theirs", location=None, why="another file has it: @NAME reads it"),
)


class FakeSource(Struct, frozen=True):
    """Implements ``model.source.SourceInfo``: vfs_read begins in line 450."""

    lines: Sequence[SourceLine] = (
        SourceLine(file="fs/read_write.c", line=456, addrs=(TEXT + 0x10,)),
        SourceLine(
            file="fs/read_write.c",
            line=461,
            addrs=(TEXT + 0x20, TEXT + 0x48),
        ),
    )
    copies: Sequence[tuple[str, SourceFunction]] = (
        (
            "fdget",
            SourceFunction(
                file="include/linux/file.h",
                line=450,
                copies=(TEXT + 8, TEXT + 0x44),
            ),
        ),
        ("twice", SourceFunction(file="a.h", line=5, copies=(TEXT + 8,))),
        ("twice", SourceFunction(file="b.h", line=5, copies=(TEXT + 0x44,))),
    )

    @property
    def file(self) -> str:
        return "made up"

    def function(self, addr: int) -> SourceFunction | None:
        if addr != TEXT:
            return None
        return SourceFunction(file="fs/read_write.c", line=450, lines=tuple(self.lines))

    def file_lines(self, file: str, first: int, last: int) -> Sequence[SourceLine]:
        return [
            each for each in self.lines if first <= each.line <= last and file == "read_write.c"
        ]

    def inlined(self, name: str) -> Sequence[SourceFunction]:
        return [each for known, each in self.copies if known == name]

    def inlined_lines(self, name: str, function: SourceFunction) -> Sequence[SourceLine]:
        assert self.inlined(name) == [function]
        return self.lines

    def text(self, file: str) -> Sequence[str]:
        assert file in ("fs/read_write.c", "include/linux/file.h")
        return [
            *[""] * 455,
            "\tret = rw_verify_area(READ, file, pos, count);",
            *[""] * 4,
            "\tif (count > MAX_RW_COUNT)",
            "\t\tret = 5;",
        ]

    def externs(self, addr: int) -> Sequence[Variable]:
        assert TEXT <= addr < TEXT + 0x80
        return EXTERNS

    def variables(self, addr: int, line: int = 0, inlined: str = "") -> Sequence[Variable]:
        assert inlined in ("", "fdget", "twice")
        assert line in (0, 450, 456, 461)
        assert TEXT <= addr < TEXT + 0x80
        return VARIABLES


AT = "p:kprobes/a vfs_read+16"
NAMES = [symbol("vfs_read", TEXT), symbol("vfs_write", TEXT + 0x40), symbol("untold", TEXT + 0x80)]
KERNEL = make_kernel(NAMES)


def parsed(text: str) -> Definition:
    return parse(text, registers=("di", "si", "dx", "sp"))


def shown(text: str) -> list[str]:
    """Return what the kernel would list of it."""
    return [show(each) for each in at_lines(parsed(text), KERNEL, FakeSource())]


def refusal(text: str) -> DefinitionError:
    with pytest.raises(DefinitionError) as refused:
        at_lines(parsed(text), KERNEL, FakeSource())
    return refused.value
