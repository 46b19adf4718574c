"""Verdicts on instructions, each with its reason."""

import pytest

from kprobes.arch.aarch64.decode import decode_function
from kprobes.arch.aarch64.verdict import insn_verdict
from kprobes.model.kernel import Forbidden, TextPart, TextTables
from kprobes.units import Addr
from tests.build.a64 import BUG, COLD, NOP, PACIASP, RET, START, bl, code_of, function

CASES = [
    ("aa1303e0", "copy", "every address"),
    ("f9400020", "copy", "every address"),
    (NOP, "copy", "every address"),
    ("d50323bf", "copy", "every address"),
    ("d50320ff", "copy", "every address"),
    ("d503211f", "copy", "every address"),
    ("dac10020", "copy", "every address"),
    ("d5384101", "copy", "every address"),
    ("d50b7e23", "copy", "every address"),
    ("d5033fdf", "copy", "every address"),
    ("c8dffc20", "copy", "every address"),
    ("c8a07c41", "copy", "every address"),
    ("f8200041", "copy", "every address"),
    # ldr x30, [x18, #-8]!, as a shadow call stack is popped.
    ("f85f8e5e", "copy", "every address"),
    (RET, "copy", "leaves it by itself"),
    ("d65f0bff", "copy", "leaves it by itself"),
    ("d61f0200", "copy", "leaves it by itself"),
    ("d71f0822", "copy", "leaves it by itself"),
    ("14000010", "relocate", "same target"),
    ("54000200", "relocate", "same target"),
    ("b4000203", "relocate", "same target"),
    ("371ffe05", "relocate", "same target"),
    ("30008000", "relocate", "same address"),
    ("90000001", "relocate", "same address"),
    ("97fffff0", "emulate", "x30"),
    ("d63f0100", "emulate", "x30"),
    ("58000200", "emulate", "its own register"),
    ("98000202", "emulate", "its own register"),
    ("d8000200", "emulate", "hints"),
    ("d63f03c0", "refuse", "overwrites"),
    ("d73f087e", "refuse", "overwrites"),
    ("58fffe1f", "refuse", "keeps nothing"),
    ("9c000200", "refuse", "vector register"),
    (BUG, "refuse", "on purpose"),
    ("d4200080", "refuse", "somebody else's breakpoint"),
    ("d4400000", "refuse", "debugger"),
    ("00000000", "refuse", "not an instruction"),
    ("02000000", "refuse", "not an instruction"),
    ("d4000002", "refuse", "hypervisor"),
    ("d69f03e0", "refuse", "leaves the kernel"),
    ("d50342df", "refuse", "state of the CPU"),
    ("d5182000", "refuse", "state of the CPU"),
    ("d53b4220", "refuse", "interrupt mask"),
    ("d503205f", "refuse", "waits"),
    ("d5031003", "refuse", "waits"),
    ("d503229f", "refuse", "hint"),
    ("d503203f", "refuse", "hint"),
    ("d503245f", "refuse", "land on it"),
    ("c85f7c20", "refuse", "exclusive"),
    ("c8027c20", "refuse", "exclusive"),
]


@pytest.mark.parametrize(("word", "verdict", "reason"), CASES)
def test_what_a_slot_does_with_an_instruction_and_why(word: str, verdict: str, reason: str) -> None:
    got = insn_verdict(function(f"{NOP} {word} {RET}"), START + 4)

    assert got.verdict == verdict
    assert reason in got.why


def test_paciasp_at_the_entry_is_landed_on_where_the_kernel_is_compiled_for_that() -> None:
    signing = function(f"{PACIASP} {RET}")

    assert "land on it" in insn_verdict(signing, START).why
    assert insn_verdict(signing, START, TextTables(has_landing_pads=False)).verdict == "copy"


def test_paciasp_after_the_tracer_s_nops_is_not_landed_on() -> None:
    assert insn_verdict(function(f"{NOP} {NOP} {PACIASP} {RET}"), START + 8).verdict == "copy"


def test_between_an_exclusive_load_and_its_store_nothing_may_be_probed() -> None:
    # mov x3, x1; 1: ldxr x0, [x1]; add x0, x0, x2; stxr w4, x0, [x1]; cbnz w4, 1b; ret
    sequence = function("aa0103e3 c85f7c20 8b020000 c8047c20 35ffffa4 d65f03c0")

    verdicts = [insn_verdict(sequence, START + at).verdict for at in range(0, 24, 4)]

    assert verdicts == ["copy", "refuse", "refuse", "refuse", "relocate", "copy"]


def test_a_branch_out_of_an_exclusive_sequence_ends_it() -> None:
    # 1: ldxr x0, [x1]; cmp x0, x2; b.ne 2f; stxr w4, x3, [x1]; cbnz w4, 1b; 2: mov x5, x0; ret
    compare = function("c85f7c20 eb02001f 54000061 c8047c23 35ffff84 aa0003e5 d65f03c0")

    assert insn_verdict(compare, START + 4).is_refused
    assert insn_verdict(compare, START + 8).is_refused
    assert insn_verdict(compare, START + 20).verdict == "copy"


def test_an_exclusive_load_that_nothing_stores_after_protects_nothing() -> None:
    # __cmpwait: ldxr w0, [x1]; eor w0, w0, w2; cbnz w0, 1f; wfe; 1: mov x0, #0; ret
    waiting = function("885f7c20 4a020000 35000040 d503205f d2800000 d65f03c0")

    assert insn_verdict(waiting, START + 4).verdict == "copy"


def test_constants_in_the_text_are_no_instructions() -> None:
    # ldr x0, 1f; ret; 1: .quad
    reading = function("58000040 d65f03c0 aa0003e5 aa0003e5")

    assert [insn_verdict(reading, START + at).is_refused for at in (8, 12)] == [True, True]
    assert "constant" in insn_verdict(reading, START + 12).why


def test_what_is_after_the_last_instruction_is_not_probed() -> None:
    padded = function(f"{RET} {NOP} {NOP}")

    assert "after the function's last instruction" in insn_verdict(padded, START + 4).why


def test_an_address_inside_an_instruction_or_outside_is_refused() -> None:
    small = function(f"{NOP} {RET}")

    assert "inside the 4-byte instruction at f+0x4" in insn_verdict(small, START + 6).why
    assert "not in f" in insn_verdict(small, START + 8).why


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        (TextTables(ftrace=frozenset({START + 4})), "function tracer"),
        (TextTables(ftrace=frozenset({START + 8})), "function tracer"),
        (TextTables(jump_labels={START + 4: START + 8}), "jump label"),
        (TextTables(exceptions={START + 4: START + 8}), "exception table"),
        (TextTables(alternatives=((START, START + 8),)), "alternative"),
        (
            TextTables(
                forbidden=(Forbidden(start=Addr(START), stop=Addr(START + 8), why="noinstr"),)
            ),
            "noinstr",
        ),
    ],
)
def test_what_the_kernel_s_tables_forbid(tables: TextTables, reason: str) -> None:
    found = insn_verdict(function(f"{NOP} {NOP} aa1303e0 {RET}"), START + 4, tables)

    assert found.is_refused
    assert reason in found.why


def test_a_tracer_s_site_is_its_call_and_the_move_before_it() -> None:
    tables = TextTables(ftrace=frozenset({START + 4}))
    traced = function(f"aa1e03e9 {bl(COLD, at=START + 4)} {PACIASP} {RET}")

    found = [insn_verdict(traced, START + at, tables).is_refused for at in (0, 4, 8)]

    assert found == [True, True, False]


@pytest.mark.parametrize("words", [f"{RET} {RET}", f"{NOP} 14000000", "aa0003e5 58000040"])
def test_a_pointer_in_front_of_the_next_function_is_no_code_whatever_it_looks_like(
    words: str,
) -> None:
    # mov x5, x0; br x16, and the pointer
    code, tables = f"aa0003e5 d61f0200 {words}", TextTables(pointers=frozenset({START + 8}))

    found = [insn_verdict(function(code, tables=tables), START + at, tables) for at in (8, 12)]

    assert [found.is_refused for found in found] == [True, True]
    assert all("pointer of the kernel's function tracer" in found.why for found in found)
    assert insn_verdict(function(code, tables=tables), START, tables).verdict == "copy"
    assert START + 8 not in function(code, tables=tables).targets


def test_bytes_after_the_last_whole_word_are_no_instruction() -> None:
    part = TextPart(addr=Addr(START), code=code_of(RET) + b"\x1f\x20")

    assert "last whole instruction" in insn_verdict(decode_function("f", (part,)), START + 4).why
