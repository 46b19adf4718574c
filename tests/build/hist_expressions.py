"""Expressions of hist triggers at random, and what they are by kernel/trace/trace_events_hist.c."""

from collections.abc import Mapping
from random import Random

from kprobes.units import U64

_LARGEST_FAST = 1 << 20
"""Numbers below are divided by a constant with a multiplication, which is wrong by one at times."""
_CONSTANTS = (1, 2, 3, 7, 10, 64, 1000, 4097, _LARGEST_FAST - 1, _LARGEST_FAST, 1_000_003, U64)


def random_expression(chance: Random, names: tuple[str, ...]) -> str:
    """Return an expression of some fields, with one to three operators."""

    def operand() -> str:
        return str(chance.choice(_CONSTANTS)) if chance.random() < 0.4 else chance.choice(names)

    words = [operand()]
    for _ in range(chance.randint(1, 3)):
        words += [chance.choice("+-*/"), operand()]
    return "".join(words)


def kernels_number(text: str, fields: Mapping[str, int]) -> int:
    """Return what an expression is, of numbers of 64 bits."""
    for signs in ("+-", "*/"):
        at = max(text.rfind(sign) for sign in signs)
        if at > 0:
            left, sign, right = text[:at], text[at], text[at + 1 :]
            numbers = kernels_number(left, fields), kernels_number(right, fields)
            return _joined(sign, *numbers, is_constant=right.isdigit()) & U64
    return int(text) if text.isdigit() else fields[text] & U64


def _joined(sign: str, one: int, other: int, *, is_constant: bool) -> int:
    if sign != "/":
        return {"+": one + other, "-": one - other, "*": one * other}[sign]
    if not other:
        return U64
    is_power = not other & (other - 1)
    if not is_constant or is_power or other > _LARGEST_FAST or one >= _LARGEST_FAST:
        return one // other
    return (one * (_LARGEST_FAST // other) + _LARGEST_FAST - 1) >> 20
