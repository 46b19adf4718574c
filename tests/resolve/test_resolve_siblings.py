"""Several probes of one event."""

import pytest

from kprobes.errors import DefinitionError
from kprobes.resolve.resolve import check_alike
from tests.build.typed import resolved


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("p:e vfs_read", "p:e void_fn"),
        ("p:e vfs_read a=count", "p:e many a=p1"),
        ("p:e vfs_read a=count", "p:e void_fn a=%di:u64"),
        ("p:e vfs_read a=%di:b4@0/32", "p:e void_fn a=%si:u32"),
        ("p:e vfs_read a=$comm", "p:e void_fn a=+0(%si):string"),
    ],
)
def test_the_same_names_and_types_are_alike(first: str, second: str) -> None:
    check_alike(resolved(first), resolved(second))


@pytest.mark.parametrize(
    ("first", "marked"),
    [
        ("p:e vfs_read a=count", "p:e void_fn ^a=%di"),
        ("p:e vfs_read a=%di b=file->f_mode", "p:e void_fn a=%di ^b=%di"),
        ("p:e vfs_read $arg*", "p:e vfs_read $arg1^"),
        ("r:e vfs_read a=$retval", "r:e many ^a=$retval"),
        ("p:e vfs_read a=+0(%di):u8[2]", "p:e void_fn ^a=+0(%di):u8[3]"),
    ],
)
def test_the_caret_marks_the_first_that_differs(first: str, marked: str) -> None:
    command = marked.replace("^", "")

    with pytest.raises(DefinitionError) as caught:
        check_alike(resolved(first), resolved(command))

    behind_all = marked.endswith("^")
    assert caught.value.code == "DIFF_ARG_TYPE"
    assert caught.value.column == (len(command) + 1 if behind_all else marked.index("^"))
