"""Type words of arguments: ``u8``, ``b4@2/32``, ``string``, ``x16[4]``."""

import re

from kprobes.lang.numbers import read_plain, read_unsigned
from kprobes.lang.piece import Piece
from kprobes.model.codes import Code
from kprobes.model.type_word import TypeWord

_NUMBERS = {f"{sign}{bits}": bits // 8 for sign in "usx" for bits in (8, 16, 32, 64)}
_LOCATION = 4
_SIZES = {
    **_NUMBERS,
    "char": 1,
    "symbol": 8,
    "string": _LOCATION,
    "ustring": _LOCATION,
    "symstr": _LOCATION,
}
TYPES = (*_SIZES, "%pd", "%pD")
"""Every type word of the language but bit-fields and arrays."""

_STRINGS_ALONE = ("$comm", "$COMM")
_COUNT_MAX = 64
_U32 = (1 << 32) - 1
_BITFIELD = re.compile(r"b([0-9a-zA-Z]+)@([0-9a-zA-Z]+)/.*", re.DOTALL)
_CONTAINERS = (8, 16, 32, 64)


def read_type(word: Piece, expression: str) -> TypeWord:
    """Read a type word that stands behind an expression.

    A bit-field's own numbers are not looked at: the kernel does so only after it has read the
    expression, see ``read_bits``.

    Raises:
        DefinitionError: it is no type, or none for this expression.
    """
    base, bracket, _ = word.text.partition("[")
    count = _read_count(word.cut(len(base) + 1)) if bracket else None
    if is_string_alone(expression) and word.text != "string":
        raise word.error(Code.NEED_STRING_TYPE, hint="leave the type out, or write :string")
    size = _container(base) if base.startswith("b") else _SIZES.get(base)
    if size is None:
        raise word.error(Code.BAD_TYPE, hint=f"types: {' '.join(TYPES)} bWIDTH@OFFSET/SIZE")
    return TypeWord(base="bits" if base.startswith("b") else base, size=size, count=count)


def is_string_alone(expression: str) -> bool:
    """Whether an expression is a string and nothing else: ``$comm`` or an immediate string."""
    return expression in _STRINGS_ALONE or expression.startswith('\\"')


def read_bits(word: Piece, spec: TypeWord) -> tuple[int, int] | None:
    """Return width and offset of ``bWIDTH@OFFSET/SIZE``, or None when they make no sense."""
    found = _BITFIELD.fullmatch(word.text)
    width, offset = (read_plain(found[1]), read_plain(found[2])) if found else (None, None)
    if not width or offset is None or width + offset > 8 * spec.size:
        return None
    return width, offset


def _read_count(rest: Piece) -> int:
    # All of "N]", from behind the bracket.
    digits, close, suffix = rest.text.partition("]")
    if not close:
        raise rest.error(Code.ARRAY_NO_CLOSE, len(rest.text))
    if suffix:
        raise rest.error(Code.BAD_ARRAY_SUFFIX, len(digits) + 1)
    count = read_unsigned(digits, most=_U32)
    if not count:
        raise rest.error(Code.BAD_ARRAY_NUM)
    if count > _COUNT_MAX:
        raise rest.error(Code.ARRAY_TOO_BIG, hint=f"at most {_COUNT_MAX}")
    return count


def _container(base: str) -> int | None:
    _, slash, size = base.partition("/")
    bits = read_unsigned(size) if slash else None
    return bits // 8 if bits in _CONTAINERS else None
