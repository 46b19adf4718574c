import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kprobes.errors import RingError
from kprobes.ring.chunk import Decoded, Shapes
from kprobes.ring.reader import Geometry, RingReader
from tests.build.ring import GuestRing, Hit, IdentityClock, make_layout, record

pytestmark = pytest.mark.usefixtures("few_and_many")

FIXED = make_layout(1, ("u64",))
EMPTY = make_layout(2)
TEXT = make_layout(3, ("u64", "string"))
SHAPES = Shapes([FIXED, EMPTY, TEXT])
CLOCK = IdentityClock()


def reader_of(ring: GuestRing) -> RingReader:
    return RingReader(Geometry(cpu=0, size=ring.size, slack=ring.slack), ring.copy)


def counters(decoded: list[Decoded]) -> list[int]:
    return sorted(
        count for part in decoded for batch in part.batches for count in batch.ts.tolist()
    )


def hit(kind: int, number: int) -> Hit:
    if kind == 0:
        return Hit(layout=FIXED, counter=number, values=(number,))
    if kind == 1:
        return Hit(layout=EMPTY, counter=number)
    return Hit(layout=TEXT, counter=number, values=(number, b"x" * (kind - 2)))


# What a guest does, one step at a time: write whole records of some kind, reserve one and
# leave it, commit what was left, or be read by the host.
STEPS = st.lists(
    st.one_of(
        st.integers(0, 40).map(lambda kind: ("write", kind)),
        st.integers(0, 40).map(lambda kind: ("reserve", kind)),
        st.just(("commit", 0)),
        st.just(("read", 0)),
    ),
    max_size=80,
)


class World:
    """A guest that writes and a host that reads, one step at a time."""

    def __init__(self) -> None:
        self.ring = GuestRing(size=256, slack=128)
        self.reader = reader_of(self.ring)
        self.pending: list[tuple[Hit, int]] = []
        self.written: list[int] = []
        self.seen: list[int] = []

    def step(self, step: str, kind: int, number: int) -> None:
        if step == "read":
            self.read()
        elif step == "commit" and self.pending:
            self.ring.commit(*self.pending.pop())
        elif step == "reserve":
            self.reserve(hit(kind, number))
        elif step == "write" and self.reserve(hit(kind, number)):
            self.ring.commit(*self.pending.pop())

    def reserve(self, event: Hit) -> bool:
        position = self.ring.reserve(event)
        if position is None:
            return False
        self.ring.fill(event, position)
        self.pending.append((event, position))
        self.written.append(event.counter)
        return True

    def commit_all(self) -> None:
        while self.pending:
            self.ring.commit(*self.pending.pop())

    def read(self) -> None:
        self.seen += counters(self.reader.read(self.ring.head, SHAPES, CLOCK))
        self.ring.tail = self.reader.tail


@settings(max_examples=150)
@given(STEPS)
def test_every_record_comes_out_once_whatever_the_guest_and_host_interleave(
    steps: list[tuple[str, int]],
) -> None:
    world = World()

    for number, (step, kind) in enumerate(steps):
        world.step(step, kind, number)
    world.commit_all()
    world.read()

    assert sorted(world.seen) == world.written
    assert world.reader.tail == world.ring.head
    assert world.reader.damaged == 0


@pytest.mark.parametrize("after", [[hit(0, 2), hit(0, 3)], [hit(2, 2), hit(9, 3)], [hit(40, 2)]])
def test_a_record_that_begins_in_room_given_back_may_end_after_the_head(after: list[Hit]) -> None:
    ring = GuestRing(size=1024, slack=256)
    reader = reader_of(ring)
    first, room = hit(3, 1), 64
    position = ring.reserve(first)
    assert position is not None
    stale = ring.head + room
    ring.fill(first, position)
    ring.commit(first, position)
    for event in after:
        ring.write(event)
    assert ring.head > stale

    seen = counters(reader.read(stale, SHAPES, CLOCK))
    seen += counters(reader.read(ring.head, SHAPES, CLOCK))

    assert seen == [event.counter for event in (first, *after)]
    assert reader.tail == ring.head
    assert reader.damaged == 0


def test_a_record_that_begins_before_the_end_runs_on_into_the_slack() -> None:
    ring = GuestRing(size=256, slack=64)
    reader = reader_of(ring)
    for number in range(4):
        ring.write(hit(1, number))
    reader.read(ring.head, SHAPES, CLOCK)
    ring.tail = reader.tail
    events = [hit(0, number) for number in range(10, 15)]
    assert all(ring.write(event) for event in events)

    decoded = reader.read(ring.head, SHAPES, CLOCK)

    assert [len(part) for part in decoded] == [2, 3]
    assert counters(decoded) == [10, 11, 12, 13, 14]


def test_records_of_the_lap_before_are_not_taken_again() -> None:
    ring = GuestRing(size=192, slack=48)  # 4 records of 48 bytes to the lap: same offsets again
    reader = RingReader(Geometry(cpu=0, size=256, slack=48), lambda o, n: ring.memory[o : o + n])
    ring.memory = np.zeros(256 + 48, np.uint8)
    for lap in range(2):
        position = lap * 256
        ring.memory[:48] = np.frombuffer(record(hit(0, lap), position), np.uint8)
        if lap == 0:
            reader.read(48, SHAPES, CLOCK)
            reader.tail = 256

    stale = reader.read(256 + 96, SHAPES, CLOCK)

    assert (counters(stale), reader.tail, stale[-1].is_blocked) == ([1], 256 + 48, True)


def test_positions_go_on_past_48_bits() -> None:
    ring = GuestRing(size=256, slack=64)
    start = (1 << 48) - 48
    reader = reader_of(ring)
    ring.head = ring.tail = reader.tail = start
    for number in range(3):
        assert ring.write(hit(0, number))

    decoded = reader.read(ring.head & ((1 << 48) - 1), SHAPES, CLOCK)

    assert counters(decoded) == [0, 1, 2]
    assert reader.tail == 96


@pytest.mark.parametrize("head", [264, 12, -8, 1 << 48, (1 << 48) - 8])
def test_a_head_that_no_writer_could_reach_is_an_error(head: int) -> None:
    ring = GuestRing(size=256, slack=64)

    with pytest.raises(RingError, match="cpu 0: head"):
        reader_of(ring).read(head, SHAPES, CLOCK)


def test_after_damage_with_nothing_sound_after_it_reading_goes_on_at_the_head() -> None:
    ring = GuestRing(size=256, slack=64)
    reader = reader_of(ring)
    ring.write(Hit(layout=make_layout(77), counter=1))

    lost = reader.read(ring.head, SHAPES, CLOCK)
    ring.write(hit(0, 2))
    found = reader.read(ring.head, SHAPES, CLOCK)

    assert (counters(lost), counters(found), reader.damaged) == ([], [2], 1)


def test_damage_before_the_wrap_does_not_leave_the_reader_between_records() -> None:
    ring = GuestRing(size=256, slack=64)
    reader = reader_of(ring)
    for number in range(5):
        ring.write(hit(0, number))
    reader.read(ring.head, SHAPES, CLOCK)
    ring.tail = reader.tail
    ring.write(
        Hit(layout=make_layout(77, ("u64",)), counter=5, values=(5,))
    )  # 16 bytes, 32 into the slack
    ring.write(hit(0, 6))

    lost = reader.read(ring.head, SHAPES, CLOCK)
    ring.write(hit(0, 7))
    found = reader.read(ring.head, SHAPES, CLOCK)

    assert (counters(lost), counters(found), reader.damaged) == ([], [7], 1)
    assert reader.tail == ring.head


def test_commit_words_are_looked_at_before_values_are_copied() -> None:
    # The guest commits between the two looks, while the copy still holds the old values.
    ring = GuestRing(size=256, slack=64)
    event = hit(0, 5)
    position = ring.reserve(event)
    assert position is not None
    is_committed = False

    def copy(offset: int, size: int) -> NDArray[np.uint8]:
        nonlocal is_committed
        before = ring.copy(offset, size)
        if not is_committed:
            ring.commit(event, position)
            is_committed = True
        return before

    reader = RingReader(Geometry(cpu=0, size=256, slack=64), copy)

    first = reader.read(ring.head, SHAPES, CLOCK)
    ring.fill(event, position)
    second = reader.read(ring.head, SHAPES, CLOCK)

    assert (counters(first), counters(second)) == ([], [5])


def test_lost_counts_are_differences_and_never_negative() -> None:
    reader = reader_of(GuestRing(size=256, slack=64))

    assert [reader.note_lost(total) for total in (0, 5, 5, 3, 9)] == [0, 5, 0, 0, 4]
    assert reader.lost == 9


def test_a_ring_is_a_power_of_two() -> None:
    with pytest.raises(ValueError, match="a ring of 192 bytes"):
        Geometry(cpu=0, size=192, slack=0)
