"""A timeline for Perfetto: one file of its own messages, for its page, its SQL and its tools.

A thread of the guest is a track, and so is the idle task of each CPU. Calls of which the beginning
is known are slices: those of a return probe that records ``duration``, and those that a probe at
a function's entry and one at its return have seen. All else is an instant. What would cross a
slice of its thread is on a track of its event below the thread's; what crosses one there, too, is
an instant. Arguments are debug annotations, as are ``cpu``, ``comm``, ``flags`` and ``caller``; a
field of such a name is there in its place. What could not be read is left out.

The messages: protos/perfetto/trace/trace_packet.proto and track_event/*.proto of Perfetto.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from enum import Enum, auto
from functools import partial
from itertools import count, repeat
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np
from msgspec import Struct
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
    BuiltinClock,
    DebugAnnotation,
    Trace,
    TracePacket,
    TrackDescriptor,
    TrackEvent,
)

from kprobes.export.files import NewFile
from kprobes.model.definition import TGID
from kprobes.model.events import Batch, Column, Events
from kprobes.model.recording import RecordedKernel
from kprobes.model.resolved import Field, RecordLayout, Storage
from kprobes.sinks.json import valid_text
from kprobes.sinks.names import WINDOW, Names, TraceSource, flags

_SEQUENCE = 1
_NAMED = TracePacket.SEQ_NEEDS_INCREMENTAL_STATE
"""Of packets that have names by their number."""
_HELD = 1 << 12
"""Packets that are written at once."""
_REMEMBERED = 1 << 14
_OPEN = 1 << 16
"""Calls whose return is to come: so many are held at most."""
_SPACES = 1 << 10
"""Of a track, between slices that are in no other: so many are remembered at least."""
_ENTRY = re.compile(r"\+0x[04](/|$)")
"""After a function's name: its first instruction, which may stand after an endbr64."""
_MAX_PID = (1 << 31) - 1
_FAULT = b"(fault)"
_MAIN_CLOCK = BuiltinClock.BUILTIN_CLOCK_BOOTTIME

Annotations = Sequence[DebugAnnotation]


class _Role(Enum):
    ENTRY = auto()
    RETURN = auto()
    OTHER = auto()


class _Kind(Struct, frozen=True, kw_only=True, eq=False):
    # What the events of a layout have in common; ``own`` are the names of its fields.
    event: str
    function: str
    role: _Role
    category_iid: int
    name_iid: int
    own: frozenset[str]


class _Lane:
    # A track, and which slices it may still take: of those that it has, the outermost are known,
    # as [start, end) in their order.

    def __init__(self, uuid: int) -> None:
        self.uuid = uuid
        self.end = TracePacket(trusted_packet_sequence_id=_SEQUENCE, sequence_flags=_NAMED)
        self.end.track_event.type = TrackEvent.TYPE_SLICE_END
        self.end.track_event.track_uuid = uuid
        self._starts: list[int] = []
        self._ends: list[int] = []

    def takes(self, start: int, end: int) -> bool:
        # Slices come in the order of their ends, so a new one crosses that which it begins in.
        # Where both begin at once, readers would take the end of one for the other's.
        at = bisect_right(self._starts, start)
        if at and self._ends[at - 1] > start:
            return False
        if self._ends and self._ends[-1] > end:
            return False
        self._starts[at:], self._ends[at:] = [start], [end]
        if at > 2 * _SPACES:
            self._forget()
        return True

    def _forget(self) -> None:
        # What is between slices that are close to each other: a call around later ones that
        # began just there is as if it crossed them.
        starts, ends = np.array(self._starts, np.uint64), np.array(self._ends, np.uint64)
        kept = np.sort(np.argsort(starts[1:] - ends[:-1], kind="stable")[-_SPACES:])
        self._starts = [self._starts[0], *starts[kept + 1].tolist()]
        self._ends = [*ends[kept].tolist(), self._ends[-1]]


class _Thread(_Lane):
    def __init__(self, uuid: int, pid: int) -> None:
        super().__init__(uuid)
        self.pid = pid
        self.tgid: int | None = None
        self.comm: bytes | None = None
        self.others: dict[str, _Lane] = {}


_Head = tuple[_Thread, bytes, TracePacket]
"""Whose an event is, its name then, and an instant that has all but its time and arguments."""
_Row = tuple[_Kind, int, int | None, _Head, Annotations]
"""One event: when it was, when the call began that it is the end of, its arguments."""


class PerfettoFile:
    """One file. Held are some packets, and what is known of threads and of calls that go on."""

    def __init__(self, path: Path, kernel: RecordedKernel, source: TraceSource) -> None:
        """Begin the file; OSError where that is impossible."""
        self._new, self._kernel = NewFile(path), kernel
        self._packets = _Packets(self._new.file)
        self._tracks = _Tracks(self._packets)
        self._values = _Values(self._packets, source)
        self._calls = _Calls()
        self._kinds: dict[RecordLayout, _Kind] = {}
        self._probes: dict[tuple[str, bool], tuple[str, str]] = {}
        self._heads: dict[Hashable, _Head] = {}
        self._lost: list[tuple[int, int]] = []
        self._last_ts: int | None = None

    def write(self, events: Events) -> None:
        """Take events, oldest first."""
        if not len(events):
            return
        first, last = (_time(events, place) for place in (0, -1))
        if self._last_ts is None:
            self._begin(first)
            self._mark_lost(first)
        for index in np.flatnonzero(np.bincount(events.batch)).tolist():
            self._kind(events.batches[index].layout)
            self._tracks.learn(events.batches[index])
        for start in range(0, len(events), WINDOW):
            for row in self._window(events, slice(start, start + WINDOW)):
                self._put(row)
        self._last_ts = last

    def lose(self, cpu: int, count: int) -> None:
        """Mark that events of a CPU were lost: after what was written, before what comes."""
        # What returns next may be another call.
        self._give_up_calls()
        self._lost.append((cpu, count))
        if self._last_ts is not None:
            self._mark_lost(self._last_ts)

    def close(self) -> None:
        """Finish the file."""
        if self._last_ts is None:
            self._begin(0)
            self._mark_lost(0)
        self._give_up_calls()
        self._packets.flush()
        self._new.close()

    def discard(self) -> None:
        """Leave nothing behind of what was begun."""
        self._new.discard()

    def _begin(self, ts: int) -> None:
        packet = self._packets.add(ts)
        packet.first_packet_on_sequence = True
        packet.sequence_flags = TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
        packet.clock_snapshot.primary_trace_clock = _MAIN_CLOCK
        packet.clock_snapshot.clocks.add(clock_id=_MAIN_CLOCK, timestamp=ts)
        info = self._packets.add(ts).system_info
        info.num_cpus = self._kernel.cpus
        info.utsname.sysname = "Linux"
        info.utsname.release = self._kernel.release
        info.utsname.machine = self._kernel.arch

    def _mark_lost(self, ts: int) -> None:
        for cpu, lost in self._lost:
            uuid = self._tracks.of_lost(cpu)
            event = self._packets.add(ts).track_event
            event.type, event.track_uuid, event.name = TrackEvent.TYPE_INSTANT, uuid, "lost"
            event.debug_annotations.add(name="count", uint_value=lost)
        self._lost.clear()

    def _kind(self, layout: RecordLayout) -> _Kind:
        if layout not in self._kinds:
            self._kinds[layout] = _Kind(
                event=layout.event,
                function=layout.function,
                role=self._role(layout),
                category_iid=self._packets.iid("event_categories", layout.group),
                name_iid=self._packets.iid("event_names", layout.event),
                own=frozenset(field.name for field in layout.fields),
            )
        return self._kinds[layout]

    def _role(self, layout: RecordLayout) -> _Role:
        is_return = layout.caller_offset is not None
        if any(field.storage is Storage.DURATION for field in layout.fields):
            self._calls.timed.add(layout.function)
        elif is_return or _ENTRY.search(layout.where):
            # Of several at one place the first: else one call's would be another's.
            name = layout.group, layout.event
            if self._probes.setdefault((layout.function, is_return), name) == name:
                return _Role.RETURN if is_return else _Role.ENTRY
        return _Role.OTHER

    def _window(self, events: Events, part: slice) -> Iterable[_Row]:
        which, rows = events.batch[part], events.row[part]
        found: list[_Row] = []
        places = np.empty(len(which), np.int64)
        for index in np.flatnonzero(np.bincount(which)).tolist():
            is_its = which == index
            batch = events.batches[index].take(rows[is_its])
            places[is_its] = np.arange(len(found), len(found) + len(batch))
            found += self._rows(batch)
        return map(found.__getitem__, places.tolist())

    def _rows(self, batch: Batch) -> Iterable[_Row]:
        kind = self._kind(batch.layout)
        columns = batch.ts.tolist(), _starts(batch), self._heads_of(kind, batch)
        return zip(repeat(kind), *columns, self._values.rows(batch), strict=False)

    def _heads_of(self, kind: _Kind, batch: Batch) -> list[_Head]:
        if len(self._heads) > _REMEMBERED:
            self._heads.clear()
        columns = (batch.pid, batch.cpu, batch.comm, batch.context)
        keys = list(zip(repeat(kind), *(each.tolist() for each in columns), strict=False))
        for key in dict.fromkeys(keys):
            if key not in self._heads:
                self._heads[key] = self._head(*key)
        return list(map(self._heads.__getitem__, keys))

    def _head(self, kind: _Kind, pid: int, cpu: int, comm: bytes, context: int) -> _Head:
        thread = self._tracks.of_task(pid, cpu)
        packet = TracePacket(trusted_packet_sequence_id=_SEQUENCE, sequence_flags=_NAMED)
        event = packet.track_event
        event.type, event.track_uuid = TrackEvent.TYPE_INSTANT, thread.uuid
        event.name_iid = kind.name_iid
        event.category_iids.append(kind.category_iid)
        event.debug_annotations.extend(self._values.of_task(cpu, comm, context, kind.own))
        return thread, comm, packet

    def _put(self, row: _Row) -> None:
        kind, ts, start, (thread, comm, _), _ = row
        if thread.comm != comm:
            self._tracks.rename(thread, comm)
        if start is not None:
            lane = self._tracks.lane(thread, kind.event, start, ts)
            if lane is not None:
                self._add_slice(row, start, lane)
                self._add_end(lane, ts)
                return
        elif kind.role is _Role.ENTRY and self._awaits(kind.function):
            self._calls.enter(row)
            return
        elif kind.role is _Role.RETURN:
            entry = self._calls.leave(thread, kind.function)
            if entry is not None:
                self._add_call(entry, row)
                return
        self._add(row, ts)

    def _awaits(self, function: str) -> bool:
        if self._calls.count >= _OPEN:
            self._give_up_calls()
        return self._calls.awaits(function)

    def _add_call(self, entry: _Row, row: _Row) -> None:
        # What the return tells is one annotation, of its event's name.
        entered, start, *_ = entry
        kind, ts, _, (thread, _, instant), arguments = row
        lane = self._tracks.lane(thread, entered.event, start, ts)
        if lane is None:
            self._add(entry, start)
            self._add(row, ts)
            return
        name_iid = self._packets.iid("debug_annotation_names", kind.event)
        self._add_slice(entry, start, lane)
        note = self._add_end(lane, ts).track_event.debug_annotations.add(name_iid=name_iid)
        note.dict_entries.extend(instant.track_event.debug_annotations)
        note.dict_entries.extend(arguments)

    def _add(self, row: _Row, ts: int) -> TracePacket:
        _, _, _, (_, _, instant), arguments = row
        packet = self._packets.copy(instant)
        packet.timestamp = ts
        if arguments:
            packet.track_event.debug_annotations.extend(arguments)
        return packet

    def _add_slice(self, row: _Row, start: int, lane: _Lane) -> None:
        event = self._add(row, start).track_event
        event.type, event.track_uuid = TrackEvent.TYPE_SLICE_BEGIN, lane.uuid

    def _add_end(self, lane: _Lane, ts: int) -> TracePacket:
        packet = self._packets.copy(lane.end)
        packet.timestamp = ts
        return packet

    def _give_up_calls(self) -> None:
        for row in self._calls.rest():
            self._add(row, row[1])


def _time(events: Events, place: int) -> int:
    batch = events.batches[int(events.batch[place])]
    return int(batch.ts[int(events.row[place])])


def _starts(batch: Batch) -> Iterable[int | None]:
    fields = zip(batch.layout.fields, batch.values, batch.faulted, strict=True)
    for field, values, faulted in fields:
        if field.storage is Storage.DURATION:
            known = values if faulted is None else np.where(faulted, np.uint64(0), values)
            pairs = zip(batch.ts.tolist(), known.tolist(), strict=True)
            return [ts - ns if 0 < ns <= ts else None for ts, ns in pairs]
    return repeat(None)


class _Packets:
    # Writes them, after what they refer to.

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._trace = Trace()
        self._iids: dict[tuple[str, str], int] = {}

    def add(self, ts: int | None = None) -> TracePacket:
        # Its fields are to be set before the next one is added.
        if len(self._trace.packet) >= _HELD:
            self.flush()
        return self._trace.packet.add(
            timestamp=ts, trusted_packet_sequence_id=_SEQUENCE, sequence_flags=_NAMED
        )

    def copy(self, model: TracePacket) -> TracePacket:
        # Likewise.
        if len(self._trace.packet) >= _HELD:
            self.flush()
        packet = self._trace.packet.add()
        packet.CopyFrom(model)
        return packet

    def iid(self, kind: str, name: str) -> int:
        # ``kind`` is one of the lists of InternedData.
        if (kind, name) not in self._iids:
            self._iids[kind, name] = len(self._iids) + 1
            names: Any = getattr(self.add().interned_data, kind)
            names.add(iid=self._iids[kind, name], name=name)
        return self._iids[kind, name]

    def flush(self) -> None:
        # Files of this message that stand one after the other are one.
        self._file.write(self._trace.SerializeToString())
        self._trace = Trace()


class _Calls:
    # Entries of calls whose return is to come. ``timed`` are functions whose returns need none,
    # ``_alone`` those of which no return had come when there was no more room.

    def __init__(self) -> None:
        self.timed: set[str] = set()
        self.count = 0
        self._open: dict[tuple[_Thread, str], list[_Row]] = {}
        self._returning: set[str] = set()
        self._alone: set[str] = set()

    def awaits(self, function: str) -> bool:
        return function not in self.timed and function not in self._alone

    def enter(self, row: _Row) -> None:
        kind, _, _, (thread, *_), _ = row
        self._open.setdefault((thread, kind.function), []).append(row)
        self.count += 1

    def leave(self, thread: _Thread, function: str) -> _Row | None:
        self._returning.add(function)
        self._alone.discard(function)
        entries = self._open.get((thread, function))
        if entries is None:
            return None
        self.count -= 1
        entry = entries.pop()
        if not entries:
            del self._open[thread, function]
        return entry

    def rest(self) -> Iterator[_Row]:
        self._alone |= {function for _, function in self._open} - self._returning
        for entries in self._open.values():
            yield from entries
        self._open.clear()
        self.count = 0


class _Tracks:
    # Describes each before it has events.

    def __init__(self, packets: _Packets) -> None:
        self._packets = packets
        self._uuids = count(1)
        self._threads: dict[tuple[int, int], _Thread] = {}
        self._processes: dict[int, int] = {}
        self._tgids: dict[int, int] = {}
        self._lost: dict[int, int] = {}

    def learn(self, batch: Batch) -> None:
        # Of which process a thread is, where an event tells.
        for field, values in zip(batch.layout.fields, batch.values, strict=True):
            is_number = field.storage is Storage.NUMBER and field.count is None
            if field.name in ("tgid", TGID) and is_number:
                pairs = zip(batch.pid.tolist(), values.tolist(), strict=True)
                for pid, tgid in set(pairs):
                    if 0 < tgid <= _MAX_PID:
                        self._tgids.setdefault(pid, tgid)

    def of_task(self, pid: int, cpu: int) -> _Thread:
        # All idle tasks have one number.
        key = pid, 0 if pid else cpu
        if key not in self._threads:
            self._threads[key] = _Thread(next(self._uuids), pid)
            if not pid:
                self._describe(self._threads[key].uuid).name = f"swapper/{cpu}"
        return self._threads[key]

    def rename(self, thread: _Thread, comm: bytes) -> None:
        # A thread of which no more is known is a process of its own.
        thread.comm, pid, name = comm, thread.pid, valid_text(comm)
        if not pid:
            return
        if thread.tgid is None:
            thread.tgid = self._tgids.get(pid, pid)
        tgid = thread.tgid
        is_new = tgid not in self._processes
        if is_new:
            self._processes[tgid] = next(self._uuids)
        if is_new or tgid == pid:
            process = self._describe(self._processes[tgid]).process
            process.pid, process.process_name = tgid, name
        track = self._describe(thread.uuid)
        track.parent_uuid = self._processes[tgid]
        track.thread.pid, track.thread.tid, track.thread.thread_name = tgid, pid, name

    def lane(self, thread: _Thread, event: str, start: int, end: int) -> _Lane | None:
        # That which takes a slice.
        if thread.takes(start, end):
            return thread
        if event not in thread.others:
            thread.others[event] = _Lane(next(self._uuids))
            track = self._describe(thread.others[event].uuid)
            track.parent_uuid, track.name = thread.uuid, event
        return thread.others[event] if thread.others[event].takes(start, end) else None

    def of_lost(self, cpu: int) -> int:
        if cpu not in self._lost:
            self._lost[cpu] = next(self._uuids)
            self._describe(self._lost[cpu]).name = f"lost events of CPU {cpu}"
        return self._lost[cpu]

    def _describe(self, uuid: int) -> TrackDescriptor:
        track = self._packets.add().track_descriptor
        track.uuid = uuid
        return track


_Maker = Callable[[int | None, Any], DebugAnnotation]
"""Of a value, with the name that it has; the elements of an array have none."""


class _Values:
    # Makes annotations of columns.

    def __init__(self, packets: _Packets, source: TraceSource) -> None:
        self._iid = partial(packets.iid, "debug_annotation_names")
        self._names = Names(source)
        self._version = source.version

    def of_task(
        self, cpu: int, comm: bytes, context: int, own: frozenset[str]
    ) -> list[DebugAnnotation]:
        # But those in whose place is a field.
        found = {
            "cpu": partial(_unsigned, value=cpu),
            "comm": partial(_text, value=comm),
            "flags": partial(_text, value=flags(context, self._version).encode()),
        }
        return [make(self._iid(name)) for name, make in found.items() if name not in own]

    def rows(self, batch: Batch) -> Iterable[Annotations]:
        # The arguments of each event, and where the call came from.
        fields = zip(batch.layout.fields, batch.values, batch.faulted, strict=True)
        columns = [self._column(field, values, faulted) for field, values, faulted in fields]
        if batch.caller is not None and all(f.name != "caller" for f in batch.layout.fields):
            make = partial(self._symbol, self._iid("caller"))
            columns.insert(0, _each(batch.caller.tolist(), make))
        if not columns:
            return repeat(())
        rows = zip(*columns, strict=True)
        if not any(None in column for column in columns):
            return cast("Iterable[Annotations]", rows)
        return ([note for note in row if note is not None] for row in rows)

    def _column(
        self, field: Field, values: Column, faulted: Column | None
    ) -> list[DebugAnnotation | None]:
        make = self._maker(field)
        name_iid = self._iid(field.name)
        if field.count is not None:
            make = partial(_array, make)
        found = _each(_hashable(values), partial(make, name_iid))
        if faulted is None or faulted.ndim > 1:
            return found
        return [None if bad else note for note, bad in zip(found, faulted.tolist(), strict=True)]

    def _maker(self, field: Field) -> _Maker:
        match field.type:
            case _ if field.storage is Storage.STACK:
                return self._stack
            case _ if field.storage not in (Storage.NUMBER, Storage.DURATION):
                return _text
            case "char":
                return _character
            case "symbol" | "symstr":
                return self._symbol
            case type_ if type_.startswith("x"):
                return _hexadecimal
            case _:
                return _signed if field.is_signed else _unsigned

    def _symbol(self, name_iid: int | None, addr: int) -> DebugAnnotation:
        return _text(name_iid, self._names.symbol(addr))

    def _stack(self, name_iid: int | None, stack: bytes) -> DebugAnnotation:
        return _text(name_iid, self._names.stack_text(stack))


def _each(
    values: list[Any], make: Callable[[Any], DebugAnnotation]
) -> list[DebugAnnotation | None]:
    # Most values come more than once. None is what could not be read.
    found = {value: make(value) for value in set(values) if value is not None}
    return list(map(found.get, values))


def _hashable(values: Column) -> list[Any]:
    # An array's elements as a tuple.
    rows: list[Any] = values.tolist()
    return rows if values.ndim == 1 else list(map(tuple, rows))


def _array(make: _Maker, name_iid: int | None, values: tuple[Any, ...]) -> DebugAnnotation:
    # An element that could not be read has its place.
    each = [_text(None, _FAULT) if value is None else make(None, value) for value in values]
    return DebugAnnotation(name_iid=name_iid, array_values=each)


def _text(name_iid: int | None, value: bytes) -> DebugAnnotation:
    return DebugAnnotation(name_iid=name_iid, string_value=valid_text(value))


def _character(name_iid: int | None, value: int) -> DebugAnnotation:
    return _text(name_iid, bytes((value,)))


def _unsigned(name_iid: int | None, value: int) -> DebugAnnotation:
    return DebugAnnotation(name_iid=name_iid, uint_value=value)


def _signed(name_iid: int | None, value: int) -> DebugAnnotation:
    return DebugAnnotation(name_iid=name_iid, int_value=value)


def _hexadecimal(name_iid: int | None, value: int) -> DebugAnnotation:
    return DebugAnnotation(name_iid=name_iid, pointer_value=value)
