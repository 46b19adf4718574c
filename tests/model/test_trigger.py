"""Triggers: how the kernel lists them, which exclude each other, and where their words are."""

import pytest
from msgspec.structs import replace

from kprobes.lang.trigger import parse_trigger
from kprobes.model.trigger import (
    MOST,
    WORDS_SIZE,
    is_there_offset,
    left_offset,
    soft_enable_offset,
)


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


def test_words_are_one_after_the_other() -> None:
    last = replace(parse_trigger("traceon").trigger, number=MOST - 1)
    assert (soft_enable_offset(0), is_there_offset(last) + 8) == (64, WORDS_SIZE)
    assert soft_enable_offset(MOST - 1) + 8 == left_offset(0)
    assert left_offset(MOST - 1) + 8 == is_there_offset(replace(last, number=0))


def test_a_hist_trigger_is_there_where_its_own_word_says_so() -> None:
    hist = replace(parse_trigger("hist:keys=a").trigger, number=3, soft_enable=9)
    assert is_there_offset(hist) == soft_enable_offset(9)
