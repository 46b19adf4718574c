"""The cursor: a run of a command's columns that is cut into smaller runs, form by form.

The kernel parses by cutting its copy of a word at separators that it searches (the first ``=``,
the first ``:``, the last ``)``), not from left to right. A Piece is cut the same way and never
loses where it stands in the command.
"""

from dataclasses import dataclass

from kprobes.errors import DefinitionError
from kprobes.model.codes import Code, rejection
from kprobes.model.definition import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
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

    def cut(self, start: int, stop: int | None = None) -> "Piece":
        """Return a part; offsets count from this piece's start."""
        return Piece(
            command=self.command,
            start=self.start + start,
            stop=self.stop if stop is None else self.start + stop,
            caret=self.caret + start,
        )

    def error(self, code: Code, at: int = 0, *, hint: str = "") -> DefinitionError:
        """Return the error whose caret stands ``at`` columns into this piece."""
        return rejection(code, command=self.command, column=self.caret + at, hint=hint)

    def not_yet(self, what: str, at: int = 0) -> DefinitionError:
        """Return the error for a form that we know and cannot do."""
        return self.error(Code.NOT_YET, at, hint=what)
