"""Registers and stack words of arguments at a function's entry."""

import pytest

from kprobes.arch.aarch64.registers import passed
from kprobes.arch.arch import Passed


def in_registers(*numbers: int) -> Passed:
    return Passed(registers=tuple(f"x{n}" for n in numbers))


@pytest.mark.parametrize(
    ("sizes", "places"),
    [
        ([8, 4, 1], [in_registers(0), in_registers(1), in_registers(2)]),
        ([16, 8], [in_registers(0, 1), in_registers(2)]),
        ([12, 8], [in_registers(0, 1), in_registers(2)]),
        # A larger one is a pointer to the caller's copy.
        ([24, 8], [Passed(registers=("x0",), is_address=True), in_registers(1)]),
        ([8] * 10, [*(in_registers(n) for n in range(8)), Passed(stack=0), Passed(stack=8)]),
        # What does not fit whole is on the stack, and no register is left to those after it.
        (
            [8] * 7 + [16, 8],
            [*(in_registers(n) for n in range(7)), Passed(stack=0), Passed(stack=16)],
        ),
        ([8] * 8 + [24], [*(in_registers(n) for n in range(8)), Passed(stack=0, is_address=True)]),
    ],
)
def test_where_arguments_are(sizes: list[int], places: list[Passed]) -> None:
    assert passed(sizes) == places
