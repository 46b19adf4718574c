"""Hist triggers of events that were recorded: the kernel's grammar, asked of columns.

Every event of a batch is counted at once. A table of N entries keeps the first N keys that came,
and drops the hits of others, as the kernel's does (kernel/trace/tracing_map.c).
"""

from collections.abc import Callable, Iterable, Sequence
from typing import assert_never

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.buckets import bucket_of
from kprobes.column_filter import ColumnFilter
from kprobes.errors import DefinitionError, UsageError
from kprobes.histogram import Histogram, combined, objects, of_entries
from kprobes.lang.hist import parse_hist
from kprobes.model.codes import HistCode, hist_error
from kprobes.model.events import Batch, Column, Events
from kprobes.model.filter import Header
from kprobes.model.hist import (
    DIVIDE_SHIFT,
    IDLE,
    MAX_TEXT,
    Expression,
    HistField,
    HistKind,
    HistTrigger,
    Modifier,
    NumericLiteral,
    Operator,
    Special,
    multiplier_of,
)
from kprobes.model.resolved import RecordLayout, Storage
from kprobes.model.strings import Strings
from kprobes.resolve.hist import known_fields
from kprobes.sinks.names import Names, TraceSource
from kprobes.tracked import Numbers, Tracked, joined, kept, nothing
from kprobes.units import U64

Groups = NDArray[np.int64]
Mask = NDArray[np.bool_]

_COMM_DTYPE = np.dtype("S16")
_TEXTUAL = (HistKind.TEXT, HistKind.STACK)
_ADDRESS = 8


class ColumnHist:
    """One hist trigger, for events of all kinds; those that lack a field of it are not counted.

    Several events share its table, as those do that have a trigger of one name.
    """

    def __init__(self, text: str, source: TraceSource) -> None:
        """Have no entry yet.

        Args:
            text: of the trigger.
            source: the kernel that the events are of.
        """
        self._text, self._source = text, source
        self._names = Names(source)
        self._triggers: dict[int, tuple[RecordLayout, HistTrigger | None]] = {}
        self._error: DefinitionError | None = None
        self._filter: ColumnFilter | None = None
        self._texts = _Texts()
        self._table: _Table | None = None
        self._unhit: HistTrigger | None = None

    def check(self) -> None:
        """Find out at the end whether it could be asked of anything.

        Raises:
            DefinitionError: of no event that came; says what is wrong for the first.
        """
        if self._error is not None and self._table is None and self._unhit is None:
            raise self._error
        if self._filter is not None:
            self._filter.check()

    def take(self, events: Events) -> None:
        """Count events, which are only read.

        Raises:
            DefinitionError: a key is of one kind in one event, and of another in another.
            UsageError: a value is.
        """
        found = self._parsed(events)
        if self._table is None or self._table.trigger.is_paused:
            return
        if self._filter is not None:
            events = self._filter.passed(events)
        parts = [
            part
            for index, trigger in found.items()
            if (part := self._part(events, index, trigger)) is not None
        ]
        self._table.add(parts)

    def histogram(self) -> Histogram | None:
        """Return what was counted until now, sorted; None while no event has all fields."""
        table = self._table
        if table is None and self._unhit is not None:
            table = _Table(self._unhit)
        return None if table is None else table.histogram(self._source, self._texts)

    def _parsed(self, events: Events) -> dict[int, HistTrigger]:
        # By the indices of the batches that have all fields. The table is that of the first event
        # that has hits: signs may differ.
        found: dict[int, HistTrigger] = {}
        counts = np.bincount(events.batch, minlength=len(events.batches))
        hit_first: list[int] = np.argsort(counts == 0, kind="stable").tolist()
        for index in hit_first:
            trigger = self._trigger(events.batches[index].layout)
            if trigger is None:
                continue
            if counts[index]:
                found[index] = trigger
                self._begin(trigger)
            else:
                self._unhit = self._unhit or trigger
        return found

    def _begin(self, trigger: HistTrigger) -> None:
        if self._table is not None:
            _check_alike(self._text, self._table.trigger, trigger)
            return
        self._table = _Table(trigger)
        if trigger.filter:
            self._filter = ColumnFilter(trigger.filter, self._source)

    def _trigger(self, layout: RecordLayout) -> HistTrigger | None:
        known, trigger = self._triggers.get(layout.event_id, (None, None))
        if known is layout:
            return trigger
        try:
            trigger = parse_hist(self._text, known_fields(layout))
        except DefinitionError as error:
            trigger, self._error = None, self._error or error
        self._triggers[layout.event_id] = layout, trigger
        return trigger

    def _part(self, events: Events, index: int, trigger: HistTrigger) -> "_Part | None":
        places = np.flatnonzero(events.batch == index)
        if not len(places):
            return None
        batch = events.batches[index].take(events.row[places])
        measured = _measured(batch, trigger)
        if measured is not None and not measured.all():
            unmeasured = int(np.count_nonzero(~measured))
            batch, places = batch.take(measured), places[measured]
        else:
            unmeasured = 0
        keys = [self._codes(batch, key) for key in trigger.keys]
        for field in trigger.percentiles:
            numbers = _number(batch, field)
            buckets = bucket_of(numbers.view(np.int64) if field.is_signed else numbers)
            keys.append(buckets.view(np.uint64))
        return _Part(
            keys=keys,
            columns=[_taken(_number(batch, each), each) for each in trigger.columns],
            tracked=[_taken(_number(batch, each), each) for each in trigger.tracked],
            batch=batch,
            places=places,
            unmeasured=unmeasured,
        )

    def _codes(self, batch: Batch, key: HistField) -> Numbers:
        # A text is a number that it has for good.
        if key.kind not in _TEXTUAL:
            return _taken(_number(batch, key), key)
        if not isinstance(key.source, int):
            return self._texts.of_comms(batch.comm)
        values, storage = batch.columns[key.source], batch.layout.fields[key.source].storage
        if isinstance(values, Strings):
            is_stack = storage is Storage.STACK
            return self._texts.of_strings(values, key.width * _ADDRESS if is_stack else MAX_TEXT)
        if storage is Storage.NUMBER:
            return self._texts.of_numbers(values, self._names.symbol)
        return self._texts.of(values)


def _measured(batch: Batch, trigger: HistTrigger) -> Mask | None:
    # Which events have all durations that are asked for.
    found = None
    asked = (*trigger.fields, *trigger.tracked)
    for field in (leaf for each in asked for leaf in each.leaves):
        if field.kind is HistKind.DURATION and isinstance(field.source, int):
            values, bad = batch.values[field.source], batch.faulted[field.source]
            is_known = values != 0 if bad is None else (values != 0) & ~bad
            found = is_known if found is None else found & is_known
    return found


def _number(batch: Batch, field: HistField) -> Numbers:
    # What could not be read is 0, as it is in the kernel's records.
    match field.source:
        case int():
            values, bad = batch.values[field.source], batch.faulted[field.source]
            numbers = _wide(values)
            return numbers if bad is None else np.where(bad, np.uint64(0), numbers)
        case NumericLiteral() | Expression():
            return _computed(batch, field.source)
        case Special():
            return _special(batch, field.source)
        case Header.PID:
            return _wide(batch.pid)
        case Header.CPU:
            return batch.cpu.astype(np.uint64)
        case Header.IP:
            return np.full(len(batch), batch.layout.ip, np.uint64)
        case Header.TYPE:
            return np.full(len(batch), batch.layout.event_id, np.uint64)
        case _:
            raise TypeError(f"{field.source} is not in a record")


def _computed(batch: Batch, expression: NumericLiteral | Expression) -> Numbers:
    if isinstance(expression, NumericLiteral):
        return np.full(len(batch), expression.value, np.uint64)
    first, *others = (_taken(_number(batch, each), each) for each in expression.operands)
    match expression.operator:
        case Operator.NEGATED:
            return np.uint64(0) - first
        case Operator.PLUS:
            return np.add(first, *others)
        case Operator.MINUS:
            return np.subtract(first, *others)
        case Operator.TIMES:
            return np.multiply(first, *others)
        case Operator.OVER:
            divisor = expression.operands[1].source
            if isinstance(divisor, NumericLiteral):
                return _divided(first, divisor.value)
            (other,) = others
            return np.where(other == 0, np.uint64(U64), first // np.maximum(other, np.uint64(1)))
        case _:
            assert_never(expression.operator)


def _divided(numbers: Numbers, constant: int) -> Numbers:
    # As kernels do it, with what they get wrong by one.
    exact, multiplier = numbers // np.uint64(constant), multiplier_of(constant)
    if multiplier is None:
        return exact
    product = numbers * np.uint64(multiplier) + np.uint64((1 << DIVIDE_SHIFT) - 1)
    return np.where(numbers >> _DIVIDE_SHIFT == 0, product >> _DIVIDE_SHIFT, exact)


def _special(batch: Batch, source: Special) -> Numbers:
    match source:
        case Special.HITCOUNT:
            return np.ones(len(batch), np.uint64)
        case Special.TIMESTAMP:
            return batch.ts
        case Special.FUNCTION:
            return np.full(len(batch), batch.layout.ip, np.uint64)
        case Special.CALLER:
            return np.zeros(len(batch), np.uint64) if batch.caller is None else batch.caller
        case _:
            assert_never(source)


def _wide(values: Column) -> Numbers:
    if values.dtype.kind == "i":
        return values.astype(np.int64).view(np.uint64)
    return values.astype(np.uint64)


_NS_PER_US = np.uint64(1000)
_DIVIDE_SHIFT = np.uint64(DIVIDE_SHIFT)


def _taken(numbers: Numbers, field: HistField) -> Numbers:
    match field.modifier:
        case Modifier.LOG2:
            return log2(numbers)
        case Modifier.BUCKETS:
            return numbers - numbers % np.uint64(field.width)
        case Modifier.USECS if field.source is Special.TIMESTAMP or field.kind is HistKind.DURATION:
            return (numbers + _NS_PER_US // np.uint64(2)) // _NS_PER_US
        case _:
            return numbers


_HALF = np.uint64(32)


def log2(numbers: Numbers) -> Numbers:
    """Return the powers of two that numbers, shape (n,), do not exceed; of 0 it is 0.

    That is ilog2(roundup_pow_of_two(n)), as kernels print it: 64 beyond 2**63. It is a new array
    of their shape.
    """
    less = numbers - np.uint64(1)
    high = np.frexp((less >> _HALF).astype(np.float64))[1]
    low = np.frexp((less & np.uint64(0xFFFF_FFFF)).astype(np.float64))[1]
    length = np.where(high > 0, high + 32, low)
    return np.where(numbers == 0, 0, length).astype(np.uint64)


class _Texts(dict[bytes | None, int]):
    """Numbers of texts, from 0 on; one that could not be read is an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[bytes, int] = {}
        self.names: list[bytes] = []

    def __missing__(self, text: bytes | None) -> int:
        number = self[text] = self._number((text or b"")[:MAX_TEXT])
        return number

    def _number(self, name: bytes) -> int:
        number = self._known.setdefault(name, len(self.names))
        if number == len(self.names):
            self.names.append(name)
        return number

    def of(self, texts: Column) -> Numbers:
        """Return the numbers of texts, shape (n,), new."""
        return np.fromiter(map(self.__getitem__, texts.tolist()), np.uint64, len(texts))

    def of_strings(self, strings: Strings, most: int) -> Numbers:
        """Return those of strings, shape (n,), new, by so many of their bytes, or by all: 0."""
        numbers = strings.mapped(lambda text: self._number((text or b"")[: most or None]))
        return numbers.astype(np.uint64)

    def of_comms(self, comms: Column) -> Numbers:
        """Return those of names of tasks, S16; as they come in runs, of each run once."""
        heads = np.flatnonzero(np.append(True, comms[1:] != comms[:-1]))[: len(comms)]
        return self.of(comms[heads]).repeat(np.diff(heads, append=len(comms)))

    def of_numbers(self, numbers: Column, name: Callable[[int], bytes]) -> Numbers:
        """Return those of the texts that numbers stand for, each asked for once."""
        unique, which = np.unique(numbers, return_inverse=True)
        return self.of(objects([*map(name, unique.tolist())]))[which]


class _Part(Struct, frozen=True, kw_only=True, eq=False):
    # Events of one layout: keys, buckets last, columns, and what an action looks at; where each
    # stands in the order of time.
    batch: Batch
    keys: Sequence[Numbers]
    columns: Sequence[Numbers]
    tracked: Sequence[Numbers]
    places: NDArray[np.int64]
    unmeasured: int


class _Groups(Struct, frozen=True, kw_only=True, eq=False):
    # A part's hits by their keys, each of which has a row or, if negative, none.
    part: _Part
    groups: Groups
    firsts: Groups
    keys: list[tuple[int, ...]]


class _Table:
    """The entries of one trigger."""

    def __init__(self, trigger: HistTrigger) -> None:
        self.trigger = trigger
        self._rows: dict[tuple[int, ...], int] = {}
        self._comms: list[bytes] = []
        self._hits: Numbers = np.zeros(0, np.uint64)
        self._columns = [np.zeros(0, np.uint64) for _ in trigger.columns]
        self._tracked = nothing(0, max(len(trigger.tracked) - 1, 0))
        self._dropped = 0
        self._unmeasured = 0

    def add(self, parts: Iterable[_Part]) -> None:
        """Count what a round has brought."""
        every = [_grouped(part) for part in parts]
        self._admit(every)
        hits: list[Tracked] = []
        rows: list[Groups] = []
        for each in every:
            self._unmeasured += each.part.unmeasured
            own = self._add(each)[each.groups]
            if each.part.tracked:
                has_row = own >= 0
                hits.append(_tracked(each.part).take(np.flatnonzero(has_row)))
                rows.append(own[has_row])
        if hits and self.trigger.action is not None:
            before, new = self._tracked, joined(hits)
            self._tracked = kept(self.trigger.action.handler, before, new, np.concatenate(rows))

    def _admit(self, every: Sequence[_Groups]) -> None:
        # Who came first has a place, whatever its event.
        new = [
            (place, key, at, first)
            for at, each in enumerate(every)
            for key, first, place in zip(
                each.keys,
                each.firsts.tolist(),
                each.part.places[each.firsts].tolist(),
                strict=True,
            )
            if key not in self._rows
        ]
        for _, key, at, first in sorted(new):
            if len(self._rows) == self.trigger.room:
                break
            if self._rows.setdefault(key, len(self._rows)) == len(self._comms):
                batch = every[at].part.batch
                self._comms.append(bytes(batch.comm[first]) if batch.pid[first] else IDLE)
        room = len(self._rows) - len(self._hits)
        self._hits = np.pad(self._hits, (0, room))
        self._columns = [np.pad(column, (0, room)) for column in self._columns]
        self._tracked = joined([self._tracked, nothing(room, len(self._tracked.saved))])

    def _add(self, each: _Groups) -> Groups:
        # Return the row of each group.
        count = len(each.keys)
        rows = np.array([self._rows.get(key, -1) for key in each.keys], np.int64)
        has_row = rows >= 0
        hits = np.bincount(each.groups, minlength=count).astype(np.uint64)
        self._dropped += int(hits[~has_row].sum())
        own = rows[has_row]
        is_new = self._hits[own] == 0
        self._hits[own] += hits[has_row]
        of = zip(self.trigger.columns, self._columns, each.part.columns, strict=True)
        for field, held, values in of:
            found = combined(values, each.groups, count, field=field)[has_row]
            held[own] = np.where(is_new, found, _joined(held[own], found, field))
        return rows

    def histogram(self, source: TraceSource, texts: _Texts) -> Histogram:
        """Return a copy, sorted."""
        names = objects(texts.names)
        count, every = len(self.trigger.keys), np.arange(len(self._rows))
        width = count + len(self.trigger.percentiles)
        words = np.array([*self._rows], np.uint64).reshape(-1, width).T
        keys = (
            names[codes.astype(np.int64)] if key.kind in _TEXTUAL else codes.copy()
            for key, codes in zip(self.trigger.keys, words, strict=False)
        )
        found = Histogram(
            trigger=self.trigger,
            source=source,
            keys=tuple(keys),
            comms=np.array(self._comms, _COMM_DTYPE),
            hitcount=self._hits.copy(),
            vals=(),
            dropped=self._dropped,
            unmeasured=self._unmeasured,
            tracked=None if self.trigger.action is None else self._tracked.take(every),
        )
        return of_entries(found, self._columns, words[count:].view(np.int64))


def _tracked(part: _Part) -> Tracked:
    numbers, *saved = part.tracked
    return Tracked(numbers=numbers, when=part.batch.ts, saved=tuple(saved))


def _joined(one: Numbers, other: Numbers, field: HistField) -> Numbers:
    dtype = np.int64 if field.is_signed else np.uint64
    match field.modifier:
        case Modifier.MIN:
            return np.minimum(one.view(dtype), other.view(dtype)).view(np.uint64)
        case Modifier.MAX:
            return np.maximum(one.view(dtype), other.view(dtype)).view(np.uint64)
        case _:
            return one + other


def _grouped(part: _Part) -> _Groups:
    groups, count = _numbered(part.keys[0])
    for key in part.keys[1:]:
        codes, more = _numbered(key)
        groups, count = _numbered((groups * more + codes).view(np.uint64))
    firsts = np.zeros(count, np.int64)
    # Of several values for one place the last one stays: that of the first event.
    firsts[groups[::-1]] = np.arange(len(groups))[::-1]
    keys = zip(*(key[firsts].tolist() for key in part.keys), strict=True)
    return _Groups(part=part, groups=groups, firsts=firsts, keys=[*keys])


_DENSE = 4
"""Times the number of hits: numbers within such a range are counted without sorting them."""


def _numbered(numbers: Numbers) -> tuple[Groups, int]:
    # Each number's place among the different ones, and how many these are.
    if not len(numbers):
        return np.zeros(0, np.int64), 0
    least, span = numbers.min(), int(numbers.max() - numbers.min())
    if span > _DENSE * len(numbers):
        unique, which = np.unique(numbers, return_inverse=True)
        return which.astype(np.int64), len(unique)
    codes = (numbers - least).astype(np.int64)
    is_there = np.zeros(span + 1, np.bool_)
    is_there[codes] = True
    return (np.cumsum(is_there) - 1)[codes], int(np.count_nonzero(is_there))


def can_count(text: str, layouts: Iterable[RecordLayout]) -> bool:
    """Whether guests can be asked a trigger where hits happen, of all of some events.

    Args:
        text: of the trigger.
        layouts: of the events.
    """
    try:
        triggers = [
            parse_hist(text, known_fields(each, of_guest=True)) for each in _different(layouts)
        ]
    except DefinitionError:
        return False
    return len({each.form for each in triggers}) <= 1


def check_hist(text: str, layouts: Iterable[RecordLayout], source: TraceSource) -> None:
    """Find out whether a trigger, and its filter, can be asked of any of some events.

    Args:
        text: of the trigger.
        layouts: of the events.
        source: the kernel that they are of.

    Raises:
        DefinitionError: of none; says what is wrong for the first. Or a key is of one kind in one
            event, and of another in another.
    """
    error: DefinitionError | None = None
    known: list[tuple[RecordLayout, HistTrigger]] = []
    for layout in _different(layouts):
        try:
            known.append((layout, parse_hist(text, known_fields(layout))))
        except DefinitionError as found:
            error = error or found
    if not known:
        if error is not None:
            raise error
        return
    _, first = known[0]
    for _, other in known[1:]:
        _check_alike(text, first, other)
    if first.filter:
        asked = ColumnFilter(first.filter, source)
        for layout, _ in known:
            asked.ask(layout)
        asked.check()


def _check_alike(text: str, first: HistTrigger, other: HistTrigger) -> None:
    for one, another in zip(first.keys, other.keys, strict=True):
        if one.kind is not another.kind:
            kinds = f"a {one.kind.value} of one event, and a {another.kind.value} of another"
            hint = f"it is {kinds}: rename the argument, or choose events"
            raise hist_error(HistCode.BAD_KEY, text=text, token=one.name, hint=hint)
    if (len(first.columns), first.room) != (len(other.columns), other.room):
        # What is one field of one event, and two of another.
        pairs = zip(first.vals, other.vals, strict=True)
        token = next((a.name for a, b in pairs if a.source != b.source), first.vals[0].name)
        raise UsageError(
            f"{token} is an argument of one event, and not of another: rename it, or choose events"
        )


def _different(layouts: Iterable[RecordLayout]) -> Iterable[RecordLayout]:
    # All functions of a pattern have the same fields.
    return {(each.fields, each.caller_offset): each for each in layouts}.values()


def histogram_of(rounds: Iterable[Events], text: str, source: TraceSource) -> Histogram | None:
    """Return the histogram of some events by a trigger; None where there is no kind of them.

    Args:
        rounds: one after the other.
        text: of the trigger.
        source: the kernel that they are of.

    Raises:
        DefinitionError: the trigger is wrong.
    """
    hist = ColumnHist(text, source)
    for events in rounds:
        hist.take(events)
    hist.check()
    return hist.histogram()
