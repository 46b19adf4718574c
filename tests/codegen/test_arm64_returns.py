"""Return probes on arm64, where a register has the return address and the function signs it."""

import pytest

from kprobes.arch.aarch64 import encode
from kprobes.model.plan import INSTANCE_CALLER, INSTANCE_SLOT, ReturnMethod, Returns
from kprobes.model.resolved import RegisterValue
from kprobes.units import Addr
from tests.build.arm64 import NMISSED, SITE, TEXT, Arm64Machine, random_state
from tests.build.arm64_returning import CALLERS, RET, RETAA, Function, Leaving, return_probe
from tests.build.records import Record, records

F, G = SITE, SITE + 0x100
X0 = RegisterValue(name="x0")
PLAIN, SIGNED = Leaving(RET), Leaving(RETAA, is_signed=True)
DEAD = {f"x{n}" for n in range(9, 18)}
ARITHMETIC = 0xF << 28


def returns_at(
    addr: int, return_method: ReturnMethod, *, keeps: bool = False, event_id: int = 1
) -> Returns:
    probe = return_probe("r f v=$retval", event_id=event_id, addr=addr)
    kept = (X0,) if keeps else ()
    return Returns(entry=Addr(addr), return_method=return_method, probes=(probe,), kept=kept)


def machine_of() -> Arm64Machine:
    machine = Arm64Machine()
    machine.sign()
    return machine


def found(machine: Arm64Machine) -> list[Record]:
    return records(machine, 0)


def assert_returned(function: Function, number: int = 0) -> dict[str, int]:
    """Call a function, and check that its caller notices nothing."""
    went, before, after = function.call(number)
    assert went == CALLERS + 16 * number
    changed = {name for name in before if after[name] != before[name]}
    assert changed <= {*DEAD, "x0", "x30", "pstate"}
    # Where a function is entered its condition flags are dead.
    assert (after["pstate"] ^ before["pstate"]) & ~ARITHMETIC == 0
    return after


def test_the_emulated_function_signs_its_return_address() -> None:
    machine = machine_of()
    function = Function(machine, returns_at(F, ReturnMethod.RETHOOK), PLAIN)
    machine.cpu.add_exit(F + 12)
    machine.cpu.set_registers(random_state(machine.random, x30=CALLERS))

    machine.run(F)

    assert machine.cpu.register("x30") != CALLERS
    assert function.leave > F


@pytest.mark.parametrize("leaving", [PLAIN, SIGNED])
@pytest.mark.parametrize("return_method", [ReturnMethod.RETINSN, ReturnMethod.RETHOOK])
@pytest.mark.parametrize("keeps", [False, True])
def test_a_return_is_recorded_with_value_and_caller(
    leaving: Leaving, return_method: ReturnMethod, keeps: bool
) -> None:
    machine = machine_of()
    # mov x0, #77
    function = Function(
        machine, returns_at(F, return_method, keeps=keeps), leaving, encode.movz(0, 77)
    )
    function.arm()

    for number in range(4):
        assert assert_returned(function, number)["x0"] == 77

    expected = [((77,), CALLERS + 16 * number) for number in range(4)]
    assert [(r.values, r.caller) for r in found(machine)] == expected
    assert function.used() == 0


@pytest.mark.parametrize("leaving", [PLAIN, SIGNED])
@pytest.mark.parametrize("return_method", [ReturnMethod.RETINSN, ReturnMethod.RETHOOK])
def test_calls_inside_of_calls_return_in_turn(
    leaving: Leaving, return_method: ReturnMethod
) -> None:
    machine = machine_of()
    # cbz x0, past the call; sub x0, x0, #1; bl f
    inside = Addr(F + 20)
    call = bytes.fromhex("000400d1") + encode.bl(Addr(inside + 8), Addr(F))
    work = encode.cbz(0, len(call)) + call
    function = Function(machine, returns_at(F, return_method, keeps=True), leaving, work)
    function.arm()

    went, _, after = function.call(x0=4)

    assert (went, after["x0"]) == (CALLERS, 0)
    assert [r.caller for r in found(machine)] == [inside + 12] * 4 + [CALLERS]
    assert function.used() == 0


def test_a_jump_into_another_function_returns_through_both() -> None:
    machine = machine_of()
    g = Function(machine, returns_at(G, ReturnMethod.RETINSN, event_id=2), PLAIN, encode.movz(0, 9))
    there = Leaving(encode.b(Addr(F + 20 + 12), Addr(G)))
    f = Function(machine, returns_at(F, ReturnMethod.TAIL, keeps=True), there)
    assert f.leave == F + 20 + 12
    f.arm()
    g.arm()

    for number in range(3):
        assert_returned(f, number)

    expected = [(event, CALLERS + 16 * number) for number in range(3) for event in (2, 1)]
    assert [(r.event_id, r.caller) for r in found(machine)] == expected
    assert (f.used(), g.used()) == (0, 0)


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_conditional_jump_into_another_function_counts_when_it_is_taken(is_taken: bool) -> None:
    machine = machine_of()
    machine.cpu.write(G, encode.movz(0, 9) + RET)
    f = Function(machine, returns_at(F, ReturnMethod.TAIL), PLAIN)
    f.add_trampoline()
    # A leaf: cbz x0, g; mov x0, #1; ret
    leaf = Addr(TEXT + 0x3000)
    branch = bytes.fromhex("000000b4")
    distance = (G - leaf) // 4 & 0x7FFFF
    branch = (int.from_bytes(branch, "little") | distance << 5).to_bytes(4, "little")
    machine.cpu.write(leaf, branch + encode.movz(0, 1) + RET)
    f.patch_branch(branch, leaf)
    machine.cpu.add_exit(CALLERS)
    machine.cpu.set_registers(random_state(machine.random, x0=0 if is_taken else 5, x30=CALLERS))

    assert machine.run(leaf) == CALLERS

    assert machine.cpu.register("x0") == (9 if is_taken else 1)
    assert [r.caller for r in found(machine)] == [CALLERS] * is_taken
    assert f.used() == 0


def test_the_instance_of_a_call_that_died_is_used_again() -> None:
    machine = machine_of()
    function = Function(machine, returns_at(F, ReturnMethod.RETHOOK), PLAIN)
    function.arm()
    state = random_state(machine.random, x30=CALLERS)
    machine.cpu.add_exit(function.leave)
    machine.cpu.set_registers(state)
    machine.run(F)
    assert function.used() == 1

    machine.cpu.set_registers({**state, "x30": CALLERS + 16})
    machine.run(F)

    assert function.used() == 1
    assert machine.cpu.register("x30") == function.instances.trampoline
    row = next(
        at
        for at in range(0, function.instances.size, function.instances.stride)
        if machine.cpu.number(function.instances.addr + at + INSTANCE_SLOT)
    )
    assert machine.cpu.number(function.instances.addr + row + INSTANCE_SLOT) == state["sp"]
    assert machine.cpu.number(function.instances.addr + row + INSTANCE_CALLER) == CALLERS + 16


def test_calls_without_an_instance_return_unseen_and_are_counted() -> None:
    machine = machine_of()
    inside = Addr(F + 20)
    call = bytes.fromhex("000400d1") + encode.bl(Addr(inside + 8), Addr(F))
    work = encode.cbz(0, len(call)) + call
    function = Function(machine, returns_at(F, ReturnMethod.RETHOOK), PLAIN, work)
    function.arm()

    went, _, after = function.call(x0=11)

    assert (went, after["x0"]) == (CALLERS, 0)
    assert len(found(machine)) == 8
    assert machine.cpu.number(NMISSED + 8) == 4
