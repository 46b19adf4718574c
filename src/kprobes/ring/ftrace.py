"""Decoder of the kernel's trace rings: pages to columns, by the events' own ``format``.

The context of a hit, in ``struct trace_entry``, is flags

    TRACE_FLAG_IRQS_OFF 0x01, NEED_RESCHED_LAZY 0x02 (6.13), NEED_RESCHED 0x04, HARDIRQ 0x08,
    SOFTIRQ 0x10, PREEMPT_RESCHED 0x20, NMI 0x40, BH_OFF 0x80

and a count: of preemption, of which since 5.15 the high half counts migrate_disable.

The kernel's own trace shows a task by the last name noted for its pid; here a name counts from its
time on. New names are in ``task:task_newtask`` and ``task:task_rename``, whose records lie in the
same rings.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.errors import RingError
from kprobes.formats.ftrace import PageFormat, PageRecords, read_pages
from kprobes.model.events import Batch, Column, Locator, Pages
from kprobes.model.resolved import (
    COMM_SIZE,
    CONTEXT_HARDIRQ,
    CONTEXT_IRQS_ON,
    CONTEXT_MIGRATE_SHIFT,
    CONTEXT_NEED_RESCHED,
    CONTEXT_NEED_RESCHED_LAZY,
    CONTEXT_NMI,
    CONTEXT_NO_PREEMPT_RESCHED,
    CONTEXT_SERVING_SOFTIRQ,
    MIGRATE_SINCE,
    RecordLayout,
)
from kprobes.model.strings import Strings, cut
from kprobes.native.library import Function, function_for
from kprobes.ring.ftrace_shapes import COMMON_SIZE, EventShape, NamingShape, is_cut_out

_SOFTIRQ_OFF = 2 * CONTEXT_SERVING_SOFTIRQ
_SET = {
    0x02: CONTEXT_NEED_RESCHED_LAZY,
    0x04: CONTEXT_NEED_RESCHED,
    0x08: CONTEXT_HARDIRQ & -CONTEXT_HARDIRQ,
    0x10: CONTEXT_SERVING_SOFTIRQ,
    0x40: CONTEXT_NMI & -CONTEXT_NMI,
    0x80: _SOFTIRQ_OFF,
}
_CLEAR = {0x01: CONTEXT_IRQS_ON, 0x20: CONTEXT_NO_PREEMPT_RESCHED}


class Contexts:
    """Tables from a record's two bytes to its context word, of one kernel release."""

    def __init__(self, version: tuple[int, int]) -> None:
        self._flags = np.array([_of_flags(flags) for flags in range(256)], np.uint32)
        has_migrate = version >= MIGRATE_SINCE
        counts = [_of_count(count, has_migrate=has_migrate) for count in range(256)]
        self._counts = np.array(counts, np.uint32)

    def of(self, flags: NDArray[np.uint8], counts: NDArray[np.uint8]) -> NDArray[np.uint32]:
        """Return the context column, a copy; all have the shape (n,)."""
        return self._flags[flags] | self._counts[counts]


def _of_flags(flags: int) -> int:
    word = sum(bits for flag, bits in _SET.items() if flags & flag)
    return word + sum(bits for flag, bits in _CLEAR.items() if not flags & flag)


def _of_count(count: int, *, has_migrate: bool) -> int:
    if not has_migrate:
        return count
    return count & 0xF | count >> 4 << CONTEXT_MIGRATE_SHIFT


PID_LIMIT = (1 << 22) + 1
"""No pid is larger: PID_MAX_LIMIT of include/linux/threads.h."""

UNKNOWN = b"<...>"
"""What the kernel's trace prints for a task that nobody has a name of."""

_COMM = f"S{COMM_SIZE}"


class Naming(Struct, frozen=True, kw_only=True):
    """A task got a name.

    Attributes:
        old: what it was called, or None for a new task.
    """

    pid: int
    ts: int
    old: bytes | None
    new: bytes


class TaskNames:
    """The names of all tasks of a machine over a while.

    Args:
        known: by pid, from the beginning.
        ask: names by pid as the kernel has them now, for a pid that nothing else told of.
    """

    def __init__(self, known: Mapping[int, bytes], ask: Callable[[], Mapping[int, bytes]]) -> None:
        self._ask = ask
        self._table: list[bytes] = [b""]
        self._numbers: dict[bytes, int] = {b"": 0}
        # By pid the number of a name; untouched parts of it take no memory.
        self._slots = np.zeros(PID_LIMIT, np.int32)
        self._is_renamed = np.zeros(PID_LIMIT, np.bool_)
        self._recent: dict[int, list[Naming]] = defaultdict(list)
        for pid, name in known.items():
            self._set(pid, name)

    def note(self, namings: Iterable[Naming]) -> None:
        """Take names in any order; they count from their times on."""
        for naming in namings:
            self._recent[naming.pid].append(naming)
            self._is_renamed[naming.pid] = True

    def of(self, batch: Batch) -> Column:
        """Return the comm column of a batch, whose pids are below ``PID_LIMIT``.

        It is a copy, shape (n,).
        """
        # Tasks hit in bursts, so the first of every run of one pid is looked at.
        heads = np.flatnonzero(np.diff(batch.pid, prepend=-1))
        pids = batch.pid[heads]
        is_renamed = self._is_renamed[pids]
        self._learn(pids[(self._slots[pids] == 0) & ~is_renamed])
        lengths = np.diff(np.append(heads, len(batch)))
        comm = np.repeat(np.array(self._table, _COMM)[self._slots[pids]], lengths)
        if is_renamed.any():
            self._rename(comm, batch, np.flatnonzero(np.repeat(is_renamed, lengths)))
        idle = np.flatnonzero(batch.pid == 0)
        comm[idle] = [b"swapper/%d" % cpu for cpu in batch.cpu[idle].tolist()]
        return comm

    def forget_until(self, horizon: int) -> None:
        """Forget the times of names up to ``horizon``: no older event will be asked for."""
        for pid, namings in list(self._recent.items()):
            namings.sort(key=_time)
            old = [naming for naming in namings if naming.ts <= horizon]
            if old:
                self._set(pid, old[-1].new)
                del namings[: len(old)]
            if not namings:
                del self._recent[pid]
                self._is_renamed[pid] = False

    def _rename(self, comm: Column, batch: Batch, rows: NDArray[np.int64]) -> None:
        rows = rows[np.argsort(batch.pid[rows], kind="stable")]
        pids = batch.pid[rows]
        heads = np.flatnonzero(np.diff(pids, prepend=-1))
        for own in np.split(rows, heads[1:]):
            pid = int(batch.pid[own[0]])
            namings = sorted(self._recent[pid], key=_time)
            first = namings[0].old
            before = self._table[int(self._slots[pid])] if first is None else first
            names = np.array([before or UNKNOWN, *(naming.new for naming in namings)], _COMM)
            times = np.array([naming.ts for naming in namings], np.uint64)
            comm[own] = names[np.searchsorted(times, batch.ts[own], side="right")]

    def _learn(self, pids: NDArray[np.int32]) -> None:
        if not len(pids):
            return
        saved = self._ask()
        for pid in set(pids.tolist()):
            self._set(pid, saved.get(pid, UNKNOWN))

    def _set(self, pid: int, name: bytes) -> None:
        if name not in self._numbers:
            self._numbers[name] = len(self._table)
            self._table.append(name)
        self._slots[pid] = self._numbers[name]


def _time(naming: Naming) -> int:
    return naming.ts


_LOCATION_SIZE = 4
_STEP = 4  # every record begins at a multiple of it
_NOT_OURS = (1 << 16) - 1
_NO_COMM = np.zeros((), f"S{COMM_SIZE}")
_NO_IP = np.zeros(1, np.uint64)

_ALL = slice(None)
_EVENT = np.dtype([(name, "u8") for name in ("rows", "index", "size", "least")])
_LONGEST = (1 << 63) - 1

Bytes = NDArray[np.uint8]
Index = NDArray[np.int64]
Which = Index | slice
"""Some records, or all of them at no cost."""


class HostDecoded(Struct, frozen=True, kw_only=True, eq=False):
    """What some pages hold.

    Attributes:
        batches: at most one per layout; rows in the pages' order, comm not filled in yet.
        which: uint16 (n,), for each event in the pages' order its index in ``batches``; its row
            there is how many of that batch stand before it.
        ts: uint64 (n,), of each.
        cpu: uint16 (n,), likewise.
        namings: what tasks got new names.
        lost: events that the kernel overwrote or dropped before these pages.
    """

    batches: tuple[Batch, ...]
    which: NDArray[np.uint16]
    ts: NDArray[np.uint64]
    cpu: NDArray[np.uint16]
    namings: tuple[Naming, ...]
    lost: int


class HostShapes(Struct, frozen=True, kw_only=True):
    """Everything that may be in the pages of one instance.

    Attributes:
        events: by their numbers; more may be added while others decode with it.
        more: is told a number of which there is none yet, and may add it.
    """

    page: PageFormat
    contexts: Contexts
    events: dict[int, EventShape]
    namings: Mapping[int, NamingShape]
    more: Callable[[int], None] | None = None

    def of(self, number: int) -> EventShape | None:
        """Return the event of a number, or None for one that is not expected."""
        if self.more is not None and number not in self.events:
            self.more(number)
        return self.events.get(number)


class _Found(Struct, frozen=True, kw_only=True, eq=False):
    # The records of some pages, whose bytes are ``flat``, and the CPU of each.
    flat: Bytes
    records: PageRecords
    cpu: NDArray[np.uint16]

    def rows(self, index: Which, dtype: np.dtype[np.void]) -> NDArray[np.void]:
        """Return the fixed parts of some records, which are copied."""
        size = dtype.itemsize
        _check_size(int(self.records.sizes[index].min()), size)
        places = (len(self.flat) - size) // _STEP + 1
        every = np.ndarray((places,), f"V{size}", self.flat, strides=(_STEP,))
        return every[self.records.at[index] // _STEP].view(dtype)


class _Own(Struct, frozen=True, kw_only=True, eq=False):
    # The fixed parts of one event's records, and which of all records they are.
    rows: NDArray[np.void]
    index: Which


class _Part(Struct, frozen=True, kw_only=True, eq=False):
    # Records of one event at one address, and which of all records they are.
    shape: EventShape
    layout: RecordLayout
    rows: NDArray[np.void]
    index: Which


def decode_pages(pages: Pages, shapes: HostShapes) -> HostDecoded:
    """Turn pages into columns.

    Raises:
        RingError: bytes that no kernel wrote.
    """
    found = _find(pages, shapes)
    batches: list[Batch] = []
    which = np.full(len(found.records), _NOT_OURS, np.uint16)
    namings: list[Naming] = []
    for number, own in _each_event(found, shapes):
        if number in shapes.namings:
            namings += _namings(found, own, shapes.namings[number])
        elif (shape := shapes.of(number)) is not None:
            for part in _split(own, shape):
                which[part.index] = len(batches)
                batches.append(_batch(found, part, shapes.contexts))
    is_ours = which != _NOT_OURS
    ours = _ALL if is_ours.all() else is_ours
    return HostDecoded(
        batches=tuple(batches),
        which=which[ours],
        ts=found.records.ts[ours],
        cpu=found.cpu[ours],
        namings=tuple(namings),
        lost=found.records.lost,
    )


def count_pages(pages: Pages, shapes: HostShapes) -> Counter[int]:
    """Return how many records pages have, by their layouts' event ids.

    Nothing but their numbers and places is looked at. Errors are those of ``decode_pages``.
    """
    found = _find(pages, shapes)
    counts: Counter[int] = Counter()
    for number, own in _each_event(found, shapes):
        shape = shapes.of(number)
        if shape is not None:
            for part in _split(own, shape):
                counts[part.layout.event_id] += len(part.rows)
    return counts


def _find(pages: Pages, shapes: HostShapes) -> _Found:
    records = read_pages(pages.data, shapes.page, pages.skips)
    if (records.sizes < COMMON_SIZE).any():
        raise RingError(f"a record of {int(records.sizes.min())} bytes")
    is_one = bool((pages.cpu[1:] == pages.cpu[:-1]).all()) and len(pages.cpu) > 0
    cpu = np.broadcast_to(pages.cpu[0], len(records)) if is_one else pages.cpu[records.page]
    return _Found(flat=pages.data.reshape(-1), records=records, cpu=cpu)


def _each_event(found: _Found, shapes: HostShapes) -> Iterator[tuple[int, _Own]]:
    # Those that are expected, by their numbers.
    numbers = found.records.numbers
    counts = np.bincount(numbers)
    dtypes: dict[int, np.dtype[np.void]] = {}
    for number in np.flatnonzero(counts).tolist():
        shape = shapes.namings.get(number) or shapes.of(number)
        if shape is not None:
            dtypes[number] = shape.dtype
    copy_all = function_for(len(numbers), "pages", "pages_copy", 7)
    if copy_all is not None:
        yield from _copied(copy_all, found, counts, dtypes)
        return
    for number, dtype in dtypes.items():
        is_all = int(counts[number]) == len(numbers)
        index = _ALL if is_all else np.flatnonzero(numbers == number)
        yield number, _Own(rows=_checked(found.rows(index, dtype)), index=index)


def _copied(
    copy_all: Function,
    found: _Found,
    counts: NDArray[np.int64],
    dtypes: Mapping[int, np.dtype[np.void]],
) -> Iterator[tuple[int, _Own]]:
    # By C, in one pass. The first group is of all that are not expected.
    records = found.records
    rest = len(records) - sum(int(counts[number]) for number in dtypes)
    indices = [np.empty(rest, np.int64)]
    rows = [np.empty(0, np.uint8)]
    groups = np.zeros(len(counts), np.uint16)
    for at, (number, dtype) in enumerate(dtypes.items(), 1):
        groups[number] = at
        indices.append(np.empty(int(counts[number]), np.int64))
        rows.append(np.empty(int(counts[number]) * dtype.itemsize, np.uint8))
    sizes = [0, *(dtype.itemsize for dtype in dtypes.values())]
    pairs = zip(rows, indices, sizes, strict=True)
    table = np.array([(r.ctypes.data, i.ctypes.data, s, _LONGEST) for r, i, s in pairs], _EVENT)
    given = found.flat, records.at, records.sizes, records.numbers
    addresses = (each.ctypes.data for each in given)
    copy_all(*addresses, len(records), groups.ctypes.data, table.ctypes.data)
    for at, (number, dtype) in enumerate(dtypes.items(), 1):
        _check_size(int(table["least"][at]), dtype.itemsize)
        index = _ALL if len(indices[at]) == len(records) else indices[at]
        yield number, _Own(rows=_checked(rows[at].view(dtype)), index=index)


def _check_size(smallest: int, size: int) -> None:
    if smallest < size:
        raise RingError(f"a record of {smallest} bytes, not {size}")


def _checked(rows: NDArray[np.void]) -> NDArray[np.void]:
    first, last = int(rows["pid"].min()), int(rows["pid"].max())
    if first < 0 or last >= PID_LIMIT:
        raise RingError(f"records of pids from {first} to {last}")
    return rows


def _split(own: _Own, shape: EventShape) -> Iterator[_Part]:
    # One part for each address, of which an event has nearly always one.
    rows, index = own.rows, own.index
    addrs = rows["ip"] if shape.has_ip else _NO_IP
    if (addrs == addrs[0]).all():
        yield _Part(shape=shape, layout=shape.layout(int(addrs[0])), rows=rows, index=index)
        return
    for addr in np.unique(addrs).tolist():
        at = np.flatnonzero(addrs == addr)
        place = at if isinstance(index, slice) else index[at]
        yield _Part(shape=shape, layout=shape.layout(addr), rows=rows[at], index=place)


def _batch(found: _Found, part: _Part, contexts: Contexts) -> Batch:
    rows, records = part.rows, found.records
    fields = [_field(found, part, i) for i in range(len(part.shape.fields))]
    return Batch(
        layout=part.layout,
        ts=records.ts[part.index],
        cpu=found.cpu[part.index],
        pid=rows["pid"],
        context=contexts.of(rows["flags"], rows["preempt"]),
        comm=np.broadcast_to(_NO_COMM, len(rows)),
        columns=tuple(column for column, _ in fields),
        faulted=tuple(faulted for _, faulted in fields),
        caller=rows["caller"] if part.shape.is_return else None,
    )


def _field(found: _Found, part: _Part, i: int) -> tuple[Column | Strings, NDArray[np.bool_] | None]:
    field, where = part.shape.fields[i], part.shape.wheres[i]
    if where.locator is Locator.HERE and not is_cut_out(field, where):
        # A number that could not be read is whatever stood there: the kernel does not say.
        return part.rows[f"f{i}"], None
    sizes = found.records.sizes[part.index][:, None]
    offsets, lengths = _places(part, i, sizes)
    if ((offsets + lengths > sizes) & (lengths > 0)).any():
        raise RingError("a string that ends after its record")
    starts = found.records.at[part.index][:, None] + offsets
    # Only what a probe fetches may not have been there.
    faulted = lengths == 0 if part.shape.has_ip else None
    sizes = lengths if faulted is None else np.where(faulted, -1, lengths)
    is_raw = field.type == "bytes"
    strings = cut(found.flat, starts, sizes.astype(np.int32), is_raw=is_raw)
    if field.count is not None:
        return strings, faulted
    return strings[:, 0], None if faulted is None else faulted[:, 0]


def _places(part: _Part, i: int, sizes: Index) -> tuple[Index, Index]:
    # Offsets and lengths of a field's bytes in records of these sizes, each shape (n, elements).
    where = part.shape.wheres[i]
    if where.locator is Locator.HERE:
        offsets = np.full_like(sizes, where.offset)
        # An array without a size takes the rest of the record.
        return offsets, np.full_like(sizes, where.size) if where.size else sizes - offsets
    values = part.rows[f"f{i}"]
    located = values.reshape(len(values), -1).astype(np.int64)
    offsets = located & 0xFFFF
    if where.locator is Locator.RELATIVE:
        offsets += where.end + np.arange(located.shape[1]) * _LOCATION_SIZE
    return offsets, located >> 16


def _namings(found: _Found, own: _Own, shape: NamingShape) -> Iterator[Naming]:
    # By task, not by event: a name is given once in a task's life, or twice.
    rows = own.rows
    news = rows[shape.new].tolist()
    olds = [None] * len(rows) if shape.old is None else rows[shape.old].tolist()
    columns = zip(
        rows["pid"].tolist(), found.records.ts[own.index].tolist(), olds, news, strict=True
    )
    for pid, ts, old, new in columns:
        yield Naming(pid=pid, ts=ts, old=_ended(old), new=_ended(new) or b"")


def _ended(name: bytes | None) -> bytes | None:
    return None if name is None else name.partition(b"\0")[0]
