"""Fetch expressions: one small function per form, chosen by the first character."""

from kprobes.lang.casts import read_cast
from kprobes.lang.derefs import is_per_cpu, read_deref, read_per_cpu
from kprobes.lang.members import read_parameter
from kprobes.lang.numbers import read_signed, read_unsigned
from kprobes.lang.piece import Piece
from kprobes.lang.registers import near_register
from kprobes.lang.scope import Reader, Reading, Scope, leaf
from kprobes.lang.variables import read_variable
from kprobes.model.codes import Code
from kprobes.model.definition import Immediate, MemoryAt, MemoryOf, Register, Text
from kprobes.units import U64, Addr


def read_fetch(piece: Piece, scope: Scope) -> Reading:
    """Read one fetch expression, which is the whole piece.

    Raises:
        DefinitionError: the kernel's error for it.
    """
    form = _FORMS.get(piece.text[:1], _other)
    return form(piece, scope)


def _register(piece: Piece, scope: Scope) -> Reading:
    name = piece.text[1:]
    if name not in scope.registers:
        raise piece.error(Code.BAD_REG_NAME, hint=near_register(name, scope.registers))
    return leaf(Register(name=name, span=piece.span), piece)


def _memory(piece: Piece, scope: Scope) -> Reading:
    where = piece.text[1:]
    if where[:1].isascii() and where[:1].isdigit():
        addr = read_unsigned(where)
        if addr is None:
            raise piece.error(Code.BAD_MEM_ADDR)
        return leaf(MemoryAt(addr=Addr(addr), span=piece.span), piece, ops=1)
    if where.startswith("+"):
        raise piece.error(Code.FILE_ON_KPROBE, hint="only user-space probes have files")
    return _memory_of_symbol(piece, scope)


def _memory_of_symbol(piece: Piece, scope: Scope) -> Reading:
    # The kernel looks the symbol up at registration, after everything else, and then all that
    # it says is that the probe cannot be registered.
    symbol, offset = _split_offset(piece.text[1:])
    late = None
    if offset is None:
        hint = f"{piece.text} has a bad offset; it is + or - and a number"
        late = scope.place.error(Code.FAIL_REG_PROBE, hint=hint)
    elif not symbol:
        late = scope.place.error(Code.BAD_PROBE_ADDR, hint=f"{piece.text} names no symbol")
    fetch = MemoryOf(symbol=symbol, offset=offset or 0, span=piece.span)
    return Reading(fetch=fetch, caret=piece.caret, ops=2, late=late)


def _split_offset(text: str) -> tuple[str, int | None]:
    for at, char in enumerate(text):
        if char in "+-":
            return text[:at], read_signed(text[at:])
    return text, 0


def _immediate(piece: Piece, scope: Scope) -> Reading:
    del scope
    text = piece.text[1:]
    if text.startswith('"'):
        return _immediate_string(piece)
    value = _immediate_value(text)
    if value is None:
        raise piece.error(Code.BAD_IMM, 1)
    return leaf(Immediate(value=value & U64, span=piece.span), piece)


def _immediate_string(piece: Piece) -> Reading:
    text = piece.text[2:]
    if not text.endswith('"'):
        hint = "it ends with a quote, and has no blank, colon or # inside"
        raise piece.error(Code.IMMSTR_NO_CLOSE, len(piece.text), hint=hint)
    return leaf(Text(value=text[:-1], span=piece.span), piece)


def _immediate_value(text: str) -> int | None:
    # A sign makes the number signed: \18446744073709551615 is one, \+18446744073709551615 none.
    if text.startswith("+"):
        return read_signed(text[1:])
    return read_signed(text) if text.startswith("-") else read_unsigned(text)


def _deref(piece: Piece, scope: Scope) -> Reading:
    return read_deref(piece, scope, read_fetch)


def _cast(piece: Piece, scope: Scope) -> Reading:
    return read_cast(piece, scope, read_fetch)


def _other(piece: Piece, scope: Scope) -> Reading:
    first = piece.text[:1]
    if is_per_cpu(piece.text):
        return read_per_cpu(piece, scope, read_fetch)
    if first.isascii() and (first.isalpha() or first == "_"):
        return read_parameter(piece, scope)
    raise piece.error(Code.BAD_FETCH_ARG, hint=r"an expression starts with % $ @ \ + - ( or a name")


_FORMS: dict[str, Reader] = {
    "%": _register,
    "$": read_variable,
    "@": _memory,
    "\\": _immediate,
    "+": _deref,
    "-": _deref,
    "(": _cast,
}
