"""An event's filter: text to a program of tests, with the kernel's errors and marks.

    filter := or ; or := and ('||' and)* ; and := not ('&&' not)* ; not := '!'* ('(' or ')' | term)
    term   := FIELD OPERATOR VALUE

As kernel/trace/trace_events_filter.c reads it: parentheses and quotes are looked at before
anything else, then everything from left to right.
"""

import re
from dataclasses import dataclass, field

from kprobes.lang.filter_scan import Known, Scan
from kprobes.lang.filter_term import read_term
from kprobes.model.filter import ACCEPT, REJECT, Filter, Step, Test
from kprobes.model.filter_codes import FilterCode

_LIMIT = 4096
_MARKS = re.compile(r"""[()]|'[^']*'?|"[^"]*"?""")
_BLANKS = " \t\n\v\f\r\xa0"
_AND, _OR, _NOT, _OPEN = "&&", "||", "!", "("
_STRENGTH = {_OPEN: 0, _OR: 1, _AND: 2, _NOT: 3}


def parse_filter(text: str, known: Known) -> Filter | None:
    """Read an event's filter.

    Args:
        text: as written to the event's ``filter`` file.
        known: what it may name.

    Returns:
        The filter; None for "0" and "", which stand for none.

    Raises:
        DefinitionError: what is wrong, in the kernel's words, and where.
    """
    data = text.encode("utf-8", "surrogateescape").split(b"\0", 1)[0]
    scan = Scan(text=data.decode("latin-1").rstrip(_BLANKS), known=known)
    if len(data) >= _LIMIT:
        raise scan.error(FilterCode.FILTER_TOO_LONG, 0)
    if not data or scan.text.lstrip(_BLANKS) == "0":
        return None
    if not scan.text:
        raise scan.error(FilterCode.ERRNO, 0, "there is nothing to test")
    _check_balance(scan)
    return _Program(scan).read()


def _check_balance(scan: Scan) -> None:
    opened: list[int] = []
    unclosed = None
    for found in _MARKS.finditer(scan.text):
        word, at = found[0], found.start()
        if word == "(":
            opened.append(at)
        elif word != ")":
            is_closed = len(word) > 1 and word[0] == word[-1]
            unclosed = None if is_closed else at
        elif not opened:
            raise scan.error(FilterCode.TOO_MANY_CLOSE, at)
        else:
            opened.pop()
    if unclosed is not None:
        raise scan.error(FilterCode.MISSING_QUOTE, unclosed)
    if opened:
        raise scan.error(FilterCode.TOO_MANY_OPEN, opened[-1])


@dataclass(slots=True)
class _Part:
    """One operand: its first step, and the ends that lead out of it when it holds, or not.

    An end is a step and which of its two targets.
    """

    start: int
    yes: list[tuple[int, bool]] = field(default_factory=list[tuple[int, bool]])
    no: list[tuple[int, bool]] = field(default_factory=list[tuple[int, bool]])


class _Program:
    """Operands and operators on stacks: neither nesting nor length needs recursion."""

    def __init__(self, scan: Scan) -> None:
        self._scan = scan
        self._tests: list[Test] = []
        self._targets: list[list[int]] = []
        self._operands: list[_Part] = []
        self._operators: list[str] = []

    def read(self) -> Filter:
        """Read all of it."""
        while True:
            self._read_operand()
            if not self._read_operator():
                break
        self._apply(_OR)
        whole = self._operands.pop()
        self._lead(whole.yes, ACCEPT)
        self._lead(whole.no, REJECT)
        return Filter(
            steps=tuple(
                Step(test=test, yes=yes, no=no)
                for test, (no, yes) in zip(self._tests, self._targets, strict=True)
            )
        )

    def _read_operand(self) -> None:
        scan = self._scan
        while True:
            scan.skip_blanks()
            if scan.take("("):
                self._operators.append(_OPEN)
            elif scan.has("!") and not scan.has("!=") and not scan.has("!~"):
                scan.take("!")
                self._operators.append(_NOT)
            else:
                break
        if not scan.peek():
            code = FilterCode.INVALID_FILTER if self._tests else FilterCode.NO_FILTER
            raise scan.error(code, len(scan.text))
        test, is_wanted = read_term(scan)
        index = len(self._tests)
        self._tests.append(test)
        self._targets.append([ACCEPT, ACCEPT])
        part = _Part(index, [(index, is_wanted)], [(index, not is_wanted)])
        self._operands.append(part)
        self._negate()

    def _read_operator(self) -> bool:
        """Whether another operand follows."""
        scan = self._scan
        while True:
            scan.skip_blanks()
            if not scan.peek():
                return False
            for operator in (_AND, _OR):
                if scan.take(operator):
                    self._apply(operator)
                    self._operators.append(operator)
                    return True
            if not scan.take(")"):
                hint = "terms are joined by && and ||"
                raise scan.error(FilterCode.TOO_MANY_PREDS, scan.at, hint)
            self._apply(_OR)
            self._operators.pop()
            self._negate()

    def _negate(self) -> None:
        while self._operators and self._operators[-1] == _NOT:
            self._operators.pop()
            part = self._operands[-1]
            part.yes, part.no = part.no, part.yes

    def _apply(self, operator: str) -> None:
        """Join operands by what binds at least as strongly."""
        while self._operators and _STRENGTH[self._operators[-1]] >= _STRENGTH[operator]:
            joint = self._operators.pop()
            right, left = self._operands.pop(), self._operands[-1]
            if joint == _AND:
                self._lead(left.yes, right.start)
                left.yes, left.no = right.yes, left.no + right.no
            else:
                self._lead(left.no, right.start)
                left.yes, left.no = left.yes + right.yes, right.no

    def _lead(self, ends: list[tuple[int, bool]], target: int) -> None:
        for index, holds in ends:
            self._targets[index][holds] = target
