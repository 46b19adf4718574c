"""Parser: statements to Definitions, with the errors, carets and order of checks of the kernel.

A statement that begins with ``-:`` deletes: ``-:[GRP/]EVENT [PLACE [ARGS]]``.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from msgspec.structs import replace

from kprobes.errors import DefinitionError
from kprobes.lang.append import apply
from kprobes.lang.argument import check_meta, is_parameter, read_arguments, read_parameter
from kprobes.lang.lexer import (
    Line,
    Token,
    each_line,
    lines_of,
    lines_of_boot,
    read_signed,
    read_unsigned,
)
from kprobes.lang.names import event_at, read_names
from kprobes.lang.scope import ParseContext
from kprobes.model.codes import Code, rejection
from kprobes.model.definition import (
    Definition,
    Deletion,
    EventType,
    FetchArg,
    Kind,
    Place,
    Statement,
)
from kprobes.units import Addr

_MARK = "-:"
_HINT = "such as: -:myopen or -:mygroup/"


def read_deletion(line: Line) -> Deletion:
    """Read a statement that starts with a hyphen.

    Raises:
        DefinitionError: it names no event.
    """
    head, *rest = line.words
    if line.is_indented:
        # As the kernel, which looks at the line's first character.
        raise head.error(Code.BAD_DELETION, hint="a deletion begins its line")
    if not head.text.startswith(_MARK):
        raise head.error(Code.BAD_DELETION, 1, hint=_HINT)
    label = head.text.removeprefix(_MARK)
    group, slash, event = label.partition("/") if "/" in label else ("", "", label)
    if not event and not group:
        raise head.error(Code.BAD_DELETION, len(head.text), hint=_HINT)
    return Deletion(
        command=line.command,
        group=group if slash else None,
        event=event,
        words=tuple(word.text for word in rest),
    )


_OFFSET_MAX = (1 << 32) - 1
_SYMBOL = re.compile(r"[A-Za-z_.][A-Za-z0-9_.]*")
_MODULE = re.compile(r"[A-Za-z0-9_]+")
_PATTERN = re.compile(r"[A-Za-z0-9_.*?\[\]!^-]+")
# A pattern may hold [a-z], whose hyphen starts no offset.
_UP_TO_OFFSET = re.compile(r"(?:\[[^\]]*\]|[^+-])*")
_RETURN = "%return"
SOURCE_FILE = r"[\w./+-]+\.[chS]"
"""The end of a source file's path, as an expression."""
_SOURCE = re.compile(
    rf"(?:(?P<module>[A-Za-z0-9_]+):)?(?:(?P<file>{SOURCE_FILE})|(?P<function>[A-Za-z_][\w.]*)(?:@(?P<of>{SOURCE_FILE}))?)"
    r"(?::(?P<line>\d{1,9})|;(?P<pattern>.+))?",
    re.ASCII,
)
_PLACES = (
    "a place is SYMBOL, SYMBOL+OFFSET, MODULE:SYMBOL, an address, or of the source SYMBOL:LINE, "
    "FILE:LINE or SYMBOL;PATTERN"
)


def read_place(word: Token) -> tuple[Place, bool]:
    """Read ``[MOD:]SYM[+OFF][%return]`` or an address; SYM may be a shell pattern.

    Returns:
        The place, and whether ``%return`` follows it.

    Raises:
        DefinitionError: it cannot be a place.
    """
    addr = read_unsigned(word.text)
    if addr is not None:
        return Place(symbol="", offset=0, span=word.span, addr=Addr(addr)), False
    source = _SOURCE.fullmatch(word.text)
    if source is not None and (source["of"] or source["line"] or source["pattern"]):
        if source["pattern"] and not source["function"]:
            hint = "lines are found by their text in a function: FUNCTION;PATTERN"
            raise word.error(Code.BAD_PROBE_ADDR, hint=hint)
        place = Place(
            symbol=source["function"] or "",
            offset=0,
            span=word.span,
            module=source["module"] or "",
            file=source["file"] or source["of"] or "",
            line=int(source["line"] or 0),
            pattern=source["pattern"] or "",
        )
        return place, False
    if "/" in word.text and ":" in word.text:
        raise word.error(Code.NOT_KPROBE, hint="a path and an offset are a user-space probe")
    symbol, percent, suffix = word.text.partition("%")
    if percent and percent + suffix != _RETURN:
        raise word.error(Code.BAD_ADDR_SUFFIX, len(symbol), hint="the only suffix is %return")
    place = _split_module(word, _symbol_and_offset(word.cut(0, len(symbol))))
    # The kernel would look the symbol up; no kernel has one of other characters.
    if not (_PATTERN if place.is_glob else _SYMBOL).fullmatch(place.symbol):
        raise word.error(Code.BAD_PROBE_ADDR, hint=_PLACES)
    return place, bool(percent)


def _split_module(word: Token, place: Place) -> Place:
    module, colon, symbol = place.symbol.partition(":")
    if not colon:
        return place
    if not _MODULE.fullmatch(module):
        raise word.error(Code.BAD_PROBE_ADDR, hint="a module is named by letters, digits and _")
    return replace(place, module=module, symbol=symbol)


def _symbol_and_offset(token: Token) -> Place:
    symbol = _prefix(token.text)
    rest = token.text[len(symbol) :]
    offset = read_signed(rest) if rest else 0
    if not symbol:
        raise token.error(Code.BAD_PROBE_ADDR, hint=_PLACES)
    if offset is None or not 0 <= offset <= _OFFSET_MAX:
        raise token.error(Code.BAD_PROBE_ADDR, hint="an offset is + and a number, such as +0x10")
    return Place(symbol=symbol, offset=offset, span=token.span)


def _prefix(text: str) -> str:
    found = _UP_TO_OFFSET.match(text)
    return found[0] if found else ""


_TRACEPOINT = re.compile(r"[A-Za-z0-9_]*")
_TRACEPOINTS = re.compile(r"[A-Za-z0-9_*?\[\]!^-]*")
_RETVAL = re.compile(r"\$retval(?![A-Za-z0-9_])")


def _read_function(word: Token, words: Sequence[Token]) -> tuple[Place, bool]:
    # Of ``f``: as the kernel, which takes the return for the place where any word needs it.
    place, is_return = read_place(word)
    if place.addr is not None or place.line is not None or "+" in word.text:
        hint = "f is at a function's entry or return; another place is probed by p"
        raise word.error(Code.BAD_PROBE_ADDR, hint=hint)
    return place, is_return or any(_RETVAL.search(each.text) for each in words)


def _read_tracepoint(word: Token, words: Sequence[Token]) -> Place:
    name, percent, _ = word.text.partition("%")
    if percent:
        raise word.error(Code.BAD_ADDR_SUFFIX, len(name), hint="a tracepoint has no return")
    place = Place(symbol=name, offset=0, span=word.span)
    found = (_TRACEPOINTS if place.is_glob else _TRACEPOINT).match(name)
    if found is None or found.end() < len(name):
        at = found.end() if found else 0
        raise word.error(Code.BAD_TP_NAME, at, hint="its name alone, without a group")
    for each in words:
        if (needed := _RETVAL.search(each.text)) is not None:
            hint = "a tracepoint returns nothing"
            raise each.error(Code.RETVAL_ON_PROBE, needed.start(), hint=hint)
    return place


_EVENT = re.compile(r"(?P<group>\w+)[./](?P<event>\w+)", re.ASCII)
_SYSTEM_CALL = re.compile(r"sys_(?P<when>enter|exit)_(?P<name>\w+)", re.ASCII)
_FIELD = re.compile(r"\$(?!(?:comm|COMM|stack\d*|current)\b|common_|__)(\w+)", re.ASCII)
_RESULT = re.compile(r"\$ret\b", re.ASCII)
_TYPES = {
    "p": (EventType.KPROBE, Kind.ENTRY),
    "r": (EventType.KPROBE, Kind.RETURN),
    "f": (EventType.FPROBE, Kind.ENTRY),
    "t": (EventType.TRACEPOINT, Kind.ENTRY),
}
_SUCH_AS = "such as: p:myopen do_sys_openat2"
_DIGIT = re.compile(r"[0-9]")
_MAXACTIVE_DIGITS = 63
_MAXACTIVE_MAX = 4096


class _Start(NamedTuple):
    # What stands before the arguments, but for names.
    type: EventType
    kind: Kind
    place: Place
    maxactive: int


def parse(text: str, *, registers: Collection[str]) -> Definition:
    """Read one definition.

    Args:
        text: one statement; comments and blank lines around it are fine.
        registers: the names that ``%NAME`` may have in the target.

    Raises:
        DefinitionError: what is wrong, in the kernel's words, and where.
    """
    statement = parse_statement(text, registers=registers)
    if isinstance(statement, Deletion):
        raise rejection(Code.IS_DELETION, command=statement.command, column=0)
    return statement


def parse_statement(text: str, *, registers: Collection[str]) -> Statement:
    """Read one definition or deletion; everything else as ``parse``."""
    found = lines_of(text)
    if not found:
        raise rejection(Code.NO_STATEMENT, command="", column=0)
    first, *others = found
    for other in others:
        raise other.words[0].error(Code.MANY_STATEMENTS)
    return _parse(first, registers)


def parse_statements(text: str, *, registers: Collection[str]) -> tuple[Statement, ...]:
    """Read the statements of a file, one per line; ``#`` starts a comment.

    Raises:
        DefinitionError: for the first line that is wrong; a note on it has the line's number.
    """
    return tuple(each_statement(text, registers=registers))


def each_statement(text: str, *, registers: Collection[str]) -> Iterator[Statement]:
    """Yield the statements of a file as they are read; else as ``parse_statements``."""
    return (_parse_line(line, registers) for line in each_line(text))


def parse_source(text: str, *, registers: Collection[str]) -> tuple[Definition, ...]:
    """Read a file, and return the definitions that are there after all its statements.

    Raises:
        DefinitionError: as ``parse_statements`` and ``append.apply``.
    """
    return apply(parse_statements(text, registers=registers))


class Prefix(NamedTuple):
    """What a kernel looks at in a wrong definition before it comes to the error.

    Attributes:
        read: the definition with the arguments before the error, its event without a name.
        with_parameters: the same, and the words after it that stand for parameters.
        with_variable: the same, and the variable of a wrong walk along members, if that is wrong
            after its first arrow.
    """

    read: Definition
    with_parameters: Definition
    with_variable: Definition


def parse_prefix(text: str, *, registers: Collection[str]) -> Prefix | None:
    """Return what the kernel has understood of a wrong definition when it comes to the error.

    The kernel looks up what it reads as it reads it, so all of this must be right first.

    Returns:
        What there is; None when the error comes before the end of its place, or it is no
        definition.
    """
    try:
        lines = lines_of(text)
        if not lines:
            return None
        head, *rest = lines[0].words
        start = _read_start(head, rest)
    except DefinitionError:
        return None
    words = rest[1:]
    context = _context(registers, rest[0], start)
    found, parameters = _right_arguments(head, words, context)
    read = Definition(
        command=head.command,
        kind=start.kind,
        type=start.type,
        group="",
        event="",
        is_named=False,
        place=start.place,
        args=found,
    )
    variable = _variable(words[len(found)], context) if len(found) < len(words) else ()
    return Prefix(
        read=read,
        with_parameters=replace(read, args=(*found, *parameters)),
        with_variable=replace(read, args=(*found, *variable)),
    )


def _variable(word: Token, context: ParseContext) -> tuple[FetchArg, ...]:
    try:
        read_arguments((word,), context)
    except DefinitionError as error:
        before, arrow, _ = word.text.partition("->")
        if error.code == Code.BAD_HYPHEN.name and arrow and "(" not in before:
            with suppress(DefinitionError):
                return read_arguments((word.cut(0, len(before)),), context)
    return ()


def _right_arguments(
    head: Token, words: list[Token], context: ParseContext
) -> tuple[tuple[FetchArg, ...], list[FetchArg]]:
    found: tuple[FetchArg, ...] = ()
    parameters: list[FetchArg] = []
    with suppress(DefinitionError):
        read_names(head, context.type)
        check_meta(words, context)
        parameters = [read_parameter(word, context) for word in words if is_parameter(word)]
        for count in range(1, len(words) + 1):
            found = read_arguments(words[:count], context, is_registered=False)
    return found, parameters[sum(map(is_parameter, words[: len(found)])) :]


def parse_boot(text: str, *, registers: Collection[str]) -> tuple[Definition, ...]:
    """Read the value of the kernel's boot parameter ``kprobe_event=``.

    Raises:
        DefinitionError: as ``parse_source``; a note has the statement's number.
    """
    return apply(tuple(_parse_line(line, registers) for line in lines_of_boot(text)))


def _parse_line(line: Line, registers: Collection[str]) -> Statement:
    try:
        return _parse(line, registers)
    except DefinitionError as error:
        error.add_note(f"line {line.number}")
        raise


def _parse(line: Line, registers: Collection[str]) -> Statement:
    head, *rest = line.words
    if head.text.startswith("-"):
        return read_deletion(line)
    start = _read_start(head, rest)
    group, event = read_names(head, start.type)
    args = read_arguments(rest[1:], _context(registers, rest[0], start))
    return Definition(
        command=line.command,
        kind=start.kind,
        type=start.type,
        group=group,
        event=event or event_at(start.kind, start.place, start.type),
        is_named=bool(event),
        place=start.place,
        args=args,
        maxactive=start.maxactive,
    )


def _context(registers: Collection[str], word: Token, start: _Start) -> ParseContext:
    return ParseContext(
        registers=registers,
        place=word,
        is_address=start.place.addr is not None,
        is_return=start.kind is Kind.RETURN,
        type=start.type,
        has_structs=start.place.line is not None or start.place.offset != 0,
    )


def _read_start(head: Token, words: Sequence[Token]) -> _Start:
    type_, kind = _read_type(head, words)
    if not words:
        raise head.error(Code.NO_PLACE, len(head.text), hint=_SUCH_AS)
    maxactive = _read_maxactive(head, type_, kind)
    if type_ is EventType.TRACEPOINT:
        place, is_return = _read_tracepoint(words[0], words[1:]), False
    elif type_ is EventType.FPROBE:
        place, is_return = _read_function(words[0], words[1:])
    else:
        place, is_return = read_place(words[0])
    kind = Kind.RETURN if is_return else kind
    if kind is Kind.RETURN and place.line is not None:
        raise words[0].error(Code.BAD_RETPROBE, hint="a function returns: name it without a line")
    return _Start(type=type_, kind=kind, place=place, maxactive=maxactive)


def _read_type(head: Token, words: Sequence[Token]) -> tuple[EventType, Kind]:
    # Of p and r, all that stands between the letter and the colon is ignored, but for digits.
    letter = head.text[0]
    if letter == "s":
        raise head.error(Code.NOT_KPROBE, hint="s: is a synthetic event")
    if letter == "e":
        raise head.error(Code.NOT_KPROBE, hint=f"e: is an event probe{_instead(head, words)}")
    if letter not in _TYPES:
        raise head.error(Code.BAD_STATEMENT, hint=_SUCH_AS)
    return _TYPES[letter]


def _instead(head: Token, words: Sequence[Token]) -> str:
    # What serves instead: system calls have probes of their own, whose arguments have those names.
    found = _EVENT.fullmatch(words[0].text) if words else None
    if found is None:
        return ""
    label, event = head.text[1:], found["event"]
    call = _SYSTEM_CALL.fullmatch(event) if found["group"] == "syscalls" else None
    if call is None:
        listed = f"kprobe list --tracepoints {event} -v"
        return f"; the tracepoint's own arguments, which `{listed}` shows: t{label} {event} ..."
    texts = [each.text for each in words[1:]]
    args, rest = (texts[: texts.index("if")], " --filter ...") if "if" in texts else (texts, "")
    if call["when"] == "exit":
        letter, named = "r", (_RESULT.sub("$retval", each) for each in args)
    else:
        letter, named = "p", (_FIELD.sub(r"\1", each) for each in args)
    line = [f"{letter}{label}", f"sys_{call['name']}", *named]
    return f"; such as: {' '.join(line)}{rest}"


def _read_maxactive(head: Token, type_: EventType, kind: Kind) -> int:
    if type_ is not EventType.KPROBE:
        # No longer since 6.14, when calls got to be kept with their tasks.
        if head.text[1:2] not in ("", ":"):
            raise head.error(Code.BAD_MAXACT, 1, hint=f"{head.text[0]} has no maxactive")
        return 0
    if not _DIGIT.match(head.text, 1):
        return 0
    if kind is not Kind.RETURN:
        raise head.error(Code.BAD_MAXACT_TYPE, 1)
    digits = head.text[1:].partition(":")[0]
    number = read_unsigned(digits, most=(1 << 32) - 1) if len(digits) <= _MAXACTIVE_DIGITS else None
    if not number:
        raise head.error(Code.BAD_MAXACT, 1, hint=f"1 to {_MAXACTIVE_MAX}")
    if number > _MAXACTIVE_MAX:
        raise head.error(Code.MAXACT_TOO_BIG, 1, hint=f"at most {_MAXACTIVE_MAX}")
    return number
