"""Filters of events that were recorded already: the kernel's language, asked of columns.

The same program that a guest's code follows is followed for all events of a batch at once. Here a
duration is a number and an address of type symstr is a text, which the guest cannot test. A task's
process is not in a record.
"""

import re
from collections.abc import Callable
from typing import Any, assert_never

import numpy as np
from numpy.typing import NDArray

from kprobes.errors import DefinitionError
from kprobes.lang.filter import parse_filter
from kprobes.lang.filter_value import Known
from kprobes.model.definition import Kind
from kprobes.model.events import Batch, Events, kept_of
from kprobes.model.filter import (
    ACCEPT,
    Always,
    Compare,
    FieldKind,
    Filter,
    FilterField,
    Header,
    Matches,
    Pattern,
    Piece,
    Relation,
    Source,
    Test,
    Within,
)
from kprobes.model.resolved import RecordLayout, Storage
from kprobes.model.strings import Strings
from kprobes.resolve.resolve import layout_fields
from kprobes.sinks.names import Names, TraceSource

Mask = NDArray[np.bool_]
_UNKNOWN = (Header.FLAGS, Header.PREEMPT_COUNT)
"""What records have in another form."""
_COMPARE: dict[Relation, Callable[[Any, Any], Any]] = {
    Relation.EQ: np.equal,
    Relation.NE: np.not_equal,
    Relation.LT: np.less,
    Relation.LE: np.less_equal,
    Relation.GT: np.greater,
    Relation.GE: np.greater_equal,
}


class ColumnFilter:
    """One filter, for events of all kinds: those that lack a field that it names do not pass."""

    def __init__(self, text: str, source: TraceSource) -> None:
        """Take a filter of events of a kernel."""
        self._text, self._cpus = text, source.cpus
        self._names = Names(source)
        self._programs: dict[int, tuple[RecordLayout, Filter | None]] = {}
        self._error: DefinitionError | None = None

    def check(self) -> None:
        """Find out at the end whether it could be asked of anything.

        Raises:
            DefinitionError: of no event that came; says what is wrong for the first.
        """
        if self._error is not None and not any(each for _, each in self._programs.values()):
            raise self._error

    def ask(self, layout: RecordLayout) -> None:
        """Find out whether it can be asked of a kind of events, none of which has come yet."""
        self._program(layout)

    def passed(self, events: Events) -> Events:
        """Return those for which it holds, in their order; the columns are the same."""
        return kept_of(events, [self._mask(batch) for batch in events.batches])

    def _mask(self, batch: Batch) -> Mask:
        program = self._program(batch.layout)
        if program is None:
            return np.zeros(len(batch), np.bool_)
        return _followed(program, len(batch), lambda test: self._holds(batch, test))

    def _program(self, layout: RecordLayout) -> Filter | None:
        known, program = self._programs.get(layout.event_id, (None, None))
        if known is layout:
            return program
        kind = Kind.ENTRY if layout.caller_offset is None else Kind.RETURN
        found = layout_fields(layout, kind).items()
        fields = {name: _asked(each) for name, each in found if each.source not in _UNKNOWN}
        try:
            program = parse_filter(
                self._text, Known(fields=fields, cpus=self._cpus, function=_no_function)
            )
        except DefinitionError as error:
            program, self._error = None, self._error or error
        self._programs[layout.event_id] = layout, program
        return program

    def _holds(self, batch: Batch, test: Test) -> Mask:
        match test:
            case Always(holds=holds):
                return np.full(len(batch), holds)
            case Compare():
                return _compared(_number(batch, test.source, test.size), test)
            case Within():
                number = _number(batch, test.source, test.size)
                inside = np.zeros(len(batch), np.bool_)
                for low, high in test.ranges:
                    inside |= (number >= low) & (number <= high)
                return inside
            case Matches():
                return self._matched(batch, test)
            case _:
                assert_never(test)

    def _matched(self, batch: Batch, test: Matches) -> Mask:
        wanted = re.compile(_regex(test.pattern), re.DOTALL)
        column = batch.comm if isinstance(test.source, Header) else batch.columns[test.source]
        if isinstance(column, Strings):
            found = column.mapped(lambda text: text is not None and bool(wanted.fullmatch(text)))
            return found.astype(np.bool_)
        texts: list[bytes] = column.tolist()
        bad = None
        # What is no string is the task's name, one text for all, or an address that has a name.
        if column.dtype.kind in "iu" and not isinstance(test.source, Header):
            texts = list(map(self._names.symbol, column.tolist()))
            bad = batch.faulted[test.source]
        known = {text: wanted.fullmatch(text) is not None for text in set(texts)}
        matches = np.fromiter(map(known.__getitem__, texts), np.bool_, len(texts))
        return matches if bad is None else matches & ~bad


def _followed(program: Filter, count: int, holds: Callable[[Test], Mask]) -> Mask:
    # Each event goes from step to step; what it tests is asked of all at once.
    here = [np.zeros(count, np.bool_) for _ in program.steps]
    here[0][:] = True
    accepted = np.zeros(count, np.bool_)
    for at, step in enumerate(program.steps):
        found = holds(step.test)
        for target, mask in ((step.yes, here[at] & found), (step.no, here[at] & ~found)):
            if target >= 0:
                here[target] |= mask
            elif target == ACCEPT:
                accepted |= mask
    return accepted


def _asked(field: FilterField) -> FilterField:
    match field.kind:
        case FieldKind.TIME:
            return FilterField(kind=FieldKind.NUMBER, source=field.source, size=8)
        case FieldKind.SYMBOL_NAME:
            return FilterField(kind=FieldKind.TEXT, source=field.source)
        case _:
            return field


def _no_function(place: str | int) -> None:
    del place


def _number(batch: Batch, source: Source, size: int) -> NDArray[Any]:
    # Without sign, in the size that is asked for; what could not be read is 0.
    unsigned = np.dtype(f"<u{size}")
    if isinstance(source, Header):
        return _header(batch, source).astype(unsigned)
    values, bad = batch.values[source], batch.faulted[source]
    plain = np.ascontiguousarray(values)
    whole = plain.view(unsigned).reshape(len(batch)) if plain.ndim > 1 else plain.astype(unsigned)
    is_time = batch.layout.fields[source].storage is Storage.DURATION
    return whole if bad is None or is_time else np.where(bad, unsigned.type(0), whole)


def _header(batch: Batch, source: Header) -> NDArray[Any]:
    match source:
        case Header.PID:
            return batch.pid
        case Header.CPU:
            return batch.cpu
        case Header.TYPE:
            return np.full(len(batch), batch.layout.event_id)
        case Header.IP:
            return np.full(len(batch), batch.layout.ip, np.uint64)
        case _:
            raise TypeError(f"{source} is not in a record")


def _compared(number: NDArray[Any], test: Compare) -> Mask:
    bits = number.dtype.type(test.value & (1 << 8 * test.size) - 1)
    if test.relation is Relation.AND:
        return (number & bits) != 0
    if test.is_signed:
        signed = np.dtype(f"<i{test.size}")
        return _COMPARE[test.relation](number.view(signed), bits.view(signed))
    return _COMPARE[test.relation](number, bits)


def _regex(pattern: Pattern) -> bytes:
    return b".*".join(map(_of_piece, pattern.pieces))


def _of_piece(piece: Piece) -> bytes:
    return b"".join(
        b"[" + b"".join(b"\\x%02x" % byte for byte in range(256) if allowed >> byte & 1) + b"]"
        for allowed in piece
    )
