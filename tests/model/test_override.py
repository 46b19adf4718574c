"""Conditions of overrides, and what a type of error allows."""

import pytest

from kprobes.errors import UsageError
from kprobes.model.override import (
    ErrorType,
    OverrideOptions,
    OverrideWords,
    errno_value,
    with_comm,
)


@pytest.mark.parametrize(
    ("error_type", "allowed"),
    [
        (ErrorType.NULL, {0}),
        (ErrorType.ERRNO, {-4095, -1}),
        (ErrorType.ERRNO_NULL, {-4095, -1, 0}),
        (ErrorType.TRUE, {1}),
    ],
)
def test_a_type_of_error_allows_what_callers_expect(
    error_type: ErrorType, allowed: set[int]
) -> None:
    values = (-4096, -4095, -1, 0, 1, 2, 42, (1 << 64) - 1)

    assert {value for value in values if error_type.allows(value)} == allowed


@pytest.mark.parametrize(
    "words",
    [{"every": 0}, {"every": 1 << 64}, {"times": -1}, {"probability": -0.1}, {"probability": 1.1}],
)
def test_conditions_that_count_nothing_are_refused(words: OverrideWords) -> None:
    with pytest.raises(UsageError, match="must be"):
        OverrideOptions(**words)


def test_an_errno_may_have_a_minus() -> None:
    assert [errno_value(n) for n in (12, -12, 4095)] == [-12, -12, -4095]
    for wrong in (0, 4096, -4096):
        with pytest.raises(UsageError, match="not an errno"):
            errno_value(wrong)


def test_a_task_s_name_comes_before_the_rest_of_the_filter() -> None:
    assert with_comm({"every": 2}, "") == {"every": 2}
    assert with_comm({}, "str*") == {"filter": 'comm ~ "str*"'}
    assert with_comm({}, 'a"b') == {"filter": "comm ~ 'a\"b'"}
    with pytest.raises(UsageError, match="one kind of quotes"):
        with_comm({}, "a'\"b")
    assert with_comm({"filter": "a == 1 || b == 2"}, "x") == {
        "filter": 'comm ~ "x" && (a == 1 || b == 2)'
    }
