import pytest

from kprobes.model.definition import CurrentTask, Member, ReturnValue, Span, Stacktrace, Step
from tests.build.definitions import Wrong, argument, caret_of


@pytest.mark.parametrize("head", ["r vfs_read", "r3:x vfs_read", "p vfs_read%return"])
def test_the_return_value_is_there_at_function_return(head: str) -> None:
    fetch = argument("$retval:s32", head=head).fetch

    assert fetch == ReturnValue(span=Span(len(head) + 1, len(head) + 8))


@pytest.mark.parametrize("head", ["p vfs_read", "r vfs_read"])
def test_the_stack_is_a_variable(head: str) -> None:
    start = len(head) + 4

    assert argument("st=$stacktrace", head=head).fetch == Stacktrace(span=Span(start, start + 11))


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
        ("p vfs_read ^$stacktraces", "BAD_VAR"),
        ("p vfs_read +0(^$stacktrace)", "BAD_VAR"),
        ("p vfs_read this_cpu_ptr(^$stacktrace)", "BAD_VAR"),
        ("p vfs_read (file)^$stacktrace->f_mode", "BAD_VAR"),
        ("p vfs_read ^$stacktrace:%pd", "BAD_VAR"),
        ("p vfs_read $stacktrace:^u64", "BAD_TYPE"),
        ("p vfs_read $stacktrace:^string", "BAD_TYPE"),
    ],
)
def test_the_caret_marks_the_wrong_variable(marked: str, code: str) -> None:
    assert caret_of(Wrong(marked, code)) == (code, marked)
