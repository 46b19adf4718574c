"""The source's structure: every exception is on tools/structure.toml's list, with a reason."""

import pytest

from tools.structure import TOP, Structure, read_reasons, read_words, stale, unexplained

_FOUND = Structure(TOP, read_words()).findings()
_REASONS = read_reasons()


@pytest.mark.parametrize("rule", _FOUND)
def test_every_exception_has_a_reason(rule: str) -> None:
    assert unexplained(_FOUND[rule], _REASONS.get(rule, ())) == []


@pytest.mark.parametrize("rule", _REASONS)
def test_every_reason_is_of_something(rule: str) -> None:
    assert stale(_FOUND[rule], _REASONS[rule]) == []
