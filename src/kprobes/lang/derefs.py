"""Expressions around another one: ``+8(...)``, ``this_cpu_ptr(...)``, ``this_cpu_read(...)``."""

from dataclasses import replace

from kprobes.lang.numbers import read_signed
from kprobes.lang.piece import Piece
from kprobes.lang.scope import Reader, Reading, Scope, one_more
from kprobes.model.codes import Code
from kprobes.model.definition import Comm, Deref, PerCpu, Span, Text

_POINTER = "this_cpu_ptr("
_READ = "this_cpu_read("


def is_per_cpu(text: str) -> bool:
    """Whether an expression is one of a per-CPU variable."""
    return text.startswith((_POINTER, _READ))


def read_deref(piece: Piece, scope: Scope, read: Reader) -> Reading:
    """Read ``+|-[u]OFF(FETCH)``, the inner expression by ``read``.

    Raises:
        DefinitionError: the kernel's error for it.
    """
    text = piece.text
    is_user = text[1:2] == "u"
    opening = text.find("(")
    if opening < 0:
        raise piece.error(Code.DEREF_NEED_BRACE, hint=f"such as {text}(%REG)")
    sign = text[0].removeprefix("+")
    number = sign + text[1 + is_user : opening]
    offset = read_signed(number)
    if offset is None:
        raise piece.error(Code.BAD_DEREF_OFFS)
    # Where the kernel believes the inner text begins: it counts its copy of the number, which
    # has lost the "+" and the "u", and adds one for the "+".
    skipped = len(number) + 1 + (0 if number.startswith("-") else 1)
    inner = _inside_brace(piece, opening + 1, piece.caret + skipped)
    base = _base(inner, scope, read)
    fetch = Deref(
        base=base.fetch, offset=offset, is_user=is_user, span=Span(piece.start, inner.stop + 1)
    )
    return replace(base, fetch=fetch, ops=one_more(base.ops, inner), caret=inner.caret)


def read_per_cpu(piece: Piece, scope: Scope, read: Reader) -> Reading:
    """Read ``this_cpu_ptr(FETCH)`` or ``this_cpu_read(FETCH)``.

    Raises:
        DefinitionError: the kernel's error for it.
    """
    is_read = piece.text.startswith(_READ)
    opened = len(_READ if is_read else _POINTER)
    inner = _inside_brace(piece, opened, piece.caret + opened)
    base = _base(inner, scope, read)
    # Of @SYM the address is wanted, not what is there: its load gives way to the new operation.
    ops = base.ops if inner.text.startswith("@") else one_more(base.ops, inner)
    fetch = PerCpu(base=base.fetch, is_read=is_read, span=Span(piece.start, inner.stop + 1))
    return replace(
        base, fetch=fetch, ops=one_more(ops, inner) if is_read else ops, caret=inner.caret
    )


def _inside_brace(piece: Piece, start: int, caret: int) -> Piece:
    # The last brace closes: what follows it is dropped, as the kernel does.
    rest = replace(piece.cut(start), caret=caret)
    closing = rest.text.rfind(")")
    if closing < 0:
        raise rest.error(Code.DEREF_OPEN_BRACE, len(rest.text))
    return rest.cut(0, closing)


def _base(inner: Piece, scope: Scope, read: Reader) -> Reading:
    base = read(inner, scope)
    if isinstance(base.fetch, Comm | Text):
        raise inner.error(Code.COMM_CANT_DEREF)
    return base
