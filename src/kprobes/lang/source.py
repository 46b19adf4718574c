"""Text to statements: lines, comments and words, as the kernel splits what is written to it."""

import re
from dataclasses import dataclass

from kprobes.lang.piece import Piece
from kprobes.model.codes import Code, rejection

_WORD = re.compile(r"[^ \t\n\v\f\r]+")
_LINE_LIMIT = 4094
_BOOT_PARAMETER = "kprobe_event="


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line that says something.

    Attributes:
        number: of the line in the text, from 1.
        command: its words joined by single blanks.
        words: at least one, all of ``command``.
        is_indented: whether a blank comes first.
    """

    number: int
    command: str
    words: tuple[Piece, ...]
    is_indented: bool = False


def lines_of(text: str) -> tuple[Line, ...]:
    """Split text into statements; a ``#`` anywhere starts a comment.

    Raises:
        DefinitionError: a line is longer than the kernel takes.
    """
    lines = enumerate(text.split("\n"), start=1)
    found = (_line(number, line, line.split("#", 1)[0]) for number, line in lines)
    return tuple(line for line in found if line is not None)


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
    pieces = tuple(
        Piece(command=command, start=found.start(), stop=found.end(), caret=found.start())
        for found in _WORD.finditer(command)
    )
    is_indented = not line.startswith(words[0])
    return Line(number=number, command=command, words=pieces, is_indented=is_indented)
