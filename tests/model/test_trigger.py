"""Triggers: how the kernel lists them, which exclude each other, and where their words are."""

import pytest

from kprobes.lang.trigger import parse_trigger
from kprobes.model.trigger import MOST, WORDS_SIZE, left_offset, soft_enable_offset


@pytest.mark.parametrize(
    ("text", "left", "listed"),
    [
        ("traceoff", None, "traceoff:unlimited"),
        ("traceoff:5 if a > 1", 2, "traceoff:count=2 if a > 1"),
        ("stacktrace:5", None, "stacktrace:count=5"),
        ("enable_event:g:e:1", 0, "enable_event:g:e:count=0"),
        ("disable_event:g:e if a > 1", None, "disable_event:g:e:unlimited if a > 1"),
    ],
)
def test_triggers_are_listed_as_in_the_kernels_file(
    text: str, left: int | None, listed: str
) -> None:
    assert parse_trigger(text).trigger.listed(left) == listed


def test_events_may_have_each_kind_once() -> None:
    texts = ("traceon", "traceoff", "enable_event:g:e", "disable_event:g:e", "enable_event:g:f")
    kinds = [parse_trigger(each).trigger.kind for each in texts]

    assert kinds[0] == kinds[1]
    assert kinds[2] == kinds[3] != kinds[4]


def test_words_are_a_page() -> None:
    assert (soft_enable_offset(0), left_offset(MOST - 1) + 8) == (64, WORDS_SIZE)
    assert soft_enable_offset(MOST - 1) + 8 == left_offset(0)
    assert WORDS_SIZE == 4096
