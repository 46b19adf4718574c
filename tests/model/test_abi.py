"""Templates to code: the numbers that linking puts in."""

import pytest

from kprobes.model.abi import Field, Relocation, Template
from kprobes.units import Addr

BASE = Addr(0xFFFF_FFFF_C000_0000)


def link(value: int, *, size: int, is_relative: bool = False, addend: int = 0) -> bytes:
    field = Field(size=size, is_relative=is_relative)
    place = Relocation(offset=2, field=field, symbol="it", addend=addend)
    template = Template(code=bytes(2 + size) + b"\x90", relocations=(place,))
    return template.link(BASE, {"it": value})


@pytest.mark.parametrize(
    ("value", "size", "found"),
    [
        (0x7FFF_FFFF, 4, "ffffff7f"),
        (0xFFFF_FFFF_82B4_A350, 4, "50a3b482"),
        (0xFFFF_FFFF_82B4_A350, 8, "50a3b482ffffffff"),
        (0x1234, 8, "3412000000000000"),
    ],
)
def test_a_number_is_put_in_and_nothing_else_changes(value: int, size: int, found: str) -> None:
    assert link(value, size=size) == b"\0\0" + bytes.fromhex(found) + b"\x90"


def test_a_relative_number_counts_from_its_own_place() -> None:
    code = link(BASE + 0x102, size=4, is_relative=True, addend=-4)

    assert code[2:6] == (0xFC).to_bytes(4, "little")


@pytest.mark.parametrize("value", [1 << 31, 0xFFFF_FFFF_7FFF_FFFF, 0xFFFF_8880_0000_0000])
def test_a_number_that_does_not_fit_is_a_bug(value: int) -> None:
    with pytest.raises(ValueError, match=r"it: .* in 32 bits"):
        link(value, size=4)
