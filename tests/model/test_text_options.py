"""Trace options by the kernel's names."""

import pytest

from kprobes.errors import UsageError
from kprobes.model.text_options import DEFAULTS, NAMES, TextOptions, text_options


def test_what_is_on_without_a_word_is_what_the_kernel_has_on() -> None:
    on = {name for name in NAMES if getattr(DEFAULTS, name.replace("-", "_"))}

    assert on == {"print-parent", "context-info", "irq-info"}
    assert text_options([]) == DEFAULTS


@pytest.mark.parametrize("name", NAMES)
def test_each_is_turned_on_by_its_name_and_off_by_no_in_front(name: str) -> None:
    attribute = name.replace("-", "_")

    assert getattr(text_options([f"no{name}", name]), attribute)
    assert not getattr(text_options([name, f"no{name}"]), attribute)
    assert text_options([name]) in (DEFAULTS, TextOptions(**{attribute: True}))


@pytest.mark.parametrize("word", ["", "no", "sym_offset", "stacktrace", "nonoraw", "raw,hex"])
def test_another_word_is_refused_with_those_that_there_are(word: str) -> None:
    with pytest.raises(UsageError, match=r"no such trace option: '.*'; there are: print-parent"):
        text_options([word])
