"""Variables at places in the source, by debug information that the test makes up."""

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from kprobes.arch.x86_64.arch import X86_64
from kprobes.errors import DefinitionError
from kprobes.lang.listing import show
from kprobes.model.definition import (
    AddressOf,
    AllMembers,
    Cast,
    Computed,
    Deref,
    Fetch,
    Immediate,
    Member,
    Register,
)
from kprobes.model.source import Variable
from kprobes.resolve.resolve import resolve
from kprobes.resolve.source_place import at_lines
from kprobes.resolve.source_variables import names_variables
from kprobes.units import U64
from tests.build.kernel import TEXT
from tests.build.source_info import AT, KERNEL, STATIC, FakeSource, parsed, refusal, shown
from tests.build.typed import types


def test_variables_are_the_registers_and_the_memory_that_they_live_in() -> None:
    assert shown("p:a vfs_read:6 count flags mask limit") == [
        f"{AT} count=%dx:u32 flags=-8(%sp):u32 mask=\\{U64}:u32 limit=@0xffffffff82000000:u32"
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
    (found,) = at_lines(before, KERNEL, FakeSource())
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
    assert shown("p:a vfs_read:6 m=table.f_mode:x32") == [
        f"{AT} m=(file)\\18446744071595622400->f_mode:x32"
    ]


def test_what_is_computed_is_fetched_as_it_is_made() -> None:
    assert _shape(fetched("p:a vfs_read:6 next")) == ("+", "dx", 16)
    assert _shape(fetched("p:a vfs_read:6 +4(next):u8")) == (4, ("+", "dx", 16))
    assert _shape(fetched("p:a vfs_read:6 far")) == (8, ("+", "dx", 16))
    member = fetched("p:a vfs_read:6 next->f_mode:x32")
    assert isinstance(member, Member)
    assert isinstance(member.base, Cast)
    assert _shape(member.base.base) == ("+", "dx", 16)
    assert shown("p:a vfs_read:6 here:x64") == [f"{AT} here=\\18446744071595622400:x64"]


def test_elements_are_read_where_they_are() -> None:
    assert _shape(fetched("p:a vfs_read:6 numbers[2]")) == (8, ("+", "sp", 64))
    assert shown("p:a vfs_read:6 v=grid[1][2]") == [f"{AT} v=+20(\\{0xFFFFFFFF82000000}):s32"]
    assert shown("p:a vfs_read:6 v=argv[1]") == [f"{AT} v=+8(%si):x64"]
    assert shown("p:a vfs_read:6 m=files[1].f_mode:x32") == [
        f"{AT} m=(file)\\18446744071595622400[1].f_mode:x32"
    ]
    assert shown("p:a vfs_read:6 m=file[1].f_mode:x32") == [f"{AT} m=(file)%di[1].f_mode:x32"]


def test_elements_have_their_own_type() -> None:
    (found,) = at_lines(
        parsed("p:a vfs_read:6 numbers[2] argv[0] numbers[0]:s8"), KERNEL, FakeSource()
    )

    assert [arg.spec and arg.spec.base for arg in found.args] == ["u32", "x64", "s8"]


TYPED = replace(KERNEL, types=types())


def test_members_of_a_struct_in_several_places_are_read_where_they_are() -> None:
    text = "p:a vfs_read:6 where.mnt d=where.dentry:x32 f=where.dentry->d_name.len"
    (found,) = at_lines(parsed(text), TYPED, FakeSource())

    whole, narrow, walk = found.args
    assert (_shape(whole.fetch), whole.spec and whole.spec.base) == ("r8", "x64")
    assert (_shape(narrow.fetch), narrow.spec and narrow.spec.base) == ("r9", "x32")
    assert isinstance(walk.fetch, Member)
    assert [step.name for step in walk.fetch.steps] == ["d_name", "len"]
    assert isinstance(walk.fetch.base, Cast)
    assert (walk.fetch.base.struct, _shape(walk.fetch.base.base)) == ("dentry", "r9")


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("p vfs_read:6 where:x64", "where is in several places at once: name a member"),
        ("p vfs_read:6 where->mnt", "name a member"),
        ("p vfs_read:6 &where", "name a member"),
        ("p vfs_read:6 where.nosuch", "path has no member nosuch"),
        ("p vfs_read:6 where.mnt->x", "where.mnt points to no struct"),
        ("p vfs_read:6 where.dentry.x", "where.dentry points to no struct"),
        ("p vfs_read:6 where.mnt[0]", r"where.mnt\[0\] cannot be read there"),
        ("p vfs_read:6 narrow.mnt", "narrow.mnt cannot be read there as a whole"),
        ("p vfs_read:6 narrow.dentry:x64", "narrow.dentry cannot be read there as a whole"),
    ],
)
def test_other_uses_of_such_a_struct_are_refused(text: str, hint: str) -> None:
    with pytest.raises(DefinitionError, match=hint):
        at_lines(parsed(text), TYPED, FakeSource())


def test_an_enum_keeps_its_name() -> None:
    (found,) = at_lines(parsed("p:a vfs_read:6 mode m=mode:x32 count"), KERNEL, FakeSource())

    assert [arg.enum for arg in found.args] == ["mode", "mode", ""]


def test_addresses_and_whole_structs_are_of_what_variables_are() -> None:
    assert _shape(fetched("p:a vfs_read:6 &flags")) == ("+", "sp", U64 - 7)
    assert shown("p:a vfs_read:6 l=&limit:x64") == [f"{AT} l=\\18446744071595622400:x64"]
    element = fetched("p:a vfs_read:6 &numbers[1]")
    assert isinstance(element, AddressOf)
    assert _shape(element.base) == (4, ("+", "sp", 64))
    pointed, own = fetched("p:a vfs_read:6 *file"), fetched("p:a vfs_read:6 **table")
    assert isinstance(pointed, AllMembers)
    assert isinstance(pointed.base, Cast)
    assert (pointed.base.struct, _shape(pointed.base.base)) == ("file", "di")
    assert isinstance(own, AllMembers)
    assert isinstance(own.base, Cast)
    assert (own.depth, _shape(own.base.base)) == (2, STATIC)


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


def test_what_the_whole_file_has_is_read_where_no_other_has_the_name() -> None:
    per_cpu = "mine=this_cpu_read(@0x3100):u32 its=this_cpu_read(@0xffffffff82000200):u32"
    assert shown("p:a vfs_read:6 total count mine its") == [
        f"{AT} total=@0xffffffff82000100:u32 count=%dx:u32 {per_cpu}"
    ]
    assert shown("p:a vfs_read:6 m=queue.f_mode:x32") == [
        f"{AT} m=(file)this_cpu_ptr(@0x3200)->f_mode:x32"
    ]
    assert "theirs cannot be read: another file has it" in str(refusal("p vfs_read:6 theirs"))


@pytest.mark.parametrize(
    "text",
    [
        f"p vfs_read:6 {each}"
        for each in ("state->f_mode", "file.f_mode", "count.f_mode", "files.f_mode")
    ],
)
def test_arrows_are_for_pointers_and_dots_for_structs(text: str) -> None:
    (found,) = at_lines(parsed(text), KERNEL, FakeSource())

    # The kernel's words for it come later.
    assert isinstance(found.args[0].fetch, Member)
    assert not isinstance(found.args[0].fetch.base, Cast)


def test_all_variables_are_those_that_can_be_read_and_are_numbers() -> None:
    names = f"count=%dx:u32 flags=-8(%sp):u32 mask=\\{U64}:u32 limit=@0xffffffff82000000:u32"
    pointers = "file=%di:x64 name=%si:x64 mode=%cx:u32 argv=%si:x64"
    assert shown("p:a vfs_read+16 $params") == [f"{AT} count=%dx:u32 file=%di:x64"]
    (everything,) = shown("p:a vfs_read:6 $vars")
    assert everything.startswith(f"{AT} {names} {pointers} next=next")
    assert "gone" not in everything
    assert "buffer" not in everything


def test_all_variables_of_many_places_are_those_that_are_at_each() -> None:
    class Source(FakeSource, frozen=True):
        def variables(self, addr: int, line: int = 0, inlined: str = "") -> Sequence[Variable]:
            found = super().variables(addr, line, inlined)
            return found if addr == TEXT + 8 else found[1:3]

    found = at_lines(parsed("p:i fdget $vars"), KERNEL, Source())

    assert [show(each).split(maxsplit=2)[2] for each in found] == [
        "flags=-8(%sp):u32 mask=\\18446744073709551615:u32"
    ] * 2
    with pytest.raises(DefinitionError, match="none that can be read"):
        at_lines(parsed("p:i fdget $params"), KERNEL, Source())


def test_strings_are_followed_by_what_variables_are() -> None:
    assert shown("p:a vfs_read:6 name:ustring") == ["p:kprobes/a vfs_read+16 name=+u0(%si):ustring"]
    assert shown("p:a vfs_read:6 name:string") == ["p:kprobes/a vfs_read+16 name=+0(%si):string"]
    assert shown("p:a vfs_read:6 buffer:string") == [
        "p:kprobes/a vfs_read+16 buffer=+16(%sp):string"
    ]


def test_only_names_away_from_an_entry_need_debug_information() -> None:
    assert not names_variables(parsed("p vfs_read count"))
    assert not names_variables(parsed("p vfs_read+4 %dx $stack0"))
    assert names_variables(parsed("p vfs_read+4 +8(count)"))
    assert names_variables(parsed("p vfs_read $vars"))


@pytest.mark.parametrize("text", ["r vfs_read $vars", "r vfs_read $params", "f vfs_read $vars"])
def test_where_nothing_is_where_it_was_at_the_entry_there_are_no_variables(text: str) -> None:
    assert not names_variables(parsed(text))
    with pytest.raises(DefinitionError, match="Invalid \\$-variable"):
        resolve(parsed(text), KERNEL, X86_64, event_id=1, locate=lambda each: each.addr)


@pytest.mark.parametrize(
    ("text", "column", "hint"),
    [
        ("p vfs_read:6 nosuch", 13, "in scope there: argv buffer count far file"),
        ("p vfs_read:6 count gone", 19, "it is optimised out; it can from +0x10 to +0x17"),
        ("p vfs_read:6 buffer", 13, "buffer is a char [16]: name a member, or a type"),
        ("p vfs_read:6 numbers[4]", 13, "numbers has 4 elements, from 0"),
        ("p vfs_read:6 count[0]", 13, "count is a unsigned int: neither an array nor a pointer"),
        ("p vfs_read:6 grid[0]", 13, "grid is a int [2][3]: what is there is no number"),
        ("p vfs_read:6 grid[0][0][0]", 13, "what is there is no number"),
        ("p vfs_read:6 grid[1][3]", 13, "grid has 2 times 3 elements, from 0"),
        ("p vfs_read:6 numbers[0][0]", 13, "what is there is no number"),
        ("p vfs_read:6 argv[0][0]", 13, "what is there is no number"),
        ("p vfs_read:6 numbers[0].x", 13, "what is there is no number"),
        ("p vfs_read:6 &count", 14, "count is in no memory there: it has no address"),
        ("p vfs_read:6 +8(&count)", 17, "count is in no memory there"),
    ],
)
def test_what_is_not_there_says_what_is(text: str, column: int, hint: str) -> None:
    error = refusal(text)

    assert hint in str(error)
    assert error.column == column
