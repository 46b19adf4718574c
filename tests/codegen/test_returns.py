"""Probes at return instructions: what they record, and that the function returns as it would."""

from random import Random

import pytest

from kprobes.model.plan import Returning, ReturnMethod, Returns, Role
from kprobes.model.resolved import Resolved
from kprobes.units import Addr
from tests.build.kernel import TEXT
from tests.build.machine import NO_RESCHED, Machine, random_state
from tests.build.records import records
from tests.build.returning import CALLERS, RETURN, Site, patch, return_probe, run

ENTRY = TEXT + 0x1000
EXIT = Site(ENTRY + 0x20, RETURN)


def returns_of(*probes: Resolved, return_method: ReturnMethod = ReturnMethod.RETINSN) -> Returns:
    return Returns(entry=Addr(ENTRY), return_method=return_method, probes=probes)


def returned(machine: Machine, **fixed: int) -> tuple[int, dict[str, int], dict[str, int]]:
    """Run EXIT's return to the first caller; give where it went, and registers before and after."""
    state = random_state(machine.random, **fixed)
    machine.cpu.set_number(state["sp"], CALLERS)
    went, after = run(machine, EXIT.addr, state)
    return went, state, after


def at_return(*texts: str) -> Machine:
    return recording(*(return_probe(text, event_id=n) for n, text in enumerate(texts, 1)))


def recording(*probes: Resolved) -> Machine:
    machine = Machine()
    machine.cpu.add_exit(CALLERS)
    patch(machine, EXIT, [Returning(role=Role.RETURN, returns=returns_of(*probes))])
    return machine


@pytest.mark.parametrize("text", ["r f", "r f v=$retval", "r f v=$retval:u8 s=+0($stack):u64"])
def test_a_function_returns_with_all_as_it_left_it(text: str) -> None:
    machine = at_return(text)
    for _ in range(100):
        went, before, after = returned(machine)

        assert went == CALLERS
        assert after == {**before, "sp": before["sp"] + 8}
    assert (machine.guard(), machine.preempt_count) == (0, NO_RESCHED)


def test_a_return_s_record_tells_the_value_and_the_caller() -> None:
    machine = at_return("r f v=$retval b=%bx sp=%sp ip=%ip o=%orig_ax c=%cs x=$stack y=$stack0")

    _, before, _ = returned(machine)

    (found,) = records(machine, 0)
    stack = before["sp"] + 8
    above = machine.cpu.number(stack)
    expected = (before["ax"], before["bx"], stack, CALLERS, (1 << 64) - 1, 0x10, stack, above)
    assert (found.values, found.caller) == (expected, CALLERS)


def test_all_probes_of_a_function_record_at_a_return_in_their_order() -> None:
    machine = at_return("r f v=$retval", "r f w=$retval:u32", "r f")

    _, before, _ = returned(machine)

    low = before["ax"] & 0xFFFF_FFFF
    assert [(r.event_id, r.values) for r in records(machine, 0)] == [
        (1, (before["ax"],)),
        (2, (low,)),
        (3, ()),
    ]


def test_probes_of_the_return_instruction_see_it_before_it_runs() -> None:
    machine = Machine()
    machine.cpu.add_exit(CALLERS)
    probe = return_probe("r f sp=%sp", event_id=2)
    plain = return_probe("p f sp=%sp", event_id=1)
    returning = Returning(role=Role.RETURN, returns=returns_of(probe))
    patch(machine, EXIT, [returning], probes=[plain])

    _, before, _ = returned(machine)

    assert [r.values for r in records(machine, 0)] == [(before["sp"],), (before["sp"] + 8,)]


def test_a_return_whose_value_is_filtered_out_leaves_no_record() -> None:
    negative = return_probe("r f v=$retval:s32", "v < 0", event_id=1)
    machine = recording(negative, return_probe("r f v=$retval:s32", event_id=2))
    for value in (1, 1 << 31, 5, 0xFFFF_FFFF):
        returned(machine, ax=value)

    found = [r.values[0] for r in records(machine, 0) if r.event_id == 1]

    assert found == [1 << 31, 0xFFFF_FFFF]
    assert len(records(machine, 0)) == 6


@pytest.mark.parametrize("flags", range(64))
def test_every_arithmetic_flag_survives_a_return(flags: int) -> None:
    machine = at_return("r f v=$retval")
    bits = [0, 2, 4, 6, 7, 11]
    wanted = 2 | 1 << 9 | sum(1 << bit for n, bit in enumerate(bits) if flags >> n & 1)

    _, _, after = returned(machine, flags=wanted)

    assert after["flags"] == wanted


def test_a_record_shows_whether_interrupts_were_on_at_the_return() -> None:
    machine, random = at_return("r f"), Random(1)
    wanted = [random.getrandbits(1) for _ in range(20)]
    for is_on in wanted:
        returned(machine, flags=2 | is_on << 9)

    assert [r.context >> 24 & 1 for r in records(machine, 0)] == wanted
