"""Names that the kernel's own types know: parameters, and walks along members."""

from kprobes.lang.names import is_identifier
from kprobes.lang.piece import Piece
from kprobes.lang.scope import Reading, Scope, leaf, one_more
from kprobes.model.codes import Code
from kprobes.model.definition import Fetch, Member, Parameter, Span, Step

_NO_BTF_HERE = "names of parameters and members need a place in a function, not an address"


def read_parameter(piece: Piece, scope: Scope) -> Reading:
    """Read ``NAME`` or ``NAME->MEMBER.MEMBER...``.

    Raises:
        DefinitionError: it can be no such name.
    """
    if scope.is_address:
        raise piece.error(Code.NOSUP_BTFARG, hint=_NO_BTF_HERE)
    name, rest = split_walk(piece)
    if not is_identifier(name.text):
        raise piece.error(Code.NO_BTFARG, hint=f"{name.text!r} cannot be a parameter's name")
    base = leaf(Parameter(name=name.text, span=name.span), piece)
    return walk(base, rest, piece) if rest is not None else base


def split_walk(piece: Piece) -> tuple[Piece, Piece | None]:
    """Split ``X->REST`` at its arrow; the rest is None when there is none.

    Raises:
        DefinitionError: another mark of a walk stands there first.
    """
    at = _first_mark(piece.text)
    if at is None:
        return piece, None
    if piece.text[at] == ".":
        hint = "an argument is no structure; follow a pointer with ->"
        raise piece.error(Code.NOSUP_DAT_ARG, at + 1, hint=hint)
    _check_arrow(piece, at)
    return piece.cut(0, at), piece.cut(at + 2)


def walk(base: Reading, rest: Piece, whole: Piece) -> Reading:
    """Read the members behind an arrow, ``rest``, and walk along them from ``base``.

    Raises:
        DefinitionError: a member cannot have such a name, or the walk is too long.
    """
    steps = read_steps(rest)
    fetch: Fetch = Member(
        base=base.fetch, steps=tuple(step for step, _ in steps), span=Span(whole.start, whole.stop)
    )
    ops = base.ops
    for step, name in steps:
        ops = one_more(ops, name) if step.is_arrow else ops
    last = steps[-1][1]
    return Reading(fetch=fetch, caret=last.caret, ops=ops, late=base.late)


def read_steps(rest: Piece) -> tuple[tuple[Step, Piece], ...]:
    """Read ``MEMBER->MEMBER.MEMBER``, what stands behind an arrow.

    Raises:
        DefinitionError: a member cannot have such a name.
    """
    steps: list[tuple[Step, Piece]] = []
    is_arrow = True
    while True:
        at = _first_mark(rest.text)
        is_dot = at is not None and rest.text[at] == "."
        if at is not None and not is_dot:
            _check_arrow(rest, at)
        # Whether there can be such a member is found out when its struct is known.
        name = rest.cut(0, at)
        steps.append((Step(name=name.text, is_arrow=is_arrow, span=name.span), name))
        if at is None:
            return tuple(steps)
        rest = rest.cut(at + (1 if is_dot else 2))
        is_arrow = not is_dot


def _first_mark(text: str) -> int | None:
    return next((at for at, char in enumerate(text) if char in ".-"), None)


def _check_arrow(piece: Piece, at: int) -> None:
    if piece.text[at : at + 2] != "->":
        raise piece.error(Code.BAD_HYPHEN, at)
