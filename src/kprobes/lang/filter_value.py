"""Reader of the value in a filter's term: a number, a string, CPUs, a function.

Lists of CPUs, ``0-3,8-31:1/4``, are read as by bitmap_parselist() in the kernel.
"""

import re
from collections.abc import Callable, Mapping

from msgspec import Struct

from kprobes.errors import DefinitionError
from kprobes.lang.glob import glob, literal, matches
from kprobes.lang.lexer import read_signed, read_unsigned
from kprobes.model.codes import FilterCode, filter_error
from kprobes.model.filter import (
    Always,
    Compare,
    FieldKind,
    FilterField,
    Matches,
    Relation,
    Test,
    Within,
)

_SEPARATORS = re.compile(r"[\s,]+")
_REGION = re.compile(
    r"(?:[aA][lL][lL]|(?P<start>[0-9]+|N)(?:-(?P<end>[0-9]+|N))?)"
    r"(?::(?P<used>[0-9]+|N)/(?P<group>[0-9]+|N))?"
)


def read_cpus(text: str, *, count: int) -> frozenset[int] | None:
    """Return the CPUs of a list, or None when it is none.

    Args:
        text: numbers, ranges, ``all`` or ``N`` (the last CPU), and of a range ``:USED/GROUP`` for
            the first of every group.
        count: how many CPUs there may be.
    """
    found: set[int] = set()
    for region in filter(None, _SEPARATORS.split(text)):
        cpus = _region(region, count)
        if cpus is None:
            return None
        found |= cpus
    return frozenset(found)


def _region(text: str, count: int) -> set[int] | None:
    found = _REGION.fullmatch(text)
    if found is None or (found["used"] and found["start"] and not found["end"]):
        return None
    start = _number(found["start"] or "0", count)
    end = _number(found["end"] or found["start"] or "N", count)
    used = _number(found["used"], count) if found["used"] else end + 1
    group = _number(found["group"], count) if found["group"] else end + 1
    if start > end or end >= count or not group or used > group or group >> 32:
        return None
    return {cpu for cpu in range(start, end + 1) if (cpu - start) % group < used}


def _number(text: str, count: int) -> int:
    # Python refuses to convert thousands of digits; what is too large is too large.
    return count - 1 if text == "N" else int(text.lstrip("0")[:20] or "0")


# The kernel's isspace() and isalnum() know Latin-1; the text is read byte by byte, as there.
_BLANKS = re.compile("[ \t\n\v\f\r\xa0]*")
_WORD = re.compile("[0-9A-Za-z\xc0-\xd6\xd8-\xf6\xf8-\xff]*")
_NAME = re.compile("[0-9A-Za-z\xc0-\xd6\xd8-\xf6\xf8-\xff_]*")


class Known(Struct, frozen=True, kw_only=True):
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


class Scan(Struct, kw_only=True):
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
        """Pass what is not a character to speak of."""
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
        """Return the error with its mark at a column.

        Args:
            code: what is wrong.
            column: of the mark, from 0; None for where reading is, as inside a term: there the
                kernel counts from one.
            hint: what would be right, or "".
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


_SIZES = (1, 2, 4, 8)
_CPU_SIZE = 4
_LONG = 8
_NUMBER_CHARS = 24
_STRING_CHARS = 256
_TEXTS = (FieldKind.TEXT, FieldKind.SYMBOL_NAME)
_SPECIAL = re.compile(r"[*?\[\\]")
_NEVER = Always(holds=False)


class Subject(Struct, frozen=True, kw_only=True):
    """What a value is for.

    Attributes:
        field: on the left.
        operator: as written.
        start: where the term begins.
    """

    field: FilterField
    operator: str
    start: int

    @property
    def is_text(self) -> bool:
        """Whether it is a string to the kernel."""
        return self.field.kind in _TEXTS

    def relation(self) -> Relation:
        """Return the operator of a number."""
        return Relation(self.operator)


def read_number(scan: Scan, subject: Subject) -> Test:
    """Read a number and return the comparison with it.

    Raises:
        DefinitionError: the field is not a number, or it is none.
    """
    field, start = subject.field, scan.at
    if subject.is_text:
        raise scan.error(FilterCode.EXPECT_STRING, hint="a string in quotes")
    if subject.operator == "~":
        raise scan.error(FilterCode.ILLEGAL_FIELD_OP, hint="~ is for strings")
    scan.take("-")
    scan.word()
    word = scan.text[start : scan.at]
    if len(word) >= _NUMBER_CHARS:
        raise scan.error(FilterCode.OPERAND_TOO_LONG)
    is_signed = field.is_signed
    number = read_signed(word) if is_signed else read_unsigned(word)
    if number is None:
        hint = "" if is_signed or not word.startswith("-") else "this field is unsigned"
        raise scan.error(FilterCode.ILLEGAL_INTVAL, start + 1, hint)
    return _compare(field, subject.relation(), number)


def read_string(scan: Scan, subject: Subject) -> tuple[Test, bool]:
    """Read a string in quotes and return the match, and whether it must hold.

    Raises:
        DefinitionError: the field is not a string, or the quotes or the operator are wrong.
    """
    if subject.operator not in ("==", "!=", "~"):
        raise scan.error(FilterCode.ILLEGAL_FIELD_OP, hint="strings have ==, != and ~")
    if not subject.is_text:
        raise scan.error(FilterCode.EXPECT_DIGIT, hint="a number without quotes")
    if subject.field.kind is FieldKind.SYMBOL_NAME:
        hint = "its name is known on the host only; fetch a symbol and test FIELD.function"
        raise scan.error(FilterCode.NOT_IN_GUEST, subject.start, hint)
    quote = scan.peek()
    scan.take(quote)
    text = scan.until(quote)
    if not scan.has(quote):
        raise scan.error(FilterCode.MISSING_QUOTE)
    if len(text) >= _STRING_CHARS:
        raise scan.error(FilterCode.OPERAND_TOO_LONG, hint=f"at most {_STRING_CHARS - 1} bytes")
    scan.take(quote)
    is_glob = subject.operator == "~"
    is_wanted = subject.operator != "!=" and not (is_glob and text.startswith("!"))
    return _matches(subject.field, text, is_glob=is_glob), is_wanted


def read_cpu_list(scan: Scan, subject: Subject) -> tuple[Test, bool]:
    """Read ``CPUS{LIST}`` and return the test, and whether it must hold.

    Raises:
        DefinitionError: the field is not a number, or the list or the operator is wrong.
    """
    field, cpus = subject.field, scan.known.cpus
    if field.kind not in (FieldKind.CPU, FieldKind.NUMBER):
        raise scan.error(FilterCode.ILLEGAL_FIELD_OP, hint="a list of CPUs is for numbers")
    if subject.operator not in ("==", "!=", "&"):
        raise scan.error(FilterCode.ILLEGAL_FIELD_OP, hint="a list of CPUs has &, == and !=")
    scan.take("CPUS")
    if not scan.take("{"):
        scan.at += 1
        raise scan.error(FilterCode.MISSING_BRACE_OPEN, hint="such as: cpu & CPUS{0-3}")
    text = scan.until("}")
    if not scan.has("}"):
        raise scan.error(FilterCode.MISSING_BRACE_CLOSE)
    found = read_cpus(text, count=cpus) if text else None
    if found is None:
        raise scan.error(FilterCode.INVALID_CPULIST, hint=f"of CPUs 0 to {cpus - 1}")
    scan.take("}")
    return _in_cpus(field, subject.relation(), found, cpus=cpus)


def read_function(scan: Scan, subject: Subject) -> tuple[Test, bool]:
    """Read a function's name, or an address in it, and return whether the field is inside.

    Raises:
        DefinitionError: the field is not an address, or there is no such function.
    """
    field = subject.field
    if field.size != _LONG or field.kind is not FieldKind.NUMBER:
        raise scan.error(FilterCode.ILLEGAL_FIELD_OP, hint=".function is for 64 bits")
    if subject.operator not in ("==", "!="):
        raise scan.error(FilterCode.INVALID_OP, hint=".function has == and !=")
    found = scan.known.function(_place(scan))
    if found is None:
        raise scan.error(FilterCode.NO_FUNCTION)
    start, stop = found
    test = Within(source=field.source, size=_LONG, ranges=((start, stop - 1),))
    return test, subject.operator == "=="


def _place(scan: Scan) -> str | int:
    start = scan.at
    if not scan.peek().isdecimal():
        # Everything up to a blank, a closing parenthesis included.
        found = re.compile("[^ \t\n\v\f\r\xa0]*").match(scan.text, start)
        assert found is not None
        scan.at = found.end()
        return found[0]
    word = scan.word()
    if len(word) >= _NUMBER_CHARS:
        raise scan.error(FilterCode.OPERAND_TOO_LONG)
    addr = read_unsigned(word)
    if addr is None:
        raise scan.error(FilterCode.INVALID_VALUE)
    return addr


def _compare(field: FilterField, relation: Relation, number: int) -> Test:
    is_cpu = field.kind is FieldKind.CPU
    size = _CPU_SIZE if is_cpu else field.size
    # Numbers of other sizes, such as three bytes, never compare; nor do CPUs by &.
    if size not in _SIZES or (is_cpu and relation is Relation.AND):
        return _NEVER
    return Compare(
        source=field.source,
        size=size,
        is_signed=field.is_signed,
        relation=relation,
        value=number & (1 << 8 * size) - 1,
    )


def _matches(field: FilterField, text: str, *, is_glob: bool) -> Test:
    pattern = text.removeprefix("!") if is_glob else text
    data = pattern.encode("latin-1")
    # The kernel takes what begins with a digit for a text without special characters.
    is_plain = not is_glob or pattern[:1].isdecimal() or not _SPECIAL.search(pattern)
    wanted = literal(data) if is_plain else glob(data)
    if field.text is not None:
        return Always(holds=matches(wanted, field.text))
    return Matches(source=field.source, pattern=wanted)


def _in_cpus(
    field: FilterField, relation: Relation, found: frozenset[int], *, cpus: int
) -> tuple[Test, bool]:
    size = _CPU_SIZE if field.kind is FieldKind.CPU else field.size
    if size not in _SIZES:
        return _NEVER, True
    if len(found) == 1:
        is_wanted = relation is not Relation.NE
        return _compare(field, Relation.EQ, next(iter(found))), is_wanted
    if relation is Relation.EQ:
        return _NEVER, True
    # One CPU is never equal to several; a number that is none has no place in any list.
    members = range(cpus) if relation is Relation.NE else sorted(found)
    ranges = _ranges(members)
    return (Within(source=field.source, size=size, ranges=ranges) if ranges else _NEVER), True


def _ranges(numbers: "range | list[int]") -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return tuple(found)
