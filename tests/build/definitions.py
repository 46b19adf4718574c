"""Definitions for tests: parsed, marked with a caret, or made up by Hypothesis."""

import re
from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import strategies as st
from msgspec import Struct

from kprobes.errors import DefinitionError
from kprobes.lang.parser import parse
from kprobes.model.definition import Definition, FetchArg

REGISTERS = ("r15", "r8", "ax", "cx", "dx", "si", "di", "bx", "sp", "ip", "flags")


def read(text: str) -> Definition:
    return parse(text, registers=REGISTERS)


def argument(text: str, *, head: str = "p vfs_read") -> FetchArg:
    """The one argument of a definition."""
    return read(f"{head} {text}").args[0]


class Wrong(Struct, frozen=True):
    """A definition with a ``^`` where the caret must stand, and the error that it must give."""

    marked: str
    code: str

    @property
    def text(self) -> str:
        return self.marked.replace("^", "", 1)


def caret_of(wrong: Wrong) -> tuple[str, str]:
    """Parse; return the error's code and the text with a ``^`` at its column."""
    with pytest.raises(DefinitionError) as caught:
        read(wrong.text)
    return marked_error(caught.value)


def marked_error(error: DefinitionError) -> tuple[str, str]:
    """An error's code, and its command with a ``^`` at its column."""
    command = error.command.ljust(error.column)
    return error.code, f"{command[: error.column]}^{command[error.column :]}"


def plain(node: object) -> object:
    """A node's values without its spans, its command and whether its name was given."""
    if isinstance(node, tuple):
        return tuple(plain(item) for item in cast("tuple[object, ...]", node))
    if not isinstance(node, Struct):
        return node
    left_out = ("span", "body", "type_span", "command", "is_named")
    kept = {n: plain(getattr(node, n)) for n in node.__struct_fields__ if n not in left_out}
    return type(node).__name__, kept


class Names(Struct, frozen=True):
    """What made-up definitions speak of; by default, of anything that could have such a name.

    Attributes:
        functions: to probe; None for any.
        symbols: to read memory of; None for any.
        knows_types: whether names of parameters, members and structures may stand in them.
        newest: whether forms that no released kernel knows may.
    """

    functions: Sequence[str] | None = None
    symbols: Sequence[str] | None = None
    knows_types: bool = True
    newest: bool = True


ANY = Names()
_identifiers = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,20}", fullmatch=True)
_symbols = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.]{0,70}", fullmatch=True)
_numbers = st.one_of(
    st.integers(0, 1 << 62).map(str),
    st.integers(0, 1 << 62).map(hex),
    st.integers(0, 4095).map("0{:o}".format),
)
_small = st.one_of(st.integers(0, 4096).map(str), st.integers(0, 4096).map(hex))
_signs = st.sampled_from("+-")
_plain_types = [f"{sign}{bits}" for sign in "usx" for bits in (8, 16, 32, 64)] + ["char", "symbol"]


@st.composite
def _bits(draw: st.DrawFn) -> str:
    size = draw(st.sampled_from([8, 16, 32, 64]))
    width = draw(st.integers(1, size))
    return f"b{width}@{draw(st.integers(0, size - width))}/{size}"


_number_types = st.one_of(st.sampled_from(_plain_types), _bits())
_counts = st.one_of(st.integers(1, 8), st.just(64)).map("[{}]".format)


class _Where(Struct, frozen=True):
    names: Names
    is_return: bool = False
    is_address: bool = False

    @property
    def has_types(self) -> bool:
        return self.names.knows_types and not self.is_address


@st.composite
def _values(draw: st.DrawFn, where: _Where) -> str:
    forms = [
        st.sampled_from(REGISTERS).map("%{}".format),
        st.integers(0, 2048).map("$stack{}".format),
        st.just("$stack"),
    ]
    if not where.is_address:
        forms.append(st.integers(1, 6).map("$arg{}".format))
        forms += [st.just("$retval")] if where.is_return else []
    if where.has_types:
        forms.append(_identifiers)
        forms.append(_walks(where))
        forms += [st.just("$current"), _casts(where)] if where.names.newest else []
    return draw(st.one_of(forms))


@st.composite
def _members(draw: st.DrawFn) -> str:
    members = draw(st.lists(_identifiers, min_size=1, max_size=3))
    changes = [draw(st.sampled_from(["->", "."])) for _ in members]
    return "".join(map("".join, zip(["->", *changes[1:]], members, strict=True)))


@st.composite
def _walks(draw: st.DrawFn, where: _Where) -> str:
    bases = [_identifiers, st.just("$retval")] if where.is_return else [_identifiers]
    return draw(st.one_of(bases)) + draw(_members())


@st.composite
def _casts(draw: st.DrawFn, where: _Where) -> str:
    field = draw(st.one_of(st.just(""), _identifiers.map(",{}".format)))
    inner = draw(st.sampled_from(["%di", "$arg1", "(%si)", "+8(%di)", "(+8(%di))", "$stack1"]))
    inner = inner.replace("$arg1", "$current" if where.is_address else "$arg1")
    return f"({draw(_identifiers)}{field}){inner}{draw(_members())}"


@st.composite
def _memory(draw: st.DrawFn, where: _Where) -> str:
    names = where.names.symbols
    symbol = draw(_identifiers if names is None else st.sampled_from(names))
    offset = draw(st.one_of(st.just(""), st.tuples(_signs, _small).map("".join)))
    forms = [f"@{symbol}{offset}", f"@{draw(_small)}", f"\\{draw(_small)}"]
    if where.names.newest:
        forms.append(f"this_cpu_read(@{symbol}{offset})")
    return draw(st.sampled_from(forms))


@st.composite
def _derefs(draw: st.DrawFn, where: _Where, *, user_last: bool) -> str:
    text = draw(st.one_of(_values(where), _memory(where)))
    for level in range(draw(st.integers(1, 4)), 0, -1):
        user = draw(st.sampled_from(["", "u"])) if user_last or level > 1 else ""
        text = f"{draw(_signs)}{user}{draw(_small)}({text})"
    return text


@st.composite
def _expressions(draw: st.DrawFn, where: _Where) -> str:
    """A fetch expression with a type that fits, or none."""
    forms = {
        "value": st.tuples(_values(where), st.one_of(st.just(""), _number_types)),
        "memory": st.tuples(
            st.one_of(_memory(where), _derefs(where, user_last=True)),
            st.one_of(st.just(""), _number_types, st.sampled_from(["string", "ustring"])),
        ),
        "array": st.tuples(
            _derefs(where, user_last=False),
            st.tuples(st.one_of(_number_types, st.just("string")), _counts).map("".join),
        ),
        "symbol": st.tuples(st.sampled_from(["%di", "$stack3", "+8(%di)"]), st.just("symstr")),
        "path": st.tuples(_values(where), st.sampled_from(["%pd", "%pD"])),
        "text": st.tuples(
            st.sampled_from(["$comm", "$COMM", '\\"text"', '\\""', '\\"it"s"']),
            st.sampled_from(["", "string"]),
        ),
    }
    expression, word = draw(st.one_of(*forms.values()))
    return f"{expression}:{word}" if word else expression


@st.composite
def definitions(draw: st.DrawFn, names: Names = ANY) -> str:
    """Right definitions of every form of the language."""
    label = draw(st.sampled_from(["", ":ev", ":my-grp/ev", ":grp.ev", ":grp/"]))
    head = draw(st.sampled_from(["p", "p", "r", "r7", "r0x20", "p%"]))
    functions = _symbols if names.functions is None else st.sampled_from(names.functions)
    place = draw(functions)
    if names is ANY:
        place = draw(st.sampled_from([place, f"mod:{place}", f"{place}*", "0xffffffff81000000"]))
    where = _Where(names, head[0] == "r" or head == "p%", place.startswith("0x"))
    offset = "" if where.is_address or where.is_return else draw(_offsets(names))
    bodies = draw(st.lists(_expressions(where), max_size=6))
    given = draw(st.lists(st.sampled_from(["", "a", "_b9", "C"]), max_size=6, unique=True))
    given += [""] * (len(bodies) - len(given))
    args = [f"{name}={body}" if name else body for name, body in zip(given, bodies, strict=False)]
    suffix = "%return" if head == "p%" and not where.is_address else ""
    words = [f"{head.removesuffix('%')}{label}", place + offset + suffix, *_distinct(args)]
    return " ".join(words)


def _distinct(args: Sequence[str]) -> list[str]:
    # A word that is a name, such as a parameter's, is called by it.
    names = [re.split("[=:]", arg, maxsplit=1)[0] for arg in args]
    return [arg for at, arg in enumerate(args) if names[at] not in names[:at]]


def _offsets(names: Names) -> st.SearchStrategy[str]:
    most = (1 << 32) - 1 if names is ANY else 0
    return st.one_of(st.just(""), st.integers(0, most).map("+{}".format))
