"""Addresses as a disassembler names them."""

from kprobes.model.kernel import name_of
from tests.build.kernel import TEXT, FakeSymbols, symbol


def test_an_address_is_named_by_its_symbol_and_offset() -> None:
    symbols = FakeSymbols([symbol("f", TEXT), symbol("g", TEXT + 0x40, module="ext4")])

    assert name_of(symbols, TEXT) == "f"
    assert name_of(symbols, TEXT + 0x12) == "f+0x12"
    assert name_of(symbols, TEXT + 0x41) == "g+0x1 [ext4]"


def test_an_address_without_a_symbol_is_a_number() -> None:
    assert name_of(FakeSymbols([]), TEXT) == f"{TEXT:#x}"
