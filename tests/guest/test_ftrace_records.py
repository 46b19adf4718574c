"""Values of ftrace records when patches go: those that the guest's tracers have counted by now."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from kprobes.arch.x86_64.arch import X86_64
from kprobes.guest.armed import FLAGS, ArmedPatch
from kprobes.guest.ftrace_records import Records
from kprobes.guest.guest import Guest
from kprobes.guest.tracers import Tracers
from kprobes.plan.ftrace import DISABLED
from kprobes.units import Addr, Phys

SITE, RECORD, CALLER = Addr(0xFFFF_FFFF_8100_0100), 0x40, Addr(0xFFFF_FFFF_8100_9000)
REGS, REGS_ENABLED, ENABLED = 1 << 30, 1 << 29, 1 << 31
OTHER = 1 << 18


class _Memory:
    def __init__(self) -> None:
        self.writes: list[tuple[int, bytes]] = []

    def read_physical_many(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        assert list(spans) == [(RECORD, 8)]
        return [SITE.to_bytes(8, "little")]

    def write_physical_many(self, writes: Sequence[tuple[int, bytes]]) -> None:
        self.writes += writes


class _Tracers:
    def __init__(self, users: tuple[int, bool] | None, *, are_there: bool = True) -> None:
        self.are_there = are_there
        self._users = users

    def wanted(self, sites: Sequence[int]) -> list[tuple[int, bool] | None]:
        assert list(sites) == [SITE]
        return [self._users]


def _flags(old: int, new: int) -> ArmedPatch:
    data = [value.to_bytes(8, "little") for value in (old, new)]
    return ArmedPatch(Phys(RECORD + 8), Addr(0), data[0], data[1], FLAGS)


TEXT = ArmedPatch(Phys(0x10), Addr(0x10), b"nop", b"jmp", "vfs_read")


class _Symbols:
    def __init__(self, caller: Addr | None) -> None:
        self._caller = caller

    def find(self, name: str) -> SimpleNamespace | None:
        assert name == "ftrace_regs_caller"
        return None if self._caller is None else SimpleNamespace(addr=self._caller)


def _pieces(addr: int, size: int) -> list[tuple[Phys, int, int]]:
    # A site that lies in two pages.
    assert (addr, size) == (SITE, 5)
    return [(Phys(0xFFE), 0, 2), (Phys(0x7000), 2, 3)]


def _records(
    tracers: _Tracers, memory: _Memory | None = None, caller: Addr | None = CALLER
) -> Records:
    guest = SimpleNamespace(
        kernel=SimpleNamespace(symbols=_Symbols(caller)),
        arch=X86_64,
        memory=SimpleNamespace(pieces=_pieces),
    )
    return Records(cast("Guest", guest), memory or _Memory(), cast("Tracers", tracers))


def _settled(undo: ArmedPatch, tracers: _Tracers, caller: Addr | None = CALLER) -> int:
    found = _records(tracers, caller=caller).settled([undo, TEXT])
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
        (OTHER | REGS | 3, (1, False), OTHER | 1),
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


@pytest.mark.parametrize("caller", [None, Addr(SITE + (3 << 30))])
def test_where_a_call_with_all_registers_cannot_be_made_it_stays_disabled(
    caller: Addr | None,
) -> None:
    assert _settled(_flags(0, DISABLED), _Tracers((1, True)), caller) == DISABLED
    assert _settled(_flags(0, DISABLED), _Tracers((1, False)), caller) == 1


def _made(undo: ArmedPatch, tracers: _Tracers) -> list[tuple[int, bytes]]:
    memory = _Memory()
    _records(tracers, memory).make_calls([undo, TEXT])
    return memory.writes


def test_a_tracer_that_wants_all_registers_is_called_from_then_on() -> None:
    call = b"\xe8" + (CALLER - SITE - 5).to_bytes(4, "little")
    flags = (OTHER | 2 | REGS | REGS_ENABLED | ENABLED).to_bytes(8, "little")

    made = _made(_flags(OTHER, OTHER | DISABLED), _Tracers((2, True)))

    assert made == [(0xFFE, call[:2]), (0x7000, call[2:]), (RECORD + 8, flags)]


@pytest.mark.parametrize(
    ("old", "tracers"),
    [
        (0, _Tracers((1, False))),
        (0, _Tracers((0, False))),
        (0, _Tracers(None)),
        (0, _Tracers(None, are_there=False)),
        (DISABLED, _Tracers((1, True))),
    ],
)
def test_no_other_call_is_made(old: int, tracers: _Tracers) -> None:
    assert _made(_flags(old, old | DISABLED), tracers) == []
