"""Statistics in little memory: what they have, and how nearly, of any times and values."""

import random
import tracemalloc
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from msgspec.structs import replace

from kprobes.export.statistics import (
    BINS,
    SLOWEST,
    TEXT,
    Durations,
    EventKey,
    RecordingSummary,
    Timeline,
    TopValues,
    readable,
)
from kprobes.sinks.names import TraceSource
from tests.build.events import Row, make_batch, make_events
from tests.build.ring import make_layout

SOURCE = TraceSource(version=(6, 1), cpus=2)
ONE: EventKey = ("kprobes", "one")
OTHER: EventKey = ("kprobes", "other")


def hits_of(timeline: Timeline, row: EventKey | None) -> dict[int, int]:
    """Return where the bins begin that have hits, and how many."""
    counts = timeline.rows[row].tolist()
    return {timeline.start + i * timeline.width: n for i, n in enumerate(counts) if n}


@pytest.mark.parametrize("unit", [1, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_bins_hold_any_times_in_any_order(unit: int, seed: int) -> None:
    rng = random.Random(seed)
    timeline = Timeline(unit)
    added: dict[EventKey | None, list[int]] = {ONE: [], OTHER: []}

    for _ in range(60):
        row = rng.choice((ONE, OTHER))
        times = [rng.getrandbits(rng.choice((20, 40, 63, 64))) for _ in range(3)]
        timeline.add(row, np.array(times, np.uint64))
        added[row] += times
        for key in timeline.rows:
            begins = Counter(ts // timeline.width * timeline.width for ts in added[key])
            assert hits_of(timeline, key) == dict(begins)

    assert BINS / 2 < timeline.used <= BINS


def test_bins_are_no_wider_than_needed() -> None:
    timeline = Timeline(10)

    for ts, width in ((12_345, 10), (12_345 + 5000, 10), (12_345 + 5120, 20), (9000, 20), (0, 40)):
        timeline.add(ONE, np.array([ts], np.uint64))
        assert timeline.width == width
    assert hits_of(timeline, ONE) == {12_320: 1, 17_320: 1, 17_440: 1, 9000: 1, 0: 1}


def test_a_row_can_be_given_weights() -> None:
    timeline = Timeline(1)
    timeline.add(ONE, np.array([5, 5, 6], np.uint64))

    timeline.add(None, np.array([6], np.uint64), 700)

    assert hits_of(timeline, ONE) == {5: 2, 6: 1}
    assert hits_of(timeline, None) == {6: 700}


@pytest.mark.parametrize("most", [300, 5000, 10**9, 2**62, 2**64 - 1])
def test_percentiles_are_within_a_fifth_of_a_percent(most: int) -> None:
    rng = random.Random(most)
    values = np.array([int(most ** rng.random()) for _ in range(3000)] + [most], np.uint64)
    durations = Durations()

    for part in np.array_split(values, 7):
        durations.add(part)

    assert (durations.count, durations.greatest) == (3001, most)
    for percent in (0, 1, 50, 90, 99, 99.9, 100):
        wanted = np.sort(values)[max(int(np.ceil(3001 * percent / 100)) - 1, 0)]
        assert abs(durations.percentile(percent) - int(wanted)) <= int(wanted) / 500
    if most < 512:
        assert durations.percentile(50) == np.sort(values)[1500]


@pytest.mark.parametrize("most", [1, 300, 10**9, 2**64 - 1])
def test_bars_have_all_durations_between_their_edges(most: int) -> None:
    rng = random.Random(most)
    values = sorted(int(most ** rng.random()) for _ in range(2000))
    durations = Durations()
    durations.add(np.array(values, np.uint64))

    begins, counts = durations.bars()

    assert counts[-1] == 0
    assert sum(counts) == 2000
    assert begins[0] <= values[0] <= values[-1] < begins[-1]
    for count, (begin, end) in zip(counts, pairwise(begins), strict=False):
        assert count == sum(begin <= value < end for value in values)


def test_too_many_values_are_counted_as_nearly_as_is_told() -> None:
    rng = random.Random(1)
    values = [
        b"often" if rng.random() < 0.2 else b"%d" % rng.getrandbits(62) for _ in range(20_000)
    ]
    top = TopValues()

    for start in range(0, 20_000, 500):
        top.add(values[start : start + 500], [1] * 500)

    (first, count), *_ = top.top(10)
    wanted = values.count(b"often")
    assert first == "often"
    assert wanted - top.error <= count <= wanted
    assert 0 < top.error <= 20_000 / 1024
    assert top.total == 20_000


def test_few_values_are_counted_exactly() -> None:
    top = TopValues()

    for _ in range(3):
        top.add([b"%d" % i for i in range(2000)], range(1, 2001))

    assert (top.error, len(top), top.total) == (0, 2000, 3 * 2000 * 2001 // 2)
    assert top.top(2) == [("1999", 6000), ("1998", 5997)]


def test_the_slowest_calls_are_kept_however_they_come() -> None:
    layout = make_layout(1, ("u32", "duration"), event="x", has_caller=True)
    numbers = list(range(1, 2001))
    for order in (numbers, numbers[::-1], random.Random(1).sample(numbers, 2000)):
        summary = RecordingSummary(SOURCE)
        for start in range(0, 2000, 250):
            rows = [Row(ts=5, values=(n, n)) for n in order[start : start + 250]]
            summary.add(make_events([make_batch(layout, rows)]))

        kept = summary.events["kprobes", "x"].slowest

        assert [(call.duration, call.args) for call in kept] == [
            (n, f"a0={n}") for n in numbers[: -SLOWEST - 1 : -1]
        ]


def test_rows_that_are_no_events_are_not_counted() -> None:
    layout = make_layout(1, ("u32",), event="x")
    batch = make_batch(layout, [Row(ts=ts, values=(ts,)) for ts in (1, 2, 3)])
    summary = RecordingSummary(SOURCE)

    summary.add(make_events([batch], [(0, 2), (0, 1)]))

    assert (summary.hits, summary.first, summary.last) == (2, 2, 3)
    assert summary.events["kprobes", "x"].fields["a0"].top(9) == [("2", 1), ("3", 1)]


def test_functions_of_one_event_are_counted_together_and_each() -> None:
    one = make_layout(1, ("u32",), event="x")
    two = make_layout(2, ("u32", "s8"), event="x", where="vfs_write+0x0/0x1")
    summary = RecordingSummary(SOURCE)

    for layout, rows in ((one, [(1,), (2,)]), (two, [(1, -2)])):
        summary.add(make_events([make_batch(layout, [Row(values=values) for values in rows])]))

    (event,) = summary.events.values()
    assert event.functions.top(9) == [("vfs_read", 2), ("vfs_write", 1)]
    assert event.fields["a0"].top(9) == [("1", 2), ("2", 1)]
    assert event.fields["a1"].top(9) == [("-2", 1)]


def test_an_enums_numbers_are_named() -> None:
    plain = make_layout(1, ("u32",), event="x")
    layout = replace(plain, fields=(replace(plain.fields[0], enumerators=((1, "ONE"),)),))
    summary = RecordingSummary(SOURCE)

    summary.add(make_events([make_batch(layout, [Row(values=(n,)) for n in (1, 1, 2)])]))

    assert summary.events["kprobes", "x"].fields["a0"].top(9) == [("ONE", 2), ("2", 1)]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (b"plain", "plain"),
        (b"\xff\x1b[0m", "\\xff\\x1b[0m"),
        ("\u2028\u202e".encode(), "\\u2028\\u202e"),
        (b"x" * TEXT, "x" * TEXT),
        (b"x" * (TEXT + 1), "x" * (TEXT - 1) + "…"),
        ("\U0001f600" * 1000, "\U0001f600" * (TEXT - 1) + "…"),
        (("\U0001f600" * 1000).encode(), "\U0001f600" * (TEXT - 1) + "…"),
        (b"\xff" * 1000, ("\\xff" * 30)[: TEXT - 1] + "…"),
    ],
    ids=["plain", "control", "separators", "fits", "cut", "wide", "wide-bytes", "no-text"],
)
def test_texts_are_visible_and_short(text: bytes | str, shown: str) -> None:
    assert readable(text) == shown


def test_memory_does_not_grow_with_the_events() -> None:
    layout = make_layout(1, ("u64", "string", "duration"), event="x", has_caller=True)
    rng = random.Random(1)
    summary = RecordingSummary(SOURCE)

    def add(start: int) -> None:
        rows = [
            Row(
                ts=(start + i) * 10**6,
                comm=b"%d" % rng.getrandbits(40),
                caller=rng.getrandbits(12),
                values=(rng.getrandbits(64), b"%d" % rng.getrandbits(90) * 40, rng.getrandbits(30)),
            )
            for i in range(500)
        ]
        summary.add(make_events([make_batch(layout, rows)]))

    for number in range(20):
        add(500 * number)
    tracemalloc.start()
    for number in range(20, 60):
        add(500 * number)
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    # 20,000 events with 1,000 bytes of text each.
    assert grown < 4_000_000
