"""Reader of fetch expressions: one small function per form, chosen by the first character.

The forms are registers, ``$`` expressions, memory and constants; ``+8(...)``, ``this_cpu_ptr(...)``
and ``this_cpu_read(...)`` around another expression; and parameters, walks along members and type
casts, ``(STRUCT)FETCH->MEMBER`` and ``(STRUCT,FIELD)FETCH->MEMBER``, which need the kernel's types.
"""

import re
from collections.abc import Collection
from difflib import get_close_matches

from msgspec.structs import replace

from kprobes.lang.lexer import Token, read_decimal, read_signed, read_unsigned
from kprobes.lang.names import is_identifier
from kprobes.lang.scope import ParseContext, Reader, Reading, leaf, one_more
from kprobes.model.codes import Code
from kprobes.model.definition import (
    AddressOf,
    AllMembers,
    Argument,
    Cast,
    Comm,
    CurrentTask,
    Deref,
    EventType,
    Fetch,
    Immediate,
    Member,
    MemoryAt,
    MemoryOf,
    Parameter,
    PerCpu,
    Register,
    ReturnValue,
    Span,
    StackPointer,
    StackSlot,
    Stacktrace,
    Step,
    Text,
)
from kprobes.units import U64, Addr

_POINTER = "this_cpu_ptr("
_READ = "this_cpu_read("


def is_per_cpu(text: str) -> bool:
    """Whether an expression is one of a per-CPU variable."""
    return text.startswith((_POINTER, _READ))


def read_deref(token: Token, context: ParseContext, read: Reader) -> Reading:
    """Read ``+|-[u]OFF(FETCH)``.

    Args:
        token: the whole of it.
        context: what is parsed, and how deep.
        read: reads the inner expression.

    Raises:
        DefinitionError: the kernel's error for it.
    """
    text = token.text
    is_user = text[1:2] == "u"
    opening = text.find("(")
    if opening < 0:
        raise token.error(Code.DEREF_NEED_BRACE, hint=f"such as {text}(%REG)")
    sign = text[0].removeprefix("+")
    number = sign + text[1 + is_user : opening]
    offset = read_signed(number)
    if offset is None:
        raise token.error(Code.BAD_DEREF_OFFS)
    # Where the kernel believes the inner text begins: it counts its copy of the number, which
    # has lost the "+" and the "u", and adds one for the "+".
    skipped = len(number) + 1 + (0 if number.startswith("-") else 1)
    inner = _inside_brace(token, opening + 1, token.caret + skipped)
    base = _base(inner, context, read)
    fetch = Deref(
        base=base.fetch, offset=offset, is_user=is_user, span=Span(token.start, inner.stop + 1)
    )
    return replace(base, fetch=fetch, ops=one_more(base.ops, inner), caret=inner.caret)


def read_per_cpu(token: Token, context: ParseContext, read: Reader) -> Reading:
    """Read ``this_cpu_ptr(FETCH)`` or ``this_cpu_read(FETCH)``.

    Args:
        token: the whole of it.
        context: what is parsed, and how deep.
        read: reads the inner expression.

    Raises:
        DefinitionError: the kernel's error for it.
    """
    is_read = token.text.startswith(_READ)
    opened = len(_READ if is_read else _POINTER)
    inner = _inside_brace(token, opened, token.caret + opened)
    base = _base(inner, context, read)
    # Of @SYM the address is wanted, not what is there: its load gives way to the new operation.
    ops = base.ops if inner.text.startswith("@") else one_more(base.ops, inner)
    fetch = PerCpu(base=base.fetch, is_read=is_read, span=Span(token.start, inner.stop + 1))
    return replace(
        base, fetch=fetch, ops=one_more(ops, inner) if is_read else ops, caret=inner.caret
    )


def _inside_brace(token: Token, start: int, caret: int) -> Token:
    # The last brace closes: what follows it is dropped, as the kernel does.
    rest = replace(token.cut(start), caret=caret)
    closing = rest.text.rfind(")")
    if closing < 0:
        raise rest.error(Code.DEREF_OPEN_BRACE, len(rest.text))
    return rest.cut(0, closing)


def _base(inner: Token, context: ParseContext, read: Reader) -> Reading:
    base = read(inner, context)
    check_number(base.fetch, inner)
    return base


def check_number(fetch: Fetch, token: Token) -> None:
    """Refuse an expression that is no number, where one is wanted.

    Raises:
        DefinitionError: it is a text or a stack.
    """
    if isinstance(fetch, Comm | Text):
        raise token.error(Code.COMM_CANT_DEREF)
    if isinstance(fetch, Stacktrace):
        raise token.error(Code.BAD_VAR, hint="a stack trace is no address: $stack is one")
    if isinstance(fetch, AllMembers):
        raise token.error(Code.BAD_FETCH_ARG, hint="*NAME is an argument of its own")


_INDEXED = re.compile(r"(\w+)((?:\[\d{1,9}\])+)", re.ASCII)
_NO_BTF_HERE = "names of parameters and members need a place in a function, not an address"


def read_parameter(token: Token, context: ParseContext) -> Reading:
    """Read ``NAME`` or ``NAME->MEMBER.MEMBER...``.

    Raises:
        DefinitionError: it can be no such name.
    """
    if context.is_address:
        raise token.error(Code.NOSUP_BTFARG, hint=_NO_BTF_HERE)
    whole, rest = split_walk(token, has_structs=context.has_structs)
    name, indexes = _split_indexes(whole)
    if not is_identifier(name.text):
        raise token.error(Code.NO_BTFARG, hint=f"{name.text!r} cannot be a parameter's name")
    base = leaf(Parameter(name=name.text, span=name.span), token)
    if rest is None:
        return walk(base, None, token, indexes=indexes) if indexes else base
    is_arrow = token.text[len(whole.text)] == "-"
    return walk(base, rest, token, is_arrow=is_arrow, indexes=indexes)


def split_walk(token: Token, *, has_structs: bool = False) -> tuple[Token, Token | None]:
    """Split ``X->REST`` at its arrow; the rest is None when there is none.

    Args:
        token: the whole of it.
        has_structs: whether it may be ``X.REST``, too.

    Raises:
        DefinitionError: another mark of a walk stands there first.
    """
    at = _first_mark(token.text)
    if at is None:
        return token, None
    if token.text[at] == ".":
        if has_structs or token.text[at - 1] == "]":
            return token.cut(0, at), token.cut(at + 1)
        hint = "an argument is not a structure; follow a pointer with ->"
        raise token.error(Code.NOSUP_DAT_ARG, at + 1, hint=hint)
    _check_arrow(token, at)
    return token.cut(0, at), token.cut(at + 2)


def walk(
    base: Reading,
    rest: Token | None,
    whole: Token,
    *,
    is_arrow: bool = True,
    indexes: tuple[int, ...] = (),
) -> Reading:
    """Read the members after an arrow, and walk along them.

    Args:
        base: where the walk begins.
        rest: the members, after the first arrow; None where there are only indexes.
        whole: the whole expression.
        is_arrow: whether it is one, and no dot.
        indexes: that follow the base.

    Raises:
        DefinitionError: a member cannot have such a name, or the walk is too long.
    """
    steps = list[tuple[Step, Token]]()
    if indexes:
        element = Step(name="", is_arrow=True, span=whole.span, indexes=indexes)
        steps.append((element, whole))
    if rest is not None:
        steps += read_steps(rest, is_arrow=is_arrow)
    fetch: Fetch = Member(
        base=base.fetch, steps=tuple(step for step, _ in steps), span=Span(whole.start, whole.stop)
    )
    ops = base.ops
    for step, name in steps:
        ops = one_more(ops, name) if step.is_arrow else ops
    last = steps[-1][1]
    return Reading(fetch=fetch, caret=last.caret, ops=ops, late=base.late)


def read_steps(rest: Token, *, is_arrow: bool = True) -> tuple[tuple[Step, Token], ...]:
    """Read ``MEMBER->MEMBER.MEMBER``, what stands after an arrow.

    Args:
        rest: the members.
        is_arrow: whether it is one that they stand after, and no dot.

    Raises:
        DefinitionError: a member cannot have such a name.
    """
    steps: list[tuple[Step, Token]] = []
    while True:
        at = _first_mark(rest.text)
        is_dot = at is not None and rest.text[at] == "."
        if at is not None and not is_dot:
            _check_arrow(rest, at)
        # Whether there can be such a member is found out when its struct is known.
        name, indexes = _split_indexes(rest.cut(0, at))
        step = Step(name=name.text, is_arrow=is_arrow, span=name.span, indexes=indexes)
        steps.append((step, name))
        if at is None:
            return tuple(steps)
        rest = rest.cut(at + (1 if is_dot else 2))
        is_arrow = not is_dot


def _split_indexes(token: Token) -> tuple[Token, tuple[int, ...]]:
    found = _INDEXED.fullmatch(token.text)
    if found is None:
        return token, ()
    name, indexes = found.groups()
    return token.cut(0, len(name)), tuple(int(each) for each in re.findall(r"\d+", indexes))


def _first_mark(text: str) -> int | None:
    return next((at for at, char in enumerate(text) if char in ".-"), None)


def _check_arrow(token: Token, at: int) -> None:
    if token.text[at : at + 2] != "->":
        raise token.error(Code.BAD_HYPHEN, at)


_NESTED_MAX = 8
_DIGIT = re.compile(r"[0-9]")
_REQUIRED = "a cast is followed by a member, such as (task_struct)%di->pid"


def read_cast(token: Token, context: ParseContext, read: Reader) -> Reading:
    """Read a cast and the member after it.

    Args:
        token: the whole of it.
        context: what is parsed, and how deep.
        read: reads the expression that is cast.

    Raises:
        DefinitionError: the kernel's error for it.
    """
    if context.is_address:
        raise token.error(Code.NOSUP_BTFARG, hint="casts need a place in a function")
    if context.casts >= _NESTED_MAX:
        raise token.error(Code.TOO_MANY_NESTED, hint=f"at most {_NESTED_MAX}")
    closing = token.text.find(")")
    if closing < 0:
        raise token.error(Code.DEREF_OPEN_BRACE, len(token.text))
    inner, rest = _split(token.cut(closing + 1))
    base = read(inner, replace(context, casts=context.casts + 1))
    check_number(base.fetch, inner)
    struct, container = _read_struct(token.cut(1, closing))
    span = Span(token.start, rest.start - 2)
    cast = Cast(struct=struct, container=container, base=base.fetch, span=span)
    return walk(replace(base, fetch=cast), rest, token)


def _split(token: Token) -> tuple[Token, Token]:
    # What is cast, without braces around all of it, and what stands after its arrow.
    text = token.text
    if text.startswith("("):
        close = _matching(text, 0)
        if close is None:
            raise token.error(Code.DEREF_OPEN_BRACE)
        return token.cut(1, close), _members(token, close + 1, missing=close + 1)
    if text.startswith(("+", "-")) or is_per_cpu(text):
        return _split_nested(token)
    return _split_plain(token)


def _split_nested(token: Token) -> tuple[Token, Token]:
    opening = token.text.find("(", 1)
    if opening < 0:
        raise token.error(Code.DEREF_NEED_BRACE)
    close = _matching(token.text, opening)
    if close is None:
        raise token.error(Code.DEREF_OPEN_BRACE, len(token.text))
    return token.cut(0, close + 1), _members(token, close + 1, missing=close + 2)


def _split_plain(token: Token) -> tuple[Token, Token]:
    text = token.text
    sign = next((at for at, char in enumerate(text) if char in "+-"), len(text))
    if text.startswith("@") and _DIGIT.match(text, sign + 1):
        raise token.error(Code.TYPECAST_SYM_OFFSET, hint=f"such as ({text[: sign + 2]}...)->MEMBER")
    hyphen = text.find("-")
    arrow = hyphen if hyphen >= 0 else len(text)
    return token.cut(0, arrow), _members(token, arrow, missing=len(text))


def _members(token: Token, arrow: int, *, missing: int) -> Token:
    if token.text[arrow : arrow + 2] != "->":
        raise token.error(Code.TYPECAST_REQ_FIELD, missing, hint=_REQUIRED)
    return token.cut(arrow + 2)


def _matching(text: str, opening: int) -> int | None:
    depth = 0
    for at in range(opening, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at
    return None


def _read_struct(token: Token) -> tuple[str, str]:
    name, comma, _ = token.text.partition(",")
    if not is_identifier(name):
        raise token.error(Code.NO_PTR_STRCT, hint="a cast names a structure, without 'struct'")
    if not comma:
        return name, ""
    field = token.cut(len(name) + 1)
    path, arrow, _ = field.text.partition("->")
    for _, member in read_steps(field.cut(0, len(path))):
        if not is_identifier(member.text):
            hint = f"{member.text!r} cannot be a member's name"
            raise member.error(Code.NO_BTF_FIELD, hint=hint)
    if arrow:
        raise field.error(Code.TYPECAST_BAD_ARROW, len(path))
    return name, path


def near_register(name: str, registers: Collection[str]) -> str:
    """Return a hint for a wrong register name.

    pt_regs calls every register by its bare name (``di``), where people write the name that
    the assembler has for one of its widths (``rdi``, ``edi``, ``r8d``, ``al``).
    """
    lower = name.lower()
    guesses = (lower, lower[1:], lower[:-1], f"{lower[:-1]}x")
    close = get_close_matches(lower, sorted(registers), n=1)
    for guess in (*guesses, *close):
        if guess in registers:
            return f"did you mean %{guess}?"
    return f"registers: {' '.join(registers)}"


ARGUMENTS_MAX = 2048
"""THREAD_SIZE / sizeof(long): 16 KiB stacks on x86-64 and arm64. Words of the stack, too."""

_VARIABLES = "variables: $argN $arg* $retval $stack $stackN $stacktrace $ustack $comm $current"
_RETVAL = "$retval"
_CURRENT = "$current"
STACKTRACE = "$stacktrace"
_USER_STACK = "$ustack"


def read_variable(token: Token, context: ParseContext) -> Reading:
    """Read an expression that starts with a dollar sign.

    Raises:
        DefinitionError: the kernel's error for it.
    """
    text = token.text
    if text in ("$comm", "$COMM"):
        return leaf(Comm(span=token.span), token)
    if text.startswith(_RETVAL):
        return _return_value(token, context)
    if text == _CURRENT or text.startswith((_CURRENT + "-", _CURRENT + ".")):
        return _current(token)
    if text == STACKTRACE:
        return leaf(Stacktrace(span=token.span), token)
    if text == _USER_STACK:
        return leaf(Stacktrace(span=token.span, is_user=True), token)
    if text.startswith("$stack"):
        return _stack(token)
    if text.startswith("$arg"):
        return _argument(token, context)
    raise token.error(Code.BAD_VAR, hint=_VARIABLES)


def _return_value(token: Token, context: ParseContext) -> Reading:
    if not context.is_return or context.is_address:
        hint = "only a probe at the return of a function that is named has it"
        raise token.error(Code.RETVAL_ON_PROBE, hint=hint)
    name, rest = split_walk(token)
    if name.text != _RETVAL:
        # As the kernel, which then takes it for a parameter's name.
        raise token.error(Code.NO_BTFARG, hint="the value that a function returns is $retval")
    base = leaf(ReturnValue(span=name.span), token)
    return walk(base, rest, token) if rest is not None else base


def _current(token: Token) -> Reading:
    name, rest = split_walk(token)
    base = leaf(CurrentTask(span=name.span), token)
    return walk(base, rest, token) if rest is not None else base


def _stack(token: Token) -> Reading:
    digits = token.text.removeprefix("$stack")
    if not digits:
        return leaf(StackPointer(span=token.span), token)
    number = _number(token, digits)
    if number > ARGUMENTS_MAX:
        raise token.error(Code.BAD_STACK_NUM, hint=f"at most {ARGUMENTS_MAX}")
    return leaf(StackSlot(number=number, span=token.span), token)


def _argument(token: Token, context: ParseContext) -> Reading:
    digits = token.text.removeprefix("$arg")
    # Of such a word the number is looked at when it is known how many parameters there are.
    number = int(digits) if context.is_meta else _number(token, digits)
    if number == 0 or (number > ARGUMENTS_MAX and not context.is_meta):
        raise token.error(Code.BAD_ARG_NUM, hint=f"arguments count from 1 to {ARGUMENTS_MAX}")
    if context.is_address:
        raise token.error(Code.NOFENTRY_ARGS, hint="a place by address is not a function's entry")
    return leaf(Argument(number=number, span=token.span), token)


def _number(token: Token, digits: str) -> int:
    number = read_decimal(digits)
    if number is None:
        raise token.error(Code.BAD_VAR, hint=_VARIABLES)
    return number


def read_fetch(token: Token, context: ParseContext) -> Reading:
    """Read one fetch expression, which is the whole piece.

    Raises:
        DefinitionError: the kernel's error for it.
    """
    form = _FORMS.get(token.text[:1], _other)
    return form(token, context)


def _register(token: Token, context: ParseContext) -> Reading:
    name = token.text[1:]
    if context.type is not EventType.KPROBE:
        hint = "registers are known to p and r; here there are $argN, NAME and $stackN"
        raise token.error(Code.BAD_VAR, hint=hint)
    if name not in context.registers:
        raise token.error(Code.BAD_REG_NAME, hint=near_register(name, context.registers))
    return leaf(Register(name=name, span=token.span), token)


def _memory(token: Token, context: ParseContext) -> Reading:
    where = token.text[1:]
    if where[:1].isascii() and where[:1].isdigit():
        addr = read_unsigned(where)
        if addr is None:
            raise token.error(Code.BAD_MEM_ADDR)
        return leaf(MemoryAt(addr=Addr(addr), span=token.span), token, ops=1)
    if where.startswith("+"):
        raise token.error(Code.FILE_ON_KPROBE, hint="only user-space probes have files")
    return _memory_of_symbol(token, context)


def _memory_of_symbol(token: Token, context: ParseContext) -> Reading:
    # The kernel looks the symbol up at registration, after everything else, and then all that
    # it says is that the probe cannot be registered.
    symbol, offset = _split_offset(token.text[1:])
    late = None
    if offset is None:
        hint = f"{token.text} has a bad offset; it is + or - and a number"
        late = context.place.error(Code.FAIL_REG_PROBE, hint=hint)
    elif not symbol:
        late = context.place.error(Code.BAD_PROBE_ADDR, hint=f"{token.text} names no symbol")
    fetch = MemoryOf(symbol=symbol, offset=offset or 0, span=token.span)
    return Reading(fetch=fetch, caret=token.caret, ops=2, late=late)


def _split_offset(text: str) -> tuple[str, int | None]:
    for at, char in enumerate(text):
        if char in "+-":
            return text[:at], read_signed(text[at:])
    return text, 0


def _immediate(token: Token, context: ParseContext) -> Reading:
    del context
    text = token.text[1:]
    if text.startswith('"'):
        return _immediate_string(token)
    value = _immediate_value(text)
    if value is None:
        raise token.error(Code.BAD_IMM, 1)
    return leaf(Immediate(value=value & U64, span=token.span), token)


def _immediate_string(token: Token) -> Reading:
    text = token.text[2:]
    if not text.endswith('"'):
        hint = "it ends with a quote, and has no blank, colon or # inside"
        raise token.error(Code.IMMSTR_NO_CLOSE, len(token.text), hint=hint)
    return leaf(Text(value=text[:-1], span=token.span), token)


def _immediate_value(text: str) -> int | None:
    # A sign makes the number signed: \18446744073709551615 is one, \+18446744073709551615 none.
    if text.startswith("+"):
        return read_signed(text[1:])
    return read_signed(text) if text.startswith("-") else read_unsigned(text)


def _deref(token: Token, context: ParseContext) -> Reading:
    return read_deref(token, context, read_fetch)


def _address_of(token: Token, context: ParseContext) -> Reading:
    inner = token.cut(1)
    base = _after_mark(token, inner, context)
    if not isinstance(base.fetch, Member | Parameter):
        raise token.error(Code.BAD_FETCH_ARG, hint="& stands before a variable or a member")
    return replace(base, fetch=AddressOf(base=base.fetch, span=token.span))


def _all_members(token: Token, context: ParseContext) -> Reading:
    inner = token.cut(len(token.text) - len(token.text.lstrip("*")))
    is_cast = inner.text.startswith("(") and "->" not in inner.text
    base = _bare_cast(inner, context) if is_cast else _after_mark(token, inner, context)
    if not isinstance(base.fetch, Member | Parameter | Cast | CurrentTask | ReturnValue):
        raise token.error(
            Code.BAD_FETCH_ARG, hint="* stands before what is, or points to, a struct"
        )
    depth = len(token.text) - len(inner.text)
    return replace(base, fetch=AllMembers(base=base.fetch, depth=depth, span=token.span))


def _after_mark(token: Token, inner: Token, context: ParseContext) -> Reading:
    if not inner.text:
        # As the kernel, which knows no such mark.
        raise token.error(Code.BAD_FETCH_ARG, hint="it stands before a variable or a member")
    return read_fetch(inner, context)


def _bare_cast(token: Token, context: ParseContext) -> Reading:
    closing = token.text.find(")")
    if closing < 0:
        raise token.error(Code.DEREF_OPEN_BRACE, len(token.text))
    base = _base(token.cut(closing + 1), context, read_fetch)
    struct, container = _read_struct(token.cut(1, closing))
    cast = Cast(struct=struct, container=container, base=base.fetch, span=token.span)
    return replace(base, fetch=cast)


def _cast(token: Token, context: ParseContext) -> Reading:
    return read_cast(token, context, read_fetch)


def _other(token: Token, context: ParseContext) -> Reading:
    first = token.text[:1]
    if is_per_cpu(token.text):
        return read_per_cpu(token, context, read_fetch)
    if first.isascii() and (first.isalpha() or first == "_"):
        return read_parameter(token, context)
    raise token.error(Code.BAD_FETCH_ARG, hint=r"an expression starts with % $ @ \ + - ( or a name")


_FORMS: dict[str, Reader] = {
    "%": _register,
    "$": read_variable,
    "@": _memory,
    "\\": _immediate,
    "+": _deref,
    "-": _deref,
    "(": _cast,
    "&": _address_of,
    "*": _all_members,
}
