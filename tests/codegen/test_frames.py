"""Calls in progress: kept, found again, taken over and given back, whatever lies between."""

import pytest

from kprobes.model.exits import ReturnWay
from kprobes.model.resolved import Operand, RegisterValue
from kprobes.model.returns import Returns
from kprobes.units import Addr
from tests.build.kernel import SITE
from tests.build.machine import KERNEL, Machine, random_state
from tests.build.records import Record, records
from tests.build.returning import CALLERS, Function, return_probe, run

F, G = SITE, SITE + 0x100
SCRIPT = KERNEL + 0x1000
DI = RegisterValue(name="di")


def returns_at(
    addr: int, way: ReturnWay, text: str = "r f", *, kept: tuple[Operand, ...] = (), event_id: int
) -> Returns:
    probe = return_probe(text, event_id=event_id, addr=addr)
    return Returns(entry=Addr(addr), way=way, probes=(probe,), kept=kept)


def machine_of() -> Machine:
    machine = Machine()
    for number in range(16):
        machine.cpu.add_exit(CALLERS + 16 * number)
    return machine


def call(
    machine: Machine, function: Function, *script: int, caller: int = CALLERS, **fixed: int
) -> tuple[int, dict[str, int], dict[str, int]]:
    """Call a function that goes where the script says; give where it went, and registers."""
    state = random_state(machine.random, bp=SCRIPT, **fixed)
    machine.cpu.set_number(state["sp"], caller)
    for index, place in enumerate(script):
        machine.cpu.set_number(SCRIPT + 8 * index, place)
    went, after = run(machine, function.addr, state)
    return went, state, after


def found(machine: Machine) -> list[Record]:
    return records(machine, 0)


@pytest.mark.parametrize("way", [ReturnWay.RETINSN, ReturnWay.RETHOOK])
def test_what_the_entry_has_kept_is_in_the_return_s_record(way: ReturnWay) -> None:
    machine = machine_of()
    f = Function(machine, returns_at(F, way, "r f a=$arg1 v=$retval", kept=(DI,), event_id=1))
    f.arm()

    went, before, after = call(machine, f, f.leave.addr, di=77)

    assert went == CALLERS
    assert after["sp"] == before["sp"] + 8
    assert [(r.values, r.caller) for r in found(machine)] == [((77, after["ax"]), CALLERS)]
    assert f.used() == {}
