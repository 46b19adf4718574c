"""The benchmarks' own assembler: words that a disassembler reads as they were written."""

import re

import pytest

from bench.a64 import assemble
from kprobes.arch.aarch64.disasm import text_of
from kprobes.units import Addr

LINES = (
    "mov x3, #0x11",
    "movk x1, #0x5678, lsl #16",
    "mov x1, x30",
    "add x1, sp, #0x10",
    "sub x1, x2, #0xfff",
    "subs x21, x21, #1",
    "add x1, x2, x3",
    "sub x1, x4, x3",
    "eor x12, x13, x11",
    "orr x12, x13, x11",
    "orr x15, x16, x17, lsl #31",
    "cmp x12, x14",
    "madd x12, x13, x14, x15",
    "lsr x12, x11, #0x30",
    "lsl x11, x12, #0x10",
    "ubfx x14, x11, #3, #0x18",
    "bfi x14, x11, #0x20, #0x1f",
    "ldr x1, [x2, #8]",
    "ldr x1, [x2]",
    "ldr w1, [x2, #0xc]",
    "ldrh w1, [x2, #0xe]",
    "str x1, [sp, #0x7ff8]",
    "str w1, [x2]",
    "ldp x1, x2, [x3]",
    "stp x9, x30, [sp, #0x10]",
    "stlr x11, [x12]",
    "casal x15, x13, [x10]",
    "stadd x11, [x10]",
    *(f"mrs x1, {name}" for name in ("sp_el0", "tpidr_el0", "tpidr_el1", "tpidr_el2")),
    *(f"mrs x1, {name}" for name in ("cntvct_el0", "daif", "nzcv")),
    "msr tpidr_el0, x7",
    "svc #0",
    "ret x10",
)
BRANCHES = ("b", "bl", "b.eq", "b.ne", "b.hi", "b.ls", "cbz x1,", "cbnz x2,", "adr x3,")


def _read(code: bytes) -> list[str]:
    found = (text_of(code[at : at + 4], at) for at in range(0, len(code), 4))
    return [" ".join(text) for text in found if text is not None]


@pytest.mark.parametrize("line", LINES)
def test_a_line_is_read_as_it_was_written(line: str) -> None:
    assert _read(assemble(line).code) == [line]


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize(("before", "after"), [(0, 5), (7, 0)])
def test_a_label_is_where_it_stands(branch: str, before: int, after: int) -> None:
    label, nop = "there:\n", "mov x0, x0\n"
    text = (label + nop * before if before else "") + f"{branch} there\n"
    text += nop * after + label if after else ""

    place = "#0x18" if after else "#0"
    assert _read(assemble(text).code)[before] == f"{branch} {place}"


@pytest.mark.parametrize(
    ("number", "words"), [(0, 1), (0x1234, 1), (0x5_0000, 1), (-1, 4), (0x1234_0000_5678, 2)]
)
def test_any_number_is_moved_in_as_few_words_as_it_takes(number: int, words: int) -> None:
    code = assemble(f"mov x1, #{number}").code

    parts = [int.from_bytes(code[at : at + 4], "little") for at in range(0, len(code), 4)]
    assert len(parts) == words
    assert sum((p >> 5 & 0xFFFF) << 16 * (p >> 21 & 3) for p in parts) == number & (1 << 64) - 1


def test_a_name_that_is_no_label_is_left_to_linking() -> None:
    template = assemble("ret x1\nmovz x13, event0")

    assert [each.symbol for each in template.relocations] == ["event0"]
    assert _read(template.link(Addr(0x1000), {"event0": 0x1234}))[1] == "mov x13, #0x1234"


def test_data_comes_last_where_it_is_aligned() -> None:
    code = assemble('svc #0\nname:\n.asciz "ab"\n.balign 16\nbody:').code

    assert code[4:] == b"ab\0" + bytes(9)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("mul x0, x1, x2", "mul xxx: not among"),
        ("fmov d0, x1", "d0: no such label"),
        ("ldr x1, [x2, #4]", "4 does not fit"),
        ("add x1, x2, #4096", "4096 does not fit"),
        ("add x1, {x2}", "{x2}"),
        ('.asciz "a"\nsvc #0', "after data"),
    ],
)
def test_what_is_not_known_or_does_not_fit_is_an_error(line: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        assemble(line)
