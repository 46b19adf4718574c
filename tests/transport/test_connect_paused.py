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

    def runs(pid: int) -> bool | None:
        del pid
        return next(answers)

    monkeypatch.setattr(connect, "runs", runs)

    assert bool(connect.is_process_paused(1)) is is_paused


def test_of_who_does_not_listen_here_nothing_is_known() -> None:
    assert not connect.is_paused("/gdb.sock")
