"""Where a branch to a register may lead: into the function by a table, or out of it.

Compilers compute the place of a case right before the branch: the address of a label inside,
which ``adr`` gives, and a distance from a table, in words:

    adr x1, LABEL; add x0, x1, w0, sxth #2; br x0
"""

from enum import Enum

from kprobes.arch.aarch64.function import Function
from kprobes.arch.aarch64.words import Kind, first_register, fits, target_register

_FAR_BACK = 16
"""Words that are looked at before the branch, and again before the addition."""
_ADD_EXTENDED = (0xFFE00000, 0x8B200000)
_ADD_SHIFTED = (0xFF200000, 0x8B000000)
_ADD_IMMEDIATE = (0xFF800000, 0x91000000)
_LDR_INDEXED = (0xFFE00C00, 0xF8600800)
_STORE = (0x0A400000, 0x08000000)


class Way(Enum):
    """Where it leads."""

    TABLE = "table"
    """To code of the function's own, by a table."""
    OUT = "out"
    """Where a pointer says: out of the function."""
    UNKNOWN = "unknown"


def way_of(function: Function, row: int) -> Way:
    """Return where the branch in a row leads."""
    register = first_register(int(function.words[row]))
    made = _made(function, row, register)
    if made is None:
        return Way.OUT
    word = int(function.words[made])
    if fits(word, _ADD_EXTENDED) or fits(word, _ADD_SHIFTED):
        bases = (first_register(word), word >> 16 & 31)
        return Way.TABLE if any(_is_own(function, made, each) for each in bases) else Way.UNKNOWN
    if fits(word, _ADD_IMMEDIATE) or fits(word, _LDR_INDEXED):
        return Way.UNKNOWN
    named = int(function.named[made])
    return Way.UNKNOWN if named and function.part_of(named) else Way.OUT


def _made(function: Function, row: int, register: int) -> int | None:
    # The row of the last word before that sets a register, as far as one may look.
    for at in range(row - 1, max(row - _FAR_BACK, 0) - 1, -1):
        word = int(function.words[at])
        if target_register(word) == register and not fits(word, _STORE):
            return at
    return None


def _is_own(function: Function, row: int, register: int) -> bool:
    made = _made(function, row, register)
    if made is None or function.kinds[made] != Kind.ADR:
        return False
    return function.part_of(int(function.named[made])) is not None
