"""Operations on two numbers of 64 bits, in plain Python."""

from collections.abc import Callable, Mapping

from kprobes.model.definition import Operation
from kprobes.units import U64, signed

SHIFTS = (Operation.SHL, Operation.LSHR, Operation.ASHR)
_ALL: Mapping[Operation, Callable[[int, int], int]] = {
    Operation.ADD: lambda a, b: a + b,
    Operation.SUB: lambda a, b: a - b,
    Operation.MUL: lambda a, b: a * b,
    Operation.AND: lambda a, b: a & b,
    Operation.OR: lambda a, b: a | b,
    Operation.XOR: lambda a, b: a ^ b,
    Operation.SHL: lambda a, b: a << b,
    Operation.LSHR: lambda a, b: (a & U64) >> b,
    Operation.ASHR: lambda a, b: a >> b,
    Operation.EQ: lambda a, b: a == b,
    Operation.NE: lambda a, b: a != b,
    Operation.SLT: lambda a, b: a < b,
    Operation.SLE: lambda a, b: a <= b,
    Operation.SGT: lambda a, b: a > b,
    Operation.SGE: lambda a, b: a >= b,
}


def operate(operation: Operation, left: int, right: int) -> int:
    """Return what an operation makes of two numbers, signed; a shift's is below 64."""
    made = _ALL[operation](signed(left & U64), signed(right & U64))
    return signed(int(made) & U64)
