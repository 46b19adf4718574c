"""Hist triggers of recorded events: a slow reading of the kernel's rules, event by event."""

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprobes.column_hist import ColumnHist, check_hist, histogram_of, log2
from kprobes.errors import DefinitionError, UsageError
from kprobes.histogram import Histogram
from kprobes.model.events import NO_EVENTS, Events
from kprobes.ring.merge import in_order
from tests.build.events import Row, make_batch, make_events
from tests.build.hist_expressions import kernels_number, random_expression
from tests.build.reference import packed
from tests.build.ring import make_layout
from tests.test_column_filter import OTHER, READ, SOURCE, VFS_READ, events

U64 = (1 << 64) - 1


def counted(trigger: str, *rounds: Events) -> Histogram:
    found = histogram_of(rounds or [events()], trigger, SOURCE)
    assert found is not None
    return found


def entries(found: Histogram) -> dict[tuple[Any, ...], tuple[int, ...]]:
    """Return hitcount and values by keys, as they are kept."""
    keys = zip(*(key.tolist() for key in found.keys), strict=True)
    columns = zip(found.hitcount.tolist(), *(val.tolist() for val in found.vals), strict=True)
    return dict(zip(keys, columns, strict=True))


def random_rows(rng: random.Random, count: int) -> list[Row]:
    def values() -> tuple[Any, ...]:
        return (
            rng.choice([0, 1, 2, 3, 1000, 2**32 - 1, None]),
            rng.choice([0, 1, -1, 300, -32768]),
            rng.choice([b"/etc/passwd", b"/tmp", None, b"x" * 300]),
            rng.choice([None, 0, 1, 100, 5000, 2**40]),
            (0, 0, 0, 0),
            rng.choice([0, VFS_READ, VFS_READ + 300]),
            rng.choice([0, 1, 2**63, 2**63 + 1, 2**64 - 1, 12345]),
        )

    return [
        Row(
            ts=1000 * n,
            pid=rng.choice([0, 1, 7]),
            cpu=rng.randrange(3),
            comm=rng.choice([b"cat", b"sh", b"a-name-of-15-by"]),
            values=values(),
            caller=rng.choice([VFS_READ, VFS_READ + 8]),
        )
        for n in range(count)
    ]


def value(row: Row, at: int) -> Any:
    return row.values[at]


def kernels_log2(number: int) -> int:
    # ilog2(roundup_pow_of_two(n)), as kernels print it: 64 beyond 2**63.
    return (number - 1).bit_length() if number else 0


MODIFIED: dict[str, Callable[[int], int]] = {
    "": lambda number: number,
    "hex": lambda number: number,
    "log2": kernels_log2,
    "buckets=7": lambda number: number // 7 * 7,
}
KEYS: dict[str, Callable[[Row], int | bytes]] = {
    "count": lambda row: value(row, 0) or 0,
    "got": lambda row: (value(row, 1) or 0) & U64,
    "path": lambda row: (value(row, 2) or b"")[:255],
    "duration": lambda row: value(row, 3) or 0,
    "by": lambda row: SOURCE.symbol_at(value(row, 5) or 0).encode(),
    "wide": lambda row: value(row, 6) or 0,
    "common_pid": lambda row: row.pid,
    "common_cpu": lambda row: row.cpu,
    "comm": lambda row: row.comm,
    "common_timestamp": lambda row: row.ts,
    "__probe_ret_ip": lambda row: row.caller,
    "__probe_func": lambda _: READ.ip,
    "hitcount": lambda _: 1,
}


def key(row: Row, word: str) -> int | bytes:
    name, _, modifier = word.partition(".")
    found = KEYS[name](row)
    return found if isinstance(found, bytes) else MODIFIED[modifier](found)


def slow(
    rows: Sequence[Row], keys: Sequence[str], vals: Sequence[str], size: int
) -> tuple[dict[tuple[Any, ...], tuple[int, ...]], int, int]:
    """Return entries, drops and what was not measured, by going from row to row."""
    table: dict[tuple[Any, ...], list[Row]] = {}
    dropped = unmeasured = 0
    for row in rows:
        if any(word.startswith("duration") for word in (*keys, *vals)) and not value(row, 3):
            unmeasured += 1
            continue
        found = tuple(key(row, word) for word in keys)
        if found not in table and len(table) == size:
            dropped += 1
            continue
        table.setdefault(found, []).append(row)
    return (
        {
            found: (len(own), *(_value([_number(row, word) for row in own], word) for word in vals))
            for found, own in table.items()
        },
        dropped,
        unmeasured,
    )


def _number(row: Row, word: str) -> int:
    found = KEYS[word.partition(".")[0]](row)
    assert isinstance(found, int)
    return found


def _value(numbers: list[int], word: str) -> int:
    name, _, modifier = word.partition(".")
    if modifier not in ("min", "max"):
        return sum(numbers) & U64
    half = 1 << 63 if name == "got" else U64 + 1
    return (min if modifier == "min" else max)(
        numbers, key=lambda number: number - (U64 + 1) * (number >= half)
    )


key_words = st.sampled_from(
    [
        *(f"{n}{m}" for n in ("count", "got", "wide") for m in ("", ".log2", ".buckets=7")),
        *("path", "duration.log2", "by", "common_pid", "common_cpu", "comm", "common_timestamp"),
        *("__probe_ret_ip", "__probe_func.hex", "hitcount"),
    ]
)
val_words = st.sampled_from(
    ["count", "got", "wide", "duration", "got.min", "got.max", "wide.avg", "wide.max", "count.min"]
)


@given(
    keys=st.lists(key_words, min_size=1, max_size=3, unique=True),
    vals=st.lists(val_words, max_size=2, unique=True),
    size=st.sampled_from([128, 256]),
    seed=st.integers(0, 1 << 30),
    cuts=st.lists(st.integers(0, 400), max_size=3),
)
def test_it_counts_what_the_kernel_would(
    keys: list[str], vals: list[str], size: int, seed: int, cuts: list[int]
) -> None:
    rows = random_rows(random.Random(seed), 400)
    ends = [0, *sorted(cuts), len(rows)]
    rounds = [
        in_order([make_batch(READ, rows[low:high])]) for low, high in itertools.pairwise(ends)
    ]
    trigger = f"keys={','.join(keys)}:size={size}" + (f":vals={','.join(vals)}" if vals else "")

    found = counted(trigger, *rounds)

    wanted, dropped, unmeasured = slow(rows, keys, vals, size)
    assert entries(found) == wanted
    assert (found.dropped, found.unmeasured) == (dropped, unmeasured)
    assert found.hits + dropped + unmeasured == len(rows)


@pytest.mark.parametrize("seed", range(50))
def test_expressions_are_the_kernels(seed: int) -> None:
    chance = random.Random(seed)
    rows = random_rows(chance, 60)
    key_text, val_text = (random_expression(chance, ("count", "got", "wide")) for _ in range(2))

    found = counted(f"keys={key_text}:vals={val_text}", in_order([make_batch(READ, rows)]))

    wanted: dict[tuple[int, ...], tuple[int, ...]] = {}
    for row in rows:
        numbers = {name: _number(row, name) for name in ("count", "got", "wide")}
        place = (kernels_number(key_text, numbers),)
        hits, total = wanted.get(place, (0, 0))
        wanted[place] = hits + 1, total + kernels_number(val_text, numbers) & U64
    assert entries(found) == wanted, (key_text, val_text)


def test_an_expression_of_a_duration_leaves_out_what_has_none() -> None:
    rows = random_rows(random.Random(1), 100)

    found = counted("keys=duration/1000", in_order([make_batch(READ, rows)]))

    assert found.unmeasured == sum(not value(row, 3) for row in rows) > 0
    assert found.hits + found.unmeasured == len(rows)


@pytest.mark.parametrize("handler", ["onmax", "onchange"])
@pytest.mark.parametrize("seed", range(20))
def test_an_action_keeps_the_fields_of_the_hit_that_the_kernel_would(
    handler: str, seed: int
) -> None:
    chance = random.Random(seed)
    rows = random_rows(chance, 300)
    ends = [0, *sorted(chance.sample(range(300), 2)), len(rows)]
    rounds = [
        in_order([make_batch(READ, rows[low:high])]) for low, high in itertools.pairwise(ends)
    ]

    found = counted(f"keys=comm:x=got+count:{handler}($x).save(wide,pid)", *rounds)

    kept: dict[tuple[bytes], tuple[int, int, int]] = {}
    for row in rows:
        number = (_number(row, "got") + _number(row, "count")) & U64
        state = kept.setdefault((row.comm,), (0, 0, 0))
        if number > state[0] if handler == "onmax" else number != state[0]:
            kept[row.comm,] = number, _number(row, "wide"), row.pid
    columns = found.columns()
    names = (f"{handler}(x)", "save(wide)", "save(common_pid)")
    numbers = (columns[name].view(np.uint64).tolist() for name in names)
    assert dict(zip(found.rows(), zip(*numbers, strict=True), strict=True)) == kept


def test_an_action_sees_several_events_in_the_order_of_time() -> None:
    first = [Row(ts=2 * n, values=(n + 1, 0, b"", 0, (0,) * 4, 0, 0)) for n in range(5)]
    other = [Row(ts=2 * n + 1, values=(3,)) for n in range(4)]
    pairs = [(0, 0), *((i, n + 1 - i) for n in range(4) for i in (1, 0))]
    both = make_events([make_batch(READ, first), make_batch(OTHER, other)], pairs)

    found = counted("keys=common_cpu:x=count:onchange($x).save(common_timestamp)", both)

    # 1 3 2 3 3 3 4 3 5
    assert str(found).splitlines()[6] == "\tchanged:          5  common_timestamp:          8"


def test_a_full_table_keeps_what_came_first_of_several_events() -> None:
    # Two events share the table; in time they alternate, in their batches they do not.
    first = [Row(ts=2 * n, values=(n, 0, b"", 0, (0,) * 4, 0, 0)) for n in range(100)]
    other = [Row(ts=2 * n + 1, values=(1000 + n,)) for n in range(100)]
    pairs = [(i, n) for n in range(100) for i in (0, 1)]
    both = make_events([make_batch(READ, first), make_batch(OTHER, other)], pairs)

    found = counted("keys=common_timestamp:size=128", both)

    assert sorted(found.keys[0].tolist()) == list(range(128))
    assert (found.hits, found.dropped) == (128, 72)


def test_a_filter_chooses_hits_and_a_paused_trigger_none() -> None:
    assert counted("hist:keys=comm if count > 400").hits == 2
    assert counted("hist:keys=comm:pause").hits == 0
    assert counted("hist:keys=count if comm == 'cat'").keys[0].tolist() == [5, 5000]


def test_what_has_no_such_field_is_not_counted() -> None:
    assert counted("keys=got").hits == 4
    assert counted("keys=common_cpu").hits == 7


@pytest.mark.parametrize(
    "trigger", ["keys=nosuch", "keys=count.nosuch", "keys=comm if nosuch == 1"]
)
def test_what_is_wrong_for_all_events_is_an_error(trigger: str) -> None:
    with pytest.raises(DefinitionError):
        counted(trigger)


def test_it_is_known_before_there_are_events() -> None:
    check_hist("keys=size", [READ, OTHER], SOURCE)
    check_hist("keys=got", [READ, OTHER], SOURCE)
    with pytest.raises(DefinitionError, match="Couldn't find field"):
        check_hist("keys=nosuch", [READ, OTHER], SOURCE)


def test_a_table_is_that_of_the_first_event_that_has_hits() -> None:
    signed = make_layout(3, ("s64",), event="other", names=("size",))
    rows = [Row(values=(5,)), Row(values=(U64,))]
    both = make_events([make_batch(signed, []), make_batch(OTHER, rows)])

    assert counted("keys=comm:vals=size.max", both).value(0).tolist() == [U64]


def test_a_key_that_is_a_number_here_and_a_text_there_is_refused() -> None:
    numbers = make_layout(3, ("u64",), event="numbers", names=("comm",))
    both = make_events(
        [make_batch(numbers, [Row(values=(5,))]), make_batch(OTHER, [Row(values=(1,))])]
    )

    with pytest.raises(DefinitionError, match="a number of one event, and a text of another"):
        counted("keys=comm", both)
    with pytest.raises(DefinitionError, match="a text of one event, and a number of another"):
        check_hist("keys=common_cpu,comm", [OTHER, numbers], SOURCE)
    check_hist("keys=common_comm", [OTHER, numbers], SOURCE)


def test_without_events_there_are_no_entries() -> None:
    hist = ColumnHist("keys=comm", SOURCE)
    hist.take(NO_EVENTS)
    hist.check()
    assert hist.histogram() is None

    hist.take(Events(batches=(make_batch(READ, []),), batch=NO_EVENTS.batch, row=NO_EVENTS.row))

    found = hist.histogram()
    assert found is not None
    assert (len(found), found.hits) == (0, 0)


@given(st.lists(st.integers(0, U64), min_size=1))
def test_powers_of_two_are_the_kernels(numbers: list[int]) -> None:
    assert log2(np.array(numbers, np.uint64)).tolist() == list(map(kernels_log2, numbers))


@pytest.mark.parametrize("number", [0, 1, 2, 3, 4, 2**32, 2**32 + 1, 2**63 - 1, 2**63, 2**63 + 1])
def test_the_ends_of_buckets_are_theirs(number: int) -> None:
    assert log2(np.array([number], np.uint64)).tolist() == [kernels_log2(number)]


def test_stacks_count_whole_or_by_their_first_addresses() -> None:
    layout = make_layout(1, ("stacktrace",), names=("common_stacktrace",))
    stacks = [tuple(range(1, 17)), (*range(1, 17), 99), (*range(1, 17), 98), (1,)]
    rows = [Row(values=(packed(stack),)) for stack in stacks]
    found = make_events([make_batch(layout, rows)])

    whole = entries(counted("keys=stack", found))
    cut = entries(counted("keys=common_stacktrace", found))

    assert whole == {(packed(stack),): (1,) for stack in stacks}
    assert cut == {(packed(range(1, 17)),): (3,), (packed([1]),): (1,)}


def test_the_tasks_process_is_a_key_where_records_have_it() -> None:
    layout = make_layout(3, ("u8", "s32"), names=("n", "common_tgid"))
    rows = [Row(values=(n, 7 + n // 2)) for n in range(4)]

    found = counted("keys=tgid:vals=n", make_events([make_batch(layout, rows)]))

    assert entries(found) == {(7,): (2, 1), (8,): (2, 5)}
    with pytest.raises(DefinitionError, match="-O record-tgid"):
        counted("keys=tgid")


def test_a_filter_is_wrong_before_there_is_any_event() -> None:
    check_hist("keys=common_pid if got > 0", [OTHER, READ], SOURCE)
    for trigger, message in (("junk > 5", "Field not found"), ("count >", "Invalid value")):
        with pytest.raises(DefinitionError, match=message):
            check_hist(f"keys=count if {trigger}", [OTHER, READ], SOURCE)


def test_what_is_one_field_of_one_event_and_two_of_another_is_refused() -> None:
    with_cpu = make_layout(8, ("u64",), names=("cpu",))
    both = in_order([
        make_batch(with_cpu, [Row(ts=1, values=(5,))]),
        make_batch(OTHER, [Row(ts=2, values=(1,))]),
    ])  # fmt: skip

    with pytest.raises(UsageError, match="an argument of one event, and not of another"):
        counted("keys=common_pid:vals=cpu,common_cpu", both)
