"""Guests that stand still when we come: paused, or only looked at by another command."""

import pytest

from kprobes.transport import connect


@pytest.mark.parametrize(
    ("seen", "is_paused"),
    [([True], False), ([None], False), ([False, False, True], False), ([False] * 100, True)],
)
def test_a_guest_is_paused_when_it_stands_for_a_while(
    seen: list[bool | None], is_paused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(seen)

    def is_running(address: str) -> bool | None:
        del address
        return next(answers)

    monkeypatch.setattr(connect, "is_running", is_running)

    assert connect.is_paused("/gdb.sock") is is_paused
