"""Detours that ask Python: their bytes, and that instructions do what they do in place."""

import random
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kprobes.arch.x86_64 import slot
from kprobes.arch.x86_64.decode import decode_function, decode_one
from kprobes.arch.x86_64.insn import Flow
from kprobes.arch.x86_64.upcall import at_call
from kprobes.arch.x86_64.verdict import insn_verdict
from kprobes.errors import RefusedError
from kprobes.model.kernel import TextPart
from kprobes.model.upcall import SiteUpcalls
from kprobes.units import Addr
from tests.build.asked import detour_of, is_done, is_same, run_both
from tests.build.emulator import DIFFERS_EACH_TIME, Emulator, random_state
from tests.build.text import SLOT, START, first, to

OUTSIDE = START + 0x10000
STATES = 32
ENTRY_STUB = Addr(SLOT + 0x4000)
FORMS = [
    *("90", "4801d8", "488b0510000000", "c7051000000001000000", "53", "5b", "9c", "9d"),
    *("eb10", "7410", "7510", "0f8f" + to(OUTSIDE, 6), "e2fe", "e0fe", "e310", "67e310"),
    *("e9" + to(OUTSIDE, 5), "e8" + to(OUTSIDE, 5)),
    *("ffd0", "41ffd3", "ff5018", "ff542418", "3effd0", "ff1510000000"),
    *("ffe0", "41ffe3", "ff6018", "ff642418", "ff2510000000", "c3"),
]
RUNS = [
    *(("53", "4889fb"), ("7410", "4801d8", "90"), ("e310", "4801d8")),
    *(("31d2", "be01000000", "c3"), ("4889e0", "50", "58", "ffe0")),
]


@cache
def emulator() -> Emulator:
    rng = random.Random(7)
    states = [random_state(rng, is_short=i % 2 == 0) for i in range(STATES)]
    made = Emulator(START & ~0xFFFFFF, START + 0x100000, states)
    # What the indirect jump and call beside the instruction pointer lead to.
    made.place(START + 6 + 16, OUTSIDE.to_bytes(8, "little"))
    return made


@pytest.mark.parametrize("code", FORMS)
def test_an_instruction_that_is_asked_about_does_what_it_does_in_place(code: str) -> None:
    outcomes = [run_both(emulator(), (first(code),), n) for n in range(STATES)]

    assert all(is_same(here, there) for here, there in outcomes)
    assert not all(here.fault for here, _ in outcomes)


@pytest.mark.parametrize("codes", RUNS)
def test_of_several_instructions_the_rest_does_what_it_does_in_place(codes: tuple[str]) -> None:
    part = TextPart(addr=Addr(START), code=bytes.fromhex("".join(codes)))
    run = tuple(decode_function("run", (part,)).instructions.values())
    assert len(run) == len(codes)

    outcomes = [run_both(emulator(), run, n) for n in range(STATES)]

    assert all(is_same(here, there) for here, there in outcomes)
    assert not all(here.fault for here, _ in outcomes)


@pytest.mark.parametrize("codes", RUNS)
def test_every_displaced_instruction_has_a_copy_that_one_can_go_to(codes: tuple[str]) -> None:
    part = TextPart(addr=Addr(START), code=bytes.fromhex("".join(codes)))
    run = tuple(decode_function("run", (part,)).instructions.values())

    detour = detour_of(run, before=1)

    assert list(detour.copies) == [each.addr for each in run]
    for addr, copy in list(detour.copies.items())[1:]:
        here = run[[each.addr for each in run].index(addr)].code
        there = decode_one(detour.code[copy - SLOT :], copy)
        assert there.mnemonic == decode_one(here, addr).mnemonic


def test_a_return_that_drops_arguments_is_refused() -> None:
    with pytest.raises(RefusedError, match="drops arguments"):
        detour_of((first("c20800"),))


@settings(max_examples=300, derandomize=True)
@given(code=st.binary(min_size=1, max_size=15), state=st.integers(0, STATES - 1))
def test_any_instruction_does_the_same_when_it_is_asked_about(code: bytes, state: int) -> None:
    function = decode_function("any", [TextPart(addr=Addr(START), code=code + b"\x90" * 20)])
    slot_verdict = insn_verdict(function, START)
    if slot_verdict.instruction is None or slot_verdict.is_refused:
        return
    if slot_verdict.instruction.mnemonic in DIFFERS_EACH_TIME:
        return

    try:
        here, there = run_both(emulator(), (slot_verdict.instruction,), state)
    except RefusedError:
        return

    instruction = slot_verdict.instruction
    # The emulated CPU knows no XOP, and takes its bytes for others.
    is_other = instruction.flow is Flow.NEXT and here.next != instruction.next
    assert is_same(here, there) or is_other or not is_done(here)


def _questions(*, before: int | None = None, after: int | None = None) -> SiteUpcalls:
    return SiteUpcalls(entry_stub=ENTRY_STUB, before=before, after=after)


def test_a_question_pushes_where_to_go_on_and_its_number() -> None:
    back = Addr(START + slot.SIZE)

    detour = at_call(Addr(SLOT), None, _questions(before=0x1234), back)

    after = SLOT + 5 + 5 + 5 + 5
    expected = "488d642408" + "68" + (after & 0xFFFF_FFFF).to_bytes(4, "little").hex()
    expected += "6834120000" + "e9" + to(ENTRY_STUB, 5, place=SLOT + 15)
    expected += "e9" + to(back, 5, place=after)
    assert detour.code.hex() == expected
    assert detour.copies == {START: after}


def test_an_ftrace_site_asks_after_its_nop_before_it_goes_on() -> None:
    back = Addr(START + slot.SIZE)

    detour = at_call(Addr(SLOT), None, _questions(before=1, after=2), back)

    assert detour.copies == {START: SLOT + 20, back: SLOT + 35}
    assert detour.code[35:].hex() == "e9" + to(back, 5, place=SLOT + 35)


def test_compiled_probes_come_first_with_the_stack_as_the_site_left_it() -> None:
    probes, back = Addr(SLOT + 0x800), Addr(START + slot.SIZE)

    detour = at_call(Addr(SLOT), probes, _questions(before=1), back)

    call = slot.saving_call(Addr(SLOT), probes)
    assert detour.code.startswith(call + bytes.fromhex("488d642408"))
