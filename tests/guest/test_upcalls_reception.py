"""Upcalls of a session: those that a guest can wait for, and threads that get turns."""

import sys

import pytest

from kprobes.drain import short_switch_interval
from kprobes.errors import UsageError
from kprobes.guest.upcalls import check
from kprobes.model.upcall import MAX_UPCALLS, Upcall, WaitingVcpu
from kprobes.units import Addr
from tests.build.guest import make_guest


def _nothing(waiting: WaitingVcpu) -> None:
    del waiting


def _upcall(*, number: int = 0, timeout_s: float = 1.0) -> Upcall:
    return Upcall(
        number=number, addr=Addr(0x1000), is_after=False, timeout_s=timeout_s, serve=_nothing
    )


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, 10.5])
def test_a_timeout_that_a_guest_s_watchdogs_would_not_survive_is_refused(timeout_s: float) -> None:
    guest = make_guest(["p f"]).guest

    with pytest.raises(UsageError, match="at most 10 s"):
        check(guest, [_upcall(timeout_s=timeout_s)])


@pytest.mark.parametrize("number", [-1, MAX_UPCALLS])
def test_more_upcalls_than_the_mailbox_has_room_for_are_refused(number: int) -> None:
    guest = make_guest(["p f"]).guest

    with pytest.raises(UsageError, match="too many Python handlers"):
        check(guest, [_upcall(number=number)])


def test_upcalls_that_can_be_served_are_accepted() -> None:
    guest = make_guest(["p f"]).guest

    check(guest, [_upcall(), _upcall(number=MAX_UPCALLS - 1, timeout_s=10.0)])


def test_turns_are_as_before_when_the_last_one_is_done_whoever_came_first() -> None:
    before = sys.getswitchinterval()
    first, second = short_switch_interval(), short_switch_interval()

    first.__enter__()
    second.__enter__()
    inside = sys.getswitchinterval()
    first.__exit__(None, None, None)
    still = sys.getswitchinterval()
    second.__exit__(None, None, None)

    assert inside == still < before
    assert sys.getswitchinterval() == before
