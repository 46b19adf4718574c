"""One argument word: ``[NAME=]FETCH[:TYPE]``.

The kernel's first pass over the arguments: words that start with ``$arg``.
"""

import re
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from kprobes.errors import DefinitionError
from kprobes.lang.fetch import check_number, read_fetch
from kprobes.lang.lexer import Token
from kprobes.lang.names import default_arg_name, is_path_word, read_arg_name
from kprobes.lang.scope import ParseContext, Reading, one_more
from kprobes.lang.types import Written, finish, read_type
from kprobes.model.codes import Code
from kprobes.model.definition import (
    AllMembers,
    AllParameters,
    AllVariables,
    Argument,
    Comm,
    Fetch,
    FetchArg,
    Member,
    Parameter,
    ReturnValue,
    Stacktrace,
    Text,
    TypeWord,
)

ALL = "$arg*"
_PREFIX = "$arg"
_NUMBERED = re.compile(r"\$arg([0-9]+)(?::.*)?", re.DOTALL)
_DIGIT = re.compile(r"[0-9]")


_ALL_VARIABLES = {"$params": False, "$vars": True}


def is_all(word: Token) -> bool:
    """Whether a word stands for all parameters."""
    return word.text.startswith(ALL)


def is_parameter(word: Token) -> bool:
    """Whether a word is one that the kernel replaces by names of parameters."""
    return is_all(word) or is_numbered(word)


def is_numbered(word: Token) -> bool:
    """Whether a word stands for one parameter."""
    return _NUMBERED.fullmatch(word.text) is not None


def check_meta(words: Sequence[Token], context: ParseContext) -> None:
    """Check the words that the kernel replaces by names of parameters before it reads any.

    Raises:
        DefinitionError: one is no such word, there is a second ``$arg*``, or none is possible.
    """
    meta = [word for word in words if word.text.startswith(_PREFIX)]
    seen = False
    for word in meta:
        if context.is_address:
            hint = "a place by address is not a function's entry"
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


def _check_number(word: Token) -> None:
    found = _NUMBERED.fullmatch(word.text)
    if found is None:
        raise word.error(Code.BAD_VAR, hint="such as $arg1 or $arg1:u32")
    if not found[1].strip("0"):
        raise word.error(Code.BAD_ARG_NUM, hint="arguments count from 1")


_ARGS_MAX = 128
_BODY_MAX = 255
"""Of the newest kernels; up to 7.2 it was 63."""
_RECORD_MAX = 3072
"""Bytes of all fields, without those of strings."""
_LOCATION = 4
_PATHS = {"%pd": (len("+0x0(+0x28()):string"), 2), "%pD": (len("+0x0(+0x28(+0x48())):string"), 3)}
"""By type: what the kernel puts around such an expression, in characters and dereferences."""


class _Word(Struct, frozen=True, kw_only=True):
    """What the words before and the word itself say of its body."""

    name: str
    token: Token
    body: Token
    room: int

    @property
    def is_named(self) -> bool:
        return self.body.start > self.token.start


def read_arguments(
    words: Sequence[Token], context: ParseContext, *, is_registered: bool = True
) -> tuple[FetchArg, ...]:
    """Read all argument words, from left to right.

    Args:
        words: one for each argument.
        context: that they are read in.
        is_registered: whether to look for what the kernel finds at registration only, too.

    Raises:
        DefinitionError: the first that is wrong, in the kernel's order of checks.
    """
    check_meta(words, context)
    if len(words) > _ARGS_MAX:
        raise words[0].error(Code.TOO_MANY_ARGS, hint=f"at most {_ARGS_MAX}")
    args: list[FetchArg] = []
    late: list[DefinitionError] = []
    for word in words:
        arg, error = _read_word(word, args, context)
        args.append(arg)
        late += [error] if error is not None else []
    if late and is_registered:
        raise late[0]
    return tuple(args)


def read_parameter(word: Token, context: ParseContext) -> FetchArg:
    """Read a word that stands for parameters, whatever its type.

    Raises:
        DefinitionError: its number is none.
    """
    arg, _ = _read_word(word.cut(0, len(word.text.partition(":")[0])), (), context)
    return arg


def _read_word(
    token: Token, before: Sequence[FetchArg], context: ParseContext
) -> tuple[FetchArg, DefinitionError | None]:
    if is_all(token):
        return _all_parameters(token), None
    if token.text in _ALL_VARIABLES:
        return _all_variables(token), None
    number = len(before) + 1
    taken = {arg.name for arg in before}
    if "" in taken:
        # After $arg* a default name's number is not known yet, and so not who has it.
        taken -= {f"arg{number}"} if "=" not in token.text else set()
    default = default_arg_name(token, number)
    name, body = read_arg_name(token, default=default, taken=frozenset(taken))
    room = _RECORD_MAX - sum(_size(arg.spec, arg.fetch) for arg in before)
    word = _Word(name=name, token=token, body=body, room=room)
    return _read_path(word, context) if is_path_word(token) else _read_body(word, context)


def _all_parameters(token: Token) -> FetchArg:
    # What stands after the star is dropped, as the kernel does.
    return FetchArg(
        name="",
        fetch=AllParameters(span=token.span),
        type="",
        text=ALL,
        span=token.span,
        body=token.span,
        type_span=token.cut(len(token.text)).span,
    )


def _all_variables(token: Token) -> FetchArg:
    all_variables = AllVariables(has_locals=_ALL_VARIABLES[token.text], span=token.span)
    return replace(_all_parameters(token), fetch=all_variables, text=token.text)


def _read_body(word: _Word, context: ParseContext) -> tuple[FetchArg, DefinitionError | None]:
    body = word.body
    _check_length(body, 0)
    text, colon, _ = body.text.partition(":")
    expression, type_word = body.cut(0, len(text)), body.cut(len(text) + len(colon))
    written = Written(
        body=body,
        expression=expression,
        word=type_word,
        spec=read_type(type_word, text) if colon else None,
        is_named=word.is_named,
        is_return=context.is_return,
    )
    reading = read_fetch(expression, replace(context, is_meta=is_numbered(word.token)))
    _check_room(word, reading, _size(written.spec, reading.fetch))
    return _argument(word, written, reading, finish(reading, written)), reading.late


def _read_path(word: _Word, context: ParseContext) -> tuple[FetchArg, DefinitionError | None]:
    # The kernel rewrites X:%pd to +0x0(+0xOFF(X)):string before it reads the word.
    body = word.body
    end = len(body.text) - len(":%pd")
    expression, type_word = body.cut(0, end), body.cut(end + 1)
    longer, derefs = _PATHS[type_word.text]
    _check_length(body, longer - len(":%pd"))
    if ":" in expression.text:
        raise body.error(Code.BAD_TYPE, expression.text.index(":") + 1)
    spec = TypeWord(base=type_word.text.removeprefix("%"), size=_LOCATION)
    reading = read_fetch(expression, context)
    check_number(reading.fetch, expression)
    ops = reading.ops
    for _ in range(derefs):
        ops = one_more(ops, expression)
    _check_room(word, reading, spec.size)
    written = Written(
        body=body,
        expression=expression,
        word=type_word,
        spec=spec,
        is_named=word.is_named,
        is_return=context.is_return,
    )
    return _argument(word, written, reading, spec), reading.late


def _argument(word: _Word, written: Written, reading: Reading, spec: TypeWord | None) -> FetchArg:
    is_all = isinstance(reading.fetch, AllMembers)
    if is_all and written.word.text:
        raise written.word.error(Code.BAD_TYPE, hint="members have types of their own")
    return FetchArg(
        name="" if is_all and not word.is_named else word.name,
        fetch=reading.fetch,
        type=written.word.text,
        text=word.body.text,
        span=word.token.span,
        body=written.expression.span,
        type_span=written.word.span,
        spec=spec,
    )


def _check_length(body: Token, longer: int) -> None:
    if len(body.text) + longer > _BODY_MAX:
        raise body.error(Code.ARG_TOO_LONG, hint=f"at most {_BODY_MAX} characters")
    if not body.text:
        raise body.error(Code.NO_ARG_BODY)


def _check_room(word: _Word, reading: Reading, size: int) -> None:
    if size > word.room:
        at = replace(word.body, caret=reading.caret)
        raise at.error(Code.EVENT_TOO_BIG, hint=f"all fields have at most {_RECORD_MAX} bytes")


def _size(spec: TypeWord | None, fetch: Fetch) -> int:
    if spec is not None:
        return spec.size * (spec.count or 1)
    match fetch:
        case Comm() | Text() | Stacktrace():
            return _LOCATION
        case Argument() | Parameter() | Member() | ReturnValue() | AllParameters() | AllVariables():
            # The kernel's types may make it smaller than x64, and then it counts less.
            return 1
        case _:
            return 8
