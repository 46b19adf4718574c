"""The state shared by the readers of expressions: the text around one, and what was read."""

from collections.abc import Callable, Collection

from msgspec import Struct

from kprobes.errors import DefinitionError
from kprobes.lang.lexer import Token
from kprobes.model.codes import Code
from kprobes.model.definition import EventType, Fetch

OPS_MAX = 14
"""The kernel's fetch programs have 16 operations; two are its own (store and end)."""


class ParseContext(Struct, frozen=True, kw_only=True):
    """What the text around an expression says about it.

    Attributes:
        registers: names that ``%NAME`` may have.
        place: the statement's second word, where errors found at registration point.
        is_address: whether the place is a bare number, which is in no function.
        is_return: whether it probes a function's return.
        casts: how many type casts are open around the expression.
        type: of the event.
        is_meta: whether the word may become a parameter's name before it is read.
        has_structs: whether a name may be a struct itself, as variables of the source are.
    """

    registers: Collection[str]
    place: Token
    is_address: bool = False
    is_return: bool = False
    casts: int = 0
    type: EventType = EventType.KPROBE
    is_meta: bool = False
    has_structs: bool = False


class Reading(Struct, frozen=True, kw_only=True):
    """An expression that was read.

    Attributes:
        fetch: the node.
        ops: index of the last operation of the kernel's program for it.
        caret: the column that the kernel has reached; later errors count from there.
        late: an error that the kernel finds only after it has read all arguments.
    """

    fetch: Fetch
    caret: int
    ops: int = 0
    late: DefinitionError | None = None


Reader = Callable[[Token, ParseContext], Reading]
"""Reads one expression, which is the whole piece."""


def leaf(fetch: Fetch, token: Token, *, ops: int = 0) -> Reading:
    """Return the reading of an expression without another one inside.

    Args:
        fetch: the expression.
        token: what it was read from.
        ops: operations of the kernel's that it takes.
    """
    return Reading(fetch=fetch, caret=token.caret, ops=ops)


def one_more(ops: int, token: Token) -> int:
    """Return the index of the operation after ``ops``.

    Raises:
        DefinitionError: TOO_MANY_OPS at the piece.
    """
    if ops >= OPS_MAX:
        raise token.error(Code.TOO_MANY_OPS, hint=f"at most {OPS_MAX} levels")
    return ops + 1
