"""An event's filter: tests in a row, each of which says where to go on.

A filter is a program without loops, as the kernel's own is: whatever its nesting was, every
stage walks along it in a straight line.
"""

from collections.abc import Sequence
from enum import Enum, StrEnum
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

ACCEPT: Final = -1
REJECT: Final = -2
"""Where a step leads to that is the last one asked."""


class Header(StrEnum):
    """What every event has; the value is the kernel's name of the field."""

    PID = "common_pid"
    TGID = "tgid"
    EXEC_ID = "self_exec_id"
    TYPE = "common_type"
    FLAGS = "common_flags"
    PREEMPT_COUNT = "common_preempt_count"
    IP = "__probe_ip"
    CPU = "cpu"
    COMM = "comm"


Source = Header | int
"""What is tested: a field that every event has, or an argument by its index."""


class FieldKind(Enum):
    """What a filter can do with a field."""

    NUMBER = "number"
    CPU = "cpu"
    TEXT = "text"
    SYMBOL_NAME = "symstr"
    """A string to the kernel; here an address that becomes one only on the host."""
    TIME = "duration"
    """A counter in the guest, which becomes a time only on the host: refused."""
    STACK = "stacktrace"
    """No filter of the kernel's ever holds for it."""


class FilterField(Struct, frozen=True, kw_only=True):
    """One field that a filter may name.

    Attributes:
        kind: what it is.
        source: where its value comes from; meaningless for STACK.
        size: of a number, all elements of an array together.
        is_signed: whether a number can be negative.
        text: of a TEXT that is the same in every event, else None.
    """

    kind: FieldKind
    source: Source
    size: int = 0
    is_signed: bool = False
    text: bytes | None = None


class Relation(StrEnum):
    """How a number compares; the value is the kernel's operator."""

    EQ = "=="
    NE = "!="
    LT = "<"
    LE = "<="
    GT = ">"
    GE = ">="
    AND = "&"


Piece = tuple[int, ...]
"""Characters in a row: for each the bytes that it may be, bit N for byte N. Never a NUL."""


class Pattern(Struct, frozen=True, kw_only=True):
    """What a text must look like.

    Attributes:
        pieces: what stands before, between and after the stars, which stand for any text; a
            single piece is the whole text. The first and the last may be empty.
    """

    pieces: tuple[Piece, ...]

    @property
    def length(self) -> int:
        """Characters that a text has at least."""
        return sum(map(len, self.pieces))


class Compare(Struct, frozen=True, kw_only=True):
    """A number beside a constant.

    Attributes:
        size: of the number: 1, 2, 4 or 8 bytes.
        value: the constant's bits in that size.
    """

    source: Source
    size: int
    is_signed: bool
    relation: Relation
    value: int


class Within(Struct, frozen=True, kw_only=True):
    """A number, without sign, in one of some ranges; both their ends belong to them."""

    source: Source
    size: int
    ranges: tuple[tuple[int, int], ...]


class Matches(Struct, frozen=True, kw_only=True):
    """A text that looks like a pattern; one that cannot be read looks like none."""

    source: Source
    pattern: Pattern


class Always(Struct, frozen=True, kw_only=True):
    """What is known without looking."""

    holds: bool


Test = Compare | Within | Matches | Always


class Step(Struct, frozen=True, kw_only=True):
    """A test, and the steps after it: later ones by their index, ACCEPT or REJECT."""

    test: Test
    yes: int
    no: int


class Filter(Struct, frozen=True, kw_only=True):
    """At least one step; the first is where it begins."""

    steps: tuple[Step, ...]

    @property
    def sources(self) -> frozenset[Source]:
        """All that it tests."""
        tests = (step.test for step in self.steps)
        return frozenset(test.source for test in tests if not isinstance(test, Always))

    @property
    def certain(self) -> int:
        """How many steps, from the first on, every accepted hit has passed."""
        for index, step in enumerate(self.steps):
            if REJECT not in (step.yes, step.no) or index + 1 not in (step.yes, step.no):
                return index + 1
        return len(self.steps)


def every(filters: Sequence[Filter]) -> Filter | None:
    """Return the filter that holds where all of some hold, the first asked first."""
    steps: list[Step] = []
    for each in filters:
        start = len(steps)
        steps = [_then(step, start) for step in steps]
        steps += [_moved(step, start) for step in each.steps]
    return Filter(steps=tuple(steps)) if steps else None


def any_of(tests: Sequence[Test]) -> Filter:
    """Return the filter that holds where one of some tests does."""
    last = len(tests) - 1
    return Filter(
        steps=tuple(
            Step(test=test, yes=ACCEPT, no=REJECT if index == last else index + 1)
            for index, test in enumerate(tests)
        )
    )


def _then(step: Step, following: int) -> Step:
    # What was the end goes on with the next filter.
    yes, no = (following if target == ACCEPT else target for target in (step.yes, step.no))
    return replace(step, yes=yes, no=no)


def _moved(step: Step, start: int) -> Step:
    yes, no = (target if target < 0 else target + start for target in (step.yes, step.no))
    return replace(step, yes=yes, no=no)
