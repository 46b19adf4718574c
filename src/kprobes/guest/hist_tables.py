"""Tables of hist triggers in a guest: their memory, and what they have counted so far.

The table is drawn in ``model.hist``; the guest fills it while it is read. Every word is written at
once, and an entry is looked at when its mark says that it is whole: a hit that is under way is
seen the next time.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
from msgspec import Struct, field
from msgspec.structs import replace
from numpy.typing import NDArray

from kprobes.errors import RefusedError
from kprobes.guest.guest import GuestMemory
from kprobes.guest.rings import MappedRange
from kprobes.guest.room import Retired
from kprobes.histogram import Histogram, merged, objects, of_entries
from kprobes.model.events import Column
from kprobes.model.filter import Header
from kprobes.model.hist import (
    ENTRY_HITCOUNT,
    ENTRY_KEYS,
    ENTRY_MARK,
    IDLE,
    KEPT_DATA,
    KEPT_SIZE,
    MARK_LEAST,
    TABLE_DROPPED,
    TABLE_HEADER,
    TABLE_UNMEASURED,
    TRACKED_NUMBER,
    HistField,
    HistKind,
    HistTable,
    Modifier,
)
from kprobes.model.resolved import COMM_SIZE
from kprobes.sinks.names import Names, TraceSource
from kprobes.tracked import Tracked
from kprobes.units import Addr

_WORD = 8
_PART = 1 << 20
_LONGEST_S = 1.0
"""For an entry that is written whenever it is looked at: a hit takes far less than a look."""
Words = NDArray[np.uint64]


class _Memory(Struct, kw_only=True, eq=False):
    # Of one table; ``table`` is what it is used for, or None. Calls in progress may return to code
    # that counts in it; ``held`` is what was let go of with it, and is not free yet.
    addr: Addr
    size: int
    data: MappedRange
    table: HistTable | None = None
    held: list[Retired] = field(default_factory=list[Retired])


class HistTables:
    """The tables of one session, in memory that is kept until its end.

    One that is given up while a recording runs is not used again by that: a hit on its way may
    still count in it. Nor is one in which a call counts that is in progress when a recording ends.
    """

    def __init__(self) -> None:
        """Have none yet."""
        self._memories: list[_Memory] = []
        self._retired: Sequence[Retired] = ()

    @property
    def size(self) -> int:
        """Bytes of the guest's memory that tables take which are used."""
        return sum(each.size for each in self._memories if each.table is not None)

    def begin(self, retired: Sequence[Retired] = ()) -> None:
        """Let go of all tables: a recording begins, and nothing is armed.

        Args:
            retired: code that is not free yet, as calls in progress may return to it.
        """
        since = [each for each in retired if not _is_among(each, self._retired)]
        for each in self._memories:
            held = [one for one in each.held if _is_among(one, retired)]
            each.held = held if each.table is None else since
            each.table = None
        self._retired = retired

    def take(
        self, table: HistTable, memory: GuestMemory, cpus: int, allocate: Callable[[int], Addr]
    ) -> Addr:
        """Return where a table is, an empty one if it is new.

        Args:
            table: of a trigger.
            memory: of the guest.
            cpus: that have a table each.
            allocate: returns so many bytes of the guest's memory, all zero.

        Raises:
            RefusedError: it is of an event whose fields are of other kinds than those in it.
            TargetError: the guest has not enough memory.
        """
        size = table.size * cpus
        for each in self._memories:
            if each.table is not None and each.table.number == table.number:
                before = each.table
                if (before.trigger.form, before.size) != (table.trigger.form, table.size):
                    raise RefusedError(
                        "an event has fields of the hist trigger that are of other kinds than in "
                        "events that are counted: rename them"
                    )
                return each.addr
        unused = (each for each in self._memories if each.table is None and not each.held)
        found = next((each for each in unused if each.size >= size), None)
        if found is None:
            addr = allocate(size)
            found = _Memory(addr=addr, size=size, data=MappedRange(memory, addr, size))
            self._memories.append(found)
        else:
            for start in range(0, size, _PART):
                found.data.write(start, bytes(min(_PART, size - start)))
        found.table = table
        return found.addr

    def histogram(self, number: int, source: TraceSource, cpus: int) -> Histogram | None:
        """Return what a table has counted so far, a copy; None where there is none.

        Args:
            number: of the table.
            source: the kernel.
            cpus: that have a table each.
        """
        for each in self._memories:
            table = each.table
            if table is not None and table.number == number:
                data = _whole(table, each.data, cpus)
                parts = [data[cpu * table.size :][: table.size] for cpu in range(cpus)]
                return merged([_read(table, part, source) for part in parts])
        return None


def _tracked(words: Words) -> Tracked:
    number, when, *saved = (column.copy() for column in words.T[TRACKED_NUMBER:])
    return Tracked(numbers=number, when=when, saved=tuple(saved))


def _is_among(one: Retired, others: Iterable[Retired]) -> bool:
    # Other code may have come to the same place.
    return any(one is other for other in others)


def _whole(table: HistTable, memory: MappedRange, cpus: int) -> NDArray[np.uint8]:
    size = table.size * cpus
    if not table.trigger.tracked:
        return memory.read(0, size)
    # What an action keeps is of one hit: an entry that was written meanwhile is read again.
    before = _versions(table, memory.read(0, size), cpus)
    data = memory.read(0, size)
    after = _versions(table, memory.read(0, size), cpus)
    for cpu, slot in np.argwhere((before != after) | (before % 2 != 0)).tolist():
        entry = cpu * table.size + TABLE_HEADER + slot * table.entry_size
        data[entry : entry + table.entry_size] = _entry(table, memory, entry)
    return data


def _entry(table: HistTable, memory: MappedRange, entry: int) -> NDArray[np.uint8]:
    # A CPU may stand in the midst of it, as its turn is over; of a guest that is paused there it is
    # what it is then.
    until_s = time.monotonic() + _LONGEST_S
    while time.monotonic() < until_s:
        before = memory.read(entry + table.version, _WORD).tobytes()
        data = memory.read(entry, table.entry_size)
        if before[0] % 2 == 0 and memory.read(entry + table.version, _WORD).tobytes() == before:
            return data
    return memory.read(entry, table.entry_size)


def _versions(table: HistTable, data: NDArray[np.uint8], cpus: int) -> Words:
    # Of each CPU's entries, shape (cpus, slots).
    entries = data.reshape(cpus, -1)[:, TABLE_HEADER : table.area]
    words = entries.reshape(cpus, table.slots, table.entry_size)
    return words[:, :, table.version :][:, :, :_WORD].copy().view("<u8")[:, :, 0]


def _read(table: HistTable, data: NDArray[np.uint8], source: TraceSource) -> Histogram:
    header = data[:TABLE_HEADER].view("<u8")
    words = data[TABLE_HEADER : table.area].view("<u8").reshape(table.slots, -1)
    hitcount = words[:, ENTRY_HITCOUNT // _WORD]
    rows = words[(words[:, ENTRY_MARK // _WORD] >= MARK_LEAST) & (hitcount > 0)]
    comms = _comms(rows[:, table.comm // _WORD :]) if table.has_comm else _no_comms(len(rows))
    keys = tuple(_keys(table, rows, data[table.area :].tobytes(), source))
    for key, column in zip(table.trigger.keys, keys, strict=True):
        if key.modifier is Modifier.EXECNAME:
            comms[column == 0] = IDLE
    found = Histogram(
        trigger=table.trigger,
        source=source,
        keys=keys,
        comms=comms,
        hitcount=rows[:, ENTRY_HITCOUNT // _WORD].copy(),
        vals=(),
        dropped=int(header[TABLE_DROPPED // _WORD]),
        unmeasured=int(header[TABLE_UNMEASURED // _WORD]),
    )
    first = table.columns // _WORD
    columns = [rows[:, first + at].copy() for at in range(len(table.trigger.columns))]
    if table.trigger.tracked:
        found = replace(found, tracked=_tracked(rows[:, table.version // _WORD :]))
    # The last words of a key, where there are percentiles.
    buckets = rows[:, first - len(table.trigger.percentiles) : first]
    return of_entries(found, columns, np.ascontiguousarray(buckets.T).view(np.int64))


def _keys(table: HistTable, rows: Words, area: bytes, source: TraceSource) -> Iterator[Column]:
    at = ENTRY_KEYS // _WORD
    for key in table.trigger.keys:
        words = rows[:, at:]
        yield _kept(area, words[:, 0]) if key.is_kept else _key(key, words, source)
        at += table.words(key)


def _kept(area: bytes, places: Words) -> Column:
    def text(place: int) -> bytes:
        size = int.from_bytes(area[place + KEPT_SIZE :][:_WORD], "little")
        return area[place + KEPT_DATA :][:size]

    unique, which = np.unique(places, return_inverse=True)
    return objects([*map(text, unique.tolist())])[which]


def _key(key: HistField, words: Words, source: TraceSource) -> Column:
    if key.kind is not HistKind.TEXT:
        return words[:, 0].copy()
    if key.source is Header.COMM:
        return objects(_comms(words).tolist())
    return objects([*map(Names(source).symbol, words[:, 0].tolist())])


def _comms(words: Words) -> Column:
    # Up to the NUL: there may be the end of an older, longer name after it.
    raw = np.ascontiguousarray(words[:, :2]).view(f"V{COMM_SIZE}").ravel().tolist()
    return np.array([bytes(each).partition(b"\0")[0] for each in raw], f"S{COMM_SIZE}")


def _no_comms(count: int) -> Column:
    return np.zeros(count, f"S{COMM_SIZE}")
