"""Numbers of a ``print fmt``, computed as C computes them on the kernel's machines.

These are of 64 bits and little endian. A number has the dtype that C's rules give it, which goes
round as its type does. What depends on no column is computed once.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec import Struct

from kprobes.formats.print_c import PrintType, UnknownPrint
from kprobes.model.events import Column
from kprobes.units import U64

Compute = Callable[[tuple[Column, ...]], Column]
"""From a batch's columns to a column of shape (n,), or (1,) where it depends on none of them."""
Dtype = np.dtype[Any]

INT, UNSIGNED = np.dtype(np.int32), np.dtype(np.uint32)
UNSIGNED_LONG = np.dtype(np.uint64)
_INT_SIZE = 4


class Numbers(Struct, frozen=True, kw_only=True):
    """Numbers of an integer dtype.

    Attributes:
        dtype: of the column.
        column: computes it.
        is_constant: whether it depends on no column.
        pointee: of a pointer the bytes of what it points to, 0 where they are not known; else None.
    """

    dtype: Dtype
    column: Compute
    is_constant: bool = False
    pointee: int | None = None


def always(column: Column) -> Compute:
    """Return what computes a column of shape (1,), whatever there is."""
    return lambda _: column


def constant(value: int, dtype: Dtype) -> Numbers:
    """Return a number of which as many bits count as its dtype has."""
    column = np.array([value & U64], UNSIGNED_LONG).astype(dtype)
    return Numbers(dtype=dtype, column=always(column), is_constant=True)


def dtype_of(type_: PrintType) -> Dtype:
    """Return a type's dtype, or raise UnknownPrint."""
    if type_.is_pointer:
        return UNSIGNED_LONG
    if not type_.bits:
        raise UnknownPrint("a structure as a number")
    return np.dtype(f"<{'i' if type_.is_signed else 'u'}{type_.bits // 8}")


def computed(dtype: Dtype, function: Callable[[list[Column]], Column], *given: Numbers) -> Numbers:
    """Return what a function makes of the columns of numbers.

    Args:
        dtype: of the result.
        function: of columns of shape (n,) or (1,), to one.
        given: the numbers.
    """

    def column(columns: tuple[Column, ...]) -> Column:
        with np.errstate(all="ignore"):
            found = function([each.column(columns) for each in given])
        return found.astype(dtype, copy=False)

    if all(each.is_constant for each in given):
        return Numbers(dtype=dtype, column=always(column(())), is_constant=True)
    return Numbers(dtype=dtype, column=column)


def common(left: Dtype, right: Dtype) -> Dtype:
    """Return the dtype that an operator has of its operands: C11, 6.3.1.8."""
    a, b = promoted(left), promoted(right)
    if a.itemsize != b.itemsize:
        return a if a.itemsize > b.itemsize else b
    return a if a.kind == "u" else b


def promoted(dtype: Dtype) -> Dtype:
    """Return the dtype of one operand: what is narrower than an int becomes one; C11, 6.3.1.1."""
    return dtype if dtype.itemsize >= _INT_SIZE else INT


def unary(operator: str, number: Numbers) -> Numbers:
    """Return what one of ``- + ! ~`` makes of a number."""
    if operator == "!":
        return computed(INT, lambda x: x[0] == 0, number)
    dtype = promoted(number.dtype)
    function = _UNARY[operator]
    return computed(dtype, lambda x: function(x[0].astype(dtype)), number)


def binary(operator: str, a: Numbers, b: Numbers) -> Numbers:
    """Return what any operator of C makes of two numbers, both of which are computed.

    Args:
        operator: as C has it.
        a: on its left.
        b: on its right.
    """
    if operator == "&&":
        return computed(INT, lambda x: (x[0] != 0) & (x[1] != 0), a, b)
    if operator == "||":
        return computed(INT, lambda x: (x[0] != 0) | (x[1] != 0), a, b)
    if operator in _SHIFTS:
        return _shifted(_SHIFTS[operator], a, b)
    dtype = common(a.dtype, b.dtype)
    is_compared = operator in _COMPARED
    function = _COMPARED[operator] if is_compared else _ARITHMETIC[operator]
    return computed(
        INT if is_compared else dtype,
        lambda x: function(x[0].astype(dtype, copy=False), x[1].astype(dtype, copy=False)),
        a,
        b,
    )


_Operation = Callable[[Column, Column], Column]


def _shifted(shift: _Operation, a: Numbers, b: Numbers) -> Numbers:
    dtype = promoted(a.dtype)
    # As machines do it, where C leaves it open.
    mask = dtype.type(8 * dtype.itemsize - 1)
    return computed(dtype, lambda x: shift(x[0].astype(dtype), x[1].astype(dtype) & mask), a, b)


def _quotient(a: Column, b: Column) -> Column:
    # C rounds towards 0. By 0 nothing is divided: the kernel would not have printed the line.
    safe = np.where(b == 0, b.dtype.type(1), b)
    found: Column = a // safe
    found += ((a - found * safe != 0) & ((a < 0) != (safe < 0))).astype(found.dtype)
    return np.where(b == 0, b.dtype.type(0), found)


def _remainder(a: Column, b: Column) -> Column:
    whole: Column = _quotient(a, b) * b
    return a - whole


_UNARY: dict[str, Callable[[Column], Column]] = {
    "-": np.negative,
    "~": np.invert,
    "+": np.positive,
}
_ARITHMETIC: dict[str, _Operation] = {
    "+": np.add,
    "-": np.subtract,
    "*": np.multiply,
    "/": _quotient,
    "%": _remainder,
    "&": np.bitwise_and,
    "|": np.bitwise_or,
    "^": np.bitwise_xor,
}
_COMPARED: dict[str, _Operation] = {
    "==": np.equal,
    "!=": np.not_equal,
    "<": np.less,
    ">": np.greater,
    "<=": np.less_equal,
    ">=": np.greater_equal,
}
_SHIFTS: dict[str, _Operation] = {"<<": np.left_shift, ">>": np.right_shift}
