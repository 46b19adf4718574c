"""Instructions of one piece on a per-CPU word, so that no interrupt can come in between.

A place that a signed 32-bit displacement reaches stands in the instruction. What a guest gives us
can be farther away, behind its first chunk of per-CPU memory, and then takes a register.
"""

from collections.abc import Sequence

from kprobes.codegen.context import Context
from kprobes.codegen.ir import Value, const

_REACH = 1 << 31
_CHANGE = "ri,~{flags},~{memory}"


def exchange(context: Context, place: int, expected: Value, new: Value) -> Value:
    """Put a new u64 where an expected one is; return what was there before."""
    text, constraints = context.code.exchange
    return context.out.asm_value(*_at(place, text, constraints, (expected, new)))


def change(context: Context, text: str, place: int, operand: Value) -> None:
    """Change a word by one of the instructions of ``CodeFacts``."""
    context.out.asm(*_at(place, text, _CHANGE, (operand,)))


def _at(
    place: int, text: str, constraints: str, operands: Sequence[Value]
) -> tuple[str, str, Sequence[Value]]:
    offset = const(place)
    if -_REACH <= int(offset.text) < _REACH:
        return text.format(offset.text), constraints, operands
    own, clobbers = constraints.split(",~", 1)
    number = own.count(",") + 1
    return text.format(f"(${number})"), f"{own},r,~{clobbers}", (*operands, offset)
