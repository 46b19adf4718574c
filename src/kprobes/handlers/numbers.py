"""A type and the bits of a number to Python's integers, and back."""

from kprobes.errors import UnknownTypeError
from kprobes.model.types import CType, TypeKind, Types

_BOOL = "_Bool"
NUMBERS = (TypeKind.INT, TypeKind.ENUM, TypeKind.POINTER)
"""What is a number in memory and in a register."""


class Enumerator(int):
    """A value of an enum: a number that knows its name.

    Attributes:
        name: of the enumerator, or "" when none has this value.
    """

    name: str

    def __new__(cls, value: int, name: str) -> "Enumerator":
        """Return the number with its name."""
        made = super().__new__(cls, value)
        made.name = name
        return made

    def __repr__(self) -> str:
        return f"<{self.name}: {int(self)}>" if self.name else str(int(self))


def number(types: Types, ctype: CType, raw: int) -> int:
    """Return what the bits of a number mean: an int, a bool or an Enumerator.

    Args:
        types: the kernel's.
        ctype: INT or ENUM.
        raw: at least the type's bits; those above are ignored.
    """
    if ctype.kind is TypeKind.ENUM:
        return _enumerator(types, ctype, raw)
    bits = ctype.bits or 8 * ctype.size
    value = cut(raw >> ctype.bit_offset, bits, is_signed=ctype.is_signed)
    return bool(value) if ctype.name == _BOOL else value


def bit_field(types: Types, ctype: CType, raw: int, bits: int) -> int:
    """Return what a bit-field means whose lowest bit is the lowest of ``raw``."""
    value = cut(raw, bits, is_signed=ctype.is_signed)
    if ctype.kind is TypeKind.ENUM:
        return _enumerator(types, ctype, value)
    return bool(value) if ctype.name == _BOOL else value


def cut(raw: int, bits: int, *, is_signed: bool) -> int:
    """Return the lowest bits as a number."""
    value = raw & (1 << bits) - 1
    return value - (1 << bits) if is_signed and value >> (bits - 1) else value


def pattern(value: int, bits: int) -> int:
    """Return the bits that hold a number, signed or not.

    Raises:
        OverflowError: it does not fit.
    """
    if not -(1 << bits - 1) <= value < 1 << bits:
        raise OverflowError(f"{value:#x} does not fit into {bits} bits")
    return value & (1 << bits) - 1


def check_number(types: Types, ctype: CType) -> None:
    """Refuse what is no number.

    Raises:
        UnknownTypeError: an aggregate, an array, or what has no size.
    """
    if ctype.kind not in NUMBERS or ctype.size == 0:
        raise UnknownTypeError(f"{types.spell(ctype.number)} is no number")


def _enumerator(types: Types, ctype: CType, raw: int) -> Enumerator:
    bits = 8 * ctype.size
    raw &= (1 << bits) - 1
    named = types.enumerators(ctype.number)
    for value, name in named:
        if value & (1 << bits) - 1 == raw:
            return Enumerator(value, name)
    is_signed = any(value < 0 for value, _ in named)
    return Enumerator(cut(raw, bits, is_signed=is_signed), "")
