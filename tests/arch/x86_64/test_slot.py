"""Slots: their bytes for every form, and what they do on an emulated CPU."""

import random
from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kprobes.arch.x86_64.decode import decode_function, decode_one
from kprobes.arch.x86_64.slot import MAX_SIZE, slot
from kprobes.arch.x86_64.verdict import insn_verdict
from kprobes.errors import RefusedError
from kprobes.model.kernel import TextPart
from kprobes.units import Addr
from tests.build.emulator import DIFFERS_EACH_TIME, Emulator, random_state
from tests.build.text import SLOT, START, first, to

OUTSIDE = START + 0x10000
STATES = 32


@cache
def emulator() -> Emulator:
    rng = random.Random(7)
    states = [random_state(rng, is_short=i % 2 == 0) for i in range(STATES)]
    return Emulator(START & ~0xFFFFFF, START + 0x100000, states)


def back(to_addr: int, after: int) -> str:
    """The jump that ends a slot whose code is ``after`` bytes long."""
    return "e9" + to(to_addr, 5, place=SLOT + after)


FORMS = [
    ("90", "90" + back(START + 1, 1)),
    ("488b0510000000", "488b05" + to(START + 23, 7, place=SLOT) + back(START + 7, 7)),
    # An immediate after the displacement: it counts from the instruction's end.
    ("c7051000000001000000", "c705" + to(START + 26, 10, place=SLOT) + "01000000"),
    ("eb10", back(START + 18, 0) + "cc"),
    ("e9" + to(OUTSIDE, 5), back(OUTSIDE, 0) + "cc"),
    ("7410", "0f84" + to(START + 18, 6, place=SLOT) + back(START + 2, 6)),
    ("0f8f" + to(OUTSIDE, 6), "0f8f" + to(OUTSIDE, 6, place=SLOT) + back(START + 6, 6)),
    ("e2fe", "e202" + "eb05" + back(START, 4) + back(START + 2, 9)),
    ("e310", "e302" + "eb05" + back(START + 18, 4) + back(START + 2, 9)),
    ("67e310", "67e302" + "eb05" + back(START + 19, 5) + back(START + 3, 10)),
    ("e8" + to(OUTSIDE, 5), "6805001081" + back(OUTSIDE, 5) + "cc"),
    ("ffd0", "6802001081" + "ffe0" + "cc"),
    ("41ffd3", "6803001081" + "41ffe3" + "cc"),
    ("ff5018", "6803001081" + "ff6018" + "cc"),
    ("ff542418", "6804001081" + "ffa42420000000" + "cc"),
    ("3effd0", "6803001081" + "3effe0" + "cc"),
    ("ffe0", "ffe0" + "cc"),
    ("c3", "c3" + "cc"),
    ("c20800", "c20800" + "cc"),
]


@pytest.mark.parametrize(("code", "expected"), FORMS)
def test_the_bytes_of_a_slot(code: str, expected: str) -> None:
    found = slot(first(code), SLOT).hex()

    assert found.startswith(expected)
    assert len(found) <= 2 * MAX_SIZE


@pytest.mark.parametrize(("code", "expected"), FORMS)
def test_a_slot_does_what_the_original_does(code: str, expected: str) -> None:
    del expected
    instruction = first(code)
    copy = slot(instruction, SLOT)

    outcomes = [emulator().run((START, instruction.code), copy, state=n) for n in range(STATES)]

    # A call through memory that faults has pushed already: the one difference.
    assert all(here == there or (here.fault and there.fault) for here, there in outcomes)
    assert not all(here.fault for here, _ in outcomes)


def test_a_return_address_beyond_a_pushs_reach_is_pushed_whole() -> None:
    place = Addr(0x1234_5678_9000)
    code = "e8" + to(place + 0x100, 5, place=place)
    function = decode_function("far", [TextPart(addr=place, code=bytes.fromhex(code))])

    found = slot(function.instructions[place], Addr(place + 0x1000))

    assert found.hex().startswith("68" + "05907856" + "c7442404" + "34120000" + "e9")


def test_percpu_offsets_are_reached_around_the_end_of_addresses() -> None:
    near_zero = (0x1F000 - START - 8) & 0xFFFF_FFFF
    instruction = first("65488b05" + near_zero.to_bytes(4, "little").hex())

    found = slot(instruction, SLOT)

    assert decode_one(found, SLOT).ip_rel_memory_address == 0x1F000


@pytest.mark.parametrize(
    "code", ["488b0510000000", "e8" + to(OUTSIDE, 5), "7410", "e2fe", "90", "ff1510000000"]
)
def test_a_slot_out_of_reach_is_refused(code: str) -> None:
    with pytest.raises(RefusedError, match="too far"):
        slot(first(code), Addr(0xFFFF_C900_0000_0000))


@settings(max_examples=300)
@given(code=st.binary(min_size=1, max_size=15), state=st.integers(0, STATES - 1))
@example(code=bytes.fromhex("f2aa"), state=1)
@example(code=bytes.fromhex("406671"), state=0)
def test_any_instruction_does_the_same_in_its_slot(code: bytes, state: int) -> None:
    part = TextPart(addr=Addr(START), code=code + b"\x90" * 20)
    function = decode_function("any", [part])
    slot_verdict = insn_verdict(function, START)
    if slot_verdict.instruction is None or slot_verdict.is_refused:
        return
    if slot_verdict.instruction.mnemonic in DIFFERS_EACH_TIME:
        return
    try:
        copy = slot(slot_verdict.instruction, SLOT)
    except RefusedError:
        return

    here, there = emulator().run((START, slot_verdict.instruction.code), copy, state=state)

    if there.next == SLOT and not there.fault:
        # One that repeats, and has not come to its end.
        there = replace(there, next=START)
    assert bool(here.fault) == bool(there.fault)
    assert here.fault or here == there
