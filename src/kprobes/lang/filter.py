"""Parser of an event's filter: text to a program of tests, with the kernel's errors and marks.

    filter := or ; or := and ('||' and)* ; and := not ('&&' not)* ; not := '!'* ('(' or ')' | term)
    term   := FIELD OPERATOR VALUE

As kernel/trace/trace_events_filter.c reads it: parentheses and quotes are looked at before
anything else, then everything from left to right; a term is read as by its parse_pred(). Tasks
that are named by ``kprobe trace --follow --pid --tgid --comm`` are a filter, too.
"""

import re
from collections.abc import Collection

from msgspec import Struct, field

from kprobes.lang import filter_value
from kprobes.lang.filter_value import Known, Scan, Subject
from kprobes.lang.glob import glob, literal
from kprobes.model.codes import FilterCode
from kprobes.model.filter import (
    ACCEPT,
    REJECT,
    Compare,
    FieldKind,
    Filter,
    FilterField,
    Header,
    Matches,
    Pattern,
    Relation,
    Step,
    Test,
    any_of,
    every,
)

# What another one begins with stands after it.
_OPERATORS = ("~", "!=", "==", "<=", "<", ">=", ">", "&")
_TERM = "a term is FIELD OPERATOR VALUE, such as: count > 100"
_OPERATORS_HINT = "== != < <= > >= & and, for strings, ~"
_NEAREST = 5


def read_term(scan: Scan) -> tuple[Test, bool]:
    """Read the term that comes next, and pass it.

    Returns:
        The test, and whether it must hold: ``!=`` of a string is a test that must not.

    Raises:
        DefinitionError: it is wrong.
    """
    start = scan.at
    name = scan.name()
    if not name:
        raise scan.error(FilterCode.ERRNO, 0, _TERM)
    field = _field(scan, name, start)
    # Of strings that are read while filtering, which no probe has.
    scan.take(".ustring")
    is_function = scan.take(".function")
    scan.skip_blanks()
    operator = next((op for op in _OPERATORS if scan.take(op)), None)
    if operator is None:
        raise scan.error(FilterCode.INVALID_OP, hint=_OPERATORS_HINT)
    scan.skip_blanks()
    subject = Subject(field=field, operator=operator, start=start)
    if is_function:
        return filter_value.read_function(scan, subject)
    if scan.has("CPUS"):
        return filter_value.read_cpu_list(scan, subject)
    if scan.peek() in ("'", '"'):
        return filter_value.read_string(scan, subject)
    if scan.peek().isdecimal() or scan.has("-"):
        return filter_value.read_number(scan, subject), True
    hint = "a number, or a string in quotes"
    raise scan.error(FilterCode.INVALID_VALUE, hint=hint)


def _field(scan: Scan, name: str, start: int) -> FilterField:
    field = scan.known.fields.get(name)
    if field is None:
        names = ", ".join(list(scan.known.fields)[:_NEAREST])
        raise scan.error(FilterCode.FIELD_NOT_FOUND, hint=f"there are {names}, ...")
    if field.kind is FieldKind.TIME:
        hint = "in the guest it is a counter, which the host makes a time"
        raise scan.error(FilterCode.NO_TIME_IN_GUEST, start, hint)
    return field


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


def normal(text: str) -> str:
    """Return a filter as its file would show it; "" where it stands for none."""
    shown = text.rstrip()
    return "" if shown.lstrip() == "0" else shown or text


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


class _Part(Struct):
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
        self._aim(whole.yes, ACCEPT)
        self._aim(whole.no, REJECT)
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
                self._aim(left.yes, right.start)
                left.yes, left.no = right.yes, left.no + right.no
            else:
                self._aim(left.no, right.start)
                left.yes, left.no = left.yes + right.yes, right.no

    def _aim(self, ends: list[tuple[int, bool]], target: int) -> None:
        for index, holds in ends:
            self._targets[index][holds] = target


_COMM_CHARS = 15
"""TASK_COMM_LEN without its NUL: the kernel cuts longer names."""
_SPECIAL = re.compile(r"[*?\[]")
_PID_SIZE = 4


FOLLOWED = 1 << 63
"""``self_exec_id`` of a followed command from its exec on: the top bit, which no other task gets
to. Fork copies it to children and threads, every exec counts on, nothing in user space sets it."""
_IS_FOLLOWED = Compare(source=Header.EXEC_ID, size=8, is_signed=True, relation=Relation.LT, value=0)


def task_filter(
    pids: Collection[int] = (),
    comms: Collection[str] = (),
    *,
    tgids: Collection[int] = (),
    follow: bool = False,
) -> Filter | None:
    """Return the filter that only hits of some tasks pass.

    Args:
        pids: of the tasks; none means any.
        comms: their names, or shell patterns; none means any.
        tgids: of the processes that they are threads of; none means any.
        follow: whether they must be of a followed command, or descend from it.

    Returns:
        The filter, or None for any task.
    """
    chosen: list[Filter] = []
    if follow:
        chosen.append(any_of([_IS_FOLLOWED]))
    for source, numbers in ((Header.PID, pids), (Header.TGID, tgids)):
        if numbers:
            chosen.append(any_of([_is(source, number) for number in numbers]))
    if comms:
        patterns = [pattern for comm in comms for pattern in _patterns(comm)]
        chosen.append(any_of([Matches(source=Header.COMM, pattern=p) for p in patterns]))
    return every(chosen)


def _is(source: Header, number: int) -> Compare:
    value = number & (1 << 8 * _PID_SIZE) - 1
    return Compare(source=source, size=_PID_SIZE, is_signed=True, relation=Relation.EQ, value=value)


def _patterns(comm: str) -> list[Pattern]:
    data = comm.encode("utf-8", "surrogateescape")
    if not _SPECIAL.search(comm):
        return [literal(data[:_COMM_CHARS])]
    # A name may have such characters itself. A pattern is not cut: it says more than it matches.
    return [literal(data), glob(data, has_escapes=False)]
