"""Statistics by columns, compared with numpy's own and with counts of events one by one."""

import tracemalloc
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import kprobes
from kprobes.model.events import Events, each_event, kept_of
from kprobes.open_recording import opened_recording
from kprobes.sinks.names import TraceSource
from kprobes.statistics import (
    ERROR,
    MAX_EXACT,
    MAX_TASKS,
    MAX_VALUES,
    Distribution,
    FrequentValues,
    Statistics,
    TimeBins,
)
from tests.build.events import Row, make_batch, make_events
from tests.build.recorded import CPUS, KERNEL, SYMBOLS, hits, record, recorded
from tests.build.ring import make_layout

SOURCE = TraceSource(version=(6, 1), cpus=CPUS)
SIGNED, UNSIGNED = np.dtype(np.int64), np.dtype(np.uint64)
EXTREMES = {
    SIGNED: (-(1 << 63), -(1 << 63) + 1, -1, 0, 1, (1 << 63) - 1, (1 << 53) + 1, -(1 << 53) - 1),
    UNSIGNED: (0, 1, 63, 64, 127, 128, 129, (1 << 64) - 1, (1 << 64) - 2, (1 << 63), (1 << 63) - 1),
}
PERCENTS = range(1, 101)


def distribution(parts: Sequence[NDArray[Any]], dtype: np.dtype[Any]) -> Distribution:
    found = Distribution(is_signed=dtype == SIGNED)
    for part in parts:
        found.add(part)
    return found


def many(dtype: np.dtype[Any], seed: int, bits: float) -> NDArray[Any]:
    """Return more different numbers than are counted one by one, over so many powers of two."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(MAX_EXACT + 1, 3 * MAX_EXACT))
    sizes = np.minimum(2.0 ** rng.uniform(14, 14 + bits, count), 2.0**62).astype(dtype)
    if dtype == SIGNED:
        sizes *= rng.choice(np.array([-1, 1], dtype), count)
    return np.concatenate([sizes, np.arange(MAX_EXACT, dtype=dtype)])


def exact(values: NDArray[Any], percent: int) -> int:
    """Return the least number that so many % do not exceed, by a rank that is not rounded.

    numpy's rank is: 0.28 * 11325 is a little more than 3171.
    """
    found = int(np.sort(values)[-(-percent * len(values) // 100) - 1])
    if percent * len(values) % 100:
        assert found == int(np.percentile(values, percent, method="inverted_cdf"))
    return found


@given(data=st.data(), dtype=st.sampled_from([SIGNED, UNSIGNED]))
def test_percentiles_of_few_numbers_are_numpys(data: st.DataObject, dtype: np.dtype[Any]) -> None:
    limits = np.iinfo(dtype)
    numbers = st.integers(int(limits.min), int(limits.max)) | st.sampled_from(EXTREMES[dtype])
    values = np.array(data.draw(st.lists(numbers, min_size=1, max_size=60)), dtype)
    cut = data.draw(st.integers(0, len(values)))

    found = distribution([values[:cut], values[cut:]], dtype)

    assert found.is_exact
    assert (found.count, found.least, found.most) == (len(values), values.min(), values.max())
    assert found.total == sum(values.tolist())
    ordered: list[int] = np.sort(values).tolist()
    assert [found.percentile(each) for each in PERCENTS] == [
        ordered[max(-(-each * len(ordered) // 100), 1) - 1] for each in PERCENTS
    ]
    assert dict(found.most_frequent(99)) == Counter(values.tolist())
    assert found.different == len(set(values.tolist()))


@settings(max_examples=30)
@given(
    dtype=st.sampled_from([SIGNED, UNSIGNED]),
    seed=st.integers(0, 1 << 32),
    bits=st.floats(0.5, 48),
    cuts=st.lists(st.integers(0, MAX_EXACT), max_size=4),
    data=st.data(),
)
def test_percentiles_of_many_numbers_are_within_the_error_however_they_come(
    dtype: np.dtype[Any], seed: int, bits: float, cuts: list[int], data: st.DataObject
) -> None:
    extremes = data.draw(st.lists(st.sampled_from(EXTREMES[dtype]), max_size=30))
    values = np.concatenate([many(dtype, seed, bits), np.array(extremes, dtype)])
    np.random.default_rng(seed).shuffle(values)

    found = distribution(np.split(values, sorted(cuts)), dtype)
    whole = distribution([values], dtype)

    assert not found.is_exact
    assert (found.count, found.least, found.most) == (len(values), values.min(), values.max())
    assert found.total == sum(values.tolist())
    assert found.mean == sum(values.tolist()) / len(values)
    assert (found.most_frequent(9), found.different) == ([], None)
    for percent in PERCENTS:
        wanted = exact(values, percent)
        percentile = found.percentile(percent)
        assert percentile is not None
        assert abs(percentile - wanted) <= abs(wanted) * ERROR
        assert percentile == whole.percentile(percent)
    assert found.percentile(100) == pytest.approx(values.max(), rel=ERROR)


@pytest.mark.parametrize("dtype", [SIGNED, UNSIGNED], ids=str)
def test_a_histogram_has_each_number_once(dtype: np.dtype[Any]) -> None:
    few = np.array([*EXTREMES[dtype], *range(70)] * 2, dtype)
    values = many(dtype, 1, 48)

    each, times = distribution([few], dtype).histogram()
    nearest, counts = distribution([values], dtype).histogram()

    wanted, wanted_times = np.unique(few, return_counts=True)
    np.testing.assert_array_equal(each, wanted)
    np.testing.assert_array_equal(times, wanted_times)
    assert counts.sum() == len(values)
    # Without its sign: of those above 0, and of those below.
    for sign in (1, -1) if dtype == SIGNED else (1,):
        own = nearest * sign > 0 if sign < 0 else nearest >= 0
        begins = np.sort(np.abs(nearest[own]))
        sizes = np.abs(values[values < 0 if sign < 0 else values >= 0])
        places = np.searchsorted(begins, sizes, side="right") - 1
        assert (sizes <= begins[places] * (1 + 2 * ERROR)).all()
        np.testing.assert_array_equal(
            np.bincount(places, minlength=len(begins)), counts[own][::sign]
        )
    assert (np.diff(nearest.astype(np.float64)) > 0).all()


@pytest.mark.parametrize("dtype", [SIGNED, UNSIGNED], ids=str)
def test_every_power_of_two_and_its_neighbours_stay_within_the_error(dtype: np.dtype[Any]) -> None:
    top = 62 if dtype == SIGNED else 63
    edges = [
        edge + step for bit in range(9, top + 1) for edge in (1 << bit,) for step in (-1, 0, 1)
    ]
    for edge in edges:
        # So many that the middle is this number.
        found = distribution([many(dtype, 1, 1)], dtype)
        found.add(np.full(100_000, edge, dtype))

        assert found.percentile(50) == pytest.approx(edge, rel=ERROR, abs=0)
        low, high = found.interval(50)
        assert low is not None
        assert high is not None
        assert low <= edge <= high


def test_there_are_no_figures_of_no_numbers() -> None:
    found = Distribution(is_signed=False)

    found.add(np.empty(0, np.uint64))

    assert (found.count, found.mean, found.percentile(50)) == (0, None, None)
    assert found.interval(50) == (None, None)


@pytest.mark.parametrize("percent", [50, 99])
@pytest.mark.parametrize("count", [700, 6000])
def test_an_interval_has_the_percentile_of_the_source_99_times_in_100(
    percent: int, count: int
) -> None:
    rng = np.random.default_rng(7)
    truth = -np.log(1 - percent / 100) * 1e6
    inside = 0
    for _ in range(300):
        found = Distribution(is_signed=False)
        found.add(rng.exponential(1e6, count).astype(np.uint64))
        low, high = found.interval(percent)
        assert low is not None
        assert high is not None
        # It says something, too.
        assert high < low * 4
        inside += low <= truth <= high

    assert inside >= 293


def test_an_interval_of_too_few_numbers_has_no_limit() -> None:
    found = distribution([np.arange(100, dtype=UNSIGNED)], UNSIGNED)

    low, high = found.interval(99)

    assert low == 96
    assert high is None


@given(
    seed=st.integers(0, 1 << 32),
    sizes=st.lists(st.sampled_from([0, 9, 400, 1500]), max_size=8),
    most=st.sampled_from([3, 700, 5000]),
)
def test_frequent_values_are_counted_from_below_within_the_error(
    seed: int, sizes: list[int], most: int
) -> None:
    rng = np.random.default_rng(seed)
    found, truth = FrequentValues(), Counter[bytes]()

    for size in sizes:
        # Half of them are frequent ones.
        numbers = np.where(rng.random(size) < 0.5, rng.zipf(2, size), rng.integers(0, most, size))
        part = Counter(b"%d" % each for each in np.minimum(numbers, most).tolist())
        found.add(part)
        truth.update(part)

    assert found.total == truth.total()
    assert found.is_exact == (len(truth) <= MAX_VALUES)
    assert len(found.counts) <= MAX_VALUES
    assert found.error * MAX_VALUES <= found.total
    for value, count in truth.items():
        assert count - found.error <= found.counts.get(value, 0) <= count


def test_values_that_take_turns_do_not_make_the_error_grow() -> None:
    found = FrequentValues()
    found.add({b"%d" % number: 100 for number in range(MAX_VALUES)})

    for number in range(100):
        found.add({b"new %d" % number: 10})

    assert 0 < found.error * MAX_VALUES <= found.total


def test_what_is_frequent_is_found_among_many_values() -> None:
    found = FrequentValues()
    for start in range(0, 100_000, 1000):
        rare = {b"%d" % number: 1 for number in range(start, start + 1000)}
        found.add(rare | {b"often": 30, b"less often": 20})

    top = found.most_frequent(2)

    assert not found.is_exact
    assert [value for value, _ in top] == [b"often", b"less often"]
    assert 3000 - found.error <= top[0][1] <= 3000


@pytest.mark.parametrize("span_ns", [10**6, 10**12])
def test_hits_in_bursts_have_a_higher_dispersion(span_ns: int) -> None:
    rng = np.random.default_rng(3)
    even, bursts, steady = TimeBins(), TimeBins(), TimeBins()
    times = np.sort(rng.integers(0, span_ns, 20_000)).astype(np.uint64)
    for part in np.split(times, 20):
        even.add(part)
    bursts.add(np.repeat(rng.choice(times, 100), 200))
    steady.add(np.linspace(0, span_ns - 1, 20_000).astype(np.uint64))

    assert 1 <= even.dispersion(span_ns) < 2
    assert 100 < bursts.dispersion(span_ns) < 400
    assert steady.dispersion(span_ns) == 1


def test_a_burst_at_the_beginning_is_one_of_the_whole_time() -> None:
    found = TimeBins()
    found.add(np.arange(0, 60_000, 60, dtype=np.uint64))

    assert found.dispersion(10**12) == pytest.approx(1000, rel=0.1)


def read(path: Path) -> Statistics:
    found = Statistics()
    with opened_recording(path) as recording:
        for boot in recording.boots():
            found.begin(boot.source)
            for events in boot.rounds:
                found.cover(events)
                found.add(events)
            found.finish()
    return found


def _text(addr: int) -> bytes:
    place = SYMBOLS.at(addr)
    return (place.place(addr) if place is not None else f"{addr:#x}").encode()


def test_counts_are_those_of_the_events_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "x.rec").write_bytes(recorded(900))
    rounds = list(kprobes.load(tmp_path / "x.rec").batches())
    events = [event for each in rounds for event in each_event(each)]

    found = read(tmp_path / "x.rec")

    assert (found.boots, found.hits, found.lost) == (1, 900, 0)
    times = [event.ts for event in events]
    assert found.span_ns == max(times) - min(times)
    assert {key: each.hits for key, each in found.events.items()} == Counter(
        (event.group, event.name) for event in events
    )
    assert found.rate(900) == pytest.approx(900e9 / found.span_ns)
    for (_, name), each in found.events.items():
        own = [event for event in events if event.name == name]
        assert each.tasks == len({event.pid for event in own})
        comms = Counter(event.comm for event in own)
        assert {
            k.decode(errors="backslashreplace"): n for k, n in each.comms.counts.items()
        } == comms
        assert each.functions.counts == {b"vfs_read": len(own)}
        callers = Counter(_text(event.caller) for event in own if event.caller is not None)
        assert each.callers.counts == callers


def test_values_are_those_of_the_events_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "x.rec").write_bytes(recorded(900))
    rounds = list(kprobes.load(tmp_path / "x.rec").batches())
    events = [event for each in rounds for event in each_event(each)]

    found = read(tmp_path / "x.rec")

    seen = 0
    for (_, name), each in found.events.items():
        own = [event for event in events if event.name == name]
        for field in each.fields.values():
            flat = [v for event in own for v in _flat(event.args[field.name])]
            sound: list[Any] = [value for value in flat if value is not None]
            assert field.faulted == len(flat) - len(sound)
            seen += 1
            if field.numbers is None:
                assert field.texts.counts == Counter(_named(field.type, v) for v in sound)
            else:
                assert (field.numbers.count, field.numbers.total) == (len(sound), sum(sound))
                assert field.numbers.percentile(50) == sorted(sound)[-(-len(sound) // 2) - 1]
    # All but the text that is the same in every event.
    assert seen == 1 + 12 + 4 + 4 + 4


def _flat(value: Any) -> list[Any]:
    return [*value] if isinstance(value, list) else [value]


def _named(kind: str, value: Any) -> bytes:
    match kind:
        case "symbol" | "symstr":
            return _text(value)
        case "char":
            return bytes((value,))
        case _:
            # What is no UTF-8 has an escape.
            return value.encode().decode("unicode_escape").encode("latin-1")


def test_boots_are_one_time_after_the_other(tmp_path: Path) -> None:
    found = record(100)
    found.writer.begin(KERNEL, SYMBOLS)
    found.begin_anew()
    for cpu, hit in hits(50, seed=2):
        found.rings[cpu].write(hit)
        found.look()
    (tmp_path / "x.rec").write_bytes(found.end())

    both = read(tmp_path / "x.rec")

    assert (both.boots, both.hits) == (2, 150)
    spans: list[int] = []
    with opened_recording(tmp_path / "x.rec") as recording:
        for boot in recording.boots():
            times = np.concatenate([b.ts for each in boot.rounds for b in each.batches])
            spans.append(int(times.max() - times.min()))
    assert both.span_ns == sum(spans)


LAYOUT = make_layout(1, ("u32", "s64"), event="read", can_fault=True)


def batch_of(count: int, first: int = 0) -> Events:
    rows = [
        Row(ts=first + i, pid=i, comm=b"c%d" % (i // 7), values=(None if i % 3 == 0 else i, -i))
        for i in range(count)
    ]
    return make_events([make_batch(LAYOUT, rows)])


def test_only_chosen_events_are_counted_but_the_time_is_all_of_theirs() -> None:
    events, found = batch_of(100), Statistics()
    found.begin(SOURCE)
    mask = np.arange(100) % 4 == 1
    found.cover(events)
    found.add(kept_of(events, [mask]))
    found.finish()

    (each,) = found.events.values()

    assert (each.hits, each.tasks, found.span_ns) == (25, 25, 99)
    numbers = [i for i in range(100) if i % 4 == 1 and i % 3]
    first = each.fields["a0", "u32", "number"]
    assert first.numbers is not None
    assert (first.numbers.total, first.faulted) == (sum(numbers), 25 - len(numbers))


def test_a_time_that_is_cut_is_the_time() -> None:
    found = Statistics()
    found.begin(SOURCE)

    for first in (0, 100, 200):
        found.cover(batch_of(100, first), start=150, stop=170)

    assert found.span_ns == 20


def test_no_more_tasks_are_looked_for_than_there_is_room_for() -> None:
    found = Statistics()
    found.begin(SOURCE)
    for _ in range(2):
        events = batch_of(MAX_TASKS + 5)
        found.cover(events)
        found.add(events)
    found.finish()

    (each,) = found.events.values()

    assert each.tasks >= MAX_TASKS
    assert not each.has_all_tasks
    # Of 2,342 names.
    assert not each.comms.is_exact
    assert len(each.comms.counts) <= MAX_VALUES


@pytest.mark.parametrize("order", [(0, (1 << 64) - 1), ((1 << 64) - 1, 0)])
def test_times_that_make_no_sense_do_no_harm(order: tuple[int, int]) -> None:
    found = Statistics()
    for _ in range(3):
        found.begin(SOURCE)
        for ts in order:
            events = make_events([make_batch(LAYOUT, [Row(ts=ts, values=(1, 1))])])
            found.cover(events)
            found.add(events)
        found.finish()

    (each,) = found.events.values()

    assert each.hits == 6
    assert found.span_ns == 3 * ((1 << 64) - 1)
    assert each.dispersion(found.span_ns) >= 1


def test_memory_does_not_grow_with_the_number_of_events() -> None:
    events, found = batch_of(1 << 14), Statistics()
    found.begin(SOURCE)

    def peak(rounds: int) -> int:
        tracemalloc.reset_peak()
        for _ in range(rounds):
            # A copy, as each round brings columns of its own.
            copied = Events(
                batches=tuple(each.take(np.arange(len(each))) for each in events.batches),
                batch=events.batch,
                row=events.row,
            )
            found.cover(copied)
            found.add(copied)
        return tracemalloc.get_traced_memory()[1]

    tracemalloc.start()
    try:
        first, later = peak(18), peak(54)
    finally:
        tracemalloc.stop()
    found.finish()

    assert found.hits == 72 << 14
    assert later < first * 1.2


def test_layouts_of_one_event_are_counted_as_one() -> None:
    one = make_layout(1, ("u32",), event="x", where="vfs_read+0x0/0x9")
    two = make_layout(2, ("u32", "s8"), event="x", where="vfs_write+0x0/0x9")
    found = Statistics()
    found.begin(SOURCE)
    rows = ([Row(ts=1, values=(5,))], [Row(ts=2, values=(7, -1))] * 2)
    events = make_events([make_batch(one, rows[0]), make_batch(two, rows[1])])
    found.cover(events)
    found.add(events)
    found.finish()

    (each,) = found.events.values()

    assert each.functions.counts == {b"vfs_read": 1, b"vfs_write": 2}
    assert [(field.name, field.type) for field in each.fields.values()] == [
        ("a0", "u32"),
        ("a1", "s8"),
    ]
    first = each.fields["a0", "u32", "number"].numbers
    assert first is not None
    assert (first.count, first.total) == (3, 19)
