"""Verdicts on instructions, alone and among others."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprobes.arch.x86_64.decode import decode_function
from kprobes.arch.x86_64.slot import MAX_SIZE, slot
from kprobes.arch.x86_64.verdict import SlotAction, insn_verdict
from kprobes.model.kernel import Forbidden, TextPart, TextTables
from kprobes.units import Addr
from tests.build.text import COLD, SLOT, START, function, to

OUTSIDE = START + 0x10000


@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        ("90", SlotAction.COPY),
        ("0f1f440000", SlotAction.COPY),
        ("f0480fb111", SlotAction.COPY),
        ("65488b042510000000", SlotAction.COPY),
        ("f348ab", SlotAction.COPY),
        ("9c", SlotAction.COPY),
        ("9d", SlotAction.COPY),
        ("fa", SlotAction.COPY),
        ("fb", SlotAction.COPY),
        ("f4", SlotAction.COPY),
        ("c3", SlotAction.COPY),
        ("c20800", SlotAction.COPY),
        ("48cb", SlotAction.COPY),
        ("ffe0", SlotAction.COPY),
        ("ff6008", SlotAction.COPY),
        ("0f01d9", SlotAction.COPY),
        ("488b0510000000", SlotAction.RELOCATE),
        ("65488b0510000000", SlotAction.RELOCATE),
        ("ff2510000000", SlotAction.RELOCATE),
        ("eb10", SlotAction.RELOCATE),
        ("e9" + to(OUTSIDE, 5), SlotAction.RELOCATE),
        ("7410", SlotAction.RELOCATE),
        ("0f84" + to(OUTSIDE, 6), SlotAction.RELOCATE),
        ("e8" + to(OUTSIDE, 5), SlotAction.EMULATE),
        ("ffd0", SlotAction.EMULATE),
        ("ff542410", SlotAction.EMULATE),
        ("ff1510000000", SlotAction.EMULATE),
        ("e2fe", SlotAction.EMULATE),
        ("67e310", SlotAction.EMULATE),
    ],
)
def test_what_a_slot_does_with_an_instruction(code: str, verdict: SlotAction) -> None:
    found = insn_verdict(function(code + "90" * 20 + "c3"), START)

    assert (found.verdict, found.is_refused) == (verdict, False)
    assert found.why


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("06", "are none"),
        ("cc90", "int3"),
        ("cd80", "on purpose"),
        ("f1", "on purpose"),
        ("0f0b", "on purpose"),
        ("0fb9c0", "on purpose"),
        ("48cf", "leaves the kernel"),
        ("0f05", "leaves the kernel"),
        ("480f07", "leaves the kernel"),
        ("480f35", "leaves the kernel"),
        ("0f01f8", "per-CPU"),
        ("0f01c1", "hypervisor"),
        ("0f01c2", "hypervisor"),
        ("0f01d8", "hypervisor"),
        ("c7f800000000", "transaction"),
        ("0f01d5", "transaction"),
        ("8ed0", "stack segment"),
        ("0fb20424", "stack segment"),
        ("ff5c2408", "far branch"),
        ("48ff2c24", "far branch"),
        ("66e900000000", "prefix"),
        ("66ffd0", "prefix"),
        ("4066e900000000", "prefix"),
        ("ffd4", "stack pointer"),
        ("f30f1efa", "probe the instruction after it"),
        ("67488b0500000000", "32-bit"),
        ("0f0b6b766d0fa2", "on purpose"),
    ],
)
def test_what_no_slot_may_run_is_refused_with_the_reason(code: str, words: str) -> None:
    found = insn_verdict(function(code + "90c3"), START)

    assert found.is_refused
    assert words in found.why


def test_inside_an_instruction_the_reason_names_it() -> None:
    found = insn_verdict(function("90" + "b800000000" + "c3", name="vfs_read"), START + 3)

    assert found.why == "vfs_read+0x3 is inside the 5-byte instruction at vfs_read+0x1"
    assert found.instruction is None


def test_outside_of_the_function_is_refused() -> None:
    for addr in (START - 1, START + 2, COLD, 0, -1, 1 << 70):
        assert "is not in f" in insn_verdict(function("90c3"), addr).why


def test_a_cold_part_is_judged_like_the_rest() -> None:
    found = insn_verdict(function("90c3", cold="e9" + to(START, 5, place=COLD)), COLD)

    assert found.verdict is SlotAction.RELOCATE


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        (TextTables(ftrace=frozenset({START})), "ftrace strategy"),
        (TextTables(static_calls=frozenset({START})), "static call"),
        (TextTables(jump_labels={START: COLD}), "jump label"),
        (TextTables(exceptions={START: COLD}), "exception table"),
        (TextTables(alternatives=((START - 8, START - 4), (START - 1, START + 1))), "alternative"),
        (TextTables(forbidden=(Forbidden(start=Addr(0), stop=Addr(START + 1), why="no"),)), "no"),
    ],
)
def test_what_the_kernels_tables_name_is_refused(tables: TextTables, words: str) -> None:
    assert words in insn_verdict(function("0f1f440000" + "90c3"), START, tables).why
    assert not insn_verdict(function("0f1f440000" + "90c3"), START + 5, tables).is_refused


def test_every_byte_of_a_static_calls_site_is_the_kernels() -> None:
    tables = TextTables(static_calls=frozenset({START}))
    found = function("c3" + "cc" * 4 + "90c3", tables=tables)

    assert "static call" in insn_verdict(found, START + 4, tables).why
    assert not insn_verdict(found, START + 5, tables).is_refused


@pytest.mark.parametrize(
    ("name", "is_forbidden"),
    [("nmi.part.0", True), ("nmi.isra.0.cold", True), ("nmi", False), ("nmi2.part.0", False)],
)
def test_what_was_split_from_a_forbidden_function_is_forbidden(
    name: str, is_forbidden: bool
) -> None:
    tables = TextTables(forbidden_names=frozenset({"nmi"}))

    found = insn_verdict(function("90", name=name), START, tables)

    assert found.is_refused is is_forbidden
    assert ("split from nmi" in found.why) is is_forbidden


def test_the_cold_part_of_what_is_forbidden_is_forbidden() -> None:
    area = Forbidden(start=Addr(START), stop=Addr(START + 1), why="on the blacklist")
    tables = TextTables(forbidden=(area,))

    assert insn_verdict(function("90c3", cold="90c3"), COLD, tables).why == "on the blacklist"


@pytest.mark.parametrize("name", ["__pfx_vfs_read", "__cfi_vfs_read"])
def test_the_padding_before_a_function_is_the_kernels(name: str) -> None:
    assert "before a function" in insn_verdict(function("90c3", name=name), START).why


def test_after_a_change_of_the_stack_segment_nothing_may_trap() -> None:
    found = function("8ed0" + "4889c4" + "90c3")

    assert "stack segment" in insn_verdict(found, START + 2).why
    assert not insn_verdict(found, START + 5).is_refused


@pytest.mark.parametrize("wait", ["f4", "0f01c9", "480f35"])
def test_sti_and_what_leans_on_it_stay_together(wait: str) -> None:
    found = function("fb" + wait + "c3")

    assert "interrupts" in insn_verdict(found, START).why
    assert insn_verdict(found, START + 1).is_refused


def test_sti_with_nothing_known_after_it_is_refused() -> None:
    assert insn_verdict(function("fb"), START).is_refused


def test_what_does_not_lean_on_sti_may_follow_it() -> None:
    found = function("fb" + "90" + "c3")

    assert not insn_verdict(found, START).is_refused
    assert not insn_verdict(found, START + 1).is_refused


def test_a_cfi_check_stays_as_it_is() -> None:
    found = function("41ba11223344" + "450353fc" + "7402" + "0f0b" + "c3")

    assert "CFI" in insn_verdict(found, START).why
    assert "CFI" in insn_verdict(found, START + 6).why
    assert not insn_verdict(function("41ba11223344" + "90" + "90c3"), START).is_refused


@given(code=st.binary(min_size=1, max_size=64))
def test_any_bytes_get_a_verdict_and_what_is_not_refused_fits_into_a_slot(code: bytes) -> None:
    found = decode_function("any", [TextPart(addr=Addr(START), code=code)])

    for addr in range(START, START + len(code)):
        slot_verdict = insn_verdict(found, addr)
        if slot_verdict.is_refused:
            assert slot_verdict.why
        else:
            assert slot_verdict.instruction is not None
            if slot_verdict.verdict is SlotAction.COPY:
                assert len(slot(slot_verdict.instruction, SLOT)) <= MAX_SIZE
