"""Type casts: ``(STRUCT)FETCH->MEMBER`` and ``(STRUCT,FIELD)FETCH->MEMBER``."""

import re
from dataclasses import replace

from kprobes.lang.derefs import is_per_cpu
from kprobes.lang.members import read_steps, walk
from kprobes.lang.names import is_identifier
from kprobes.lang.piece import Piece
from kprobes.lang.scope import Reader, Reading, Scope
from kprobes.model.codes import Code
from kprobes.model.definition import Cast, Comm, Span, Text

_NESTED_MAX = 8
_DIGIT = re.compile(r"[0-9]")
_REQUIRED = "a cast is followed by a member, such as (task_struct)%di->pid"


def read_cast(piece: Piece, scope: Scope, read: Reader) -> Reading:
    """Read a cast and the member behind it, the expression that is cast by ``read``.

    Raises:
        DefinitionError: the kernel's error for it.
    """
    if scope.is_address:
        raise piece.error(Code.NOSUP_BTFARG, hint="casts need a place in a function")
    if scope.casts >= _NESTED_MAX:
        raise piece.error(Code.TOO_MANY_NESTED, hint=f"at most {_NESTED_MAX}")
    closing = piece.text.find(")")
    if closing < 0:
        raise piece.error(Code.DEREF_OPEN_BRACE, len(piece.text))
    inner, rest = _split(piece.cut(closing + 1))
    base = read(inner, replace(scope, casts=scope.casts + 1))
    if isinstance(base.fetch, Comm | Text):
        raise inner.error(Code.COMM_CANT_DEREF)
    struct, container = _read_struct(piece.cut(1, closing))
    span = Span(piece.start, rest.start - 2)
    cast = Cast(struct=struct, container=container, base=base.fetch, span=span)
    return walk(replace(base, fetch=cast), rest, piece)


def _split(piece: Piece) -> tuple[Piece, Piece]:
    # What is cast, without braces around all of it, and what stands behind its arrow.
    text = piece.text
    if text.startswith("("):
        close = _matching(text, 0)
        if close is None:
            raise piece.error(Code.DEREF_OPEN_BRACE)
        return piece.cut(1, close), _members(piece, close + 1, missing=close + 1)
    if text.startswith(("+", "-")) or is_per_cpu(text):
        return _split_nested(piece)
    return _split_plain(piece)


def _split_nested(piece: Piece) -> tuple[Piece, Piece]:
    opening = piece.text.find("(", 1)
    if opening < 0:
        raise piece.error(Code.DEREF_NEED_BRACE)
    close = _matching(piece.text, opening)
    if close is None:
        raise piece.error(Code.DEREF_OPEN_BRACE, len(piece.text))
    return piece.cut(0, close + 1), _members(piece, close + 1, missing=close + 2)


def _split_plain(piece: Piece) -> tuple[Piece, Piece]:
    text = piece.text
    sign = next((at for at, char in enumerate(text) if char in "+-"), len(text))
    if text.startswith("@") and _DIGIT.match(text, sign + 1):
        raise piece.error(Code.TYPECAST_SYM_OFFSET, hint=f"such as ({text[: sign + 2]}...)->MEMBER")
    hyphen = text.find("-")
    arrow = hyphen if hyphen >= 0 else len(text)
    return piece.cut(0, arrow), _members(piece, arrow, missing=len(text))


def _members(piece: Piece, arrow: int, *, missing: int) -> Piece:
    if piece.text[arrow : arrow + 2] != "->":
        raise piece.error(Code.TYPECAST_REQ_FIELD, missing, hint=_REQUIRED)
    return piece.cut(arrow + 2)


def _matching(text: str, opening: int) -> int | None:
    depth = 0
    for at in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at
    return None


def _read_struct(piece: Piece) -> tuple[str, str]:
    name, comma, _ = piece.text.partition(",")
    if not is_identifier(name):
        raise piece.error(Code.NO_PTR_STRCT, hint="a cast names a structure, without 'struct'")
    if not comma:
        return name, ""
    field = piece.cut(len(name) + 1)
    path, arrow, _ = field.text.partition("->")
    for _, member in read_steps(field.cut(0, len(path))):
        if not is_identifier(member.text):
            hint = f"{member.text!r} cannot be a member's name"
            raise member.error(Code.NO_BTF_FIELD, hint=hint)
    if arrow:
        raise field.error(Code.TYPECAST_BAD_ARROW, len(path))
    return name, path
