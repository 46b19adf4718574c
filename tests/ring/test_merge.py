import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kprobes.model.events import Events, each_event
from kprobes.ring.chunk import Decoded, Shapes
from kprobes.ring.merge import Merger, in_order
from kprobes.ring.reader import decode
from tests.build.ring import Hit, IdentityClock, chunk_of, make_layout, stream

ONE = make_layout(1, ("u64",))
TWO = make_layout(2, ("string", "s8"), can_fault=True)
SHAPES = Shapes([ONE, TWO])


def drained(cpu: int, times: list[int], *, is_blocked: bool = False) -> Decoded:
    """One CPU's part of a round: even times are events of ONE, odd ones of TWO."""
    hits = [
        Hit(layout=TWO, counter=ts, values=(b"t%d" % ts, None))
        if ts % 2
        else Hit(layout=ONE, counter=ts, values=(ts,))
        for ts in times
    ]
    return decoded_of(hits, cpu, is_blocked=is_blocked)


def decoded_of(hits: list[Hit], cpu: int = 0, *, is_blocked: bool = False) -> Decoded:
    position = 1 << 40
    data = stream(hits, position) + bytes(8 * is_blocked)
    return decode(chunk_of(data, cpu=cpu, position=position), SHAPES, IdentityClock())


def times_of(events: Events) -> list[int]:
    times = [batch.ts.tolist() for batch in events.batches]
    pairs = zip(events.batch.tolist(), events.row.tolist(), strict=True)
    return [times[batch][row] for batch, row in pairs]


def test_events_wait_until_no_cpu_can_bring_an_earlier_one() -> None:
    merger = Merger()

    first = merger.push([drained(0, [10, 13]), drained(1, [11])])
    second = merger.push([drained(1, [12, 20])])
    rest, more = merger.finish(), merger.finish()

    found = [times_of(part) for part in (first, second, rest, more)]
    assert found == [[], [10, 11, 12, 13], [20], []]
    assert merger.late == 0


def test_a_blocked_cpu_holds_back_what_is_later_than_its_last_event() -> None:
    merger = Merger()
    merger.push([drained(0, [10]), drained(1, [11, 14])])

    held = merger.push([drained(0, [], is_blocked=True), drained(1, [16])])
    free = merger.push([drained(0, [12])])

    assert (times_of(held), times_of(free)) == ([10], [11, 12, 14, 16])


def test_a_blocked_cpu_cannot_hold_events_longer_than_the_patience() -> None:
    merger = Merger(patience=3)
    shown = [
        times_of(merger.push([drained(0, [], is_blocked=True), drained(1, [ts])]))
        for ts in (10, 12, 14, 16, 18)
    ]

    late = merger.push([drained(0, [11]), drained(1, [30])])

    assert shown == [[], [], [], [10], [12]]
    assert (times_of(late), merger.late) == ([11, 14, 16, 18], 1)


def test_nested_interrupts_come_out_in_the_order_of_time() -> None:
    merger = Merger()
    merger.push([drained(0, [10, 16, 12, 14, 20])])

    events = merger.finish()

    assert times_of(events) == [10, 12, 14, 16, 20]


def test_rows_keep_their_values_through_splits_and_joins() -> None:
    merger = Merger()
    merger.push([drained(0, [1, 5, 3, 2]), drained(1, [4, 6, 7])])
    parts = [merger.push([drained(0, [9])]), merger.push([drained(1, [11])]), merger.finish()]

    found = {
        ts: (value, cpu)
        for events in parts
        for batch in events.batches
        for ts, value, cpu in zip(
            batch.ts.tolist(), batch.values[0].tolist(), batch.cpu.tolist(), strict=True
        )
    }

    assert found == {
        1: (b"t1", 0),
        2: (2, 0),
        3: (b"t3", 0),
        4: (4, 1),
        5: (b"t5", 0),
        6: (6, 1),
        7: (b"t7", 1),
        9: (b"t9", 0),
        11: (b"t11", 1),
    }


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=60), st.integers(1, 9))
def test_no_event_is_lost_and_all_are_in_order_when_nobody_is_blocked(
    steps: list[tuple[int, int]], per_round: int
) -> None:
    # Time goes on by the second number at each event; a round sees all that happened before.
    merger = Merger()
    now, sent, out = 0, list[int](), list[int]()
    for i in range(0, len(steps), per_round):
        rings: dict[int, list[int]] = {}
        for cpu, step in steps[i : i + per_round]:
            now += step
            rings.setdefault(cpu, []).append(now)
            sent.append(now)
        out += times_of(merger.push([drained(cpu, times) for cpu, times in rings.items()]))
    out += times_of(merger.finish())

    assert out == sent
    assert merger.late == 0


@pytest.mark.parametrize("cpus", [1, 2])
def test_events_of_one_time_keep_the_order_of_their_ring(cpus: int) -> None:
    hits = [
        Hit(layout=TWO, counter=ts, values=(b"", n))
        if n % 2
        else Hit(layout=ONE, counter=ts, values=(n,))
        for n, ts in enumerate([4, 7, 4, 4, 7, 7], 1)
    ]

    decoded = [decoded_of(hits, cpu) for cpu in range(cpus)]

    events = in_order(batch for part in decoded for batch in part.batches)

    numbers = [(event.cpu, list(event.args.values())[-1]) for event in each_event(events)]
    for cpu in range(cpus):
        assert [n for each, n in numbers if each == cpu] == [1, 3, 4, 2, 5, 6]


def test_nothing_in_order_is_nothing() -> None:
    assert len(in_order([])) == 0
    assert len(Merger().finish()) == 0
