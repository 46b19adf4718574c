"""Our own instructions, as a disassembler reads them."""

import pytest

from kprobes.arch.aarch64 import encode
from kprobes.arch.aarch64.arch import lines
from kprobes.arch.aarch64.encode import veneer
from kprobes.arch.insn import Syntax
from kprobes.units import Addr

PLACE = Addr(0xFFFF_8000_0800_0000)


def shown(code: bytes) -> str:
    found = lines(code, PLACE, next(iter(Syntax)))
    return "; ".join(f"{each.mnemonic} {each.operands}".strip() for each in found)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (encode.NOP, "nop"),
        (encode.BTI_C, "bti c"),
        (encode.BRK, "brk #0"),
        (encode.MOV_X9_X30, "mov x9, x30"),
        (encode.b(PLACE, Addr(PLACE + 0x7FF_FFFC)), "b 0xffff80000ffffffc"),
        (encode.bl(PLACE, Addr(PLACE - 0x800_0000)), "bl 0xffff800000000000"),
        (encode.cbz(16, 0x40), "cbz x16, 0xffff800008000044"),
        (encode.br(16), "br x16"),
        (encode.ret(), "ret"),
        (encode.ret(17), "ret x17"),
        (encode.stp(28, 29, 224), "stp x28, x29, [sp, #0xe0]"),
        (encode.stp_down(0, 1, 272), "stp x0, x1, [sp, #-0x110]!"),
        (encode.ldp(2, 3, 16), "ldp x2, x3, [sp, #0x10]"),
        (encode.store(30, 240), "str x30, [sp, #0xf0]"),
        (encode.load(30, 240), "ldr x30, [sp, #0xf0]"),
        (encode.add(encode.SP, encode.SP, 272), "add sp, sp, #0x110"),
        (encode.add(encode.SP, 16, 0), "mov sp, x16"),
        (encode.add(0, encode.SP, 0), "mov x0, sp"),
        (encode.mov(9, 30), "mov x9, x30"),
        (encode.movz(0, 4095), "mov x0, #0xfff"),
        (encode.read_nzcv(0), "mrs x0, nzcv"),
        (encode.write_nzcv(0), "msr nzcv, x0"),
    ],
)
def test_an_instruction_is_what_its_name_says(code: bytes, text: str) -> None:
    assert shown(code) == text


def test_a_number_takes_four_instructions_whatever_it_is() -> None:
    assert shown(encode.move_number(1, PLACE + 0x1234)) == (
        "mov x1, #0x1234; movk x1, #0x800, lsl #16; movk x1, #0x8000, lsl #32; "
        "movk x1, #0xffff, lsl #48"
    )
    assert len(encode.move_number(1, 0)) == 16


@pytest.mark.parametrize("distance", [0x800_0000, -0x800_0004, 2])
def test_what_a_branch_does_not_reach_is_a_bug(distance: int) -> None:
    with pytest.raises(ValueError, match="cannot be reached"):
        encode.b(PLACE, Addr(PLACE + distance))


@pytest.mark.parametrize("distance", [4, -4, 0x7FF_FFFC, -0x800_0000])
def test_a_branch_s_target_is_found_again(distance: int) -> None:
    target = Addr(PLACE + distance)

    assert encode.bl_target(PLACE, encode.bl(PLACE, target)) == target
    assert encode.b_target(PLACE, encode.b(PLACE, target)) == target


def test_other_instructions_have_no_target() -> None:
    code = encode.b(PLACE, Addr(PLACE + 8))

    assert encode.bl_target(PLACE, code) is None
    assert encode.b_target(PLACE, encode.NOP) is None
    assert encode.b_target(PLACE, code[:3]) is None


def test_a_veneer_changes_what_any_call_may_change_and_nothing_else() -> None:
    instructions = shown(veneer(PLACE)).split("; ")

    assert instructions[-1] == "br x16"
    assert {text.split()[1].rstrip(",") for text in instructions} == {"x16"}
    assert veneer(PLACE) == encode.move_number(16, PLACE) + encode.br(16)
