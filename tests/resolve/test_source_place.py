"""Places in the source, by debug information that the test makes up."""

import pytest

from kprobes.errors import DefinitionError
from kprobes.lang.listing import show
from kprobes.resolve.source_place import at_lines, is_inlined, module_of
from tests.build.kernel import TEXT, make_kernel, symbol
from tests.build.source_info import KERNEL, NAMES, FakeSource, parsed, refusal, shown


def test_a_line_is_every_place_that_it_has() -> None:
    assert shown("p vfs_read:6") == ["p:kprobes/p_vfs_read_L6 vfs_read+16"]
    assert shown("p:read vfs_read:11") == [
        "p:kprobes/read vfs_read+32",
        "p:kprobes/read vfs_write+8",
    ]
    assert shown("p read_write.c:456") == ["p:kprobes/p_read_write_c_L456 vfs_read+16"]


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        ("p vfs_read;ret=rw*", ["p:kprobes/p_vfs_read_lines vfs_read+16"]),
        ("p:e vfs_read;if(count>MAX*", ["p:kprobes/e vfs_read+32", "p:kprobes/e vfs_write+8"]),
        (
            "p:e vfs_read@read_write.c;*count*",
            ["p:kprobes/e vfs_read+16", "p:kprobes/e vfs_read+32", "p:kprobes/e vfs_write+8"],
        ),
        ("p:e fdget;ret=rw?verify[_-]area(*", ["p:kprobes/e vfs_read+16"]),
        ("p:e vfs_read;ret=rw* count", ["p:kprobes/e vfs_read+16 count=%dx:u32"]),
    ],
)
def test_lines_are_found_by_their_text_without_its_blanks(text: str, listed: list[str]) -> None:
    assert shown(text) == listed


def test_text_that_no_line_with_code_has_is_told_with_some_that_have() -> None:
    error = refusal("p vfs_read;ret=5;")
    assert "no line of vfs_read that has code is like this; some are: ret = rw_verify" in str(error)
    assert "FUNCTION;PATTERN" in str(refusal("p read_write.c;ret=*"))


def test_of_several_functions_of_a_name_that_of_a_file_is_meant() -> None:
    twins = [symbol("vfs_read", TEXT + 0x40), *NAMES]
    kernel = make_kernel(twins)

    def listed(text: str) -> list[str]:
        return [show(each) for each in at_lines(parsed(text), kernel, FakeSource())]

    # By its address, as its name is another's, too.
    assert listed("p:e vfs_read@fs/read_write.c") == [f"p:kprobes/e {TEXT:#018x}"]
    assert listed("p:e vfs_read@read_write.c:6") == [f"p:kprobes/e {TEXT + 16:#018x}"]
    assert "no lines of vfs_read in mm/slab.c" in str(refusal("p vfs_read@mm/slab.c:6"))


def test_a_modules_places_are_named_with_it() -> None:
    own = [symbol("vfs_read", TEXT, module="fat"), symbol("vfs_write", TEXT + 0x40, module="fat")]
    other = [symbol("vfs_read", TEXT + 0x1000), symbol("init_module", TEXT + 0x90, module="fat")]
    kernel = make_kernel([*other, *own])

    def listed(text: str) -> list[str]:
        definition = parsed(text)
        assert module_of(definition, kernel) == "fat"
        return [show(each) for each in at_lines(definition, kernel, FakeSource())]

    assert listed("p:e fat:read_write.c:456") == [f"p:kprobes/e {TEXT + 16:#018x}"]
    assert listed("p:e fat:vfs_read:6 count") == [f"p:kprobes/e {TEXT + 16:#018x} count=%dx:u32"]
    assert listed("p:e fat:vfs_read@read_write.c:6") == [f"p:kprobes/e {TEXT + 16:#018x}"]
    assert listed("p:e fat:fdget@file.h") == [
        f"p:kprobes/e {TEXT + 8:#018x}",
        "p:kprobes/e vfs_write+4",
    ]
    assert is_inlined(parsed("p fat:fdget"), kernel)
    assert not is_inlined(parsed("p fat:vfs_read"), kernel)
    assert not is_inlined(parsed("p other:fdget"), kernel)


@pytest.mark.parametrize(
    ("text", "module"),
    [
        ("p vfs_read:6", ""),
        ("p read_write.c:6", ""),
        ("p nosuch", ""),
        ("p fat_get", "fat"),
        ("p fat_get:6", "fat"),
        ("p other:nosuch.c:6", "other"),
    ],
)
def test_a_function_says_which_debug_information_is_needed(text: str, module: str) -> None:
    kernel = make_kernel([*NAMES, symbol("fat_get", TEXT + 0x1000, module="fat")])

    assert module_of(parsed(text), kernel) == module


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
    assert is_inlined(parsed(text), KERNEL) is is_one


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
    ],
)
def test_what_is_not_there_says_what_is(text: str, column: int, hint: str) -> None:
    error = refusal(text)

    assert hint in str(error)
    assert error.column == column


@pytest.mark.parametrize(
    "text", ["r vfs_read:5", "f vfs_read:5", "p vfs_read:5x", "p vfs_read:-1", "p a/b.o:5"]
)
def test_what_is_no_line_is_refused(text: str) -> None:
    with pytest.raises(DefinitionError):
        parsed(text)
