"""Other CPUs, interrupts and onlookers before every single instruction that keeps a call."""

import pytest

from kprobes.model.plan import ReturnMethod, Returns
from kprobes.model.resolved import RegisterValue
from kprobes.units import Addr
from tests.build.kernel import SITE
from tests.build.machine import KERNEL, NO_RESCHED, STACK, Machine, random_state
from tests.build.records import records
from tests.build.returning import CALLERS, Function, home, return_probe, run

COUNT = 5
SCRIPT, OTHER_SCRIPT = KERNEL + 0x1000, KERNEL + 0x1100
F, G = SITE, SITE + 0x100
DI = RegisterValue(name="di")


def function_at(
    machine: Machine, addr: int, return_method: ReturnMethod, *, target: int = 0
) -> Function:
    probe = return_probe("r f a=$arg1", event_id=1 + (addr - SITE >> 8), addr=addr)
    returns = Returns(entry=Addr(addr), return_method=return_method, probes=(probe,), kept=(DI,))
    function = Function(machine, returns, count=COUNT, target=target)
    function.arm()
    return function


def slots_of_one_home() -> tuple[int, int]:
    """Two stacks' slots whose search begins at the same instance, which is the last one."""
    places = range(STACK + 0x1000, STACK + 0x3000, 8)
    last = [slot for slot in places if home(slot, COUNT) == COUNT - 1]
    return last[0], last[-1]


def start(machine: Machine, slot: int, script: int, *places: int, **fixed: int) -> dict[str, int]:
    machine.cpu.set_number(slot, CALLERS)
    for index, place in enumerate(places):
        machine.cpu.set_number(script + 8 * index, place)
    return random_state(machine.random, sp=slot, bp=script, **fixed)


class Race:
    """A call on one CPU, before one instruction of which another CPU enters the same function."""

    def __init__(self, return_method: ReturnMethod) -> None:
        self.machine = Machine(is_watched=True)
        self.machine.cpu.add_exit(CALLERS)
        self.f = function_at(self.machine, F, return_method)
        self.slots = slots_of_one_home()
        self._slept: dict[str, int] = {}

    def run(self, step: int) -> int:
        """Let both enter, and the first one return; give the number of its instructions."""
        machine, (slot, _) = self.machine, self.slots
        state = start(machine, slot, SCRIPT, self.f.leave.addr, di=1)
        machine.cpu.trace, machine.cpu.actions = [], {step: self._enter}
        went, _ = run(machine, self.f.addr, state)
        assert went == CALLERS
        return len(machine.cpu.trace)

    def wake(self) -> None:
        """Let the other one return."""
        self.machine.move_to(1)
        went, _ = run(self.machine, self.f.wake, self._slept)
        assert went == CALLERS
        self.machine.move_to(0)

    def _enter(self) -> None:
        trace, self.machine.cpu.trace = self.machine.cpu.trace, []
        self.machine.cpu.aside(self._enter_aside)
        self.machine.cpu.trace = trace

    def _enter_aside(self) -> None:
        machine, f = self.machine, self.f
        machine.move_to(1)
        state = start(machine, self.slots[1], OTHER_SCRIPT, f.sleep, f.leave.addr, di=2)
        went, self._slept = run(machine, f.addr, state)
        machine.move_to(0)
        assert went == f.sleep


@pytest.mark.parametrize("return_method", [ReturnMethod.RETINSN, ReturnMethod.RETHOOK])
def test_another_cpu_s_call_before_any_instruction_gets_another_instance(
    return_method: ReturnMethod,
) -> None:
    race, step, steps = Race(return_method), 0, 1
    while step < steps:
        race.machine.reset()

        steps = race.run(step)

        assert [r.values for r in records(race.machine, 0)] == [(1,)], step
        assert list(race.f.used()) == [race.slots[1]]
        race.wake()
        assert [r.values for r in records(race.machine, 1)] == [(2,)], step
        assert race.f.used() == {}
        assert (race.machine.guard(), race.machine.preempt_count) == (0, NO_RESCHED)
        step += 1
    assert steps > 50


@pytest.mark.parametrize("return_method", [ReturnMethod.TAIL, ReturnMethod.RETHOOK])
def test_an_onlooker_finds_where_a_call_came_from_before_any_instruction(
    return_method: ReturnMethod,
) -> None:
    machine = Machine(is_watched=True)
    machine.cpu.add_exit(CALLERS)
    f = function_at(machine, F, return_method, target=G)
    g = function_at(machine, G, return_method, target=F)
    slot, _ = slots_of_one_home()
    state = start(machine, slot, SCRIPT, f.tail.addr, g.tail.addr, f.leave.addr)
    machine.cpu.trace, machine.cpu.actions = [], {}
    run(machine, f.addr, state)
    origins: list[int] = []

    def look() -> None:
        origins.append(origin(machine, slot, (f, g)))

    for step in range(len(machine.cpu.trace)):
        machine.cpu.set_number(slot, CALLERS)
        machine.cpu.trace, machine.cpu.actions = [], {step: look}

        went, _ = run(machine, f.addr, state)

        assert went == CALLERS
        # Who has returned to the trampoline has a word of its own there for a while.
        assert origins[-1] in (0, CALLERS), step
    assert origins.count(CALLERS) > 100
    assert f.used() == g.used() == {}


def origin(machine: Machine, slot: int, functions: tuple[Function, ...]) -> int:
    """Return where a slot's call came from: of all its instances that are taken over the same."""
    caller = machine.cpu.number(slot)
    for function in functions:
        if function.instances.trampoline == caller:
            return next(words[1] for words in function.used()[slot] if words[0])
    return caller
