import pytest

from kprobes.model.definition import CurrentTask, Member, ReturnValue, Span, Step
from tests.build.definitions import Wrong, argument, caret_of


@pytest.mark.parametrize("head", ["r vfs_read", "r3:x vfs_read", "p vfs_read%return"])
def test_the_return_value_is_there_at_function_return(head: str) -> None:
    fetch = argument("$retval:s32", head=head).fetch

    assert fetch == ReturnValue(span=Span(len(head) + 1, len(head) + 8))


def test_the_current_task_is_a_variable() -> None:
    assert argument("$current").fetch == CurrentTask(span=Span(11, 19))


@pytest.mark.parametrize(("head", "base"), [("p vfs_read", "$current"), ("r vfs_read", "$retval")])
def test_pointers_are_followed(head: str, base: str) -> None:
    fetch = argument(f"{base}->pid", head=head).fetch

    assert isinstance(fetch, Member)
    start = 13 + len(base)
    assert fetch.steps == (Step(name="pid", is_arrow=True, span=Span(start, start + 3)),)


@pytest.mark.parametrize(
    ("marked", "code"),
    [
        ("p vfs_read ^$retval", "RETVAL_ON_PROBE"),
        ("p vfs_read ^$retval->x", "RETVAL_ON_PROBE"),
        ("r 0x10 ^$retval", "RETVAL_ON_PROBE"),
        ("r vfs_read ^$retvalx", "NO_BTFARG"),
        ("r vfs_read $retval.^x", "NOSUP_DAT_ARG"),
        ("r vfs_read $retval^-f", "BAD_HYPHEN"),
        ("p vfs_read $current.^x", "NOSUP_DAT_ARG"),
        ("p vfs_read $current^-x", "BAD_HYPHEN"),
        ("p vfs_read ^$currently", "BAD_VAR"),
    ],
)
def test_the_caret_marks_the_wrong_variable(marked: str, code: str) -> None:
    assert caret_of(Wrong(marked, code)) == (code, marked)
