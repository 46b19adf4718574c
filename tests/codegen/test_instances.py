"""Calls in progress: kept, found again, taken over and given back, whatever lies between."""

from collections.abc import Sequence
from random import Random

import pytest

from kprobes.model.plan import ReturnMethod, Returns
from kprobes.model.resolved import Operand, RegisterValue
from kprobes.units import Addr
from tests.build.calls import Calls, Expected, Task
from tests.build.kernel import SITE
from tests.build.machine import CODE, CODE_SIZE, KERNEL, STACK, Machine, random_state
from tests.build.records import Record, records
from tests.build.returning import CALLERS, Function, return_probe, run

F, G = SITE, SITE + 0x100
SCRIPT = KERNEL + 0x1000
DI = RegisterValue(name="di")


def returns_at(
    addr: int,
    return_method: ReturnMethod,
    text: str = "r f",
    *,
    kept: tuple[Operand, ...] = (),
    event_id: int,
) -> Returns:
    probe = return_probe(text, event_id=event_id, addr=addr)
    return Returns(entry=Addr(addr), return_method=return_method, probes=(probe,), kept=kept)


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


@pytest.mark.parametrize("return_method", [ReturnMethod.RETINSN, ReturnMethod.RETHOOK])
def test_what_the_entry_has_kept_is_in_the_return_s_record(return_method: ReturnMethod) -> None:
    machine = machine_of()
    f = Function(
        machine, returns_at(F, return_method, "r f a=$arg1 v=$retval", kept=(DI,), event_id=1)
    )
    f.arm()

    went, before, after = call(machine, f, f.leave.addr, di=77)

    assert went == CALLERS
    assert after["sp"] == before["sp"] + 8
    assert [(r.values, r.caller) for r in found(machine)] == [((77, after["ax"]), CALLERS)]
    assert f.used() == {}


@pytest.mark.parametrize("return_method", [ReturnMethod.TAIL, ReturnMethod.RETHOOK])
@pytest.mark.parametrize("kept", [(), (DI,)])
def test_functions_that_call_each_other_by_jumps_return_in_turn(
    return_method: ReturnMethod, kept: tuple[Operand, ...]
) -> None:
    machine = machine_of()
    f, g = pair(machine, return_method, kept=kept)
    script = (f.tail.addr, g.tail.addr) * 3 + (f.leave.addr,)

    went, before, after = call(machine, f, *script, di=5)

    assert went == CALLERS
    assert after["sp"] == before["sp"] + 8
    assert [(r.event_id, r.caller) for r in found(machine)] == [
        (event, CALLERS) for event in (1, 2) * 3 + (1,)
    ]
    assert (f.used(), g.used()) == ({}, {})


def pair(
    machine: Machine,
    return_method: ReturnMethod,
    other: ReturnMethod | None = None,
    *,
    kept: tuple[Operand, ...] = (),
    count: int = 8,
) -> tuple[Function, Function]:
    """Two functions that jump to each other."""
    text = "r f a=$arg1" if kept else "r f"
    first = returns_at(F, return_method, text, kept=kept, event_id=1)
    second = returns_at(G, other or return_method, text, kept=kept, event_id=2)
    f = Function(machine, first, target=G, count=count)
    g = Function(machine, second, target=F, count=count)
    f.arm()
    g.arm()
    return f, g


def test_trampolines_in_memory_that_was_taken_later_are_known() -> None:
    machine = machine_of()
    f = Function(machine, returns_at(F, ReturnMethod.TAIL, event_id=1), target=G)
    f.arm()
    machine.grow()
    g = Function(machine, returns_at(G, ReturnMethod.TAIL, event_id=2), target=F)
    g.arm()

    went, _, _ = call(machine, f, *(f.tail.addr, g.tail.addr) * 3, f.leave.addr)

    assert (went, f.used(), g.used()) == (CALLERS, {}, {})
    assert [(r.event_id, r.caller) for r in found(machine)] == [
        (event, CALLERS) for event in (1, 2) * 3 + (1,)
    ]


@pytest.mark.parametrize("caller", [*(CODE + CODE_SIZE - before for before in (0, 1, 4, 7)), 8])
def test_nothing_is_read_where_no_trampoline_can_be(caller: int) -> None:
    machine = machine_of()
    f = Function(machine, returns_at(F, ReturnMethod.RETHOOK, event_id=1))
    f.arm()

    went, _, _ = call(machine, f, f.sleep, caller=caller)

    ((instance,),) = f.used().values()
    assert (went, instance[0]) == (f.sleep, caller)


@pytest.mark.parametrize("other", [ReturnMethod.RETINSN, ReturnMethod.TAIL, ReturnMethod.RETHOOK])
def test_the_caller_is_told_through_the_trampoline_of_who_jumped_here(other: ReturnMethod) -> None:
    machine = machine_of()
    f, g = pair(machine, ReturnMethod.TAIL, other, kept=(DI,))

    call(machine, f, f.tail.addr, g.leave.addr)

    assert [(r.event_id, r.caller) for r in found(machine)] == [(2, CALLERS), (1, CALLERS)]


def test_a_jump_to_its_own_entry_is_one_more_call() -> None:
    machine = machine_of()
    f = Function(machine, returns_at(F, ReturnMethod.TAIL, event_id=1))
    f.arm()

    went, _, _ = call(machine, f, f.tail.addr, f.tail.addr, f.leave.addr)

    assert went == CALLERS
    assert [r.caller for r in found(machine)] == [CALLERS] * 3


@pytest.mark.parametrize("return_method", [ReturnMethod.TAIL, ReturnMethod.RETHOOK])
def test_an_instance_whose_task_died_is_used_again(return_method: ReturnMethod) -> None:
    machine = machine_of()
    f, g = pair(machine, return_method, count=1, kept=(DI,))

    call(machine, f, f.tail.addr, g.sleep, sp=STACK + 0x1000)
    assert len(f.used()) == len(g.used()) == 1

    went, _, _ = call(machine, f, f.leave.addr, sp=STACK + 0x1000, di=9, caller=CALLERS + 16)

    assert went == CALLERS + 16
    assert [(r.values, r.caller) for r in found(machine)] == [((9,), CALLERS + 16)]
    assert f.used() == {}


RETURN_METHODS = [
    (ReturnMethod.RETHOOK, ReturnMethod.RETHOOK),
    (ReturnMethod.TAIL, ReturnMethod.TAIL),
    (ReturnMethod.TAIL, ReturnMethod.RETINSN),
    (ReturnMethod.TAIL, ReturnMethod.RETHOOK, ReturnMethod.TAIL),
    (ReturnMethod.TAIL,),
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("return_methods", RETURN_METHODS)
def test_every_call_of_sleeping_and_dying_tasks_is_recorded(
    return_methods: Sequence[ReturnMethod], keeps: bool, seed: int
) -> None:
    random, machine = Random(seed), Machine()
    calls = Calls(machine, return_methods, count=64, keeps=keeps)
    tasks = [Task(number) for number in range(12)]
    expected: list[Expected] = []
    for _ in range(150):
        expected += calls.step(random.choice(tasks), random)

    assert [told(record, keeps=keeps) for record in found(machine)] == [
        shown(each, keeps=keeps) for each in expected
    ]
    assert sum(machine.nmissed(n + 1) for n in range(len(return_methods))) == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("return_methods", RETURN_METHODS)
def test_a_call_that_no_instance_is_free_for_is_counted_and_returns(
    return_methods: Sequence[ReturnMethod], keeps: bool, seed: int
) -> None:
    random, machine = Random(seed), Machine()
    calls = Calls(machine, return_methods, count=2, keeps=keeps)
    tasks = [Task(number) for number in range(12)]
    expected: list[Expected] = []
    for _ in range(150):
        expected += calls.step(random.choice(tasks), random)

    records = [told(record, keeps=keeps) for record in found(machine)]
    wanted = [shown(each, keeps=keeps) for each in expected]
    matcher = iter(wanted)
    assert all(record in matcher for record in records)
    nmissed = sum(machine.nmissed(n + 1) for n in range(len(return_methods)))
    missing = len(wanted) - len(records)
    waiting = calls.called - len(wanted)
    assert missing <= nmissed <= missing + waiting
    assert nmissed


def told(record: Record, *, keeps: bool) -> tuple[object, ...]:
    return (record.event_id, record.caller, *record.values[: 2 if keeps else 1])


def shown(each: Expected, *, keeps: bool) -> tuple[object, ...]:
    return (each.event_id, each.caller, each.exit, *((each.entered_with,) if keeps else ()))


@pytest.mark.parametrize("return_method", [ReturnMethod.TAIL, ReturnMethod.RETHOOK])
@pytest.mark.parametrize("text", ["r f v=$retval", "r f s=+0($stack):u64"])
def test_a_call_that_is_taken_over_returns_with_all_as_its_function_left_it(
    return_method: ReturnMethod, text: str
) -> None:
    machine = machine_of()
    f = Function(machine, returns_at(F, return_method, text, event_id=1))
    f.arm()
    jumps = (f.tail.addr,) if return_method is ReturnMethod.TAIL else ()
    flags = [0, 2, 4, 6, 7, 11]
    for number in range(64):
        went, _, slept = call(machine, f, *jumps, f.sleep, f.leave.addr)
        assert went == f.sleep
        slept |= random_state(machine.random, bp=slept["bp"], sp=slept["sp"])
        slept["flags"] = 2 | 512 | sum(1 << b for n, b in enumerate(flags) if number >> n & 1)

        went, after = run(machine, f.wake, slept)

        changed = {"bx": f.leave.addr, "bp": slept["bp"] + 8, "sp": slept["sp"] + 8}
        assert (went, after) == (CALLERS, {**slept, **changed})
    assert f.used() == {}


def test_a_conditional_jump_takes_the_return_over_when_it_is_taken() -> None:
    machine = machine_of()
    f = Function(machine, returns_at(F, ReturnMethod.TAIL, event_id=1), target=G)
    g = Function(machine, returns_at(G, ReturnMethod.RETINSN, event_id=2))
    f.arm()
    g.arm()
    # jne g; the return is behind it.
    jump = b"\x0f\x85" + (G - f.branch.addr - 6).to_bytes(4, "little", signed=True)
    f.patch_branch(jump, f.leave.addr)
    for is_zero in (0, 1):
        machine.reset()
        went, _, _ = call(machine, f, f.sleep, f.branch.addr, g.leave.addr)
        state = {**machine.cpu.registers(), "flags": 2 | is_zero << 6}

        went, after = run(machine, f.wake, state)

        assert (went, after["sp"]) == (CALLERS, state["sp"] + 8)
        assert [r.event_id for r in found(machine)] == ([1] if is_zero else [2, 1])
        assert f.used() == {}
