"""Timelines as Perfetto reads them: by its own messages, begins and ends put on each other."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import (
    DebugAnnotation,
    Trace,
    TracePacket,
    TrackEvent,
)

import kprobes
from kprobes.export.perfetto import PerfettoFile
from kprobes.model.events import Batch, Events, kept_of
from kprobes.model.resolved import Field, RecordLayout
from kprobes.open_recording import opened_recording
from kprobes.sinks.json import valid_text
from kprobes.sinks.names import TraceSource
from tests.build.events import Row, make_batch, make_events
from tests.build.recorded import CPUS, EVENTS, KERNEL, SYMBOLS, recorded
from tests.build.ring import make_layout

SOURCE = TraceSource(version=(6, 1), cpus=CPUS)
READ = make_layout(1, ("s32",), event="enter", names=("fd",))
GOT = make_layout(2, ("s64",), event="got", names=("ret",), has_caller=True)
TIMED = make_layout(3, ("u64", "duration"), event="timed", names=("id", "took"), has_caller=True)
_CLEARED = TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
_NEEDED = TracePacket.SEQ_NEEDS_INCREMENTAL_STATE


class Shown(Struct, kw_only=True):
    """A slice or, without an end, an instant."""

    track: int
    name: str
    category: str
    ts: int
    args: dict[str, Any]
    end: int | None = None
    depth: int = 0


class Timeline:
    """What Perfetto's trace processor makes of a file, as far as it says how it does."""

    def __init__(self, path: Path) -> None:
        self.packets = list(Trace.FromString(path.read_bytes()).packet)
        self.names: dict[str, dict[int, str]] = {}
        self.tracks: dict[int, Any] = {}
        self.shown: list[Shown] = []
        events = [(p.timestamp, self._read(p)) for p in self.packets if self._takes(p)]
        open_slices: dict[int, list[Shown]] = {}
        # Packets of one time stay in the file's order.
        for ts, (event, one) in sorted(events, key=lambda pair: pair[0]):
            stack = open_slices.setdefault(event.track_uuid, [])
            match event.type:
                case TrackEvent.TYPE_SLICE_END:
                    ended = stack.pop()
                    ended.end = ts
                    assert not ended.args.keys() & one.args.keys()
                    ended.args |= one.args
                case TrackEvent.TYPE_SLICE_BEGIN:
                    one.depth = len(stack)
                    stack.append(one)
                    self.shown.append(one)
                case _:
                    assert event.type == TrackEvent.TYPE_INSTANT
                    self.shown.append(one)
        assert not any(open_slices.values())

    def _takes(self, packet: TracePacket) -> bool:
        assert packet.trusted_packet_sequence_id == 1
        first = packet is self.packets[0]
        assert packet.sequence_flags == (_CLEARED if first else _NEEDED)
        for kind, names in packet.interned_data.ListFields():
            for each in names:
                assert each.iid
                assert each.iid not in self.names.setdefault(kind.name, {})
                self.names[kind.name][each.iid] = each.name
        if packet.HasField("track_descriptor"):
            self.tracks[packet.track_descriptor.uuid] = packet.track_descriptor
        return packet.HasField("track_event")

    def _read(self, packet: TracePacket) -> tuple[TrackEvent, Shown]:
        # What is referred to was told before.
        event = packet.track_event
        assert event.track_uuid in self.tracks
        name = self.names["event_names"][event.name_iid] if event.name_iid else event.name
        categories = [self.names["event_categories"][iid] for iid in event.category_iids]
        return event, Shown(
            track=event.track_uuid,
            name=name,
            category=",".join(categories),
            ts=packet.timestamp,
            args=self._dict(event.debug_annotations),
        )

    def _dict(self, notes: Sequence[DebugAnnotation]) -> dict[str, Any]:
        found = [(self._name(note), self._value(note)) for note in notes]
        assert len(dict(found)) == len(found)
        return dict(found)

    def _name(self, note: DebugAnnotation) -> str:
        return note.name or self.names["debug_annotation_names"][note.name_iid]

    def _value(self, note: DebugAnnotation) -> Any:
        if note.dict_entries:
            return self._dict(note.dict_entries)
        if note.array_values:
            return [self._value(each) for each in note.array_values]
        kind = note.WhichOneof("value")
        assert kind is not None
        value = getattr(note, kind)
        return hex(value) if kind == "pointer_value" else value

    def threads(self) -> dict[int, tuple[int, int, str]]:
        """Return process, thread and name of each track that is a thread's."""
        threads = {uuid: track.thread for uuid, track in self.tracks.items() if track.thread.tid}
        return {uuid: (each.pid, each.tid, each.thread_name) for uuid, each in threads.items()}

    def calls(self) -> list[tuple[str, int, int | None]]:
        """Return name and times of what is shown, in their order."""
        return [(each.name, each.ts, each.end) for each in self.shown]


def write(path: Path, *rounds: Events) -> Timeline:
    file = PerfettoFile(path, KERNEL, SOURCE)
    for events in rounds:
        file.write(events)
    file.close()
    return Timeline(path)


def row(ts: int, *values: Any, pid: int = 7, comm: bytes = b"sh", cpu: int = 0) -> Row:
    return Row(ts=ts, values=values, pid=pid, comm=comm, cpu=cpu)


def in_turn(*each: tuple[RecordLayout, Row]) -> Events:
    """Return events in this order."""
    layouts = list({layout.event_id: layout for layout, _ in each}.values())
    rows = [[row for its, row in each if its is layout] for layout in layouts]
    order: list[tuple[int, int]] = []
    for layout, _ in each:
        at = layouts.index(layout)
        order.append((at, sum(batch == at for batch, _ in order)))
    return make_events([make_batch(*pair) for pair in zip(layouts, rows, strict=True)], order)


def expected(events: Events) -> Iterator[tuple[str, int, int, str, tuple[tuple[str, str], ...]]]:
    for batch in events.batches:
        for at in range(len(batch)):
            args = _arguments(batch, at)
            name, ts, pid = batch.layout.event, int(batch.ts[at]), int(batch.pid[at])
            yield name, ts, pid, valid_text(bytes(batch.comm[at])), _comparable(args)


def _comparable(args: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted((name, repr(value)) for name, value in args.items()))


def _arguments(batch: Batch, at: int) -> dict[str, Any]:
    found: dict[str, Any] = {"cpu": int(batch.cpu[at]), "flags": "d...."}
    if batch.caller is not None:
        found["caller"] = _symbol(int(batch.caller[at]))
    for i, field in enumerate(batch.layout.fields):
        value, mask = batch.values[i][at], batch.faulted[i]
        is_bad = mask is not None and mask.ndim == 1 and bool(mask[at])
        if not is_bad and value is not None:
            found[field.name] = _plain(field, value)
    return found


def _plain(field: Field, value: Any) -> Any:
    if field.count is not None:
        one = replace(field, count=None)
        return ["(fault)" if each is None else _plain(one, each) for each in value.tolist()]
    if isinstance(value, bytes):
        return valid_text(value)
    if field.type == "char":
        return valid_text(bytes((int(value),)))
    if field.type.startswith("x"):
        return hex(value)
    return _symbol(int(value)) if field.type in ("symbol", "symstr") else int(value)


def _symbol(addr: int) -> str:
    found = SYMBOLS.at(addr)
    return found.place(addr) if found is not None else f"{addr:#x}"


def test_every_event_of_a_recording_is_there_with_all_its_values(tmp_path: Path) -> None:
    path, out = tmp_path / "x.rec", tmp_path / "x.pftrace"
    path.write_bytes(recorded(EVENTS))
    rounds = list(kprobes.load(path).batches())
    with opened_recording(path) as recording:
        (boot,) = ((boot, list(boot.rounds)) for boot in recording.boots())
    file = PerfettoFile(out, boot[0].kernel, boot[0].source)
    for events in boot[1]:
        file.write(events)

    file.close()

    found = Timeline(out)
    threads = found.threads()
    parents = {uuid: track.parent_uuid for uuid, track in found.tracks.items()}
    shown = Counter(
        (
            each.name,
            each.ts if each.end is None else each.end,
            threads[each.track if each.track in threads else parents[each.track]][1],
            each.args.pop("comm"),
            _comparable(each.args),
        )
        for each in found.shown
    )
    assert shown == Counter(one for events in rounds for one in expected(events))
    assert sum(shown.values()) == EVENTS
    assert {each.category for each in found.shown} == {"kprobes"}
    slices = [each for each in found.shown if each.end is not None]
    assert len(slices) > 50
    assert {each.name for each in slices} == {"e5"}
    assert all(each.end == each.ts + each.args["a1"] for each in slices)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 30)), min_size=1, max_size=40),
    st.sampled_from([1, 2, 1000]),
    st.booleans(),
)
def test_no_slices_of_a_track_cross_whatever_comes(
    tmp_path_factory: pytest.TempPathFactory,
    spans: list[tuple[int, int]],
    gaps: int,
    is_in_order: bool,
) -> None:
    ends = [(1000 + start + took, took) for start, took in spans]
    ends = sorted(ends) if is_in_order else ends
    rows = [row(end, i, took) for i, (end, took) in enumerate(ends)]
    path = tmp_path_factory.getbasetemp() / "any.pftrace"

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("kprobes.export.perfetto._SPACES", gaps)
        found = write(path, make_events([make_batch(TIMED, rows)]))

    by_id = {each.args["id"]: each for each in found.shown}
    assert len(by_id) == len(found.shown) == len(spans)
    for i, (end, took) in enumerate(ends):
        own = by_id[i]
        assert (own.ts, own.end) in ((end - took, end), (end, None))
        # The first one crosses nothing.
        assert i or not took or own.end == end


def _nested(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    # Spans (start, end, depth), each begun and ended at a time of its own, by their ends.
    spans: list[tuple[int, int, int]] = []
    begun: list[int] = []
    for now in range(1000, 1000 + 2 * draw(st.integers(1, 40))):
        if begun and draw(st.booleans()):
            spans.append((begun.pop(), now, len(begun)))
        else:
            begun.append(now)
    return spans


@given(st.composite(_nested)())
def test_calls_in_each_other_are_slices_of_their_thread_in_each_other(
    tmp_path_factory: pytest.TempPathFactory, spans: list[tuple[int, int, int]]
) -> None:
    rows = [row(end, i, end - start) for i, (start, end, _) in enumerate(spans)]
    path = tmp_path_factory.getbasetemp() / "nested.pftrace"

    found = write(path, make_events([make_batch(TIMED, rows)]))

    (thread, *others) = {each.track for each in found.shown} or {0}
    assert not others
    assert not spans or found.threads()[thread] == (7, 7, "sh")
    shown = sorted((each.ts, each.end, each.depth) for each in found.shown)
    outer = [(span[0], span[1]) for span in spans]
    depths = {span: sum(a < span[0] and span[1] < b for a, b in outer) for span in outer}
    assert shown == sorted((*span, depth) for span, depth in depths.items())


def test_what_crosses_a_slice_is_on_a_track_of_its_event_below_or_an_instant(
    tmp_path: Path,
) -> None:
    rows = [row(1020, 0, 20), row(1030, 1, 20), row(1040, 2, 20), row(1050, 3, 5)]

    found = write(tmp_path / "x.pftrace", make_events([make_batch(TIMED, rows)]))

    places = {each.args["id"]: (each.end, found.tracks[each.track]) for each in found.shown}
    assert [places[i][0] for i in range(4)] == [1020, 1030, 1040, 1050]
    (thread,) = found.threads()
    assert [places[i][1].uuid == thread for i in range(4)] == [True, False, True, True]
    assert (places[1][1].name, places[1][1].parent_uuid) == ("timed", thread)


def test_slices_that_begin_at_once_are_apart(tmp_path: Path) -> None:
    rows = [row(1015, 0, 5), row(1020, 1, 10), row(1021, 2, 11)]

    found = write(tmp_path / "x.pftrace", make_events([make_batch(TIMED, rows)]))

    shown = {each.args["id"]: (each.ts, each.end) for each in found.shown}
    assert shown == {0: (1010, 1015), 1: (1010, 1020), 2: (1021, None)}


def test_long_recordings_keep_what_is_around_many_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kprobes.export.perfetto._SPACES", 8)
    inner = [row(1000 + 10 * i, i, 9) for i in range(1, 200)]
    later = [row(4000 + 10 * i, i, 9) for i in range(200, 300)]
    outer = [row(8000, 300, 3000)]

    found = write(tmp_path / "x.pftrace", make_events([make_batch(TIMED, inner + later + outer)]))

    assert len({each.track for each in found.shown}) == 1
    depths = {each.args["id"]: each.depth for each in found.shown}
    assert (depths[300], depths[299], depths[200], depths[199]) == (0, 1, 1, 0)


def test_durations_that_cannot_be_are_instants(tmp_path: Path) -> None:
    rows = [row(1000, 0, 1001), row(1010, 1, 0), row(1020, 2, None)]

    found = write(tmp_path / "x.pftrace", make_events([make_batch(TIMED, rows)]))

    assert found.calls() == [("timed", 1000, None), ("timed", 1010, None), ("timed", 1020, None)]
    assert [each.args.get("took") for each in found.shown] == [1001, 0, None]


def test_an_entry_and_a_return_of_a_thread_are_a_slice(tmp_path: Path) -> None:
    first = in_turn((READ, row(10, 3)), (READ, row(11, 4)), (READ, row(12, 5, pid=8)))
    then = in_turn((GOT, row(20, 1)), (GOT, row(21, -2, cpu=1)), (GOT, row(30, 0, pid=8)))

    found = write(tmp_path / "x.pftrace", first, then)

    assert found.calls() == [("enter", 10, 21), ("enter", 11, 20), ("enter", 12, 30)]
    outer, inner, other = found.shown
    assert (outer.depth, inner.depth, other.depth) == (0, 1, 0)
    assert (outer.args["fd"], inner.args["fd"], other.args["fd"]) == (3, 4, 5)
    assert outer.args["cpu"] == 0
    assert outer.args["got"] == {
        "cpu": 1,
        "comm": "sh",
        "flags": ".....",
        "caller": "0x0",
        "ret": -2,
    }


def test_what_has_no_partner_is_an_instant(tmp_path: Path) -> None:
    inside = make_layout(4, (), event="inside", where="vfs_open+0x10/0x310")
    opened = make_layout(7, (), event="opened", where="vfs_open+0x0/0x310", has_caller=True)
    second = make_layout(5, (), event="second")
    other = make_layout(6, (), event="other", where="vfs_write+0x0/0x20")
    events = in_turn(
        (GOT, row(10, 1)),
        (READ, row(20, 1)),
        (second, row(21)),
        (other, row(22)),
        (inside, row(23)),
        (GOT, row(24, 2)),
        (GOT, row(25, 2)),
        (opened, row(26)),
        (READ, row(30, 1)),
    )

    found = write(tmp_path / "x.pftrace", events)

    assert found.calls() == [
        ("got", 10, None),
        ("enter", 20, 24),
        ("second", 21, None),
        ("other", 22, None),
        ("inside", 23, None),
        ("got", 25, None),
        ("opened", 26, None),
        ("enter", 30, None),
    ]


def test_entries_of_functions_whose_returns_have_a_duration_are_instants(tmp_path: Path) -> None:
    events = in_turn((READ, row(1010, 3)), (TIMED, row(1020, 0, 10)), (GOT, row(1021, 3)))

    found = write(tmp_path / "x.pftrace", events)

    assert sorted(found.calls(), key=str) == [
        ("enter", 1010, None),
        ("got", 1021, None),
        ("timed", 1010, 1020),
    ]


def test_more_open_calls_than_are_held_are_instants_and_later_ones_slices_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kprobes.export.perfetto._OPEN", 3)
    entries = [(READ, row(10 + i, i)) for i in range(9)]
    events = in_turn(*entries, (GOT, row(30, 0)), (READ, row(40, 9)), (GOT, row(50, 0)))

    found = write(tmp_path / "x.pftrace", events)

    assert found.calls() == [
        *(("enter", 10 + i, None) for i in range(9)),
        ("got", 30, None),
        ("enter", 40, 50),
    ]


def test_lost_events_are_marked_and_no_call_goes_on_over_them(tmp_path: Path) -> None:
    file = PerfettoFile(tmp_path / "x.pftrace", KERNEL, SOURCE)
    file.lose(0, 5)
    file.write(in_turn((READ, row(10, 3)), (READ, row(15, 4))))
    file.lose(1, 7)
    file.write(in_turn((GOT, row(20, 1)), (READ, row(30, 3)), (GOT, row(40, 1))))
    file.lose(1, 2)

    file.close()

    found = Timeline(tmp_path / "x.pftrace")
    lost = [each for each in found.shown if each.name == "lost"]
    assert [(found.tracks[each.track].name, each.ts, each.args) for each in lost] == [
        ("lost events of CPU 0", 10, {"count": 5}),
        ("lost events of CPU 1", 15, {"count": 7}),
        ("lost events of CPU 1", 40, {"count": 2}),
    ]
    assert [call for call in found.calls() if call[0] != "lost"] == [
        ("enter", 10, None),
        ("enter", 15, None),
        ("got", 20, None),
        ("enter", 30, 40),
    ]


@pytest.mark.parametrize("name", ["tgid", "common_tgid"])
def test_threads_are_in_their_processes_and_have_their_last_names(
    tmp_path: Path, name: str
) -> None:
    known = make_layout(4, ("s32",), event="known", names=(name,))
    events = in_turn(
        (READ, row(10, 1, pid=8, comm=b"worker")),
        (known, row(11, 7, pid=8, comm=b"worker")),
        (known, row(12, 7, pid=7, comm=b"main")),
        (READ, row(13, 1, pid=7, comm=b"new\xff")),
        (known, row(14, -1, pid=9, comm=b"odd")),
    )

    found = write(tmp_path / "x.pftrace", events)

    threads = found.threads()
    assert sorted(threads.values()) == [(7, 7, "new\\xff"), (7, 8, "worker"), (9, 9, "odd")]
    processes = {t.process.pid: t for t in found.tracks.values() if t.process.pid}
    assert {pid: each.process.process_name for pid, each in processes.items()} == {
        7: "new\\xff",
        9: "odd",
    }
    parents = {pid: found.tracks[uuid].parent_uuid for uuid, (pid, _, _) in threads.items()}
    assert parents == {pid: each.uuid for pid, each in processes.items()}


def test_the_idle_task_is_a_track_for_each_cpu(tmp_path: Path) -> None:
    events = in_turn(
        (READ, row(10, 1, pid=0, comm=b"swapper/0", cpu=0)),
        (READ, row(11, 2, pid=0, comm=b"swapper/1", cpu=1)),
        (GOT, row(20, 1, pid=0, comm=b"swapper/0", cpu=0)),
        (GOT, row(21, 2, pid=0, comm=b"swapper/1", cpu=1)),
    )

    found = write(tmp_path / "x.pftrace", events)

    assert found.calls() == [("enter", 10, 20), ("enter", 11, 21)]
    names = [found.tracks[each.track].name for each in found.shown]
    assert names == ["swapper/0", "swapper/1"]


def test_fields_of_our_own_names_take_their_places(tmp_path: Path) -> None:
    layout = make_layout(4, ("u8", "string", "x64"), names=("cpu", "comm", "caller"))
    layout = replace(layout, caller_offset=40)
    events = make_events([make_batch(layout, [row(10, 200, b"own", 255, cpu=1)])])

    found = write(tmp_path / "x.pftrace", events)

    assert found.shown[0].args == {"cpu": 200, "comm": "own", "caller": "0xff", "flags": "....."}


def test_many_events_and_only_those_that_are_meant_are_written(tmp_path: Path) -> None:
    times = range(10, 20_010)
    batch = make_batch(READ, [row(ts, ts) for ts in times])
    mask = batch.ts % 2 == 0

    found = write(tmp_path / "x.pftrace", kept_of(make_events([batch]), [mask]))

    assert [each.args["fd"] for each in found.shown] == [ts for ts in times if ts % 2 == 0]


def test_times_are_the_guests_own_clock(tmp_path: Path) -> None:
    found = write(tmp_path / "x.pftrace", in_turn((READ, row(123, 1))))

    snapshot = found.packets[0].clock_snapshot
    assert found.packets[0].first_packet_on_sequence
    assert snapshot.primary_trace_clock == 6  # BUILTIN_CLOCK_BOOTTIME
    assert [(clock.clock_id, clock.timestamp) for clock in snapshot.clocks] == [(6, 123)]
    info = found.packets[1].system_info
    assert (info.num_cpus, info.utsname.release, info.utsname.machine) == (CPUS, "6.1.0", "x86_64")


def test_a_recording_of_nothing_is_a_file_too(tmp_path: Path) -> None:
    assert write(tmp_path / "x.pftrace").shown == []
