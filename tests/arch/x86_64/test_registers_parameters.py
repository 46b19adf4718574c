"""Registers and stack words of arguments at a function's entry, against a compiler's."""

from collections.abc import Sequence

import pytest

from kprobes.arch.x86_64.registers import passed


@pytest.mark.parametrize(
    ("sizes", "places"),
    [
        ([], []),
        ([8, 4, 1], [("di",), ("si",), ("dx",)]),
        ([8] * 8, [("di",), ("si",), ("dx",), ("cx",), ("r8",), ("r9",), 8, 16]),
        ([16, 8], [("di", "si"), ("dx",)]),
        ([8, 24, 8], [("di",), 8, ("si",)]),
        # What does not fit into the registers that are left goes to the stack as a whole; what
        # comes after may still have them.
        ([8] * 5 + [16, 8, 8], [("di",), ("si",), ("dx",), ("cx",), ("r8",), 8, ("r9",), 24]),
        ([40, 3, 20], [8, ("di",), 48]),
        ([0, 8], [(), ("di",)]),
    ],
)
def test_arguments_are_where_the_abi_puts_them(
    sizes: Sequence[int], places: Sequence[object]
) -> None:
    found = [each.registers if each.stack is None else each.stack for each in passed(sizes)]

    assert found == places
