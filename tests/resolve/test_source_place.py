"""Places in the source and variables there, by debug information that the test makes up."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from kprobes.errors import DefinitionError
from kprobes.lang.listing import show
from kprobes.lang.parser import parse
from kprobes.model.definition import Definition, TypeWord
from kprobes.model.source import Location, LocationKind, SourceFunction, SourceLine, Variable
from kprobes.resolve.source_place import at_lines, names_variables
from kprobes.units import U64
from tests.build.kernel import TEXT, make_kernel, symbol

_SLIDE = 0x1000
_U32 = TypeWord(base="u32", size=4)
_PLACES = {
    "count": Location(kind=LocationKind.REGISTER, register="dx"),
    "flags": Location(kind=LocationKind.MEMORY, register="sp", number=-8),
    "mask": Location(kind=LocationKind.CONSTANT, number=-1),
    "limit": Location(kind=LocationKind.STATIC, number=0x7000),
}


def variable(name: str, **others: Any) -> Variable:
    known: dict[str, Any] = {"type": "unsigned int", "spec": _U32, "location": _PLACES.get(name)}
    return Variable(name=name, **(known | others))


_VARIABLES = (
    *map(variable, _PLACES),
    variable(
        "file",
        type="struct file *",
        struct="file",
        is_pointer=True,
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
        "gone",
        location=None,
        why="it is optimised out",
        ranges=((TEXT - _SLIDE + 0x10, TEXT - _SLIDE + 0x18),),
    ),
)


class FakeSource(Struct, frozen=True):
    """Implements ``model.source.SourceInfo``: vfs_read begins in line 450."""

    lines: Sequence[SourceLine] = (
        SourceLine(file="fs/read_write.c", line=456, addrs=(TEXT - _SLIDE + 0x10,)),
        SourceLine(
            file="fs/read_write.c",
            line=461,
            addrs=(TEXT - _SLIDE + 0x20, TEXT - _SLIDE + 0x48),
        ),
    )

    def function(self, addr: int) -> SourceFunction | None:
        if addr != TEXT - _SLIDE:
            return None
        return SourceFunction(file="fs/read_write.c", line=450, lines=tuple(self.lines))

    def file_lines(self, file: str, first: int, last: int) -> Sequence[SourceLine]:
        return [
            each for each in self.lines if first <= each.line <= last and file == "read_write.c"
        ]

    def variables(self, addr: int, line: int = 0) -> Sequence[Variable]:
        assert line in (0, 450, 456, 461)
        assert TEXT - _SLIDE <= addr < TEXT
        return _VARIABLES


_AT = "p:kprobes/a vfs_read+16"
_NAMES = [symbol("vfs_read", TEXT), symbol("vfs_write", TEXT + 0x40), symbol("untold", TEXT + 0x80)]
_KERNEL = replace(make_kernel(_NAMES), slide=_SLIDE)


def parsed(text: str) -> Definition:
    return parse(text, registers=("di", "si", "dx", "sp"))


def shown(text: str) -> list[str]:
    """Return what the kernel would list of it."""
    return [show(each) for each in at_lines(parsed(text), _KERNEL, FakeSource())]


def refusal(text: str) -> DefinitionError:
    with pytest.raises(DefinitionError) as refused:
        at_lines(parsed(text), _KERNEL, FakeSource())
    return refused.value


def test_a_line_is_every_place_that_it_has() -> None:
    assert shown("p vfs_read:6") == ["p:kprobes/p_vfs_read_L6 vfs_read+16"]
    assert shown("p:read vfs_read:11") == [
        "p:kprobes/read vfs_read+32",
        "p:kprobes/read vfs_write+8",
    ]
    assert shown("p read_write.c:456") == ["p:kprobes/p_read_write_c_L456 vfs_read+16"]


def test_of_several_functions_of_a_name_that_of_a_file_is_meant() -> None:
    twins = [symbol("vfs_read", TEXT + 0x40), *_NAMES]
    kernel = replace(make_kernel(twins), slide=_SLIDE)

    def listed(text: str) -> list[str]:
        return [show(each) for each in at_lines(parsed(text), kernel, FakeSource())]

    # By its address, as its name is another's, too.
    assert listed("p:e vfs_read@fs/read_write.c") == [f"p:kprobes/e {TEXT:#018x}"]
    assert listed("p:e vfs_read@read_write.c:6") == [f"p:kprobes/e {TEXT + 16:#018x}"]
    assert "no lines of vfs_read in mm/slab.c" in str(refusal("p vfs_read@mm/slab.c:6"))


def test_the_functions_own_line_is_its_entry() -> None:
    assert shown("p:e vfs_read:0") == ["p:kprobes/e vfs_read"]


def test_variables_are_the_registers_and_the_memory_that_they_live_in() -> None:
    assert shown("p:a vfs_read:6 count flags mask limit") == [
        f"{_AT} count=%dx:u32 flags=-8(%sp):u32 mask=\\{U64}:u32 limit=@0x8000:u32"
    ]
    assert shown("p:a vfs_read+0x10 count:x8 n=flags") == [
        "p:kprobes/a vfs_read+16 count=%dx:x8 n=-8(%sp):u32"
    ]


def test_members_are_walked_from_what_a_variable_points_to() -> None:
    assert shown("p:a vfs_read:6 mode=file->f_mode:x32 +8(file):u64") == [
        "p:kprobes/a vfs_read+16 mode=(file)%di->f_mode:x32 arg2=+8(%di):u64"
    ]


def test_strings_are_followed_by_what_variables_are() -> None:
    assert shown("p:a vfs_read:6 name:ustring") == ["p:kprobes/a vfs_read+16 name=+u0(%si):ustring"]
    assert shown("p:a vfs_read:6 name:string") == ["p:kprobes/a vfs_read+16 name=+0(%si):string"]
    assert shown("p:a vfs_read:6 buffer:string") == [
        "p:kprobes/a vfs_read+16 buffer=+16(%sp):string"
    ]


@pytest.mark.parametrize(
    ("text", "column", "hint"),
    [
        ("p vfs_read:9", 2, "that line has no code; of vfs_read there is some at 6, 11"),
        ("p untold:3", 2, "the debug information has no lines of untold"),
        ("p other.c:456", 2, "there is no code of other.c there"),
        ("p read_write.c:458", 2, "of read_write.c there is some at 456, 461"),
        ("p vfs_read:6 nosuch", 13, "in scope there: buffer count file"),
        ("p vfs_read:6 count gone", 19, "it is optimised out; it can from +0x10 to +0x17"),
        ("p vfs_read:6 buffer", 13, "buffer is a char [16]: name a member, or a type"),
    ],
)
def test_what_is_not_there_says_what_is(text: str, column: int, hint: str) -> None:
    error = refusal(text)

    assert hint in str(error)
    assert error.column == column


def test_only_names_away_from_an_entry_need_debug_information() -> None:
    assert not names_variables(parsed("p vfs_read count"))
    assert not names_variables(parsed("p vfs_read+4 %dx $stack0"))
    assert names_variables(parsed("p vfs_read+4 +8(count)"))


@pytest.mark.parametrize(
    "text", ["r vfs_read:5", "f vfs_read:5", "p vfs_read:5x", "p vfs_read:-1", "p a/b.o:5"]
)
def test_what_is_no_line_is_refused(text: str) -> None:
    with pytest.raises(DefinitionError):
        parsed(text)
