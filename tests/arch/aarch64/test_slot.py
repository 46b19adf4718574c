"""Slots: their words for every form, and what they do on an emulated CPU."""

import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kprobes.arch.aarch64.decode import decode_function, decode_one
from kprobes.arch.aarch64.insn import kind_of, named_by
from kprobes.arch.aarch64.slot import MAX_SIZE, set_register, slot
from kprobes.arch.aarch64.verdict import insn_verdict
from kprobes.errors import RefusedError
from kprobes.model.kernel import TextPart
from kprobes.units import U64, Addr
from tests.build.a64 import NOP, RET, RETAA, SLOT, START, b, code_of, first
from tests.build.a64_emulator import Emulator, random_state

STATES = 24
TEXT = 1 << 16
FAR = Addr(START + (1 << 33))


def adrp(register: int, value: int, at: int) -> str:
    pages = (value >> 12) - (at >> 12)
    return f"{0x90000000 | (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5 | register:08x}"


def add(register: int, value: int) -> str:
    return f"{0x91000000 | (value & 0xFFF) << 10 | register << 5 | register:08x}"


def address(register: int, value: int) -> str:
    return f"{adrp(register, value, SLOT)} {add(register, value)}"


FORMS = [
    (NOP, f"{NOP} {b(START + 4, at=SLOT + 4)}"),
    ("14000010", b(START + 0x40, at=SLOT)),
    (
        "54000200",
        f"54000040 14000002 {b(START + 0x40, at=SLOT + 8)} {b(START + 4, at=SLOT + 12)}",
    ),
    (
        "b4000203",
        f"b4000043 14000002 {b(START + 0x40, at=SLOT + 8)} {b(START + 4, at=SLOT + 12)}",
    ),
    (
        "b6400205",
        f"b6400045 14000002 {b(START + 0x40, at=SLOT + 8)} {b(START + 4, at=SLOT + 12)}",
    ),
    ("97fffff0", f"{address(30, START + 4)} {b(START - 0x40, at=SLOT + 8)}"),
    ("d63f0100", f"{address(30, START + 4)} aa0803f0 d61f0200"),
    ("d63f0200", f"{address(30, START + 4)} d61f0200"),
    ("d63f0220", f"{address(30, START + 4)} d61f0220"),
    ("d73f0864", f"{address(30, START + 4)} aa0303f0 d71f0a04"),
    ("d73f0870", f"{address(30, START + 4)} aa0303f1 d71f0a30"),
    ("30008000", f"{address(0, START + 0x1001)} {b(START + 4, at=SLOT + 8)}"),
    ("1000005f", b(START + 4, at=SLOT)),
    ("90000001", f"{adrp(1, START & ~0xFFF, SLOT)} {b(START + 4, at=SLOT + 4)}"),
    ("58000200", f"{address(0, START + 0x40)} f9400000 {b(START + 4, at=SLOT + 12)}"),
    ("18000201", f"{address(1, START + 0x40)} b9400021 {b(START + 4, at=SLOT + 12)}"),
    ("98000202", f"{address(2, START + 0x40)} b9800042 {b(START + 4, at=SLOT + 12)}"),
    ("d8000200", b(START + 4, at=SLOT)),
    ("d61f0200", "d61f0200"),
    (RET, RET),
    (RETAA, RETAA),
]


@cache
def emulator() -> Emulator:
    rng = random.Random(7)
    states = [random_state(rng) for _ in range(STATES)]
    return Emulator((START - TEXT, bytes(2 * TEXT)), SLOT, states)


@pytest.mark.parametrize(("words", "expected"), FORMS)
def test_the_words_of_a_slot(words: str, expected: str) -> None:
    found = slot(first(words), SLOT)

    assert found == code_of(expected)
    assert len(found) <= MAX_SIZE


@pytest.mark.parametrize(("words", "expected"), FORMS)
def test_a_slot_does_what_the_original_does(words: str, expected: str) -> None:
    del expected
    copy = slot(first(words), SLOT)
    emulator().place(START, code_of(words))

    outcomes = [emulator().run(START, copy, state=n) for n in range(STATES)]

    kind = kind_of(int(words, 16))
    assert all(here.seen_after(kind) == there.seen_after(kind) for here, there in outcomes)
    assert not all(here.fault for here, _ in outcomes)


@settings(max_examples=400)
@given(
    st.sampled_from([int(words, 16) for words, _ in FORMS])
    | st.sampled_from([0x34000000, 0x36000000, 0x10000000, 0x90000000, 0x54000000]),
    st.integers(0, 2**24 - 1),
    st.integers(0, STATES - 1),
)
def test_any_fields_do_in_a_slot_what_they_do_in_place(word: int, bits: int, state: int) -> None:
    code = (word ^ bits).to_bytes(4, "little")
    function = decode_function("f", (TextPart(addr=Addr(START), code=code + code_of(NOP)),))
    if insn_verdict(function, START).is_refused:
        return
    instruction = decode_one(code, START)
    emulator().place(START, code)

    here, there = emulator().run(START, slot(instruction, SLOT), state=state)

    kind = instruction.kind
    assert here.seen_after(kind) == there.seen_after(kind) or (here.fault and there.fault)


@given(st.integers(0, U64), st.integers(0, 2**62), st.integers(0, 30))
def test_a_register_is_set_to_any_address_from_anywhere(value: int, at: int, register: int) -> None:
    code = set_register(register, value, Addr(4 * at))

    assert len(code) <= 16
    assert run(code, 4 * at) == {register: value}


def run(code: bytes, at: int) -> dict[int, int]:
    # movn, movz, movk, adrp and add, as the Arm ARM's pseudocode has them.
    held: dict[int, int] = {}
    for place in range(0, len(code), 4):
        word = int.from_bytes(code[place : place + 4], "little")
        register, shift, half = word & 31, (word >> 21 & 3) * 16, word >> 5 & 0xFFFF
        named = named_by(word, kind_of(word), at + place)
        if named is not None:
            held[register] = named
        elif word >> 22 == 0b1001000100:
            held[register] = held[register] + (word >> 10 & 0xFFF)
        else:
            old = {0: U64, 2: 0}.get(word >> 29 & 3, held.get(register, 0))
            put = ~half & 0xFFFF if word >> 29 & 3 == 0 else half
            held[register] = old & ~(0xFFFF << shift) | put << shift
    return held


@pytest.mark.parametrize("words", ["14000010", "54000200", "97fffff0", NOP])
def test_a_slot_out_of_a_branch_s_reach_is_refused(words: str) -> None:
    with pytest.raises(RefusedError, match="too far"):
        slot(first(words), FAR)


def test_what_only_computes_has_no_reach() -> None:
    # Where a slot leaves by itself, only x30 names a place: in four words at most.
    assert len(slot(first("d63f0100"), FAR)) <= 20
