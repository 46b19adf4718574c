"""What ftrace records get back when patches go: what the guest's tracers have counted by now."""

from collections.abc import Sequence
from typing import cast

import pytest

from kprobes.drivers.guest.records import settled
from kprobes.drivers.guest_tracers import Tracers
from kprobes.drivers.journal import FLAGS, Undo
from kprobes.plan.ftrace import DISABLED
from kprobes.units import Addr, Phys

SITE, RECORD = 0xFFFF_FFFF_8100_0100, 0x40
REGS, CONVERTED = 1 << 30, 1 << 29


class _Memory:
    def read_physical_many(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        assert list(spans) == [(RECORD, 8)]
        return [SITE.to_bytes(8, "little")]

    def write_physical_many(self, writes: Sequence[tuple[int, bytes]]) -> None:
        raise AssertionError(writes)


class _Tracers:
    def __init__(self, users: tuple[int, bool] | None, *, are_there: bool = True) -> None:
        self.are_there = are_there
        self._users = users

    def wanted(self, sites: Sequence[int]) -> list[tuple[int, bool] | None]:
        assert list(sites) == [SITE]
        return [self._users]


def _flags(old: int, new: int) -> Undo:
    data = [value.to_bytes(8, "little") for value in (old, new)]
    return Undo(Phys(RECORD + 8), Addr(0), data[0], data[1], FLAGS)


TEXT = Undo(Phys(0x10), Addr(0x10), b"nop", b"jmp", "vfs_read")


def _settled(undo: Undo, tracers: _Tracers) -> int:
    found = settled([undo, TEXT], _Memory(), cast("Tracers", tracers))
    assert found[1] == TEXT
    assert found[0].new == undo.new
    return int.from_bytes(found[0].old, "little")


@pytest.mark.parametrize(
    ("old", "users", "expected"),
    [
        (0, (0, False), 0),
        (0, (2, False), 2),
        (0, (1, True), REGS | 1),
        # Somebody who had it before is gone, and what else was told of the site stays.
        (CONVERTED | REGS | 3, (1, False), CONVERTED | 1),
    ],
)
def test_a_record_gets_its_tracers_back(old: int, users: tuple[int, bool], expected: int) -> None:
    assert _settled(_flags(old, old | DISABLED), _Tracers(users)) == expected


def test_where_nobody_traces_it_is_as_it_was() -> None:
    assert _settled(_flags(5, 5 | DISABLED), _Tracers(None, are_there=False)) == 5


def test_where_it_is_not_known_who_traces_it_stays_disabled() -> None:
    assert _settled(_flags(0, DISABLED), _Tracers(None)) == DISABLED


def test_a_record_that_was_disabled_before_counts_nobody() -> None:
    assert _settled(_flags(DISABLED, DISABLED), _Tracers((1, True))) == DISABLED
