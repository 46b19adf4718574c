"""Functions made by hand, and bytes that are none."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprobes.arch.insn import Flow
from kprobes.arch.x86_64.decode import decode_function
from kprobes.arch.x86_64.insn import MAX_SIZE
from kprobes.model.kernel import TextPart, TextTables
from kprobes.units import Addr
from tests.build.text import COLD, START, first, function, to

OUTSIDE = START + 0x10000


@pytest.mark.parametrize(
    ("code", "flow", "target"),
    [
        ("90", Flow.NEXT, None),
        ("0f05", Flow.NEXT, None),
        ("eb10", Flow.JUMP, START + 0x12),
        ("e9" + to(OUTSIDE, 5), Flow.JUMP, OUTSIDE),
        ("74fe", Flow.BRANCH, START),
        ("0f84" + to(OUTSIDE, 6), Flow.BRANCH, OUTSIDE),
        ("e2fe", Flow.BRANCH, START),
        ("e8" + to(OUTSIDE, 5), Flow.CALL, OUTSIDE),
        ("ffd0", Flow.INDIRECT_CALL, None),
        ("ff10", Flow.INDIRECT_CALL, None),
        ("ffe0", Flow.INDIRECT_JUMP, None),
        ("c3", Flow.RETURN, None),
        ("c20800", Flow.RETURN, None),
        ("0f0b", Flow.TRAP, None),
        ("cc", Flow.TRAP, None),
        ("c7f800000000", Flow.TRANSACTION, START + 6),
        ("06", Flow.UNKNOWN, None),
    ],
)
def test_an_instruction_says_where_it_goes_on(code: str, flow: Flow, target: int | None) -> None:
    found = first(code)

    assert (found.flow, found.target) == (flow, target)


def test_thunks_are_what_they_stand_for() -> None:
    tables = TextTables(returns=frozenset({OUTSIDE}), indirect=frozenset({OUTSIDE + 32}))
    jump, call = "e9" + to(OUTSIDE + 32, 5), "e8" + to(OUTSIDE + 32, 5, place=START + 5)
    ret = "e9" + to(OUTSIDE, 5, place=START + 10)

    found = function(jump + call + ret, tables=tables).instructions

    assert found[START].flow is Flow.INDIRECT_JUMP
    assert found[START + 5].flow is Flow.INDIRECT_CALL
    assert found[START + 10].flow is Flow.RETURN


def test_targets_are_branches_of_all_parts_and_what_tables_lead_to_and_addresses_taken() -> None:
    cold_jump = "e9" + to(START + 9, 5, place=COLD)
    take = "488d05f2ffffff"  # lea rax, [rip-14]
    tables = TextTables(exceptions={1: START + 2}, jump_labels={2: OUTSIDE})

    found = function("eb06" + "90" * 7 + take + "c3", cold=cold_jump, tables=tables)

    assert found.targets == {START + 8, START + 9, START + 2}


def test_a_taken_address_is_one_that_lea_or_an_immediate_names() -> None:
    place = START.to_bytes(8, "little")
    for code in ("48c7c0" + place[:4].hex(), "48b8" + place.hex(), "68" + place[:4].hex()):
        assert START in function(code).targets


def test_padding_after_a_function_is_filler() -> None:
    found = function("c3" + "cccc" + "6690" + "0f1f4000").instructions.values()

    assert [i.is_filler for i in found] == [False, True, True, True, True]


def test_int3_after_a_jump_is_filler_but_not_where_something_leads() -> None:
    assert function("eb01" + "cc" + "c3").instructions[START + 2].is_filler
    assert not function("7402" + "eb01" + "cc" + "90c3").instructions[START + 4].is_filler


def test_nops_at_the_start_are_executed() -> None:
    assert not function("0f1f440000" + "c3").instructions[START].is_filler


def test_after_somebody_elses_int3_nothing_is_proven() -> None:
    found = function("90" + "cc" + "8b03" + "c3")

    assert found.doubt(START) is None
    assert "int3" in (found.doubt(START + 2) or "")


def test_after_no_instruction_nothing_is_proven_in_this_part_only() -> None:
    found = function("90" + "06" + "90" + "c3", cold="90c3")

    assert "are none" in (found.doubt(START + 3) or "")
    assert found.doubt(COLD) is None


def test_a_branch_into_an_instruction_leaves_doubts() -> None:
    found = function("eb01" + "b8000000ff" + "c3")

    assert "middle" in (found.doubt(START + 2) or "")


def test_a_forced_emulation_prefix_belongs_to_its_instruction() -> None:
    found = function("0f0b78656e" + "0fa2" + "c3").instructions

    assert sorted(found) == [START, START + 7]


@given(code=st.binary(max_size=200), cold=st.binary(max_size=40))
def test_any_bytes_decode_to_the_end_and_every_byte_belongs_to_one_instruction(
    code: bytes, cold: bytes
) -> None:
    parts = [TextPart(addr=Addr(START), code=code), TextPart(addr=Addr(COLD), code=cold)]

    found = decode_function("any", parts)

    whole = b"".join(found.instructions[addr].code for addr in sorted(found.instructions))
    assert whole == code + cold
    for addr in range(START, START + len(code)):
        inside = found.covering(addr)
        assert inside is not None
        assert inside.addr <= addr < inside.next
    for each in found.instructions.values():
        assert len(each.code) <= MAX_SIZE + 5


def test_the_last_addresses_there_are_do_not_wrap_around() -> None:
    start = (1 << 64) - 4

    found = decode_function("top", [TextPart(addr=Addr(start), code=bytes.fromhex("9090eb10"))])

    assert list(found.instructions) == [start, start + 1, start + 2]


def test_a_mebibyte_of_anything_takes_seconds_at_most() -> None:
    part = TextPart(addr=Addr(START), code=bytes.fromhex("66" * 3 + "cc") * (1 << 16))
    begun = time.monotonic()

    decode_function("large", [part])

    assert time.monotonic() - begun < 10
