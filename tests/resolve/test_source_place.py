"""Places in the source and variables there, by debug information that the test makes up."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace

from kprobes.errors import DefinitionError
from kprobes.lang.listing import show
from kprobes.lang.parser import parse
from kprobes.model.definition import (
    Cast,
    Computed,
    Definition,
    Deref,
    Fetch,
    Immediate,
    Member,
    Register,
    TypeWord,
)
from kprobes.model.source import Location, LocationKind, SourceFunction, SourceLine, Variable
from kprobes.resolve.source_place import at_lines, is_inlined
from kprobes.resolve.source_variables import names_variables
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


def _sum(base: Location, number: int) -> Location:
    constant = Location(kind=LocationKind.CONSTANT, number=number)
    return Location(kind=LocationKind.COMPUTED, operands=(base, constant))


def _read(base: Location, offset: int) -> Location:
    return Location(kind=LocationKind.MEMORY, number=offset, operands=(base,))


def variable(name: str, **others: Any) -> Variable:
    known: dict[str, Any] = {"type": "unsigned int", "spec": _U32, "location": _PLACES.get(name)}
    known["is_parameter"] = name in ("count", "file")
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
        "state",
        type="struct file",
        struct="file",
        spec=None,
        location=Location(kind=LocationKind.MEMORY, register="sp", number=32),
    ),
    variable(
        "table",
        type="struct file",
        struct="file",
        spec=None,
        location=Location(kind=LocationKind.STATIC, number=0x7000),
    ),
    variable(
        "next",
        type="struct file *",
        struct="file",
        is_pointer=True,
        spec=TypeWord(base="x64", size=8),
        location=_sum(_PLACES["count"], 16),
    ),
    variable("far", location=_read(_sum(_PLACES["count"], 16), 8)),
    variable("here", location=Location(kind=LocationKind.ADDRESS, number=0x7000)),
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
    copies: Sequence[tuple[str, SourceFunction]] = (
        (
            "fdget",
            SourceFunction(
                file="include/linux/file.h",
                line=450,
                copies=(TEXT - _SLIDE + 8, TEXT - _SLIDE + 0x44),
            ),
        ),
        ("twice", SourceFunction(file="a.h", line=5, copies=(TEXT - _SLIDE + 8,))),
        ("twice", SourceFunction(file="b.h", line=5, copies=(TEXT - _SLIDE + 0x44,))),
    )

    def function(self, addr: int) -> SourceFunction | None:
        if addr != TEXT - _SLIDE:
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

    def variables(self, addr: int, line: int = 0, inlined: str = "") -> Sequence[Variable]:
        assert inlined in ("", "fdget", "twice")
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


def test_a_function_that_is_inlined_is_every_copy_of_it() -> None:
    at = ["vfs_read+8", "vfs_write+4"]
    assert shown("p:i fdget") == [f"p:kprobes/i {each}" for each in at]
    assert shown("p:i fdget@file.h count") == [f"p:kprobes/i {each} count=%dx:u32" for each in at]
    assert shown("p:i fdget:6") == ["p:kprobes/i vfs_read+16"]
    assert shown("p:i twice") == [f"p:kprobes/i {each}" for each in at]
    assert shown("p:i twice@b.h") == [f"p:kprobes/i {at[1]}"]


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("p fdget", True),
        ("r fdget", True),
        ("p fdget@file.h:3", True),
        ("p vfs_read", False),
        ("p fdget+4", False),
        ("p fdget*", False),
        ("p ext4:fdget", False),
        ("p 0x1234", False),
        ("t fdget", False),
        ("f fdget", False),
    ],
)
def test_only_a_name_alone_that_no_symbol_has_may_be_inlined(text: str, is_one: bool) -> None:
    assert is_inlined(parsed(text), _KERNEL) is is_one


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


def fetched(text: str) -> Fetch:
    """Return the first argument's expression, whose text stays as it was written."""
    before = parsed(text)
    (found,) = at_lines(before, _KERNEL, FakeSource())
    assert found.args[0].text == before.args[0].text
    return found.args[0].fetch


def test_members_of_a_struct_are_walked_from_where_it_is() -> None:
    found = fetched("p:a vfs_read:6 state.f_path.mnt->mnt_flags:x32")

    assert isinstance(found, Member)
    assert [(step.name, step.is_arrow) for step in found.steps] == [
        ("f_path", True),
        ("mnt", False),
        ("mnt_flags", True),
    ]
    assert isinstance(found.base, Cast)
    assert found.base.struct == "file"
    assert isinstance(found.base.base, Computed)
    assert _shape(found.base.base) == ("+", "sp", 32)
    assert shown("p:a vfs_read:6 m=table.f_mode:x32") == [f"{_AT} m=(file)\\32768->f_mode:x32"]


def test_what_is_computed_is_fetched_as_it_is_made() -> None:
    assert _shape(fetched("p:a vfs_read:6 next")) == ("+", "dx", 16)
    assert _shape(fetched("p:a vfs_read:6 +4(next):u8")) == (4, ("+", "dx", 16))
    assert _shape(fetched("p:a vfs_read:6 far")) == (8, ("+", "dx", 16))
    member = fetched("p:a vfs_read:6 next->f_mode:x32")
    assert isinstance(member, Member)
    assert isinstance(member.base, Cast)
    assert _shape(member.base.base) == ("+", "dx", 16)
    assert shown("p:a vfs_read:6 here:x64") == [f"{_AT} here=\\32768:x64"]


def _shape(fetch: Fetch) -> object:
    match fetch:
        case Register(name=name):
            return name
        case Immediate(value=value):
            return value
        case Deref(base=base, offset=offset):
            return offset, _shape(base)
        case Computed(operation=operation, left=left, right=right):
            return operation.sign, _shape(left), _shape(right)
        case _:
            raise AssertionError(fetch)


@pytest.mark.parametrize(
    "text", ["p vfs_read:6 state->f_mode", "p vfs_read:6 file.f_mode", "p vfs_read:6 count.f_mode"]
)
def test_arrows_are_for_pointers_and_dots_for_structs(text: str) -> None:
    (found,) = at_lines(parsed(text), _KERNEL, FakeSource())

    # The kernel's words for it come later.
    assert isinstance(found.args[0].fetch, Member)
    assert not isinstance(found.args[0].fetch.base, Cast)


def test_all_variables_are_those_that_can_be_read_and_are_numbers() -> None:
    names = "count=%dx:u32 flags=-8(%sp):u32 mask=\\18446744073709551615:u32 limit=@0x8000:u32"
    pointers = "file=%di:x64 name=%si:x64"
    assert shown("p:a vfs_read+16 $params") == [f"{_AT} count=%dx:u32 file=%di:x64"]
    (everything,) = shown("p:a vfs_read:6 $vars")
    assert everything.startswith(f"{_AT} {names} {pointers} next=next")
    assert "gone" not in everything
    assert "buffer" not in everything


def test_all_variables_of_many_places_are_those_that_are_at_each() -> None:
    class Source(FakeSource, frozen=True):
        def variables(self, addr: int, line: int = 0, inlined: str = "") -> Sequence[Variable]:
            found = super().variables(addr, line, inlined)
            return found if addr == TEXT - _SLIDE + 8 else found[1:3]

    found = at_lines(parsed("p:i fdget $vars"), _KERNEL, Source())

    assert [show(each).split(maxsplit=2)[2] for each in found] == [
        "flags=-8(%sp):u32 mask=\\18446744073709551615:u32"
    ] * 2
    with pytest.raises(DefinitionError, match="none that can be read"):
        at_lines(parsed("p:i fdget $params"), _KERNEL, Source())


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
        ("r fdget", 2, "fdget is inlined: it has no return of its own"),
        ("p vfs_raed", 2, "did you mean vfs_read"),
        ("p fdget@fs/other.c", 2, "fdget is a function of include/linux/file.h"),
        ("p fdget:99", 2, "of fdget there is some at 6, 11"),
        ("p twice:1", 2, "several functions have this name: twice@a.h, twice@b.h"),
        ("p vfs_read:6 nosuch", 13, "in scope there: buffer count far file"),
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
    assert names_variables(parsed("p vfs_read $vars"))


@pytest.mark.parametrize(
    "text", ["r vfs_read:5", "f vfs_read:5", "p vfs_read:5x", "p vfs_read:-1", "p a/b.o:5"]
)
def test_what_is_no_line_is_refused(text: str) -> None:
    with pytest.raises(DefinitionError):
        parsed(text)
