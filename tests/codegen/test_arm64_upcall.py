"""Hits on arm64 that wait for Python: what it sees, and how they go on."""

import pytest

from kprobes.arch.aarch64 import encode
from kprobes.units import Addr
from tests.build.arm64 import TASK, TEXT
from tests.build.arm64_asking import (
    AFTER,
    BEFORE,
    BEHIND,
    ELSEWHERE,
    FUNCTION,
    SITE,
    AskingGuest,
    instruction_guest,
    site_guest,
)
from tests.build.cpu import ARM64_GPRS

NEXT, TARGET = FUNCTION + 4, TEXT + 0x3400
DEAD = {f"x{n}" for n in range(9, 18)}
ARITHMETIC, BTYPE = 0xF << 28, 3 << 10


def changed(before: dict[str, int], after: dict[str, int]) -> set[str]:
    return {name for name in before if after[name] != before[name]}


def assert_at_rest(guest: AskingGuest) -> None:
    machine = guest.machine
    assert (machine.guard(), machine.preempt_count) == (0, 0)


def test_python_sees_the_site_s_registers_and_it_goes_on() -> None:
    guest = site_guest()

    went, before, after = guest.hit(FUNCTION)

    assert went == AFTER
    assert changed(before, after) <= DEAD
    (request,) = guest.requests
    names = [name for name in ARM64_GPRS if name != "x9"]
    assert [request[name] for name in names] == [before[name] for name in names]
    assert (request["sp"], request["ip"]) == (before["sp"], SITE)
    assert (request["upcall"], request["task"]) == (BEFORE, TASK)
    assert request["pstate"] & ~ARITHMETIC == before["pstate"] & ~ARITHMETIC
    assert_at_rest(guest)


def test_registers_that_python_changes_are_gone_on_with() -> None:
    guest = site_guest()
    guest.change = lambda request: request.update(x0=5, x19=6, x30=7)

    _, before, after = guest.hit(FUNCTION)

    assert (after["x0"], after["x19"], after["x30"]) == (5, 6, 7)
    assert changed(before, after) <= {*DEAD, "x0", "x19", "x30"}


def test_python_may_send_a_hit_elsewhere_with_another_stack_pointer() -> None:
    guest = site_guest()

    def change(request: dict[str, int]) -> None:
        request.update(ip=ELSEWHERE, sp=request["sp"] + 64, x1=3)

    guest.change = change

    went, before, after = guest.hit(FUNCTION)

    assert (went, after["sp"], after["x1"]) == (ELSEWHERE, before["sp"] + 64, 3)
    assert changed(before, after) <= {*DEAD, "x1", "sp"}
    assert_at_rest(guest)


def test_behind_a_site_is_asked_again() -> None:
    guest = site_guest(is_after=True)

    went, _, _ = guest.hit(FUNCTION)

    assert went == AFTER
    assert [(r["upcall"], r["ip"]) for r in guest.requests] == [(BEFORE, SITE), (BEHIND, AFTER)]


def test_where_nobody_attends_a_hit_goes_on_and_is_counted() -> None:
    guest = site_guest()
    guest.is_there = False
    guest.set(64, 0)

    went, before, after = guest.hit(FUNCTION)

    assert (went, guest.missed(BEFORE)) == (AFTER, 1)
    assert changed(before, after) <= DEAD
    assert_at_rest(guest)


def branch(word: int, target: int, bits: int = 19, at: int = 5) -> bytes:
    distance = (target - FUNCTION) // 4 & (1 << bits) - 1
    return (word | distance << at).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("code", "fixed", "went"),
    [
        # add x3, x3, #1
        (bytes.fromhex("63040091"), {}, NEXT),
        # b target; b.eq target; cbnz x7, target
        (encode.b(Addr(FUNCTION), Addr(TARGET)), {}, TARGET),
        (branch(0x54000000, TARGET), {"pstate": 0x40000005}, TARGET),
        (branch(0x54000000, TARGET), {"pstate": 0x80000005}, NEXT),
        (branch(0xB5000007, TARGET), {"x7": 1}, TARGET),
        (branch(0xB5000007, TARGET), {"x7": 0}, NEXT),
        # bl target; br x0; ret; blr x1
        (encode.bl(Addr(FUNCTION), Addr(TARGET)), {}, TARGET),
        (bytes.fromhex("00001fd6"), {"x0": TARGET}, TARGET),
        (encode.ret(), {"x30": TARGET}, TARGET),
        (bytes.fromhex("20003fd6"), {"x1": TARGET}, TARGET),
    ],
)
@pytest.mark.parametrize("before", [False, True])
def test_behind_an_instruction_python_sees_where_it_leads(
    code: bytes, fixed: dict[str, int], went: int, before: bool
) -> None:
    guest = instruction_guest(code, exits=(NEXT, TARGET), before=before)
    state = {**guest.machine.random_state(), **fixed}

    there, _, after = guest.hit(FUNCTION, state)

    assert there == went
    is_call = code[3] == 0x94 or code == bytes.fromhex("20003fd6")
    expected = {**state, "x30": NEXT} if is_call else dict(state)
    if code == bytes.fromhex("20003fd6"):
        # Jumped to by x16, so that it may begin with bti c.
        expected["x16"] = TARGET
    if code == bytes.fromhex("63040091"):
        expected["x3"] = (state["x3"] + 1) & (1 << 64) - 1
    # A branch by a register says in BTYPE that it was one.
    after["pstate"] &= ~BTYPE
    assert after == expected
    assert [r["ip"] for r in guest.requests] == [FUNCTION] * before + [went]
    assert guest.requests[-1]["x30"] == expected["x30"]
    assert_at_rest(guest)
