"""Interrupts and migrations before every single instruction: nothing is torn, nothing uncounted."""

from itertools import combinations

import pytest

from kprobes.model.abi import CPU_SHIFT
from tests.build.kernel import make_probe
from tests.build.machine import KERNEL, NO_RESCHED, Machine, random_state
from tests.build.records import records

TEXTS = [
    "p f a=$arg1 b=$arg2:u8",
    "p f a=%bx b=%si",
    "p f a=+0($arg1):u8 b=$arg1",
    "p f s=+0($arg1):string b=$arg1",
    "p f st=$stacktrace b=$arg1",
]
ROOMS = [1 << 15, 0]


def _state(machine: Machine) -> dict[str, int]:
    return random_state(machine.random, di=KERNEL, si=7, bx=9)


def _counted(machine: Machine) -> list[int]:
    """How many hits each counter knows of: records per ring, then lost ones per ring."""
    return [len(records(machine, n)) for n in (0, 1)] + [machine.lost(n) for n in (0, 1)]


@pytest.mark.parametrize("inner", ["p f a=$arg1", "p f s=+0($arg1):string"])
@pytest.mark.parametrize("text", TEXTS)
def test_an_interrupt_before_any_instruction_leaves_two_whole_records(
    text: str, inner: str
) -> None:
    machine = Machine(is_watched=True)
    outer = machine.load([make_probe(text, event_id=1)])
    nested = machine.load([make_probe(inner, event_id=2, addr=outer.site + 16)])
    machine.cpu.write(KERNEL, b"abc\0")
    state = _state(machine)
    count = len(machine.steps(outer, state))
    alone = records(machine, 0)[0].values
    for step in range(count):
        machine.reset()

        after = machine.hit(outer, state, at={step: lambda: machine.interrupt(nested)})

        by_event = {record.event_id: record for record in records(machine, 0)}
        assert by_event[1].values == alone, step
        assert (len(by_event), machine.lost(0), machine.missed(2)) == (2, 0, 0)
        assert {name for name in after if after[name] != state[name]} <= {"ax", "r11", "flags"}
        assert (machine.guard(), machine.preempt_count) == (0, NO_RESCHED)


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("text", TEXTS)
def test_a_migration_before_any_instruction_loses_and_doubles_nothing(text: str, room: int) -> None:
    machine = Machine(is_watched=True)
    loaded = machine.load([make_probe(text)])
    machine.cpu.write(KERNEL, b"abc\0")
    state = _state(machine)
    machine.hit(loaded, state)
    alone = records(machine, 0)[0].values
    machine.set_position(0, 0, room=room)
    count = len(machine.steps(loaded, state))
    rings: set[int] = set()
    for step in range(count):
        machine.reset()
        machine.move_to(0)
        for number in (0, 1):
            machine.set_position(number, 0, room=room)

        machine.hit(loaded, state, at={step: lambda: _migrate(machine)})

        counts = _counted(machine)
        assert sum(counts) == 1, step
        rings.add(counts.index(1))
        found = [*records(machine, 0), *records(machine, 1)]
        assert [record.values for record in found] == ([alone] if room else [])
        for number in (0, 1):
            machine.move_to(number)
            assert (machine.guard(), machine.preempt_count) == (0, NO_RESCHED)
    assert rings == ({0, 1} if room else {2, 3})


def test_a_migration_between_look_and_exchange_goes_round_again() -> None:
    machine = Machine(is_watched=True)
    loaded = machine.load([make_probe(TEXTS[0])])
    straight = machine.steps(loaded, _state(machine))
    step = _exchange(machine, straight)
    machine.reset()

    machine.hit(loaded, _state(machine), at={step: lambda: machine.move_to(1)})

    assert machine.cpu.trace.count(straight[step]) == 2
    assert _counted(machine) == [0, 1, 0, 0]


@pytest.mark.parametrize("rooms", [(0, 1 << 15), (1 << 15, 0)])
@pytest.mark.parametrize("home", [0, 1])
def test_another_cpus_room_is_never_taken_for_ones_own(home: int, rooms: tuple[int, int]) -> None:
    machine = Machine(is_watched=True)
    loaded = machine.load([make_probe(TEXTS[0])])
    machine.move_to(home)
    count = len(machine.steps(loaded, _state(machine)))
    shortest = _exchange(machine, machine.cpu.trace)
    for away, back in combinations(range(shortest + 2), 2):
        machine.reset()
        machine.move_to(home)
        for number, room in enumerate(rooms):
            machine.set_position(number, 4096, room=room)
        at = {away: lambda: machine.move_to(1 - home), back: lambda: machine.move_to(home)}

        machine.hit(loaded, _state(machine), at=at)

        room_left = [machine.word(n) - (n << CPU_SHIFT | 4096) <= rooms[n] for n in (0, 1)]
        moved = [machine.word(n) != n << CPU_SHIFT | 4096 for n in (0, 1)]
        assert all(room_left), (away, back)
        assert sum(moved) + machine.lost(0) + machine.lost(1) == 1
    assert count > shortest


def test_an_interrupt_between_look_and_exchange_goes_round_again() -> None:
    machine = Machine(is_watched=True)
    loaded = machine.load([make_probe(TEXTS[0], event_id=1)])
    nested = machine.load([make_probe("p f", event_id=2, addr=loaded.site + 16)])
    straight = machine.steps(loaded, _state(machine))
    step = _exchange(machine, straight)
    machine.reset()

    machine.hit(loaded, _state(machine), at={step: lambda: machine.interrupt(nested)})

    assert machine.cpu.trace.count(straight[step]) == 2
    assert [record.event_id for record in records(machine, 0)] == [2, 1]


def test_the_last_room_taken_by_an_interrupt_is_not_taken_twice() -> None:
    machine = Machine(is_watched=True)
    loaded = machine.load([make_probe("p f", event_id=1)])
    nested = machine.load([make_probe("p f", event_id=2, addr=loaded.site + 16)])
    size = loaded.probes[0].layout.size
    count = len(machine.steps(loaded))
    for step in range(count):
        machine.reset()
        machine.set_position(0, 0, room=size + 8)

        machine.hit(loaded, at={step: lambda: machine.interrupt(nested)})

        assert _counted(machine) == [1, 0, 1, 0]


def test_nested_strings_of_three_contexts_are_all_whole() -> None:
    machine = Machine(is_watched=True)
    sites = [
        machine.load([make_probe("p f s=+0($arg1):string", event_id=n + 1, addr=_site(n))])
        for n in range(3)
    ]
    machine.cpu.write(KERNEL, b"abc\0")
    levels = [sites[1], sites[2]]

    def nest() -> None:
        if levels:
            level = 0x10000 if len(levels) == 2 else 0x100000
            machine.interrupt(levels.pop(0), level=level)

    machine.readers.inside = nest

    machine.hit(sites[0], _state(machine))

    found = {record.event_id: record.values for record in records(machine, 0)}
    assert sorted(found) == [1, 2, 3]
    assert found[1] == (b"abc\0",)
    assert machine.guard() == 0


def _migrate(machine: Machine) -> None:
    # Who holds preemption off stays where it is.
    if not machine.preempt_count & 0xFF:
        machine.move_to(1)


def _exchange(machine: Machine, trace: list[int]) -> int:
    codes = [machine.cpu.read(pc, 4) for pc in trace]
    return next(n for n, code in enumerate(codes) if b"\x0f\xb1" in code)


def _site(n: int) -> int:
    return 0xFFFF_FFFF_8100_1000 + 16 * n
