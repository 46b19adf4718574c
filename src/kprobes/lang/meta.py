"""The kernel's first pass over the arguments: words that start with ``$arg``."""

import re
from collections.abc import Sequence

from kprobes.lang.piece import Piece
from kprobes.lang.scope import Scope
from kprobes.model.codes import Code

ALL = "$arg*"
_PREFIX = "$arg"
_NUMBERED = re.compile(r"\$arg([0-9]+)(?::.*)?", re.DOTALL)
_DIGIT = re.compile(r"[0-9]")


def is_all(word: Piece) -> bool:
    """Whether a word stands for all parameters."""
    return word.text.startswith(ALL)


def is_parameter(word: Piece) -> bool:
    """Whether a word is one that the kernel replaces by names of parameters."""
    return is_all(word) or is_numbered(word)


def is_numbered(word: Piece) -> bool:
    """Whether a word stands for one parameter."""
    return _NUMBERED.fullmatch(word.text) is not None


def check_meta(words: Sequence[Piece], scope: Scope) -> None:
    """Check the words that the kernel replaces by names of parameters before it reads any.

    Raises:
        DefinitionError: one is no such word, there is a second ``$arg*``, or none is possible.
    """
    meta = [word for word in words if word.text.startswith(_PREFIX)]
    seen = False
    for word in meta:
        if scope.is_address:
            hint = "a place by address is no function's entry"
            raise word.error(Code.NOFENTRY_ARGS, hint=hint)
        if _DIGIT.match(word.text, len(_PREFIX)):
            continue
        if not is_all(word):
            raise word.error(Code.BAD_VAR, hint="such as $arg1, or $arg* for all")
        if seen:
            raise word.error(Code.DOUBLE_ARGS)
        seen = True
    for word in meta:
        if not is_all(word):
            _check_number(word)


def _check_number(word: Piece) -> None:
    found = _NUMBERED.fullmatch(word.text)
    if found is None:
        raise word.error(Code.BAD_VAR, hint="such as $arg1 or $arg1:u32")
    if not found[1].strip("0"):
        raise word.error(Code.BAD_ARG_NUM, hint="arguments count from 1")
