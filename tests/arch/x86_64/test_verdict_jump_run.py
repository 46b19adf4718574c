"""Runs that one five-byte jump may replace, and those that none may."""

import pytest

from kprobes.arch.x86_64.slot import slot
from kprobes.arch.x86_64.verdict import jump_run
from kprobes.errors import RefusedError
from kprobes.model.kernel import TextTables
from tests.build.text import COLD, SLOT, START, function, to

OUTSIDE = START + 0x10000
PUSHES = "55" + "4157" + "4156"  # five bytes in three instructions
NO_TABLES = TextTables()
RETPOLINES = TextTables(has_jump_tables=False)


def refused(code: str, tables: TextTables = NO_TABLES, *, cold: str = "", at: int = 0) -> str:
    with pytest.raises(RefusedError) as caught:
        jump_run(function(code, cold=cold, tables=tables), START + at, tables)
    return str(caught.value)


def test_a_long_instruction_is_a_run_of_its_own() -> None:
    run = jump_run(function("48c7c001000000" + "c3"), START)

    assert (run.addr, run.stop, len(run.instructions)) == (START, START + 7, 1)
    assert run.detour(SLOT) == slot(run.instructions[0], SLOT)


def test_short_instructions_are_displaced_together() -> None:
    run = jump_run(function(PUSHES + "90c3"), START)

    assert (len(run.instructions), run.stop) == (3, START + 5)
    assert run.detour(SLOT).hex() == PUSHES + "e9" + to(START + 5, 5, place=SLOT + 5)


def test_a_return_and_the_int3_after_it_are_a_run() -> None:
    run = jump_run(function("90" + "c3" + "cc" * 4), START + 1)

    assert run.stop == START + 6
    assert run.detour(SLOT).hex() == "c3cc"


def test_branches_out_of_a_run_are_relocated() -> None:
    run = jump_run(function("85c0" + "7410" + "90" + "90" * 20 + "c3"), START)

    assert run.detour(SLOT).hex().startswith("85c0" + "0f84" + to(START + 20, 6, place=SLOT + 2))


def test_a_branch_to_the_runs_first_byte_does_no_harm() -> None:
    assert jump_run(function(PUSHES + "ebf9"), START).stop == START + 5


def test_a_last_call_returns_after_the_run() -> None:
    call = "e8" + to(OUTSIDE, 5, place=START + 1)

    assert jump_run(function("90" + call + "c3"), START).stop == START + 6


@pytest.mark.parametrize("call", ["ffd0", "ff10"])
def test_a_call_that_would_return_into_the_run_is_refused(call: str) -> None:
    assert "returns into" in refused(call + "90" * 5 + "c3")


def test_a_branch_into_the_run_is_refused_from_anywhere() -> None:
    inside = "something leads to f+0x1"

    assert inside in refused(PUSHES + "ebfa")
    assert inside in refused(PUSHES + "c3", cold="e9" + to(START + 1, 5, place=COLD))
    assert inside in refused(PUSHES + "c3", TextTables(exceptions={COLD: START + 1}))
    assert inside in refused(PUSHES + "c3", TextTables(jump_labels={COLD: START + 1}))
    assert inside in refused(PUSHES + "488d05" + to(START + 1, 7, place=START + 5) + "c3")


def test_a_branch_to_the_runs_last_byte_is_refused_and_one_to_the_next_is_not() -> None:
    shorter_last = "4157" + "4156" + "55"

    assert "something leads to f+0x4" in refused(shorter_last + "ebfd")
    assert jump_run(function(shorter_last + "ebfe"), START).stop == START + 5


def test_an_instruction_that_may_not_be_displaced_is_named() -> None:
    assert refused("90" + "0f0b" + "9090c3").startswith("f+0x1: it raises an exception")
    site = TextTables(jump_labels={START + 1: COLD})
    assert refused("90" + "0f1f440000" + "c3", site).startswith("f+0x1: it is a jump label")


def test_too_few_bytes_before_the_end_are_refused() -> None:
    assert "is not in f" in refused("9090")
    assert "after the end" in refused("c3")
    assert "after the end" in refused("c3" + "0f1f4000" + "90")
    assert "after the end" in refused("c3" + "cc" * 2)


def test_a_run_does_not_go_into_what_a_jump_leads_around() -> None:
    assert "after the end" in refused("eb03" + "909090" + "c3")


def test_a_function_that_is_not_proven_has_no_run_of_several() -> None:
    assert "may hide" in refused(PUSHES + "90" + "cc" + "90" + "c3")
    assert jump_run(function("48c7c001000000" + "90cc90c3"), START).stop == START + 7


def test_an_indirect_jump_may_lead_anywhere_but_with_retpolines() -> None:
    assert "indirect jump" in refused(PUSHES + "ffe0")
    assert jump_run(function(PUSHES + "ffe0"), START, RETPOLINES).stop == START + 5


def test_a_function_that_computes_places_in_itself_may_jump_anywhere() -> None:
    assert "indirect jump" in refused(PUSHES + "90" + "488d05f9ffffff" + "ffe0", RETPOLINES)


def test_an_address_inside_an_instruction_has_no_run() -> None:
    assert "is inside" in refused("48c7c001000000" + "c3", at=2)
