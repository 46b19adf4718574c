"""Data that a function names."""

import pytest

from kprobes.arch.x86_64.machine import references

TEXT = 0xFFFF_FFFF_8100_0000


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("488b1d10000000", TEXT + 0x17),  # mov rbx, [rip+0x10]
        ("488d3df0ffffff", TEXT - 9),  # lea rdi, [rip-0x10]
        ("48c7c700002082", 0xFFFF_FFFF_8220_0000),  # mov rdi, 0xffffffff82200000
        ("488b042500002082", 0xFFFF_FFFF_8220_0000),  # mov rax, [0xffffffff82200000]
    ],
)
def test_operands_name_data(code: str, found: int) -> None:
    assert found in references(bytes.fromhex(code), TEXT)


def test_registers_name_none() -> None:
    assert list(references(bytes.fromhex("4889f8 488b4708 c3"), TEXT)) == []
