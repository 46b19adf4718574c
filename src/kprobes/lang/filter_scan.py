"""What passes between the readers of a filter: its text, and what it may name."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kprobes.errors import DefinitionError
from kprobes.model.filter import FilterField
from kprobes.model.filter_codes import FilterCode, filter_error

# The kernel's isspace() and isalnum() know Latin-1; the text is read byte by byte, as there.
_BLANKS = re.compile("[ \t\n\v\f\r\xa0]*")
_WORD = re.compile("[0-9A-Za-z\xc0-\xd6\xd8-\xf6\xf8-\xff]*")
_NAME = re.compile("[0-9A-Za-z\xc0-\xd6\xd8-\xf6\xf8-\xff_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What an event's filter may name.

    Attributes:
        fields: by name.
        cpus: how many there may be.
        function: from a name, or an address, to the first address of that function and the
            first one behind it; None when there is none.
    """

    fields: Mapping[str, FilterField]
    cpus: int
    function: Callable[[str | int], tuple[int, int] | None]


@dataclass(slots=True, kw_only=True)
class Scan:
    """A filter's text while it is read.

    Attributes:
        text: one character per byte.
        known: what it may name.
        at: the next character to read.
    """

    text: str
    known: Known
    at: int = 0

    def peek(self) -> str:
        """Return the next character, or "" at the end."""
        return self.text[self.at : self.at + 1]

    def has(self, word: str) -> bool:
        """Whether a word comes next."""
        return self.text.startswith(word, self.at)

    def take(self, word: str) -> bool:
        """Whether a word comes next, which is then passed."""
        found = self.has(word)
        self.at += len(word) * found
        return found

    def skip_blanks(self) -> None:
        """Pass what is no character to speak of."""
        self._match(_BLANKS)

    def name(self) -> str:
        """Return the name of a field that comes next, and pass it; or ""."""
        return self._match(_NAME)

    def word(self) -> str:
        """Return the letters and digits that come next, and pass them."""
        return self._match(_WORD)

    def until(self, end: str) -> str:
        """Return everything before a character, or all that is left, and pass it."""
        found = self.text.find(end, self.at)
        start, self.at = self.at, len(self.text) if found < 0 else found
        return self.text[start : self.at]

    def error(self, code: FilterCode, column: int | None = None, hint: str = "") -> DefinitionError:
        """Return the error with its mark at a column; at where reading is, as inside a term.

        There the kernel counts from one.
        """
        at = self.at + 1 if column is None else column
        data = self.text.encode("latin-1")
        # A mark stands below a character, however many bytes that has.
        before = data[:at].decode("utf-8", "replace")
        shown = data.decode("utf-8", "surrogateescape")
        return filter_error(
            code, text=shown, column=len(before) + max(at - len(data), 0), hint=hint
        )

    def _match(self, pattern: re.Pattern[str]) -> str:
        found = pattern.match(self.text, self.at)
        assert found is not None
        self.at = found.end()
        return found[0]
