"""Arithmetic flags given back without popfq: all six, in all combinations, and nothing else."""

from collections.abc import Callable

import pytest

from kprobes.arch.arch import Restored
from kprobes.arch.x86_64 import slot, trampoline
from kprobes.arch.x86_64.slot import push
from kprobes.model.plan import Displaced
from kprobes.units import Addr
from tests.arch.x86_64.test_trampoline import BODY, END, Machine
from tests.build.text import SLOT, START

ARITHMETIC = [0, 2, 4, 6, 7, 11]
OTHERS = [0, 1 << 9, 1 << 10, 1 << 9 | 1 << 10 | 1 << 14 | 1 << 18]
"""Interrupts, direction, nested task, alignment check."""
SETS = [
    # sub al, 1 of 0x80; add of two that overflow; xor: what flags a body leaves.
    "48c7c080000000 2c01",
    "b87fffffff 83c07f",
    "31c0",
    "b8ffffffff 83c001",
]
NOP = Displaced(addr=Addr(START), code=b"\x90" * 5, count=5, stop=Addr(START + 5))


def by_detour() -> bytes:
    return trampoline.detour(SLOT, BODY, NOP, flags=Restored.ARITHMETIC)


def by_entry() -> bytes:
    called = push(Addr(START))
    return called + slot.entry(Addr(SLOT + len(called)), BODY, flags=Restored.ARITHMETIC)


def by_branch() -> bytes:
    # A jump that is taken or not: both ways lead on.
    jump = Displaced(addr=Addr(START), code=b"\x74\x00", count=1, stop=Addr(START + 2))
    return trampoline.branch_detour(SLOT, BODY, BODY, jump, flags=Restored.ARITHMETIC)


@pytest.mark.parametrize("return_method", [by_detour, by_entry, by_branch])
@pytest.mark.parametrize("others", OTHERS)
@pytest.mark.parametrize("sets", SETS)
def test_every_flag_and_register_is_as_before(
    return_method: Callable[[], bytes], others: int, sets: str
) -> None:
    machine = Machine("90" * 8, bytes.fromhex(sets + "49c7c3ffffffff c3"))
    machine.cpu.write(SLOT, return_method())
    for number in range(64):
        flags = 2 | others | sum(1 << bit for n, bit in enumerate(ARITHMETIC) if number >> n & 1)
        machine.state = {**machine.state, "flags": flags}

        after, _ = machine.run(SLOT)

        assert after == machine.state


def test_a_trampoline_gives_them_back_too() -> None:
    # mov [rsp+88], END's address: the body puts the return address back; then flags change.
    put = "48b8" + END.to_bytes(8, "little").hex() + "4889442458 83e87f"
    machine = Machine("90" * 8, bytes.fromhex(put + "49c7c3ffffffff c3"))
    machine.cpu.write(SLOT, trampoline.trampoline(SLOT, BODY, flags=Restored.ARITHMETIC))
    for number in range(64):
        flags = 2 | 512 | sum(1 << bit for n, bit in enumerate(ARITHMETIC) if number >> n & 1)
        machine.state = {**machine.state, "flags": flags}

        after, _ = machine.run(SLOT)

        assert after == machine.state


def test_popfq_is_not_there() -> None:
    assert b"\x58\x9d" in slot.saving_call(SLOT, BODY)
    assert b"\x9d" not in slot.saving_call(SLOT, BODY, Restored.ARITHMETIC)
