"""Lines of assembly, by their text and by what they name."""

import pytest

from kprobes.arch.aarch64.arch import lines
from kprobes.arch.aarch64.disasm import list_code
from kprobes.arch.insn import Syntax
from tests.build.a64 import NOP, RET, START, bl, code_of


@pytest.mark.parametrize(
    ("word", "text"),
    [
        (NOP, "nop"),
        (RET, "ret"),
        (bl(START + 0x100), f"bl {START + 0x100:#x}"),
        ("b4000203", f"cbz x3, {START + 0x40:#x}"),
        ("b6400205", f"tbz x5, #0x28, {START + 0x40:#x}"),
        ("54000200", f"b.eq {START + 0x40:#x}"),
        ("f9400020", "ldr x0, [x1]"),
        ("a9be7bfd", "stp x29, x30, [sp, #-0x20]!"),
        ("d4210000", "brk #0x800"),
        ("d503233f", "paciasp"),
        ("02000000", "(bad)"),
    ],
)
def test_operands_are_written_as_objdump_writes_them(word: str, text: str) -> None:
    (line,) = list_code(code_of(word), START)

    assert line.text == text


def test_what_a_line_names_is_told_beside_its_text() -> None:
    # bl; ldr x0, +0x40; adr x0, +0x1001; ldr x0, [x1]
    call, literal, address, plain = list_code(
        code_of(f"{bl(START + 0x100)} 58000200 30008000 f9400020"), START
    )

    assert call.target == START + 0x100
    assert literal.place == literal.addr + 0x40
    assert address.value == address.addr + 0x1001
    assert (plain.target, plain.place, plain.value, plain.per_cpu) == (None, None, None, None)


def test_an_address_in_two_halves_is_named_where_it_is_whole() -> None:
    page = (START & ~0xFFF) + 0x1000
    # adrp x1; add x2, x1, #0x123; ldr x3, [x1, #8]; mov x1, x0; ldr x3, [x1, #8]
    adrp, add, load, _, unknown = list_code(
        code_of("b0000001 91048c22 f9400423 aa0003e1 f9400423"), START
    )

    assert adrp.value == page
    assert add.value == page + 0x123
    assert load.place == page + 8
    assert (unknown.place, unknown.value) == (None, None)


def test_an_address_in_four_parts_is_named_where_it_is_whole() -> None:
    # movz x0, #0x1234; movk x0, #0x811, lsl #16; movk x0, #0x8000, lsl #32; movk x0, #0xffff, ...
    found = list_code(code_of("d2824680 f2a10220 f2d00000 f2ffffe0"), START)

    assert [line.value for line in found] == [None, None, None, 0xFFFF_8000_0811_1234]


def test_every_byte_is_in_a_line() -> None:
    found = list_code(code_of(RET) + b"\x01\x02", START)

    assert [line.code for line in found] == [code_of(RET), b"\x01\x02"]
    assert found[1].mnemonic == "(bad)"


def test_there_is_one_syntax() -> None:
    code = code_of("f9400020")

    assert lines(code, START, Syntax.INTEL) == lines(code, START, Syntax.ATT)
