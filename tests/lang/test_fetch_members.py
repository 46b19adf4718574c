import pytest

from kprobes.model.definition import (
    AddressOf,
    AllMembers,
    Deref,
    Member,
    Parameter,
    Span,
    Step,
)
from tests.build.definitions import Wrong, argument, caret_of


def test_a_name_is_a_parameter() -> None:
    assert argument("count:u32").fetch == Parameter(name="count", span=Span(11, 16))


def test_members_are_walked_along() -> None:
    assert argument("a=file->f_path.dentry->d_name").fetch == Member(
        base=Parameter(name="file", span=Span(13, 17)),
        steps=(
            Step(name="f_path", is_arrow=True, span=Span(19, 25)),
            Step(name="dentry", is_arrow=False, span=Span(26, 32)),
            Step(name="d_name", is_arrow=True, span=Span(34, 40)),
        ),
        span=Span(13, 40),
    )


def test_a_walk_may_be_inside() -> None:
    fetch = argument("+8(file->f_op)").fetch

    assert isinstance(fetch, Deref)
    assert isinstance(fetch.base, Member)


def test_elements_are_counted_from_0() -> None:
    assert argument("a=file->f_names[2]").fetch == Member(
        base=Parameter(name="file", span=Span(13, 17)),
        steps=(Step(name="f_names", is_arrow=True, span=Span(19, 26), indexes=(2,)),),
        span=Span(13, 29),
    )
    own = Step(name="", is_arrow=True, span=Span(11, 18), indexes=(1, 0))
    assert argument("p[1][0]").fetch == Member(
        base=Parameter(name="p", span=Span(11, 12)), steps=(own,), span=Span(11, 18)
    )
    walk = argument("p[1]->x").fetch
    assert isinstance(walk, Member)
    assert [(step.name, step.indexes) for step in walk.steps] == [("", (1,)), ("x", ())]


def test_addresses_and_whole_structs_are_of_what_follows() -> None:
    file = Parameter(name="file", span=Span(12, 16))
    assert argument("&file").fetch == AddressOf(base=file, span=Span(11, 16))
    assert argument("*file").fetch == AllMembers(base=file, depth=1, span=Span(11, 16))
    assert argument("*file").name == ""
    assert argument("f=*file").name == "f"
    deep = argument("**file->f_path").fetch
    assert isinstance(deep, AllMembers)
    assert (deep.depth, isinstance(deep.base, Member)) == (2, True)


def test_a_walk_has_fourteen_arrows() -> None:
    assert argument("a" + "->b" * 14 + ":u8").name == "arg1"

    marked = "p f a=a" + "->b" * 14 + "->^b"
    assert caret_of(Wrong(marked, "TOO_MANY_OPS")) == ("TOO_MANY_OPS", marked)


@pytest.mark.parametrize(
    ("marked", "code"),
    [
        ("p vfs_read file.^f_mode", "NOSUP_DAT_ARG"),
        ("p vfs_read file^-f_mode", "BAD_HYPHEN"),
        ("p vfs_read file^-.f_mode", "BAD_HYPHEN"),
        ("p vfs_read file->foo^-bar", "BAD_HYPHEN"),
        ("p vfs_read ^foo!bar", "NO_BTFARG"),
        ("p vfs_read +8(^file[x])", "NO_BTFARG"),
        ("p vfs_read ^file[]", "NO_BTFARG"),
        ("p vfs_read ^[2]", "BAD_FETCH_ARG"),
        ("p vfs_read ^*", "BAD_FETCH_ARG"),
        ("p vfs_read ^&", "BAD_FETCH_ARG"),
        ("p vfs_read a=^**", "BAD_FETCH_ARG"),
        ("p vfs_read ^&%di", "BAD_FETCH_ARG"),
        ("p vfs_read ^*%di", "BAD_FETCH_ARG"),
        ("p vfs_read +0(^*file)", "BAD_FETCH_ARG"),
        ("p vfs_read *file:^x64", "BAD_TYPE"),
        ("p 0x10 ^file", "NOSUP_BTFARG"),
        ("p 0x10 +8(^file->x)", "NOSUP_BTFARG"),
    ],
)
def test_the_caret_marks_the_wrong_name(marked: str, code: str) -> None:
    assert caret_of(Wrong(marked, code)) == (code, marked)
