"""Names of groups, events and arguments: what may be one, and what stands in for none."""

import re

from kprobes.lang.lexer import Token
from kprobes.model.codes import Code
from kprobes.model.definition import EventType, Kind, Place

DEFAULT_GROUPS = {
    EventType.KPROBE: "kprobes",
    EventType.FPROBE: "fprobes",
    EventType.TRACEPOINT: "tracepoints",
}
"""Of an event whose statement names none: KPROBE_EVENT_SYSTEM, and those of trace_fprobe.c."""
_NAME_LIMIT = 64
ARG_NAME_LIMIT = 32
_GROUP = re.compile(r"[A-Za-z_-][A-Za-z0-9_-]*")
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SUFFIX_MARKS = re.compile(r"[:.*]")

_RESERVED = frozenset(
    (
        "common_type",
        "common_flags",
        "common_preempt_count",
        "common_pid",
        "common_tgid",
        "__probe_ip",
        "__probe_ret_ip",
        "__probe_func",
    )
)


def is_identifier(text: str) -> bool:
    """Whether the text is a name as C has them."""
    return _IDENTIFIER.fullmatch(text) is not None


def read_names(head: Token, type_: EventType) -> tuple[str, str]:
    """Read ``[GRP/][EVENT]`` after the colon of a statement's first word.

    Args:
        head: that word.
        type_: of the event, which tells the group when none is given.

    Returns:
        Group and event; the event is empty when the word names none.

    Raises:
        DefinitionError: a name is missing, too long, or not a name.
    """
    colon = head.text.find(":", 1)
    group = DEFAULT_GROUPS[type_]
    if colon < 0:
        return group, ""
    label = head.cut(colon + 1)
    mark = "/" if "/" in label.text else "."
    slash = label.text.find(mark)
    if slash < 0:
        return group, _event(label, Code.NO_EVENT_NAME)
    return _group(label.cut(0, slash)), _event(label.cut(slash + 1))


def default_event(kind: Kind, symbol: str, offset: int) -> str:
    """Return the name that the kernel gives to an event at a symbol without one.

    Args:
        kind: entry or return.
        symbol: its name.
        offset: bytes after it.
    """
    return _tidy(f"{kind.value}_{symbol}_{offset}")


def event_at(kind: Kind, place: Place, type_: EventType = EventType.KPROBE) -> str:
    """Return the name of an event at a place when none is given; ``""`` for a pattern.

    Args:
        kind: entry or return.
        place: of the event.
        type_: of it.
    """
    if place.is_glob:
        return ""
    if type_ is EventType.FPROBE:
        return _tidy(f"{place.symbol}__{'exit' if kind is Kind.RETURN else 'entry'}")
    if type_ is EventType.TRACEPOINT:
        return _tidy(f"{'_' if place.symbol[0].isdigit() else ''}{place.symbol}")
    if place.addr is not None:
        # The kernel prints a hash of the address here, so that nobody learns it.
        return _tidy(f"{kind.value}_{place.addr:#018x}")
    if place.pattern:
        return _tidy(f"{kind.value}_{place.symbol}_lines")
    if place.line is not None:
        return _tidy(f"{kind.value}_{place.symbol or place.file.rpartition('/')[2]}_L{place.line}")
    module = f"{place.module}:" if place.module else ""
    return default_event(kind, module + place.symbol, place.offset)


def read_arg_name(word: Token, *, default: str, taken: frozenset[str]) -> tuple[str, Token]:
    """Read the ``NAME=`` of an argument word.

    Args:
        word: the whole word.
        default: the argument's name when the word gives none and is not a name itself.
        taken: the names of the arguments before it.

    Returns:
        The name, and the rest of the word.

    Raises:
        DefinitionError: it is not a name, or taken.
    """
    equals = word.text.find("=")
    if equals > ARG_NAME_LIMIT:
        raise word.error(Code.ARG_NAME_TOO_LONG, hint=f"at most {ARG_NAME_LIMIT} characters")
    if equals == 0:
        raise word.error(Code.NO_ARG_NAME)
    name = default if equals < 0 else word.text[:equals]
    if not is_identifier(name):
        raise word.error(Code.BAD_ARG_NAME)
    if name in taken or name in _RESERVED:
        raise word.error(Code.USED_ARG_NAME)
    return name, word.cut(equals + 1)


def default_arg_name(word: Token, number: int) -> str:
    """Return what an argument is called that has no ``NAME=``: itself, when it is a name."""
    text = word.text.partition(":")[0]
    # A word with %pd is rewritten first and then no name any more.
    is_name = is_identifier(text) and not is_path_word(word)
    return text if is_name else f"arg{number}"


def is_path_word(word: Token) -> bool:
    """Whether a word ends in ``:%pd`` or ``:%pD``."""
    return word.text.endswith((":%pd", ":%pD"))


def _tidy(name: str) -> str:
    name = name[: _NAME_LIMIT - 1]
    return name[0] + _SUFFIX_MARKS.sub("_", name[1:])


def _group(name: Token) -> str:
    if not name.text:
        raise name.error(Code.NO_GROUP_NAME)
    if len(name.text) >= _NAME_LIMIT:
        raise name.error(Code.GROUP_TOO_LONG, hint=f"at most {_NAME_LIMIT - 1} characters")
    if not _GROUP.fullmatch(name.text):
        raise name.error(Code.BAD_GROUP_NAME)
    return name.text


def _event(name: Token, missing: Code | None = None) -> str:
    if not name.text:
        if missing is not None:
            raise name.error(missing)
        return ""
    if len(name.text) >= _NAME_LIMIT:
        raise name.error(Code.EVENT_TOO_LONG, hint=f"at most {_NAME_LIMIT - 1} characters")
    if not is_identifier(name.text):
        raise name.error(Code.BAD_EVENT_NAME)
    return name.text
