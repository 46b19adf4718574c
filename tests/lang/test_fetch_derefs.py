import pytest

from kprobes.model.definition import Deref, MemoryOf, PerCpu, Register, Span
from tests.build.definitions import Wrong, argument, caret_of


@pytest.mark.parametrize(("word", "is_read"), [("this_cpu_ptr", False), ("this_cpu_read", True)])
def test_variables_of_this_cpu_are_read(word: str, is_read: bool) -> None:
    start = 14 + len(word)

    assert argument(f"a={word}(@x+8)x").fetch == PerCpu(
        base=MemoryOf(symbol="x", offset=8, span=Span(start, start + 4)),
        is_read=is_read,
        span=Span(13, start + 5),
    )


def test_variables_of_this_cpu_nest_with_the_others() -> None:
    fetch = argument("+8(this_cpu_read(+0(%di)))").fetch

    assert isinstance(fetch, Deref)
    assert isinstance(fetch.base, PerCpu)
    assert isinstance(fetch.base.base, Deref)
    assert isinstance(fetch.base.base.base, Register)


@pytest.mark.parametrize(
    ("marked", "code"),
    [
        ("p vfs_read this_cpu_ptr(%di^", "DEREF_OPEN_BRACE"),
        ("p vfs_read this_cpu_read(^%zz)", "BAD_REG_NAME"),
        ("p vfs_read this_cpu_read(^$comm)", "COMM_CANT_DEREF"),
        ('p vfs_read this_cpu_ptr(^\\"x")', "COMM_CANT_DEREF"),
        ("p vfs_read this_cpu_read(^)", "BAD_FETCH_ARG"),
        ("p f a=this_cpu_read(^" + "+0(" * 13 + "%di" + ")" * 14, "TOO_MANY_OPS"),
    ],
)
def test_the_caret_marks_what_is_wrong_inside(marked: str, code: str) -> None:
    assert caret_of(Wrong(marked, code)) == (code, marked)


def test_a_name_like_theirs_is_a_parameter() -> None:
    assert argument("this_cpu_ptr").name == "this_cpu_ptr"
