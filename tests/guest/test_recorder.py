"""Rings of an arena to events in order, and to counts."""

import io
import threading
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pytest

from kprobes.errors import GuestReplacedError, KprobesError
from kprobes.guest.arena import Arena, reset
from kprobes.guest.clock import GuestClock
from kprobes.guest.guest import GuestMemory
from kprobes.guest.recorder import Recorder
from kprobes.guest.rings import MappedRange
from kprobes.guest.triggers import TriggerWords
from kprobes.model.abi import CPU_SHIFT, LOAD_SIZE, PERCPU_LIMIT, PERCPU_LOST, PERCPU_WORD
from kprobes.model.events import Events
from kprobes.model.recording import RecordedRound
from kprobes.model.resolved import RecordLayout
from kprobes.recording import Recording
from kprobes.recording_writer import FileWriter
from kprobes.units import U64, Addr
from tests.build.guest import CPUS, DATA, RING, make_arena, make_memory
from tests.build.recorded import KERNEL, SYMBOLS, Full, Memory
from tests.build.ring import Hit, make_layout, record
from tests.build.turns import short_switch_interval

PLAIN, TEXT = make_layout(1, ["u32"]), make_layout(2, ["string", "s16"])


class Writer:
    """Writes records into a ring as the guest does."""

    def __init__(self, memory: GuestMemory, arena: Arena, cpu: int) -> None:
        self.memory, self.arena, self.cpu = memory, arena, cpu
        self.head = 0

    def write(self, hit: Hit, *, is_committed: bool = True) -> None:
        data = record(hit, self.head, is_committed=is_committed)
        self.memory.write(self.arena.ring(self.cpu) + self.head % RING, data)
        self.head += len(data)
        self.memory.set_u64(
            self.arena.words(self.cpu) + PERCPU_WORD, self.cpu << CPU_SHIFT | self.head
        )


class _Parted(GuestClock):
    # The clock of CPUs whose counters differ.
    is_fit: ClassVar[bool] = False


def _guest(*layouts: RecordLayout) -> tuple[Recorder, list[Writer], GuestMemory, Arena]:
    memory, arena = make_memory(), make_arena()
    reset(arena, memory)
    recorder = Recorder(arena, memory, GuestClock("f", Addr(1)))
    recorder.add(layouts)
    return recorder, [Writer(memory, arena, cpu) for cpu in range(CPUS)], memory, arena


def _times(events: Events) -> list[int]:
    times: list[list[int]] = [batch.ts.tolist() for batch in events.batches]
    places = zip(events.batch.tolist(), events.row.tolist(), strict=True)
    return [times[batch][row] for batch, row in places]


def _rest(recorder: Recorder) -> list[int]:
    return [ts for events in recorder.rest() for ts in _times(events)]


def test_records_of_all_cpus_come_in_the_order_of_time() -> None:
    recorder, writers, _, _ = _guest(PLAIN)
    for ts in range(100):
        writers[ts // 7 % CPUS].write(Hit(layout=PLAIN, counter=ts, values=(ts,)))

    found = [*_times(recorder.drain()), *_rest(recorder)]

    assert found == list(range(100))
    assert recorder.counts().recorded == {1: 100}


def test_what_was_read_is_free_for_the_guest_again_and_laps_are_endless() -> None:
    recorder, (writer, _), memory, arena = _guest(PLAIN)
    found: list[int] = []
    for ts in range(3 * RING // PLAIN.size):
        writer.write(Hit(layout=PLAIN, counter=ts, values=(ts & 0xFFFF_FFFF,)))
        if ts % 50 == 0:
            found += _times(recorder.drain())

    found += _rest(recorder)

    assert found == list(range(len(found)))
    assert len(found) == 3 * RING // PLAIN.size
    assert memory.u64(arena.words(0) + PERCPU_LIMIT) == writer.head + RING


def test_a_ring_that_was_not_read_stays_taken() -> None:
    recorder, _, memory, arena = _guest(PLAIN)
    before = memory.u64(arena.words(1) + PERCPU_LIMIT)

    recorder.drain()

    assert memory.u64(arena.words(1) + PERCPU_LIMIT) == before


def test_a_record_that_is_not_committed_waits_and_is_not_lost() -> None:
    recorder, (writer, _), _, _ = _guest(PLAIN)
    start = writer.head
    hit = Hit(layout=PLAIN, counter=5, values=(7,))
    writer.write(hit, is_committed=False)
    writer.write(Hit(layout=PLAIN, counter=6, values=(8,)))
    early = _times(recorder.drain())

    head, writer.head = writer.head, start
    writer.write(hit)
    writer.head = head
    writer.memory.set_u64(writer.arena.words(0) + PERCPU_WORD, head)

    assert early + _rest(recorder) == [5, 6]


def test_lost_and_missed_are_counted() -> None:
    recorder, writers, memory, arena = _guest(PLAIN, TEXT)
    writers[0].write(Hit(layout=TEXT, counter=1, values=(b"abc", -5)))
    memory.set_u64(arena.missed + 8 * TEXT.event_id, 4)
    memory.set_u64(arena.words(0) + PERCPU_LOST, 2)
    memory.set_u64(arena.words(1) + PERCPU_LOST, 3)

    _rest(recorder)

    counts = recorder.counts()
    assert (counts.recorded, counts.missed) == ({2: 1}, {1: 0, 2: 4})
    assert (counts.lost, counts.damaged) == (5, 0)


def test_calls_without_an_instance_are_counted_from_when_the_recording_began() -> None:
    recorder, _, memory, arena = _guest(PLAIN)
    memory.set_u64(arena.nmissed + 8 * PLAIN.event_id, 3)
    recorder.begin()
    memory.set_u64(arena.nmissed + 8 * PLAIN.event_id, 7)
    recorder.add([TEXT])
    memory.set_u64(arena.nmissed + 8 * TEXT.event_id, 2)

    assert recorder.counts().nmissed == {PLAIN.event_id: 4, TEXT.event_id: 2}
    recorder.begin()
    assert recorder.counts().nmissed == {PLAIN.event_id: 0, TEXT.event_id: 0}


def test_strings_and_signs_come_through() -> None:
    recorder, writers, _, _ = _guest(TEXT)
    writers[1].write(Hit(layout=TEXT, counter=1, values=(b"abc", -5)))
    writers[1].write(Hit(layout=TEXT, counter=2, values=(None, 5)))

    batches = [batch for events in recorder.rest() for batch in events.batches]

    values = [np.concatenate([batch.values[n] for batch in batches]).tolist() for n in (0, 1)]
    assert values == [[b"abc", None], [-5, 5]]
    assert {cpu for batch in batches for cpu in batch.cpu.tolist()} == {1}


def test_probes_that_join_a_recording_can_be_counted_at_any_time() -> None:
    recorder, writers, _, _ = _guest(PLAIN)
    joining = threading.Thread(
        target=lambda: [recorder.add([make_layout(event_id)]) for event_id in range(3, 60)]
    )

    with short_switch_interval():
        joining.start()
        for ts in range(200):
            writers[0].write(Hit(layout=PLAIN, counter=ts, values=(ts,)))
            recorder.drain()
            assert recorder.counts().missed[1] == 0
        joining.join()

    assert set(recorder.counts().missed) == {1, *range(3, 60)}
    assert recorder.counts().recorded == {1: 200}


def _is_another() -> None:
    raise GuestReplacedError("the guest was rebooted")


def test_rings_of_a_guest_that_is_another_one_are_neither_read_nor_written() -> None:
    recorder, writers, memory, arena = _guest(PLAIN)
    for ts in range(4):
        writers[ts % CPUS].write(Hit(layout=PLAIN, counter=ts, values=(ts,)))
    shown = _times(recorder.drain())
    limits = [memory.u64(arena.words(cpu) + PERCPU_LIMIT) for cpu in range(CPUS)]
    writers[0].write(Hit(layout=PLAIN, counter=9, values=(9,)))
    recorder.check = _is_another

    with pytest.raises(GuestReplacedError):
        recorder.drain()

    # What was read before is shown all the same.
    assert shown + _rest(recorder) == [0, 1, 2, 3]
    assert [memory.u64(arena.words(cpu) + PERCPU_LIMIT) for cpu in range(CPUS)] == limits


def test_words_of_a_guest_that_is_another_are_not_given() -> None:
    recorder, _, memory, _ = _guest(PLAIN)
    assert recorder.checked_words() is None
    recorder.words = TriggerWords(memory, Addr(DATA))
    recorder.check = _is_another

    with pytest.raises(GuestReplacedError):
        recorder.checked_words()


@pytest.mark.parametrize(("times", "told"), [((5, 6, 7), 0), ((5, 5, 6, 6), 1)])
def test_a_clock_that_stands_between_hits_is_told_once(times: tuple[int, ...], told: int) -> None:
    recorder, (writer, _), _, _ = _guest(PLAIN)
    said: list[str] = []
    recorder.warn = said.append

    for _ in range(2):
        for ts in times:
            writer.write(Hit(layout=PLAIN, counter=ts, values=(1,)))
        recorder.drain()

    assert len(said) == told
    assert all("tsc=reliable" in words for words in said)


def test_a_clock_whose_cpus_part_is_told_once() -> None:
    recorder, _, _, _ = _guest(PLAIN)
    said: list[str] = []
    recorder.warn = said.append
    recorder.drain()
    assert not said

    recorder.clock = _Parted("f", Addr(1))
    for _ in range(2):
        recorder.drain()

    assert len(said) == 1
    assert "`--clock local`" in said[0]


def test_one_time_on_two_cpus_is_no_clock_that_stands() -> None:
    recorder, writers, _, _ = _guest(PLAIN)
    recorder.warn = pytest.fail

    for writer in writers:
        writer.write(Hit(layout=PLAIN, counter=5, values=(1,)))

    assert len(recorder.drain()) + len(_rest(recorder)) == CPUS


def _hit(layout: RecordLayout, ts: int) -> Hit:
    return Hit(layout=layout, counter=ts, values=(ts,) if layout is not TEXT else (b"", ts))


def test_what_comes_later_is_recorded_beside_what_was_there() -> None:
    recorder, (writer, _), _, _ = _guest(PLAIN)
    writer.write(_hit(PLAIN, 1))
    early = _times(recorder.drain())
    recorder.add([TEXT])
    writer.write(_hit(TEXT, 2))
    writer.write(_hit(PLAIN, 3))

    assert early + _rest(recorder) == [1, 2, 3]
    assert recorder.counts().recorded == {PLAIN.event_id: 2, TEXT.event_id: 1}


def test_of_what_is_ignored_all_that_was_there_is_taken_and_nothing_that_comes_later() -> None:
    recorder, (writer, other), _, _ = _guest(PLAIN, TEXT)
    writer.write(_hit(PLAIN, 1))
    recorder.ignore([PLAIN.event_id])
    found = _times(recorder.drain())

    # Somebody was still in its code.
    writer.write(_hit(PLAIN, 2))
    other.write(_hit(TEXT, 3))
    found += _rest(recorder)

    assert found == [1, 3]
    assert recorder.counts().recorded == {PLAIN.event_id: 1, TEXT.event_id: 1}


def test_a_record_that_was_reserved_when_its_event_was_ignored_is_waited_for() -> None:
    recorder, (writer, _), memory, arena = _guest(PLAIN)
    hit = _hit(PLAIN, 5)
    writer.write(hit, is_committed=False)
    recorder.ignore([PLAIN.event_id])
    early = _times(recorder.drain())

    head, writer.head = writer.head, 0
    writer.write(hit)
    assert writer.head == head
    found = early + _times(recorder.drain())
    writer.write(_hit(PLAIN, 6))

    assert found + _rest(recorder) == [5]
    assert memory.u64(arena.words(0) + PERCPU_LIMIT) == writer.head + RING


@pytest.mark.parametrize("is_drained", [False, True])
def test_an_event_that_comes_again_is_taken_again(is_drained: bool) -> None:
    recorder, (writer, _), _, _ = _guest(PLAIN)
    recorder.ignore([PLAIN.event_id])
    if is_drained:
        recorder.drain()
    recorder.add([PLAIN])
    recorder.drain()

    writer.write(_hit(PLAIN, 1))

    assert _rest(recorder) == [1]


def test_a_recording_passes_over_what_the_one_before_left() -> None:
    recorder, (writer, _), _, _ = _guest(PLAIN)
    writer.write(_hit(PLAIN, 1))
    recorder.begin()
    writer.write(_hit(PLAIN, 2))

    assert _rest(recorder) == [2]
    assert recorder.counts().recorded == {PLAIN.event_id: 1}


def test_records_that_are_not_shown_are_passed_over_until_they_are() -> None:
    recorder, (writer, _), _, _ = _guest(PLAIN)
    recorder.add([TEXT], are_shown=False)
    writer.write(Hit(layout=TEXT, counter=1, values=(b"abc", -5)))
    writer.write(Hit(layout=PLAIN, counter=2, values=(7,)))
    before = _times(recorder.drain())
    recorder.show([TEXT.event_id])
    writer.write(Hit(layout=TEXT, counter=3, values=(b"abc", -5)))

    assert before + _rest(recorder) == [2, 3]
    assert recorder.counts().recorded == {1: 1, 2: 1}


def test_what_is_recorded_already_is_taken_while_its_code_changes() -> None:
    recorder, (writer, _), _, _ = _guest(PLAIN)
    recorder.begin()
    recorder.add([PLAIN])
    writer.write(_hit(PLAIN, 1))

    # A change in several pauses, which fails: nobody shows anything.
    recorder.add([PLAIN, TEXT], are_shown=False)
    writer.write(_hit(PLAIN, 2))
    writer.write(Hit(layout=TEXT, counter=3, values=(b"abc", -5)))
    before = _times(recorder.drain())
    writer.write(_hit(PLAIN, 4))

    assert before + _rest(recorder) == [1, 2, 4]
    assert recorder.counts().recorded == {PLAIN.event_id: 3}


@pytest.mark.parametrize("end", ["ignore", "begin"])
def test_what_was_recorded_before_is_not_taken_while_it_comes_again(end: str) -> None:
    recorder, (writer, _), _, _ = _guest(PLAIN)
    recorder.begin()
    recorder.add([PLAIN])
    if end == "ignore":
        recorder.ignore([PLAIN.event_id])
    else:
        recorder.begin()

    recorder.add([PLAIN], are_shown=False)
    writer.write(_hit(PLAIN, 1))
    hidden = _times(recorder.drain())
    recorder.show([PLAIN.event_id])
    writer.write(_hit(PLAIN, 2))

    assert (hidden, _rest(recorder)) == ([], [2])


WAIT_S = 10


@pytest.mark.parametrize("act", ["counts", "ignore", "begin"])
def test_while_the_guest_is_read_others_need_not_wait(
    act: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, _, _, _ = _guest(PLAIN)
    were_blocked: list[bool] = []

    def in_turn(name: str) -> None:
        found = getattr(MappedRange, name)

        def read(self: MappedRange, *args: int) -> object:
            # Who drains may have the guest stopped, which is what we wait for.
            other = threading.Thread(target=recorder.add, args=([TEXT],), daemon=True)
            other.start()
            other.join(WAIT_S)
            were_blocked.append(other.is_alive())
            return found(self, *args)

        monkeypatch.setattr(MappedRange, name, read)

    in_turn("read")
    in_turn("u64")
    arguments = ([1],) if act == "ignore" else ()
    getattr(recorder, act)(*arguments)

    assert were_blocked
    assert not any(were_blocked)


def test_what_hits_take_is_read_by_event_in_seconds() -> None:
    recorder, _, memory, arena = _guest(PLAIN, TEXT)
    for number, (hits, ticks) in {1: (5, 2_000_000_000), 2: (7, 3)}.items():
        memory.set_u64(arena.loads + LOAD_SIZE * number, hits)
        memory.set_u64(arena.loads + LOAD_SIZE * number + 8, ticks)

    hits, code_s = recorder.loads()

    # The guest's own clock counts nanoseconds.
    assert hits.tolist() == [0, 5, 7]
    assert code_s.tolist() == pytest.approx([0, 2.0, 3e-9])


def _kept(file: io.BytesIO) -> list[int]:
    recording = Recording(io.BytesIO(file.getvalue()))
    return [t for boot in recording.boots() for events in boot.rounds for t in _times(events)]


def test_a_writer_gets_what_would_be_drained() -> None:
    recorder, writers, _, _ = _guest(PLAIN, TEXT)
    file, count = Memory(), 3 * RING // PLAIN.size
    with FileWriter(file) as recorder.writer:
        recorder.writer.begin(KERNEL, SYMBOLS)
        for ts in range(count):
            writers[ts % CPUS].write(Hit(layout=PLAIN, counter=ts, values=(ts & 0xFFFF,)))
            if not ts % 50:
                assert len(recorder.drain()) == 0
        writers[0].write(Hit(layout=TEXT, counter=count, values=(b"x", 5)))
        assert _rest(recorder) == []

    assert _kept(file) == list(range(count + 1))
    assert recorder.counts().recorded == {1: count, 2: 1}


def test_of_much_a_look_keeps_a_part_and_the_order_is_that_of_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = 20 * PLAIN.size
    monkeypatch.setattr("kprobes.guest.recorder._MOST_KEPT", CPUS * most)
    monkeypatch.setattr("kprobes.guest.recorder._LOOKS", 2)
    monkeypatch.setattr("kprobes.ring.reader._MOST", 10 * PLAIN.size)
    monkeypatch.setattr("kprobes.recording._MAX_ROUND", (CPUS + 1) * most)
    recorder, writers, _, _ = _guest(PLAIN)
    file, count = Memory(), RING // PLAIN.size
    with FileWriter(file) as recorder.writer:
        recorder.writer.begin(KERNEL, SYMBOLS)
        for ts in range(count):
            writers[ts // 7 % CPUS].write(Hit(layout=PLAIN, counter=ts, values=(ts & 0xFFFF,)))
        assert _rest(recorder) == []

    assert _kept(file) == list(range(count))
    assert recorder.counts().recorded == {1: count}


class Rounds(FileWriter):
    """Remembers since when the events of each look may have been made."""

    def __init__(self) -> None:
        super().__init__(Memory())
        self.since: list[int] = []

    def write_round(self, layouts: Sequence[RecordLayout], end: RecordedRound) -> None:
        self.since.append(end.since_ns)
        super().write_round(layouts, end)


def test_what_comes_late_may_be_as_old_as_the_look_that_it_was_too_late_for() -> None:
    recorder, (writer, other), _, _ = _guest(PLAIN)
    with Rounds() as rounds:
        recorder.writer = rounds
        rounds.begin(KERNEL, SYMBOLS)
        late = Hit(layout=PLAIN, counter=1, values=(1,))
        writer.write(late, is_committed=False)
        other.write(Hit(layout=PLAIN, counter=2, values=(2,)))
        recorder.drain()
        writer.head = 0
        writer.write(late)
        recorder.drain()
        other.write(Hit(layout=PLAIN, counter=3, values=(3,)))
        recorder.drain()

    first, second, third = rounds.since
    assert first == second < third


def test_what_is_never_committed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kprobes.guest.recorder._MOST_KEPT", CPUS * PLAIN.size)
    recorder, (writer, other), _, _ = _guest(PLAIN)
    file = Memory()
    with FileWriter(file) as recorder.writer:
        recorder.writer.begin(KERNEL, SYMBOLS)
        writer.write(Hit(layout=PLAIN, counter=1, values=(1,)), is_committed=False)
        for ts in range(2, 9):
            for each in (writer, other):
                each.write(Hit(layout=PLAIN, counter=ts, values=(ts,)))
        assert _rest(recorder) == []

    assert _kept(file) == list(range(2, 9))


def test_what_cannot_be_written_stays_in_the_ring() -> None:
    recorder, (writer, _), memory, arena = _guest(PLAIN)
    before = memory.u64(arena.words(0) + PERCPU_LIMIT)
    with FileWriter(Full()) as recorder.writer:
        recorder.writer.begin(KERNEL, SYMBOLS)
        for ts in range(200):
            writer.write(Hit(layout=PLAIN, counter=ts * 0x9E3779B97F4A7C15 & U64, values=(ts,)))

        with pytest.raises(KprobesError, match="No space left"):
            recorder.drain()

    assert memory.u64(arena.words(0) + PERCPU_LIMIT) == before
