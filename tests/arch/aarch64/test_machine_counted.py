"""Members that code adds 1 to: a load, an addition and a store."""

import pytest

from kprobes.arch.aarch64.machine import counted

LOAD, ADD, STORE = 0xF9432A60, 0x91000400, 0xF9032A60
"""ldr x0, [x19, #0x650]; add x0, x0, #1; str x0, [x19, #0x650]."""
NOP = 0xD503201F


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([LOAD, ADD, STORE], [0x650]),
        ([LOAD, NOP, ADD, NOP, STORE], [0x650]),
        ([LOAD, STORE], []),
        ([LOAD, ADD + (1 << 10), STORE], []),  # add x0, x0, #2
        ([LOAD, ADD, STORE + (1 << 10)], []),  # to another place
        ([LOAD, ADD, STORE + (1 << 5)], []),  # of another struct
        ([], []),
    ],
)
def test_places_of_what_is_counted_up(words: list[int], found: list[int]) -> None:
    assert list(counted(b"".join(word.to_bytes(4, "little") for word in words))) == found
