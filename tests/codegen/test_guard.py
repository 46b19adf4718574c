"""The guard: what runs inside a hit of the same context is counted and does nothing else."""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from kprobes.model.abi import PERCPU_GUARD
from tests.build.kernel import make_probe
from tests.build.machine import (
    ABI,
    HARDIRQ,
    KERNEL,
    NMI,
    NO_RESCHED,
    SOFTIRQ,
    Loaded,
    Machine,
    random_state,
)
from tests.build.records import records

LOADING = "p f a=+0($arg1):u8 s=+0($arg1):string"
PLAIN = "p f a=$arg1"


def _machine(inner: str, *, is_guarded: bool = True) -> tuple[Machine, Loaded, Loaded]:
    machine = Machine(replace(ABI, is_guarded=is_guarded))
    outer = machine.load([make_probe(LOADING, event_id=1)])
    nested = machine.load([make_probe(inner, event_id=2, addr=outer.site + 16)])
    machine.cpu.write(KERNEL, b"abc\0")
    return machine, outer, nested


def _once(action: Callable[[], None]) -> Callable[[], None]:
    todo = [action]
    return lambda: todo.pop()() if todo else None


def _hit(machine: Machine, loaded: Loaded, **fixed: int) -> None:
    machine.hit(loaded, random_state(machine.random, di=KERNEL, **fixed))


@pytest.mark.parametrize("inner", [LOADING, PLAIN])
@pytest.mark.parametrize("outside", [0, SOFTIRQ, HARDIRQ, HARDIRQ | SOFTIRQ, NMI | HARDIRQ])
def test_a_hit_inside_a_hit_is_missed_and_leaves_the_outer_one_whole(
    inner: str, outside: int
) -> None:
    machine, outer, nested = _machine(inner)
    machine.readers.inside = _once(lambda: machine.interrupt(nested, level=0))
    machine.preempt_count = NO_RESCHED | outside

    _hit(machine, outer)

    assert [(r.event_id, r.values) for r in records(machine, 0)] == [(1, (0x61, b"abc\0"))]
    assert (machine.missed(1), machine.missed(2)) == (0, 1)
    assert (machine.guard(), machine.preempt_count) == (0, NO_RESCHED | outside)


@pytest.mark.parametrize("inner", [LOADING, PLAIN])
@pytest.mark.parametrize(
    ("outside", "level"),
    [(0, SOFTIRQ), (0, HARDIRQ), (SOFTIRQ, HARDIRQ), (HARDIRQ, NMI), (SOFTIRQ, NMI | HARDIRQ)],
)
def test_a_hit_in_an_interrupt_of_a_hit_is_recorded(inner: str, outside: int, level: int) -> None:
    machine, outer, nested = _machine(inner)
    machine.readers.inside = _once(lambda: machine.interrupt(nested, level=level))
    machine.preempt_count = NO_RESCHED | outside

    _hit(machine, outer)

    first, second = records(machine, 0)
    assert (first.values, second.event_id) == ((0x61, b"abc\0"), 2)
    assert (machine.missed(1), machine.missed(2)) == (0, 0)
    assert (machine.guard(), machine.preempt_count) == (0, NO_RESCHED | outside)


def test_sections_with_soft_interrupts_off_are_no_context_of_their_own() -> None:
    machine, outer, nested = _machine(PLAIN)
    machine.readers.inside = _once(lambda: machine.interrupt(nested, level=2 * SOFTIRQ))

    _hit(machine, outer)

    assert machine.missed(2) == 1


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_every_miss_is_counted(at_once: int) -> None:
    machine, outer, nested = _machine(LOADING)

    def nest() -> None:
        for _ in range(at_once):
            machine.interrupt(nested, level=0)

    machine.readers.inside = _once(nest)

    _hit(machine, outer)

    assert machine.missed(2) == at_once


def test_a_record_shows_the_preempt_count_of_the_probed_code_and_not_ours() -> None:
    machine, outer, _ = _machine(PLAIN)
    machine.preempt_count = NO_RESCHED | 3

    _hit(machine, outer)

    assert records(machine, 0)[0].context & 0xFF == 3


@pytest.mark.parametrize("room", [0, 1 << 15])
@pytest.mark.parametrize("addr", [KERNEL, 0, 1 << 62])
def test_guard_and_preemption_are_given_back_on_every_way_out(room: int, addr: int) -> None:
    machine, outer, _ = _machine(PLAIN)
    machine.set_position(0, 0, room=room)

    machine.hit(outer, random_state(machine.random, di=addr))

    assert (machine.guard(), machine.preempt_count) == (0, NO_RESCHED)


def test_a_session_that_calls_nothing_does_not_look_at_the_guard() -> None:
    machine = Machine(replace(ABI, is_guarded=False))
    loaded = machine.load([make_probe(PLAIN)])
    # A guard that is taken, which could not be in such a session.
    machine.cpu.set_number(machine.percpu(machine.abi.percpu + PERCPU_GUARD), 0xF, 4)

    machine.hit(loaded)

    assert len(records(machine, 0)) == 1
    assert machine.missed(1) == 0
