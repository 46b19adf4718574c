"""Histograms: what hist triggers have counted, as columns, and as the kernel's hist files print it.

hist_trigger_show() in kernel/trace/trace_events_hist.c. Average, minimum, maximum and percentiles,
which it has not, are values with their modifier in the name.
"""

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from kprobes.buckets import HitBuckets, summed
from kprobes.errors import UsageError
from kprobes.model.events import Column
from kprobes.model.hist import (
    EXTREMES,
    MAX_FIELDS,
    OWN_MODIFIERS,
    Expression,
    Handler,
    HistAction,
    HistField,
    HistKind,
    HistTrigger,
    Modifier,
)
from kprobes.sinks.json import valid_text
from kprobes.sinks.names import Names, TraceSource
from kprobes.tracked import Numbers, Tracked, joined, kept, nothing
from kprobes.units import U64

_BAR = 20
"""Characters of a graph's bar."""
_WHOLE = 10_000
"""Hundredths of a percent in the whole."""
_NO_SHARE = 0xFFFF_FFFF
_BITS = 64


class Histogram(Struct, frozen=True, kw_only=True, eq=False):
    """What a hist trigger has counted: ``n`` entries. Every array has shape (n,).

    Numbers are uint64, those of signed fields sign-extended, as the kernel's are. ``str()`` is the
    kernel's text; ``+`` makes one histogram of two, ``-`` has what was counted in between.

    Attributes:
        trigger: that was asked.
        source: the kernel that the hits are of.
        keys: for each key its numbers, or objects that are ``bytes``.
        comms: S16, for a key with ``execname`` the name of the task that made the entry.
        hitcount: uint64, hits of each.
        vals: for each value its sum, or least, or greatest, or percentile; of an average the sum.
        dropped: hits for which the table had no room.
        unmeasured: hits that are left out, as they have no duration.
        buckets: what percentiles are of, those of each field of ``trigger.percentiles``.
        tracked: what the trigger's action has kept, or None without one.
        event: whose trigger it is, ``GROUP:EVENT``; "" where that is not one event.
    """

    trigger: HistTrigger
    source: TraceSource
    keys: tuple[Column, ...]
    comms: Column
    hitcount: Numbers
    vals: tuple[Numbers, ...]
    dropped: int = 0
    unmeasured: int = 0
    buckets: tuple[HitBuckets, ...] = ()
    tracked: Tracked | None = None
    event: str = ""

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self.hitcount)

    @property
    def hits(self) -> int:
        """How many were counted."""
        return int(self.hitcount.sum())

    def __add__(self, other: "Histogram") -> "Histogram":
        """Return both in one, sorted.

        Raises:
            UsageError: their triggers have other keys or values.
        """
        return merged([self, other])

    def __sub__(self, earlier: "Histogram") -> "Histogram":
        """Return what was counted after an earlier reading of the same, sorted.

        Raises:
            UsageError: the other one has other keys or values, or is later; or a value is a least
                or greatest number, which is known of all hits only.
        """
        return since(self, earlier)

    def __repr__(self) -> str:
        """Return what it is."""
        return f"<Histogram: {self.hits} hits in {len(self)} entries by {self.trigger.text}>"

    def __str__(self) -> str:
        return self.text().decode(errors="backslashreplace")

    def is_alike(self, other: "Histogram") -> bool:
        """Whether another one has the same keys, values and action."""
        one, another = self.trigger, other.trigger
        return (one.keys, one.vals, one.action) == (another.keys, another.vals, another.action)

    def rows(self) -> Iterator[tuple[object, ...]]:
        """Yield the keys of each entry."""
        return zip(*(key.tolist() for key in self.keys), strict=True)

    def take(self, rows: NDArray[np.int64] | slice) -> "Histogram":
        """Return some of its entries by their indices, shape (m,), each once; copies."""
        rows = np.arange(len(self))[rows]
        return replace(
            self,
            keys=tuple(key[rows] for key in self.keys),
            comms=self.comms[rows],
            hitcount=self.hitcount[rows],
            vals=tuple(val[rows] for val in self.vals),
            buckets=tuple(each.take(rows) for each in self.buckets),
            tracked=None if self.tracked is None else self.tracked.take(rows),
        )

    def sorted(self) -> "Histogram":
        """Return it in the order of its trigger; what is equal keeps its order."""
        order = np.arange(len(self))
        for key in reversed(self.trigger.sort):
            ranks = self._ranks(key.index)[order]
            order = order[np.argsort(-ranks if key.is_descending else ranks, kind="stable")]
        return self.take(order)

    def value(self, at: int) -> NDArray[Any]:
        """Return a value, by its index, as a person reads it: int64 if signed, an average float64.

        The copy has shape (n,).
        """
        field, val = self.trigger.vals[at], self.vals[at]
        numbers = val.view(np.int64) if field.is_signed else val
        return numbers / self.hitcount if field.modifier is Modifier.AVG else numbers.copy()

    def columns(self) -> dict[str, Column]:
        """Return keys, ``hitcount`` and values by name, copies of shape (n,).

        Numbers are as ``value`` has them; of a key with ``log2`` they are the ends of its buckets,
        ``buckets`` where these begin. Texts, symbols and names of tasks are ``str``. Where a key
        has a value's name that is ``NAME.sum``; other names that are there twice end with a number.
        What an action has kept comes last: ``onmax(x)``, then ``save(got)`` of each field.
        """
        keys = [self._key_column(at) for at in range(len(self.keys))]
        vals = [self.value(at) for at in range(len(self.vals))]
        columns = [*keys, self.hitcount.copy(), *vals, *self._tracked_columns()]
        return dict(zip(_names(self.trigger), columns, strict=True))

    def to_pandas(self) -> Any:
        """Return ``columns`` as a ``pandas.DataFrame``.

        Raises:
            UsageError: pandas is not installed.
        """
        return _module("pandas").DataFrame(self.columns())

    def plot(self, *, ax: Any = None) -> Any:
        """Draw a bar for each entry, as high as it has hits, and return the ``Axes``.

        Args:
            ax: matplotlib's axes that are drawn on; None for a new figure's.

        Raises:
            UsageError: matplotlib is not installed.
        """
        axes = _module("matplotlib.pyplot").subplots()[1] if ax is None else ax
        keys = [*self.columns().items()][: len(self.keys)]
        labels = map(", ".join, zip(*(map(str, key.tolist()) for _, key in keys), strict=True))
        places = np.arange(len(self))
        axes.bar(places, self.hitcount)
        axes.set_xticks(places, [*labels], rotation=90)
        axes.set_xlabel(", ".join(name for name, _ in keys))
        axes.set_ylabel("hits")
        return axes

    def text(self) -> bytes:
        """Return what the kernel's ``hist`` file has of one trigger."""
        lines = [
            b"# event histogram\n#\n# trigger info: %b\n#\n\n" % _bytes(self.trigger.listed),
            *_entries(self, Names(self.source)),
            b"\nTotals:\n    Hits: %d\n    Entries: %d\n    Dropped: %d\n"
            % (self.hits, len(self), self.dropped),
        ]
        return b"".join(lines)

    def _key_column(self, at: int) -> Column:
        field, key, names = self.trigger.keys[at], self.keys[at], Names(self.source)
        if field.kind is HistKind.TEXT:
            return objects([valid_text(value) for value in key.tolist()])
        if field.kind is HistKind.STACK:
            return objects([valid_text(names.key_text(field, value)) for value in key.tolist()])
        match field.modifier:
            case Modifier.EXECNAME:
                pairs = zip(map(valid_text, self.comms.tolist()), key.tolist(), strict=True)
                return objects([f"{comm}[{pid}]" for comm, pid in pairs])
            case Modifier.SYSCALL:
                return objects([f"{syscall_name(n, self.source)}[{n}]" for n in key.tolist()])
            case Modifier.SYM:
                return objects([valid_text(symbol_name(a, names)) for a in key.tolist()])
            case Modifier.SYM_OFFSET:
                return objects([valid_text(names.symbol(a)) for a in key.tolist()])
            case Modifier.LOG2:
                powers = np.uint64(1) << key % np.uint64(_BITS)
                return np.where(key == _BITS, np.uint64(U64), powers)
            case _:
                return key.view(np.int64).copy() if field.is_signed else key.copy()

    def _tracked_columns(self) -> Iterator[Column]:
        if self.tracked is None:
            return
        every = (self.tracked.numbers, *self.tracked.saved)
        for field, numbers in zip(self.trigger.tracked, every, strict=True):
            yield numbers.view(np.int64).copy() if field.is_signed else numbers.copy()

    def _ranks(self, index: int) -> NDArray[np.int64]:
        if index == 0:
            return _ranks(self.hitcount)
        if index <= len(self.vals):
            # The kernel's sums have no sign where they are sorted.
            is_ours = self.trigger.vals[index - 1].modifier in OWN_MODIFIERS
            return _ranks(self.value(index - 1) if is_ours else self.vals[index - 1])
        at = index - 1 - len(self.vals)
        key = self.keys[at]
        return _ranks(key.view(np.int64) if self.trigger.keys[at].is_signed else key)


def _names(trigger: HistTrigger) -> list[str]:
    found: list[str] = []
    vals = (val.text if val.modifier else f"{val.text}.sum" for val in trigger.vals)
    plain = (val.text for val in trigger.vals)
    keys = ((key.text, "") for key in trigger.keys)
    tracked = ((text, "") for text in _tracked_names(trigger.action))
    known = {"hitcount"}
    for text, other in (*keys, *zip(plain, vals, strict=True), *tracked):
        free = (f"{text}.{n}" for n in range(2, MAX_FIELDS))
        name = next(each for each in (text, other, *free) if each and each not in known)
        known.add(name)
        found.append(name)
    return [*found[: len(trigger.keys)], "hitcount", *found[len(trigger.keys) :]]


def _tracked_names(action: HistAction | None) -> list[str]:
    if action is None:
        return []
    return [f"{action.handler}({action.variable.name})", *(f"save({e.text})" for e in action.saved)]


def _module(name: str) -> Any:
    package = name.partition(".")[0]
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise UsageError(f"{package} is not installed: pip install {package}") from error


def objects(values: Sequence[object]) -> Column:
    """Return values in a new array of objects, shape (n,)."""
    found = np.empty(len(values), object)
    found[:] = values
    return found


def _ranks(values: NDArray[np.generic]) -> NDArray[np.int64]:
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


def merged(parts: Sequence[Histogram]) -> Histogram:
    """Return several histograms of one kind in one, sorted.

    Raises:
        UsageError: their triggers have other keys or values.
    """
    first = parts[0]
    if not all(map(first.is_alike, parts)):
        raise UsageError("histograms of other keys or values cannot be added")
    rows: dict[tuple[object, ...], int] = {}
    every = [key for part in parts for key in part.rows()]
    which = np.array([rows.setdefault(key, len(rows)) for key in every], np.int64)
    firsts = np.unique(which, return_index=True)[1]
    found = Histogram(
        trigger=first.trigger,
        source=first.source,
        keys=tuple(
            np.concatenate([p.keys[i] for p in parts])[firsts] for i in range(len(first.keys))
        ),
        comms=np.concatenate([part.comms for part in parts])[firsts],
        hitcount=_summed(np.concatenate([part.hitcount for part in parts]), which, len(rows)),
        vals=tuple(
            combined(np.concatenate([p.vals[i] for p in parts]), which, len(rows), field=field)
            for i, field in enumerate(first.trigger.vals)
        ),
        dropped=sum(part.dropped for part in parts),
        unmeasured=sum(part.unmeasured for part in parts),
        buckets=tuple(_merged_buckets(parts, which)),
        tracked=_merged_tracked(parts, which, len(rows)),
    )
    return _with_percentiles(found).sorted()


def _merged_buckets(parts: Sequence[Histogram], which: NDArray[np.int64]) -> Iterator[HitBuckets]:
    starts = np.cumsum([0, *map(len, parts)]).tolist()
    for buckets in zip(*(part.buckets for part in parts), strict=True):
        pairs = zip(starts, buckets, strict=False)
        yield summed(buckets, [which[start:][each.entries] for start, each in pairs])


def _merged_tracked(
    parts: Sequence[Histogram], which: NDArray[np.int64], count: int
) -> Tracked | None:
    action, found = parts[0].trigger.action, [each.tracked for each in parts]
    if action is None:
        return None
    every = joined([each for each in found if each is not None])
    return kept(action.handler, nothing(count, len(action.saved)), every, which)


def _with_percentiles(histogram: Histogram) -> Histogram:
    fields = (field.source for field in histogram.trigger.percentiles)
    of_source = dict(zip(fields, histogram.buckets, strict=True))
    pairs = zip(histogram.trigger.vals, histogram.vals, strict=True)
    vals = tuple(
        of_source[field.source].percentile(field.width).view(np.uint64)
        if field.modifier is Modifier.PERCENTILE
        else val
        for field, val in pairs
    )
    return replace(histogram, vals=vals)


def since(later: Histogram, earlier: Histogram) -> Histogram:
    """Return what was counted between two readings; see ``Histogram.__sub__``."""
    if not later.is_alike(earlier):
        raise UsageError("histograms of other keys or values cannot be subtracted")
    for val in later.trigger.vals:
        if val.modifier in EXTREMES:
            raise UsageError(f"{val.text} is known of all hits, and not of those in between")
    if later.trigger.action is not None:
        raise UsageError(f"{later.trigger.action.text} is known of all hits, not of some")
    before = {key: row for row, key in enumerate(earlier.rows())}
    places = np.array([before.get(key, -1) for key in later.rows()], np.int64)
    if np.count_nonzero(places >= 0) < len(earlier):
        raise UsageError("what was counted later lacks entries of what was counted earlier")
    pairs = [(later.hitcount, earlier.hitcount), *zip(later.vals, earlier.vals, strict=True)]
    # Of what is new there was none: the last one, at -1.
    hitcount, *vals = (now - np.append(then, np.uint64(0))[places] for now, then in pairs)
    found = replace(
        later,
        hitcount=hitcount,
        vals=tuple(vals),
        dropped=later.dropped - earlier.dropped,
        unmeasured=later.unmeasured - earlier.unmeasured,
        buckets=tuple(_buckets_since(later, earlier, places)),
    )
    return _with_percentiles(found.take(np.flatnonzero(hitcount))).sorted()


def _buckets_since(
    later: Histogram, earlier: Histogram, places: NDArray[np.int64]
) -> Iterator[HitBuckets]:
    # What a bucket's least and greatest numbers were in between nobody knows: those of all are
    # in it, too.
    entries = np.empty(len(earlier), np.int64)
    entries[places[places >= 0]] = np.flatnonzero(places >= 0)
    for now, then in zip(later.buckets, earlier.buckets, strict=True):
        taken = replace(then, hits=np.negative(then.hits))
        yield summed([now, taken], [now.entries, entries[then.entries]]).without_empty()


def of_entries(
    histogram: Histogram, columns: Sequence[Numbers], buckets: NDArray[np.int64]
) -> Histogram:
    """Return the histogram of a table's entries; what differs by its buckets only is one.

    Args:
        histogram: keys and hits of the entries, without values.
        columns: that the trigger keeps, shape (n,) each.
        buckets: of each entry for each of ``trigger.percentiles``, shape (len of these, n).
    """
    trigger = histogram.trigger
    vals = (columns[trigger.columns_of(val)[0]].copy() for val in trigger.vals)
    found = replace(histogram, vals=tuple(vals))
    if not trigger.percentiles:
        return found.sorted()
    details: list[HitBuckets] = []
    for field, own in zip(trigger.percentiles, buckets, strict=True):
        dtype = np.int64 if field.is_signed else np.uint64
        least, most = (columns[at].view(dtype) for at in trigger.columns_of(field))
        details.append(
            HitBuckets(
                entries=np.arange(len(found)),
                buckets=own,
                hits=found.hitcount,
                least=least,
                most=most,
            )
        )
    return merged([replace(found, buckets=tuple(details))])


def combined(
    values: Numbers, groups: NDArray[np.int64], count: int, *, field: HistField
) -> Numbers:
    """Return a value of each group of hits, uint64 (count,), new.

    Args:
        values: of n hits, or of entries that are to be one; shape (n,).
        groups: which each belongs to, shape (n,); each group has one at least.
        count: of groups.
        field: says whether it is their sum, which is that of averages, too, or another one.
    """
    if field.modifier not in EXTREMES:
        return _summed(values, groups, count)
    order = np.argsort(groups, kind="stable")
    starts = np.searchsorted(groups[order], np.arange(count))
    which = np.minimum if field.modifier is Modifier.MIN else np.maximum
    numbers = values.view(np.int64) if field.is_signed else values
    return which.reduceat(numbers[order], starts).view(np.uint64)


_HALF = np.uint64(32)
_LOW = np.uint64(0xFFFF_FFFF)
_PART = 1 << 20


def _summed(values: Numbers, groups: NDArray[np.int64], count: int) -> Numbers:
    # bincount adds floats, which are exact below 2**53: so many halves of 32 bits are.
    total = np.zeros(count, np.uint64)
    for start in range(0, len(values), _PART):
        part, of = values[start : start + _PART], groups[start : start + _PART]
        low = np.bincount(of, part & _LOW, count).astype(np.uint64)
        total += low + (np.bincount(of, part >> _HALF, count).astype(np.uint64) << _HALF)
    return total


def _entries(histogram: Histogram, names: Names) -> Iterator[bytes]:
    trigger = histogram.trigger
    columns = [key.tolist() for key in histogram.keys]
    comms: list[bytes] = histogram.comms.tolist()
    hits: list[int] = histogram.hitcount.tolist()
    # A kernel sums up expressions, too, and does not print them: hist_trigger_entry_print().
    shown = (at for at, val in enumerate(trigger.vals) if not isinstance(val.source, Expression))
    vals = [_column(histogram, at) for at in shown]
    tracked = _tracked(histogram) or [b""] * len(hits)
    for at, hitcount in enumerate(hits):
        keys = (
            _syscall(field, column[at], histogram.source)
            if field.modifier is Modifier.SYSCALL
            else _key(field, column[at], comms[at], names)
            for field, column in zip(trigger.keys, columns, strict=True)
        )
        # Where there is a stack, no blank ends the keys, whatever comes last.
        text, has_stack = b", ".join(keys), any(e.kind is HistKind.STACK for e in trigger.keys)
        line = b"{ %b}" % text if has_stack else b"{ %b }" % text
        if trigger.has_hitcount:
            line += b" hitcount: %10d" % hitcount
        yield line + b"".join(b" " + column[at] for column in vals) + tracked[at] + b"\n"


def _key(field: HistField, value: int | bytes, comm: bytes, names: Names) -> bytes:
    name = _bytes(field.name)
    if isinstance(value, bytes):
        return _text(field, value, names)
    match field.modifier:
        case Modifier.HEX:
            return b"%b: %x" % (name, value)
        case Modifier.SYM:
            return b"%b: [%x] %-45b" % (name, value, symbol_name(value, names))
        case Modifier.SYM_OFFSET:
            return b"%b: [%x] %-55b" % (name, value, names.symbol(value))
        case Modifier.EXECNAME:
            return b"%b: %-16b[%10d]" % (name, comm, value)
        case Modifier.LOG2:
            return b"%b: ~ 2^%-2d" % (name, value)
        case Modifier.BUCKETS:
            return b"%b: ~ %d-%d" % (name, value, value + field.width - 1 & U64)
        case _:
            return b"%b: %10d" % (name, value)


def syscall_name(number: int, source: TraceSource) -> str:
    """Return what the kernel shows for the number of a system call."""
    return source.system_call(number) or "unknown_syscall"


def _syscall(field: HistField, number: int, source: TraceSource) -> bytes:
    return _bytes(f"{field.name}: {syscall_name(number, source):<30}[{number:>3}]")


def _text(field: HistField, value: bytes, names: Names) -> bytes:
    if field.kind is HistKind.TEXT:
        return b"%b: %-50b" % (_bytes(field.name), value.partition(b"\0")[0])
    # As the kernel's hist_trigger_stacktrace_print.
    head = _bytes(f"{field.name}:\n" if field.modifier is None else field.text)
    return head + b"".join(b"         %b\n" % frame for frame in names.key_stack(field, value))


def symbol_name(addr: int, names: Names) -> bytes:
    """Return what the kernel's ``%ps`` prints for an address: without the offset."""
    return function_of(names.symbol(addr))


def function_of(place: bytes) -> bytes:
    """Return a place without its offset: ``vfs_read``; of a file alone ``[sh]``."""
    if place.startswith(b"/") and b"[+" in place:
        return b"[%b]" % place.rpartition(b"[+")[0].rpartition(b"/")[2]
    function, plus, rest = place.partition(b"+")
    _, blank, module = rest.partition(b" ")
    return function + blank + module if plus else function


def _column(histogram: Histogram, at: int) -> Sequence[bytes]:
    field = histogram.trigger.vals[at]
    name = _bytes(field.text if field.modifier in OWN_MODIFIERS else field.name)
    numbers: list[int] = histogram.vals[at].tolist()
    match field.modifier:
        case Modifier.PERCENT:
            whole = sum(numbers) & U64
            return [_percent(name, share_of(number, whole)) for number in numbers]
        case Modifier.GRAPH:
            most = max(numbers, default=0)
            return [b" %b: %20b" % (name, _bar(share_of(number, most))) for number in numbers]
        case Modifier.HEX:
            return [b" %b: %10x" % (name, number) for number in numbers]
        case _ if field.modifier in OWN_MODIFIERS:
            shown = histogram.value(at).tolist()
            return [b" %b: %10d" % (name, int(number)) for number in shown]
        case _:
            return [b" %b: %10d" % (name, number) for number in numbers]


def _tracked(histogram: Histogram) -> list[bytes]:
    # As the kernel's track_data_print(), which knows no sign.
    action, tracked = histogram.trigger.action, histogram.tracked
    if action is None or tracked is None:
        return []
    word = b"max" if action.handler is Handler.ON_MAX else b"changed"
    names = [b"\n\t%b: " % word, *(b"  %b: " % _bytes(each.text) for each in action.saved)]
    rows = zip(*(each.tolist() for each in (tracked.numbers, *tracked.saved)), strict=True)
    return [
        b"".join(b"%b%10d" % pair for pair in zip(names, numbers, strict=True)) for numbers in rows
    ]


def share_of(number: int, whole: int) -> int:
    """Return hundredths of a percent, as __get_percentage(): UINT_MAX where there is no whole."""
    if number >= U64 // _WHOLE:
        whole //= _WHOLE
    else:
        number *= _WHOLE
    if not whole:
        return _NO_SHARE if number else 0
    return number // whole & _NO_SHARE


def _percent(name: bytes, share: int) -> bytes:
    if share == _NO_SHARE:
        return b" %b (%%):[ERROR]" % name
    return b" %b (%%): %3d.%02d" % (name, share // 100, share % 100)


def _bar(share: int) -> bytes:
    if share == _NO_SHARE:
        return b"[ERROR]"
    return (b"#" * min(share * _BAR // _WHOLE, _BAR)).ljust(_BAR)


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogateescape")
