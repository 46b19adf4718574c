import pytest

from kprobes.lang.listing import show
from kprobes.model.definition import AllParameters, AllVariables, Argument, Span
from tests.build.definitions import Wrong, argument, caret_of, read


@pytest.mark.parametrize("text", ["$arg*", "$arg*:u8", "$arg*x"])
def test_all_parameters_are_one_word(text: str) -> None:
    arg = argument(text)

    assert arg.fetch == AllParameters(span=Span(11, 11 + len(text)))
    assert (arg.name, arg.text, arg.spec) == ("", "$arg*", None)


def test_all_parameters_may_stand_between_others() -> None:
    assert len(read("r vfs_read %di $arg* ret=$retval").args) == 3


@pytest.mark.parametrize(("text", "has_locals"), [("$vars", True), ("$params", False)])
def test_all_variables_are_one_word(text: str, *, has_locals: bool) -> None:
    arg = argument(text)

    assert arg.fetch == AllVariables(has_locals=has_locals, span=Span(11, 11 + len(text)))
    assert show(read(f"p:e vfs_read {text} %di")) == f"p:kprobes/e vfs_read {text} %di"


@pytest.mark.parametrize(
    ("marked", "code"),
    [
        ("p vfs_read $arg* ^$arg*", "DOUBLE_ARGS"),
        ("p vfs_read %zz $arg* ^$arg*:u8", "DOUBLE_ARGS"),
        ("p vfs_read %zz ^$arg", "BAD_VAR"),
        ("p vfs_read %zz ^$argx", "BAD_VAR"),
        ("p vfs_read %zz ^$arg-1", "BAD_VAR"),
        ("p vfs_read %zz ^$arg1x", "BAD_VAR"),
        ("p vfs_read $arg1x ^$arg", "BAD_VAR"),
        ("p vfs_read %zz ^$arg0", "BAD_ARG_NUM"),
        ("p vfs_read %zz ^$arg00:u8", "BAD_ARG_NUM"),
        ("p vfs_read $arg0 ^$arg", "BAD_VAR"),
        ("p vfs_read a=^$arg*", "BAD_VAR"),
        ("p vfs_read ^$varsx", "BAD_VAR"),
        ("p vfs_read ^$vars:u8", "BAD_VAR"),
        ("p vfs_read a=^$params", "BAD_VAR"),
        ("p vfs_read +0(^$arg*)", "BAD_VAR"),
        ("p 0x10 %zz ^$arg1", "NOFENTRY_ARGS"),
        ("p 0x10 %zz ^$arg*", "NOFENTRY_ARGS"),
        ("p 0x10 ^%zz a=$arg1", "BAD_REG_NAME"),
        ("p 0x10 a=^$arg1", "NOFENTRY_ARGS"),
    ],
)
def test_words_of_arguments_are_checked_before_all_others(marked: str, code: str) -> None:
    assert caret_of(Wrong(marked, code)) == (code, marked)


@pytest.mark.parametrize("number", [2049, 1 << 64, 10**30])
def test_how_many_parameters_there_are_is_not_known_yet(number: int) -> None:
    text = f"$arg{number}"
    found = read(f"p vfs_read {text}:u8")

    assert found.args[0].fetch == Argument(number=number, span=Span(11, 11 + len(text)))
    assert show(found).endswith(f" {text}:u8")
