"""``$`` expressions: what the probed code has without a register's name."""

from kprobes.lang.members import split_walk, walk
from kprobes.lang.numbers import read_decimal
from kprobes.lang.piece import Piece
from kprobes.lang.scope import Reading, Scope, leaf
from kprobes.model.codes import Code
from kprobes.model.definition import (
    Argument,
    Comm,
    CurrentTask,
    ReturnValue,
    StackPointer,
    StackSlot,
)

ARGUMENTS_MAX = 2048
"""THREAD_SIZE / sizeof(long): 16 KiB stacks on x86-64 and arm64. Words of the stack, too."""

_VARIABLES = "variables: $argN $arg* $retval $stack $stackN $comm $current"
_RETVAL = "$retval"
_CURRENT = "$current"


def read_variable(piece: Piece, scope: Scope) -> Reading:
    """Read an expression that starts with a dollar sign.

    Raises:
        DefinitionError: the kernel's error for it.
    """
    text = piece.text
    if text in ("$comm", "$COMM"):
        return leaf(Comm(span=piece.span), piece)
    if text.startswith(_RETVAL):
        return _return_value(piece, scope)
    if text == _CURRENT or text.startswith((_CURRENT + "-", _CURRENT + ".")):
        return _current(piece)
    if text.startswith("$stack"):
        return _stack(piece)
    if text.startswith("$arg"):
        return _argument(piece, scope)
    raise piece.error(Code.BAD_VAR, hint=_VARIABLES)


def _return_value(piece: Piece, scope: Scope) -> Reading:
    if not scope.is_return or scope.is_address:
        raise piece.error(Code.RETVAL_ON_PROBE, hint="only a probe at function return has it")
    name, rest = split_walk(piece)
    if name.text != _RETVAL:
        # As the kernel, which then takes it for a parameter's name.
        raise piece.error(Code.NO_BTFARG, hint="the value that a function returns is $retval")
    base = leaf(ReturnValue(span=name.span), piece)
    return walk(base, rest, piece) if rest is not None else base


def _current(piece: Piece) -> Reading:
    name, rest = split_walk(piece)
    base = leaf(CurrentTask(span=name.span), piece)
    return walk(base, rest, piece) if rest is not None else base


def _stack(piece: Piece) -> Reading:
    digits = piece.text.removeprefix("$stack")
    if not digits:
        return leaf(StackPointer(span=piece.span), piece)
    number = _number(piece, digits)
    if number > ARGUMENTS_MAX:
        raise piece.error(Code.BAD_STACK_NUM, hint=f"at most {ARGUMENTS_MAX}")
    return leaf(StackSlot(number=number, span=piece.span), piece)


def _argument(piece: Piece, scope: Scope) -> Reading:
    digits = piece.text.removeprefix("$arg")
    # Of such a word the number is looked at when it is known how many parameters there are.
    number = int(digits) if scope.is_meta else _number(piece, digits)
    if number == 0 or (number > ARGUMENTS_MAX and not scope.is_meta):
        raise piece.error(Code.BAD_ARG_NUM, hint=f"arguments count from 1 to {ARGUMENTS_MAX}")
    if scope.is_address:
        raise piece.error(Code.NOFENTRY_ARGS, hint="a place by address is no function's entry")
    return leaf(Argument(number=number, span=piece.span), piece)


def _number(piece: Piece, digits: str) -> int:
    number = read_decimal(digits)
    if number is None:
        raise piece.error(Code.BAD_VAR, hint=_VARIABLES)
    return number
