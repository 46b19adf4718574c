"""Lexer: text to statements of lines, comments and words, and the tokens that they are cut into.

The kernel parses by cutting its copy of a word at separators that it searches (the first ``=``,
the first ``:``, the last ``)``), not from left to right. A token is cut the same way and never
loses where it stands in the command. Numbers are whole words, read as by the kernel's kstrtoul and
kstrtol: base by prefix, 64 bits.
"""

import re
from collections.abc import Iterator

from msgspec import Struct

from kprobes.errors import DefinitionError
from kprobes.model.codes import Code, rejection
from kprobes.model.definition import Span
from kprobes.units import U64

# lib/kstrtox.c takes 0x only before a hex digit and every other leading 0 for octal, so "0x"
# and "08" are not numbers.
_DIGITS = ((16, re.compile(r"0[xX]([0-9a-fA-F]+)")), (8, re.compile(r"(0[0-7]*)")))
_DECIMAL = re.compile(r"[0-9]+")
_S64_MAX = U64 >> 1


def read_unsigned(text: str, *, most: int = U64) -> int | None:
    """Return 0 to ``most``, or None when the text is no such number; one ``+`` may lead."""
    return _bounded(_magnitude(text.removeprefix("+")), most)


def read_signed(text: str) -> int | None:
    """Return a signed 64-bit number, or None when the text is none; one sign may lead."""
    if not text.startswith("-"):
        return _bounded(_magnitude(text.removeprefix("+")), _S64_MAX)
    magnitude = _bounded(_magnitude(text[1:]), _S64_MAX + 1)
    return None if magnitude is None else -magnitude


def read_decimal(text: str) -> int | None:
    """Return 0 to 2**64-1 from decimal digits alone, or None; a leading 0 means nothing."""
    return _bounded(_in_base(text, 10), U64) if _DECIMAL.fullmatch(text) else None


def read_plain(text: str) -> int | None:
    """Return 0 to 2**64-1 from a number without a sign, as simple_strtoul reads it, or None."""
    return _bounded(_magnitude(text), U64)


def _magnitude(text: str) -> int | None:
    for base, pattern in _DIGITS:
        if found := pattern.fullmatch(text):
            return _in_base(found[1], base)
    is_decimal = _DECIMAL.fullmatch(text) and not text.startswith("0")
    return _in_base(text, 10) if is_decimal else None


def _in_base(text: str, base: int) -> int:
    # Python refuses to convert thousands of decimal digits; no 64-bit number has more than 22.
    digits = text.lstrip("0") or "0"
    return int(digits, base) if len(digits) <= 22 else U64 + 1


def _bounded(value: int | None, most: int) -> int | None:
    return value if value is not None and value <= most else None


class Token(Struct, frozen=True, kw_only=True):
    """Columns [start, stop) of a command.

    Attributes:
        caret: the column that the kernel takes for ``start``. Not always the same: it does not
            count the ``u`` of ``+u8(``, so all carets inside stand one column early.
    """

    command: str
    start: int
    stop: int
    caret: int

    @property
    def text(self) -> str:
        """The characters."""
        return self.command[self.start : self.stop]

    @property
    def span(self) -> Span:
        """The columns."""
        return Span(self.start, self.stop)

    def cut(self, start: int, stop: int | None = None) -> "Token":
        """Return a part; offsets count from this piece's start."""
        return Token(
            command=self.command,
            start=self.start + start,
            stop=self.stop if stop is None else self.start + stop,
            caret=self.caret + start,
        )

    def error(self, code: Code, at: int = 0, *, hint: str = "") -> DefinitionError:
        """Return the error with its caret in this token.

        Args:
            code: what is wrong.
            at: columns from the token's first character.
            hint: what would be right, or "".
        """
        return rejection(code, command=self.command, column=self.caret + at, hint=hint)


_WORD = re.compile(r"[^ \t\n\v\f\r]+")
_LINE_LIMIT = 4094
_BOOT_PARAMETER = "kprobe_event="


class Line(Struct, frozen=True, kw_only=True):
    """One line that says something.

    Attributes:
        number: of the line in the text, from 1.
        command: its words joined by single blanks.
        words: at least one, all of ``command``.
        is_indented: whether a blank comes first.
    """

    number: int
    command: str
    words: tuple[Token, ...]
    is_indented: bool = False


def lines_of(text: str) -> tuple[Line, ...]:
    """Split text into statements; a ``#`` anywhere starts a comment.

    Raises:
        DefinitionError: a line is longer than the kernel takes.
    """
    return tuple(each_line(text))


def each_line(text: str) -> Iterator[Line]:
    """Yield statements as they are read; else as ``lines_of``."""
    lines = enumerate(text.split("\n"), start=1)
    found = (_line(number, line, line.split("#", 1)[0]) for number, line in lines)
    return (line for line in found if line is not None)


def lines_of_boot(text: str) -> tuple[Line, ...]:
    """Split the kernel's boot parameter: ``;`` between statements, ``,`` for blanks.

    ``kprobe_event=`` may stand before it; a ``#`` is nothing special there.

    Raises:
        DefinitionError: a statement is longer than the kernel takes.
    """
    value = text.strip().strip('"').removeprefix(_BOOT_PARAMETER).strip('"')
    parts = enumerate(value.replace(",", " ").split(";"), start=1)
    found = (_line(number, part, part) for number, part in parts)
    return tuple(line for line in found if line is not None)


def _line(number: int, line: str, said: str) -> Line | None:
    words: list[str] = _WORD.findall(said)
    command = " ".join(words)
    if len(line) >= _LINE_LIMIT:
        error = rejection(Code.LINE_TOO_LONG, command=command, column=0)
        error.add_note(f"line {number}")
        raise error
    if not words:
        return None
    tokens = tuple(
        Token(command=command, start=found.start(), stop=found.end(), caret=found.start())
        for found in _WORD.finditer(command)
    )
    is_indented = not line.startswith(words[0])
    return Line(number=number, command=command, words=tokens, is_indented=is_indented)
