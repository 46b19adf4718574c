"""Type words of arguments: ``u8``, ``b4@2/32``, ``string``, ``x16[4]``.

Whether an expression and its type fit: the kernel's checks after it has read both.
"""

import re

from msgspec import Struct
from msgspec.structs import replace

from kprobes.errors import DefinitionError
from kprobes.lang.lexer import Token, read_plain, read_unsigned
from kprobes.lang.scope import OPS_MAX, Reading
from kprobes.model.codes import Code
from kprobes.model.definition import (
    Argument,
    Comm,
    CurrentTask,
    Deref,
    Fetch,
    Immediate,
    Member,
    MemoryAt,
    MemoryOf,
    Parameter,
    PerCpu,
    Register,
    ReturnValue,
    StackSlot,
    Stacktrace,
    Text,
    TypeWord,
)

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


def read_type(word: Token, expression: str) -> TypeWord:
    """Read a type word that stands after an expression.

    A bit-field's own numbers are not looked at: the kernel does so only after it has read the
    expression, see ``read_bits``.

    Raises:
        DefinitionError: it is not a type, or none for this expression.
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


def read_bits(word: Token, spec: TypeWord) -> tuple[int, int] | None:
    """Return width and offset of ``bWIDTH@OFFSET/SIZE``, or None when they make no sense."""
    found = _BITFIELD.fullmatch(word.text)
    width, offset = (read_plain(found[1]), read_plain(found[2])) if found else (None, None)
    if not width or offset is None or width + offset > 8 * spec.size:
        return None
    return width, offset


def _read_count(rest: Token) -> int:
    # All of "N]", from after the bracket.
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


_STRINGS = ("string", "ustring")


class Written(Struct, frozen=True, kw_only=True):
    """An argument without its name, cut at its colon.

    Attributes:
        body: all of it.
        expression: what stands before the colon.
        word: the type, what stands after it.
        spec: the type as far as it is read, or None when there is no colon.
        is_named: whether a name stands before it.
        is_return: whether it is fetched at a function's return.
    """

    body: Token
    expression: Token
    word: Token
    spec: TypeWord | None
    is_named: bool
    is_return: bool


def finish(reading: Reading, written: Written) -> TypeWord | None:
    """Check an expression against its type, and return the type with its bits.

    Raises:
        DefinitionError: they do not fit.
    """
    spec = written.spec
    if spec is None:
        is_text = isinstance(reading.fetch, Comm | Text | Stacktrace)
        _add(reading, written, 1 if is_text or not _is_memory(reading.fetch) else 0)
        return None
    if isinstance(reading.fetch, Stacktrace):
        raise written.word.error(Code.BAD_TYPE, hint="a stack trace has no type: leave it out")
    if spec.base == "symstr":
        _check_symstr(reading, written)
    elif spec.base in _STRINGS:
        _check_string(reading, written)
    added = _store(reading.fetch, spec)
    _add(reading, written, added)
    if spec.base == "bits":
        added += 1
        spec = _bits(reading, written, spec, added)
    if spec.count is not None:
        _check_array(reading, written, spec)
        _add(reading, written, added + 1)
    return spec


def _check_symstr(reading: Reading, written: Written) -> None:
    fetch = reading.fetch
    is_value = isinstance(fetch, Register | StackSlot | ReturnValue)
    # At function return an argument is a copy that was made at its entry.
    is_argument = isinstance(fetch, Argument | Parameter) and not written.is_return
    if not (is_value or is_argument or _is_kernel_memory(fetch)):
        hint = "of a register, an argument or kernel memory"
        raise _error(reading, written, Code.BAD_SYMSTRING, hint)


def _check_string(reading: Reading, written: Written) -> None:
    fetch = reading.fetch
    # The kernel's types may say that it is a char pointer, which is then followed.
    is_renamed = isinstance(fetch, Argument) and not written.is_named
    if is_renamed or isinstance(fetch, Parameter | Member | ReturnValue):
        return
    if isinstance(fetch, CurrentTask):
        raise _reached(reading, written).error(Code.BAD_TYPE4STR, hint="its name is $comm")
    if not (isinstance(fetch, Immediate | Comm | Text) or _is_memory(fetch)):
        word, expression = written.word.text, written.expression.text
        hint = f"to read the string that it points to: +0({expression}):{word}"
        raise _error(reading, written, Code.BAD_STRING, hint)


def _check_array(reading: Reading, written: Written, spec: TypeWord) -> None:
    if spec.base in _STRINGS:
        return
    if spec.base == "symstr" or not _is_kernel_memory(reading.fetch):
        hint = "an array is read from kernel memory"
        raise _error(reading, written, Code.BAD_STRING, hint)


def _store(fetch: Fetch, spec: TypeWord) -> int:
    # Storing from memory takes the place of the last load; of what is none, and of string
    # arrays, whose last load is a pointer, it is an operation of its own.
    is_text = isinstance(fetch, Immediate | Comm | Text)
    if spec.is_string:
        return 1 if spec.base == "symstr" or is_text or spec.count is not None else 0
    return 0 if _is_memory(fetch) else 1


def _bits(reading: Reading, written: Written, spec: TypeWord, added: int) -> TypeWord:
    found = read_bits(written.word, spec)
    if found is None or reading.ops + added > OPS_MAX:
        hint = f"bWIDTH@OFFSET/SIZE, such as b4@0/{8 * spec.size}"
        raise _error(reading, written, Code.BAD_BITFIELD, hint)
    return replace(spec, bit_width=found[0], bit_offset=found[1])


def _add(reading: Reading, written: Written, added: int) -> None:
    if reading.ops + added > OPS_MAX:
        hint = f"at most {OPS_MAX} steps"
        raise _reached(reading, written).error(Code.TOO_MANY_OPS, hint=hint)


def _reached(reading: Reading, written: Written) -> Token:
    return replace(written.body, caret=reading.caret)


def _error(reading: Reading, written: Written, code: Code, hint: str) -> DefinitionError:
    # The kernel adds the type's offset to wherever its reading has come, which is after the
    # first brace or at the last member, not at the expression's start.
    offset = written.word.start - written.body.start
    return _reached(reading, written).error(code, offset, hint=hint)


def _is_memory(fetch: Fetch) -> bool:
    return _is_kernel_memory(fetch) or isinstance(fetch, Deref)


def _is_kernel_memory(fetch: Fetch) -> bool:
    match fetch:
        case Deref(is_user=is_user):
            return not is_user
        case PerCpu(is_read=is_read):
            return is_read
        case _:
            return isinstance(fetch, MemoryAt | MemoryOf | Member)
