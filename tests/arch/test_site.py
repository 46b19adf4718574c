"""The x86-64 ftrace site: encodings as another decoder reads them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from iced_x86 import Code, Decoder, Instruction, Mnemonic

from kprobes.arch.x86_64 import slot
from kprobes.arch.x86_64.registers import STUB_NAMES
from kprobes.units import U64, Addr

TEXT = 0xFFFF_FFFF_8100_0000
REACH = (1 << 31) - 1
displacements = st.integers(-(1 << 31), REACH)
places = st.integers(1 << 32, U64 - (1 << 32)).map(Addr)


def _decode(code: bytes, addr: int) -> list[Instruction]:
    return list(Decoder(64, code, ip=addr))


@given(places, displacements)
def test_calls_go_where_they_should(place: Addr, displacement: int) -> None:
    target = Addr(place + slot.SIZE + displacement)

    code = slot.call(place, target)

    (found,) = _decode(code, place)
    assert (found.code, found.near_branch_target) == (Code.CALL_REL32_64, target)
    assert len(found) == slot.SIZE
    assert slot.call_target(place, code) == target


@pytest.mark.parametrize("displacement", [-(1 << 31) - 1, REACH + 1, 1 << 40])
def test_a_target_out_of_reach_is_our_own_bug(displacement: int) -> None:
    with pytest.raises(ValueError, match="cannot be reached"):
        slot.call(Addr(TEXT), Addr(TEXT + slot.SIZE + displacement))


@given(st.binary(max_size=8))
def test_bytes_that_are_no_call_call_nothing(code: bytes) -> None:
    is_call = len(code) == slot.SIZE and code[0] == 0xE8

    assert (slot.call_target(Addr(TEXT), code) is not None) == is_call


@pytest.mark.parametrize("nop", slot.NOPS)
def test_what_counts_as_idle_is_one_instruction_that_does_nothing(nop: bytes) -> None:
    (found,) = _decode(nop, TEXT)

    assert (found.mnemonic, len(found)) == (Mnemonic.NOP, slot.SIZE)


def test_endbr64_is_endbr64() -> None:
    (found,) = _decode(slot.ENDBR64, TEXT)

    assert found.mnemonic == Mnemonic.ENDBR64


def test_the_entry_code_calls_the_body_and_returns() -> None:
    place, body = Addr(TEXT + 0x2000_0000), Addr(TEXT + 0x2000_0040)

    found = _decode(slot.entry(place, body), place)

    calls = [item.near_branch_target for item in found if item.mnemonic == Mnemonic.CALL]
    assert calls == [body]
    assert all(item.code != Code.INVALID for item in found)
    assert found[-1].mnemonic == Mnemonic.RET


def test_the_entry_code_pushes_what_it_says_in_that_order() -> None:
    place = Addr(TEXT)

    found = _decode(slot.entry(place, place), place)

    pushes = [f"{item}" for item in found if item.mnemonic in (Mnemonic.PUSH, Mnemonic.PUSHFQ)]
    said = ["pushfq" if name == "flags" else f"push {STUB_NAMES[name]}" for name in slot.SAVED]
    assert pushes == said[::-1]


def test_the_entry_code_leaves_the_stack_as_it_was() -> None:
    place = Addr(TEXT)

    found = _decode(slot.entry(place, place), place)

    moved = sum(item.stack_pointer_increment for item in found if item.is_stack_instruction)
    added = sum(item.immediate(1) for item in found if item.mnemonic == Mnemonic.ADD)
    # The body takes off what the call pushes, the last return what the site's call pushed.
    assert moved + 8 + added == 8
