"""Charts, compared with events one by one; and pages of very many different values."""

import random
import re
import tracemalloc
from collections import Counter
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from kprobes.export.charts import (
    BINS,
    SLOWEST,
    TEXT,
    EventKey,
    RecordingSummary,
    Timeline,
    bars,
    readable,
)
from kprobes.sinks.names import TraceSource
from kprobes.statistics import MAX_EXACT, Distribution
from tests.build.events import Row, make_batch, make_events
from tests.build.kernel import TEXT as ADDR
from tests.build.ring import make_layout
from tests.export.test_html import Page, page_of

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


@pytest.mark.parametrize("count", [2000, 3 * MAX_EXACT])
@pytest.mark.parametrize("most", [1, 300, 10**9, 2**63, 2**64 - 1])
def test_bars_have_all_durations_between_their_edges(most: int, count: int) -> None:
    rng = random.Random(most)
    values = sorted([*(int(most ** rng.random()) for _ in range(count - 1)), most])
    durations = Distribution(is_signed=False)
    durations.add(np.array(values, np.uint64))

    begins, counts = bars(durations)

    assert durations.is_exact == (len(set(values)) <= MAX_EXACT)
    assert counts[-1] == 0
    assert sum(counts) == count
    assert begins[0] <= values[0] <= values[-1] < begins[-1]
    for found, (begin, end) in zip(counts, pairwise(begins), strict=False):
        assert found == sum(begin <= value < end for value in values)


def test_there_are_eight_bars_for_each_doubling() -> None:
    durations = Distribution(is_signed=False)
    durations.add(np.array([64, 2**64 - 1], np.uint64))

    begins, _ = bars(durations)

    assert len(begins) == 8 * (64 - 6) + 1
    assert begins[::8] == [1 << power for power in range(6, 65)]
    ratios = [end / begin for begin, end in pairwise(begins)]
    np.testing.assert_allclose(ratios, 2 ** (1 / 8), rtol=0.01)


def test_the_slowest_calls_are_kept_however_they_come() -> None:
    layout = make_layout(1, ("u32", "duration"), event="x", has_caller=True)
    numbers = list(range(1, 2001))
    for order in (numbers, numbers[::-1], random.Random(1).sample(numbers, 2000)):
        summary = RecordingSummary(SOURCE)
        for start in range(0, 2000, 250):
            rows = [Row(ts=5, values=(n, n)) for n in order[start : start + 250]]
            summary.add(make_events([make_batch(layout, rows)]))

        kept = summary.slowest["kprobes", "x"].calls

        assert [(call.duration, call.args) for call in kept] == [
            (n, f"a0={n}") for n in numbers[: -SLOWEST - 1 : -1]
        ]


def test_rows_that_are_no_events_are_not_counted() -> None:
    layout = make_layout(1, ("u32",), event="x")
    batch = make_batch(layout, [Row(ts=ts, values=(ts,)) for ts in (1, 2, 3)])
    summary = RecordingSummary(SOURCE)

    summary.add(make_events([batch], [(0, 2), (0, 1)]))

    summary.statistics.finish()
    assert (summary.statistics.hits, summary.statistics.span_ns) == (2, 1)
    numbers = summary.statistics.events["kprobes", "x"].fields["a0", "u32", "number"].numbers
    assert numbers is not None
    assert numbers.most_frequent(9) == [(2, 1), (3, 1)]
    assert hits_of(summary.timeline, ("kprobes", "x")) == {0: 2}


def test_an_event_that_was_not_chosen_at_all_is_none() -> None:
    batches = [
        make_batch(make_layout(number, ("u32",), event=name), [Row(ts=number, values=(1,))])
        for number, name in ((1, "x"), (2, "y"))
    ]
    summary = RecordingSummary(SOURCE)

    summary.add(make_events(batches, [(1, 0)]))

    summary.statistics.finish()
    assert list(summary.statistics.events) == [("kprobes", "y")]
    assert list(summary.timeline.rows) == [("kprobes", "y")]


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
    summary.statistics.finish()
    tracemalloc.start()
    for number in range(20, 60):
        add(500 * number)
    summary.statistics.finish()
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    # 20,000 events with 1,000 bytes of text each.
    assert grown < 4_000_000


def _different(count: int) -> tuple[Page, NDArray[np.uint64], list[bytes | None]]:
    # Of events that have as many different values and durations, and one frequent text.
    rng = random.Random(5)
    took = np.array(rng.sample(range(1, 10**9), count), np.uint64)
    paths = [
        b"often" if rng.random() < 0.3 else b"%d" % number if number % 9 else None
        for number in range(count)
    ]
    layout = make_layout(
        1,
        ("s64", "x64", "string", "duration"),
        event="x",
        has_caller=True,
        can_fault=True,
        names=("got", "file", "path", "duration"),
    )
    rows = [
        Row(
            ts=10**9 + number,
            values=(None if number % 9 == 0 else -number, 16 * number, path, duration),
        )
        for number, (path, duration) in enumerate(zip(paths, took.tolist(), strict=True), 1)
    ]
    events = make_events([make_batch(layout, rows)])
    with TemporaryDirectory() as directory:
        return Page(page_of([events], Path(directory))), took, paths


def test_percentiles_of_very_many_values_are_as_near_as_the_page_says() -> None:
    page, took, _ = _different(9000)

    (row,) = page.tables["Events", "event"]
    shown = [int(title.replace(",", "")) for _, title in row[4:]]
    wanted = np.percentile(took, (50, 90, 99, 100), method="inverted_cdf")
    np.testing.assert_allclose(shown, wanted, rtol=1 / 128)
    assert shown[3] == wanted[3]
    words = "Percentiles are within 1/128, as more than 4,096 values are different."
    assert f"How long 9,000 calls took. {words}" in page.text
    assert "are exact" not in page.text
    trace = page.figures[1]["data"][0]
    bars, _ = np.histogram(took, np.round(np.array(trace["x"]) * 10**9))
    assert trace["y"] == [*bars.tolist(), 0]


def test_of_very_many_numbers_there_are_percentiles() -> None:
    page, _, _ = _different(9000)

    got = page.texts("x", "got")
    files = [(label, int(value, 16)) for label, value in page.texts("x", "file")]
    assert [label for label, _ in got] == ["min", "p50", "p90", "p99", "max"]
    numbers = [-number for number in range(1, 9001) if number % 9]
    wanted = np.percentile(numbers, (0, 50, 90, 99, 100), method="inverted_cdf")
    np.testing.assert_allclose([int(value) for _, value in got], wanted, rtol=1 / 128)
    wanted = np.percentile(np.arange(1, 9001) * 16, (0, 50, 90, 99, 100), method="inverted_cdf")
    np.testing.assert_allclose([value for _, value in files], wanted, rtol=1 / 128)
    assert "Of 8,000 values; 1,000 could not be read. Percentiles are within 1/128" in page.text


def test_counts_of_very_many_texts_are_at_least_so_many() -> None:
    page, _, paths = _different(9000)

    (often, count, _), (fault, faults, _), (others, rest, _) = page.texts("x", "path")
    found = re.search(r"\+: at least so many, and at most ([\d,]+) more, as more than", page.text)
    assert found is not None
    error, least = int(found[1].replace(",", "")), int(count.removesuffix("+").replace(",", ""))
    assert (often, count[-1:], others) == ('"often"', "+", "others, at most")
    assert least <= paths.count(b"often") <= least + error
    assert 0 < error <= 9000 / 512
    # Those are known.
    assert (fault, faults) == ("(fault)", f"{paths.count(None)}")
    assert int(rest.replace(",", "")) == 9000 - least - paths.count(None)


@pytest.mark.parametrize(("count", "words"), [(512, "512"), (513, "more than 512")])
def test_texts_that_all_occur_once_are_only_counted(count: int, words: str, tmp_path: Path) -> None:
    layout = make_layout(1, ("string",), event="x", names=("path",))
    rows = [Row(values=(b"%d" % number,)) for number in range(count)]

    page = Page(page_of([make_events([make_batch(layout, rows)])], tmp_path))

    assert page.texts("x", "path") == [[f"{words} different ones", f"{count}", "100.0 %"]]
    assert "+:" not in page.text


def test_values_look_as_in_a_trace_file(tmp_path: Path) -> None:
    layout = make_layout(
        1, ("x32", "u32", "char", "symstr"), event="x", names=("flags", "state", "letter", "fn")
    )
    state = replace(layout.fields[1], enumerators=((1, "ONE"),))
    fields = (layout.fields[0], state, *layout.fields[2:])
    rows = [Row(values=(255, n, 65, ADDR)) for n in (1, 1, 2)]
    batch = make_batch(replace(layout, fields=fields), rows)

    page = Page(page_of([make_events([batch])], tmp_path))

    assert page.texts("x", "flags") == [["0xff", "3", "100.0 %"]]
    assert page.texts("x", "state") == [["ONE", "2", "66.7 %"], ["2", "1", "33.3 %"]]
    assert page.texts("x", "letter") == [["'A'", "3", "100.0 %"]]
    assert page.texts("x", "fn") == [[f'"{ADDR:#x}"', "3", "100.0 %"]]


def test_fields_of_one_name_are_told_apart_by_their_types(tmp_path: Path) -> None:
    one = make_layout(1, ("u32",), event="x", names=("got",))
    two = make_layout(2, ("s8",), event="x", names=("got",), where="vfs_write+0x0/0x1")
    batches = [make_batch(one, [Row(values=(7,))] * 2), make_batch(two, [Row(values=(-1,))])]

    page = Page(page_of([make_events(batches)], tmp_path))

    assert page.texts("x", "got:u32") == [["7", "2", "100.0 %"]]
    assert page.texts("x", "got:s8") == [["-1", "1", "100.0 %"]]
    assert [row[:2] for row in page.texts("x", "function")] == [
        ["vfs_read", "2"],
        ["vfs_write", "1"],
    ]
