# pyright: reportPrivateUsage=false
"""Recordings: what is read is what a trace has, however the file ended."""

import io
import random
import time
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from msgspec.structs import replace

import kprobes
from kprobes.errors import FormatError
from kprobes.formats.recording import HEADER_SIZE, MARKER, FrameKind, file_header, pack_frame
from kprobes.model.clock import Knot, Line, PiecewiseLinear, Scale, Scales, Shifted, Unscaled
from kprobes.model.events import Counts, Hits
from kprobes.model.recording import RecordedClock, RecordedEvents, RecordedRound, RecordingEnd
from kprobes.recording import Recording, _decoded, _Frames
from kprobes.recording_writer import pack
from kprobes.sinks import FORMATS
from tests.build.recorded import (
    KERNEL,
    LAYOUTS,
    SYMBOLS,
    Pipe,
    Recorded,
    hits,
    printed,
    read,
    record,
    text_of,
)
from tests.build.ring import Hit


@pytest.fixture(scope="module")
def small() -> bytes:
    return record(40, every=13).end()


@pytest.mark.parametrize("seed", range(5))
def test_what_is_printed_of_a_recording_is_what_the_trace_printed(seed: int) -> None:
    recorded = record(3000, seed=seed)

    data = recorded.end()

    assert b"ext_read+" in printed(data)
    assert b" [mod]" in printed(data)
    assert printed(data) == text_of(recorded.traced)


def test_laps_and_lost_records_are_the_same_too() -> None:
    recorded = record(4000, every=900)

    data = recorded.end()
    rounds, recording = read(data)

    assert sum(ring.lost for ring in recorded.rings) > 0
    assert recording.lost == sum(ring.lost for ring in recorded.rings)
    assert text_of(rounds) == text_of(recorded.traced)


def test_who_exports_is_told_of_each_cpus_lost_records_between_the_events() -> None:
    recorded = record(4000, every=900)
    recording = Recording(io.BytesIO(recorded.end()))
    (boot,) = recording.boots()

    told = [boot.new_lost() for _ in boot.rounds]

    assert len([each for each in told if each]) > 1
    for cpu, ring in enumerate(recorded.rings):
        assert sum(n for each in told for its, n in each if its == cpu) == ring.lost


def test_a_loss_stands_between_what_was_there_and_what_came_after_it() -> None:
    recorded = Recorded(clock=Line(ns_at=0, cycles=0, mult=1, shift=0))
    ring, number = recorded.rings[0], 0
    for count in (5, 30_000, 5):
        # Of the second look's the ring holds some, and the others are lost.
        for _ in range(count):
            number += 1
            ring.write(Hit(layout=LAYOUTS[0], counter=number, values=(number % 256,)))
        recorded.look()
    (boot,) = Recording(Pipe(recorded.end())).boots()

    seen: list[int] = []
    at: list[tuple[int, int]] = []
    for events in boot.rounds:
        seen += [int(ts) for batch in events.batches for ts in batch.ts]
        at += [(len(seen), count) for _, count in boot.new_lost()]

    ((place, count),) = at
    assert count == ring.lost == seen[place] - seen[place - 1] - 1 > 0


def test_a_file_of_before_is_read_by_what_was_lost_in_all() -> None:
    recorded = record(4000, every=900)
    data = recorded.end()
    old = file_header()
    for kind, found in _Frames(io.BytesIO(data)):
        if kind == FrameKind.ROUND:
            old += pack(FrameKind.ROUND, replace(_decoded(found, RecordedRound), new_lost=None))
        else:
            old += pack_frame(FrameKind(kind), found)

    assert read(old)[1].lost == sum(ring.lost for ring in recorded.rings) > 0


class _Trickle(io.RawIOBase):
    """A pipe whose writer has said so much, and waits."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def readable(self) -> bool:
        return True

    def readinto(self, room: Any) -> int:
        if not self._data:
            raise TimeoutError
        size = min(len(room), len(self._data))
        room[:size], self._data = self._data[:size], self._data[size:]
        return size


def test_what_a_pipe_has_is_shown_before_there_is_more() -> None:
    recorded = record(60, every=20)
    data = recorded.file.getvalue()
    (boot,) = [next(Recording(io.BufferedReader(_Trickle(data))).boots())]

    shown: list[int] = []
    with pytest.raises(TimeoutError):
        shown += [len(events) for events in boot.rounds]
    again = next(Recording(io.BufferedReader(_Trickle(data))).boots())
    assert len(next(iter(again.rounds))) > 0


def test_a_file_of_nothing_but_markers_takes_a_moment() -> None:
    head = pack_frame(FrameKind.CHUNK, bytes(100))
    data = file_header() + pack(FrameKind.KERNEL, KERNEL) + head[:-1] + b"x" + MARKER * 300_000

    began = time.process_time()
    read(data)

    # It took hours: each marker moved all that was read.
    assert time.process_time() - began < 30


def _of_event(**changes: Any) -> bytes:
    layout = replace(next(each for each in LAYOUTS if each.is_dynamic), **changes)
    return pack(FrameKind.EVENTS, RecordedEvents(layouts=(layout,)))


@pytest.mark.parametrize(
    "frame",
    [
        _of_event(is_dynamic=False),
        _of_event(event="a\0b"),
        pack(FrameKind.ROUND, RecordedRound(since_ns=-(1 << 63), real_ns=9, lost=(0, 0))),
        pack(FrameKind.ROUND, RecordedRound(since_ns=0, real_ns=(1 << 64) - 1, lost=(0, 0))),
        pack(FrameKind.ROUND, RecordedRound(since_ns=0, real_ns=9, lost=((1 << 64) - 1, 0))),
        pack(FrameKind.ROUND, RecordedRound(since_ns=0, real_ns=9, lost=(0,), new_lost=(-1,))),
    ],
)
def test_what_no_writer_has_written_is_refused(frame: bytes) -> None:
    whole = record(100, every=20).end()

    with pytest.raises(FormatError, match=r"a recording with .* that cannot be"):
        read(whole + frame)


def test_only_events_of_probes_are_in_a_recording() -> None:
    # What is printed by a print fmt is of trace-cmd's files: here it could be of any columns.
    event = RecordedEvents(layouts=(replace(LAYOUTS[0], print_fmt='"%d", REC->a0'),))
    data = file_header() + pack(FrameKind.KERNEL, KERNEL) + pack(FrameKind.EVENTS, event)

    with pytest.raises(FormatError, match="not of a probe"):
        read(data)


def test_few_events_in_each_look_are_read_together_in_the_same_order() -> None:
    recorded = record(3000, every=3)

    rounds, _ = read(recorded.end(), is_file=True)

    assert len(rounds) < 3 < len(recorded.traced) - 900
    assert all(len({b.layout.event_id for b in e.batches}) == len(e.batches) for e in rounds)
    assert text_of(rounds) == text_of(recorded.traced)


def test_a_record_that_is_not_whole_yet_keeps_others_waiting_as_in_a_trace() -> None:
    recorded = Recorded()
    first, second = recorded.rings
    late = Hit(layout=LAYOUTS[0], counter=10, values=(1,))
    position = first.reserve(late)
    assert position is not None
    first.write(Hit(layout=LAYOUTS[0], counter=11, values=(2,)))
    second.write(Hit(layout=LAYOUTS[0], counter=12, values=(3,)))
    recorded.look()
    second.write(Hit(layout=LAYOUTS[0], counter=13, values=(4,)))
    recorded.look()
    first.fill(late, position)
    first.commit(late, position)
    recorded.look()

    rounds, _ = read(recorded.end())

    assert [n for n in map(len, rounds) if n] == [n for n in map(len, recorded.traced) if n]
    assert text_of(rounds) == text_of(recorded.traced)


def test_records_of_events_that_are_not_shown_are_left_out() -> None:
    recorded = record(100, every=200)
    data = recorded.end()
    end = RecordedRound(since_ns=0, real_ns=9, lost=(0, 0), new_lost=(0, 0))
    ignoring = data.replace(
        pack(FrameKind.ROUND, end), pack(FrameKind.ROUND, replace(end, ignored=(1, 2, 3, 4)))
    )
    rounds, _ = read(ignoring)

    shown = {batch.layout.event_id for events in rounds for batch in events.batches}

    assert shown == {5}


def test_times_are_told_by_the_clock_of_their_round() -> None:
    recorded = Recorded()
    for mult in (3, 4):
        recorded.clock = Line(ns_at=0, cycles=0, mult=mult, shift=0)
        recorded.rings[0].write(Hit(layout=LAYOUTS[0], counter=100, values=(1,)))
        recorded.look()

    rounds, _ = read(recorded.end())

    assert [ts for events in rounds for batch in events.batches for ts in batch.ts] == [300, 400]


@pytest.mark.parametrize(
    "clock",
    [
        Unscaled(),
        Scales(of_cpus=(Scale(mul=3, shift=1, offset=5), Scale(mul=1, shift=0, offset=0))),
        Shifted(clock=Line(ns_at=1, cycles=2, mult=3, shift=4), ahead=1 << 63),
        PiecewiseLinear(
            clock=Line(ns_at=1, cycles=2, mult=3, shift=0),
            origin=4,
            ahead=5,
            knots=(Knot(x=0.0, y=1.0, slope=0.25), Knot(x=50.0, y=9.0, slope=-0.5)),
        ),
    ],
    ids=lambda clock: type(clock).__name__,
)
def test_every_clock_tells_the_same_times_when_it_was_written(clock: Unscaled) -> None:
    recorded = Recorded(clock=clock)
    for cpu, hit in hits(50):
        recorded.rings[cpu].write(hit)
    recorded.look()

    rounds, _ = read(recorded.end())

    assert text_of(rounds) == text_of(recorded.traced)


def test_a_file_that_ends_anywhere_has_all_that_was_whole(small: bytes) -> None:
    whole = [len(events) for events in read(small)[0]]
    counts: list[int] = []
    for end in range(HEADER_SIZE, len(small), 5):
        rounds, recording = read(small[:end])
        counts.append(sum(map(len, rounds)))
        assert recording.damaged == 0
        assert recording.end is None

    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, sum(whole))
    assert len(set(counts)) > 3


@pytest.mark.parametrize("end", range(HEADER_SIZE))
def test_a_file_without_its_header_is_no_recording(small: bytes, end: int) -> None:
    with pytest.raises(FormatError):
        read(small[:end])


def test_a_damaged_frame_is_passed_over_and_told(small: bytes) -> None:
    at = small.index(MARKER + bytes((FrameKind.CHUNK,))) + 60
    data = bytearray(small)
    data[at] ^= 0x55

    rounds, recording = read(bytes(data))

    assert recording.damaged == 1
    assert 0 < sum(map(len, rounds)) < sum(map(len, read(small)[0]))


def mutated(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(out))
        match rng.randrange(4):
            case 0:
                out[at] ^= 1 << rng.randrange(8)
            case 1:
                del out[at : at + rng.randrange(40)]
            case 2:
                out[at:at] = out[rng.randrange(len(out)) :][: rng.randrange(60)]
            case _:
                out[at : at + 4] = rng.randbytes(4)
    return bytes(out)


def harden(data: bytes) -> bytes:
    """Return the file with checksums that are right, so that what is behind them is reached."""
    out = [data[:HEADER_SIZE]]
    for frame in data[HEADER_SIZE:].split(MARKER)[1:]:
        whole = MARKER + frame
        if len(whole) >= 20:
            size = int.from_bytes(whole[8:12], "little")
            crc = zlib.crc32(whole[20 : 20 + size], zlib.crc32(whole[:16]))
            whole = whole[:16] + crc.to_bytes(4, "little") + whole[20:]
        out.append(whole)
    return b"".join(out)


def print_all(data: bytes) -> None:
    """Print all of a file in each form."""
    recording = Recording(io.BytesIO(data))
    for boot in recording.boots():
        sinks = [FORMATS[form](io.BytesIO(), boot.source) for form in ("text", "json", "table")]
        for events in boot.rounds:
            for sink in sinks:
                sink.write(events)
        for sink in sinks:
            sink.close()


def check_mutations(data: bytes, count: int, seed: int) -> int:
    """Read so many mutations; return how many could be read. Only our errors may come."""
    rng = random.Random(seed)
    good = 0
    for number in range(count):
        bad = mutated(data, rng)
        try:
            print_all(harden(bad) if number % 2 else bad)
            good += 1
        except FormatError:
            pass
    return good


def test_mutations_are_read_or_refused(small: bytes) -> None:
    assert check_mutations(small, 1500, 1) > 100


@pytest.mark.fuzz
def test_a_hundred_thousand_mutations_are_read_or_refused(small: bytes) -> None:
    assert check_mutations(small, 100_000, 2) > 1000


def test_a_frame_that_would_be_huge_is_not_made() -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(300 << 20))
    frame = bytearray(pack_frame(FrameKind.EVENTS, b"x" * 100, level=1))
    frame[8:16] = len(bomb).to_bytes(4, "little") + (64 << 20).to_bytes(4, "little")
    frame[20:] = bomb
    kernel = pack(FrameKind.KERNEL, KERNEL)
    data = file_header() + kernel + harden(bytes(HEADER_SIZE) + frame)[HEADER_SIZE:]

    del bomb, frame
    tracemalloc.start()
    rounds, recording = read(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 100 << 20
    assert not sum(map(len, rounds))
    assert recording.is_cut


def test_many_frames_that_claim_to_be_long_end_in_time() -> None:
    head = (
        MARKER + bytes((FrameKind.CHUNK, 0, 0, 0)) + (60 << 20).to_bytes(4, "little") * 2 + bytes(4)
    )
    data = file_header() + pack(FrameKind.KERNEL, KERNEL) + head * (4 << 20)
    start = time.monotonic()

    _, recording = read(data)

    assert recording.is_cut
    assert time.monotonic() - start < 60


def test_frames_of_a_later_version_are_passed_over(small: bytes) -> None:
    frame = bytearray(pack_frame(FrameKind.END, b"news"))
    frame[4] = 99
    later = harden(small[:HEADER_SIZE] + bytes(frame))[HEADER_SIZE:]

    rounds, recording = read(small + later)

    assert recording.damaged == 0
    assert text_of(rounds) == text_of(read(small)[0])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"kprobes\n\2\0\0\0\0\0\0\0", "version 2"),
        (b"\x17\x08\x44tracing6\0\0\0\0\0\0\0", "not a recording"),
        (b"", "not a recording"),
    ],
)
def test_other_files_are_refused_with_words(data: bytes, words: str) -> None:
    with pytest.raises(FormatError, match=words):
        read(data)


def test_a_clock_that_makes_no_sense_is_refused() -> None:
    clock = Line(ns_at=0, cycles=0, mult=0, shift=0)
    data = file_header() + pack(FrameKind.KERNEL, KERNEL)
    data += pack(FrameKind.CLOCK, RecordedClock(clock=clock))

    with pytest.raises(FormatError, match="clock"):
        read(data)


def test_two_boots_are_two() -> None:
    recorded = record(100)
    recorded.writer.end(
        RecordingEnd(
            real_ns=1,
            counts=Counts(recorded={1: 4}, missed={1: 2}, lost=3, damaged=0),
            hits=(Hits(event="e", function="f", recorded=4, missed=2, event_id=1),),
        )
    )
    recorded.writer.begin(replace(KERNEL, release="6.2"), SYMBOLS)
    data = recorded.end()
    found: list[tuple[str, int, bool]] = []
    recording = Recording(io.BytesIO(data))
    for boot in recording.boots():
        total = sum(map(len, boot.rounds))
        found.append((boot.kernel.release, total, recording.end is None))

    assert found == [("6.1.0", 100, False), ("6.2", 0, True)]


def test_what_was_counted_is_told_also_where_the_writer_was_stopped(small: bytes) -> None:
    rounds, recording = read(small)

    counted = recording.counted

    assert sum(counted.counts.recorded.values()) == sum(map(len, rounds)) == 40
    assert {hits.event for hits in counted.hits} == {layout.event for layout in LAYOUTS}


def test_load_reads_events_when_they_are_asked_for(tmp_path: Path) -> None:
    recorded = record(200)
    (tmp_path / "x.rec").write_bytes(recorded.end())

    trace = kprobes.load(tmp_path / "x.rec")

    assert len(trace) == 200
    assert len(trace["read"]) == len(trace.columns("read")["a0"]) == trace.counts.recorded[1]
    assert (
        str(trace).encode() == text_of(recorded.traced).decode(errors="backslashreplace").encode()
    )


def test_numbers_of_one_event_are_those_that_were_recorded() -> None:
    recorded = Recorded()
    for counter in range(50):
        recorded.rings[0].write(Hit(layout=LAYOUTS[0], counter=counter, values=(counter,)))
    recorded.look()

    rounds, _ = read(recorded.end())
    (batch,) = next(events.batches for events in rounds if len(events))

    assert np.array_equal(batch.values[0], np.arange(50, dtype=np.uint64))
