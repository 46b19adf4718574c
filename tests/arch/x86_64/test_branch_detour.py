"""Detours of conditional jumps, run on an emulated CPU: a body for those that are taken."""

import pytest

from kprobes.arch.x86_64 import trampoline
from kprobes.model.plan import Displaced
from kprobes.units import Addr
from tests.arch.x86_64.test_trampoline import BODY, CLOBBER, STACK, Machine
from tests.build.text import SLOT, START

ALWAYS = Addr(BODY + 0x40)
TAKEN = Addr(BODY + 0x80)
COUNTS = STACK + 0x100
TARGET = START + 0x60
BEHIND = START + 0x20
ARITHMETIC = [0, 2, 4, 6, 7, 11]
COUNTED = ["e25e", "e15e", "e05e", "e35e", "67e35e"]


def counting(at: int) -> bytes:
    """A body that counts in memory and clobbers what it may."""
    return bytes.fromhex("48b8") + at.to_bytes(8, "little") + bytes.fromhex("48ff00") + CLOBBER


def machine_of(code: str, flags: int, cx: int = 5) -> Machine:
    machine = Machine(code)
    machine.cpu.add_exit(TARGET)
    machine.cpu.add_exit(BEHIND)
    machine.cpu.write(ALWAYS, counting(COUNTS))
    machine.cpu.write(TAKEN, counting(COUNTS + 8))
    machine.state = {**machine.state, "flags": flags, "cx": cx}
    return machine


def went(machine: Machine, start: int) -> tuple[int, dict[str, int], tuple[int, int]]:
    machine.cpu.write(COUNTS, bytes(16))
    machine.cpu.set_registers(machine.state)
    pc = machine.cpu.run(start)
    counts = machine.cpu.number(COUNTS), machine.cpu.number(COUNTS + 8)
    return pc, machine.cpu.registers(), counts


def displaced_of(code: str, count: int) -> Displaced:
    raw = bytes.fromhex(code)
    return Displaced(addr=Addr(START), code=raw, count=count, stop=Addr(START + len(raw)))


def flags_of(number: int) -> int:
    return 2 | 1 << 9 | sum(1 << bit for n, bit in enumerate(ARITHMETIC) if number >> n & 1)


@pytest.mark.parametrize("has_probes", [False, True])
@pytest.mark.parametrize("rest", ["", "4811d8 4889c3"])
@pytest.mark.parametrize("condition", range(16))
def test_the_body_runs_where_the_branch_is_taken(
    condition: int, rest: str, has_probes: bool
) -> None:
    jump = f"0f{0x80 | condition:x}" + (TARGET - START - 6).to_bytes(4, "little").hex()
    assert check(jump, rest, has_probes=has_probes) == {TARGET, BEHIND}


@pytest.mark.parametrize("cx", [0, 1, 2, 1 << 32])
@pytest.mark.parametrize("jump", COUNTED)
def test_loops_that_leave_a_function_are_conditional_jumps_too(jump: str, cx: int) -> None:
    size = len(bytes.fromhex(jump))
    goes = check(jump[:-2] + f"{TARGET - START - size:02x}", "", has_probes=True, cx=cx)

    assert goes <= {TARGET, BEHIND}


def check(jump: str, rest: str, *, has_probes: bool, cx: int = 5) -> set[int]:
    displaced = displaced_of(jump + rest, 3 if rest else 1)
    goes: set[int] = set()
    for number in range(64):
        # What is after goes on to an exit.
        away = BEHIND - displaced.stop - 5
        code = jump + rest + "e9" + away.to_bytes(4, "little").hex()
        plain, patched = (machine_of(code, flags_of(number), cx) for _ in range(2))
        body = ALWAYS if has_probes else None
        return_method = trampoline.branch_detour(SLOT, body, TAKEN, displaced)
        assert len(return_method) <= BODY - SLOT
        patched.cpu.write(SLOT, return_method)

        here, before, _ = went(plain, START)
        there, after, counts = went(patched, SLOT)

        assert (there, after) == (here, before)
        assert counts == (int(has_probes), int(here == TARGET))
        goes.add(here)
    return goes
