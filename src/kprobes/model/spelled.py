"""A probe as a kernel's own ``kprobe_events`` file takes it."""

from dataclasses import dataclass

from kprobes.model.definition import Span
from kprobes.model.resolved import Resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """One word of the line, and what it stands for.

    Attributes:
        text: as it is written.
        span: columns of the definition's command that it was made of.
        is_same: whether it stands there just so.
    """

    text: str
    span: Span
    is_same: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelled:
    """One probe as text.

    Attributes:
        probe: that it is.
        head: the statement's letter, and maxactive where it was given.
        words: the place, then the arguments.
    """

    probe: Resolved
    head: str
    words: tuple[Word, ...]

    def line(self, group: str, event: str) -> str:
        """Return the line that defines it under these names."""
        return " ".join([f"{self.head}:{group}/{event}", *(word.text for word in self.words)])

    def column(self, line: str, column: int) -> int:
        """Return the column of the definition's command that one of the line is about."""
        at = line.find(" ") + 1
        if column < at:
            return 0
        for word in self.words:
            if column <= at + len(word.text):
                return word.span.start + (column - at if word.is_same else 0)
            at += len(word.text) + 1
        return len(self.probe.definition.command) + 1
