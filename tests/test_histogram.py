"""Histograms: the kernel's text of them, and what programs make of them."""

import random
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
from msgspec.structs import replace

from kprobes.errors import UsageError
from kprobes.histogram import Histogram, share_of
from kprobes.model.hist import Modifier
from kprobes.ring.merge import in_order
from tests.build.events import Row, make_batch
from tests.test_column_filter import OTHER, READ
from tests.test_column_hist import counted, entries, random_rows, value

mpl.use("agg")
U64 = (1 << 64) - 1
PLACE = "ffffffff81000040"
CPU = "{ common_cpu:          1 }"


def lines(found: Histogram) -> list[str]:
    text = str(found)
    head, _, rest = text.partition("\n\n")
    assert head.startswith("# event histogram\n#\n# trigger info: hist:keys=")
    assert head.endswith(" [active]\n#")
    return rest.partition("\n\nTotals:")[0].split("\n")


def test_the_text_is_the_kernels() -> None:
    # hist_trigger_show() of Linux 6.12, by its printf formats.
    assert str(counted("hist:keys=count:vals=got:sort=count:size=200 if count > 0")) == (
        "# event histogram\n"
        "#\n"
        "# trigger info: hist:keys=count:vals=hitcount,got:sort=count:size=256 if count > 0"
        " [active]\n"
        "#\n"
        "\n"
        "{ count:          5 } hitcount:          1  got: 18446744073709551615\n"
        "{ count:        500 } hitcount:          1  got:          7\n"
        "{ count:       5000 } hitcount:          1  got:          0\n"
        "\n"
        "Totals:\n"
        "    Hits: 3\n"
        "    Entries: 3\n"
        "    Dropped: 0\n"
    )


@pytest.mark.parametrize(
    ("trigger", "entry"),
    [
        ("keys=count.hex", "{ count: 1f4 } hitcount:          1"),
        ("keys=count.log2", "{ count: ~ 2^9  } hitcount:          1"),
        ("keys=count.buckets=200", "{ count: ~ 400-599 } hitcount:          1"),
        ("keys=common_cpu", "{ common_cpu:          1 } hitcount:          1"),
        (
            "keys=common_pid.execname",
            "{ common_pid: dd              [         2] } hitcount:          1",
        ),
        (
            "keys=path,comm",
            f"{{ path: {'/etc/group':<50}, comm: {'dd':<50} }} hitcount:          1",
        ),
        ("keys=function", f"{{ function: [{PLACE}] {'_stext':<45} }} hitcount:          1"),
        (
            "keys=__probe_func.sym-offset",
            f"{{ __probe_func: [{PLACE}] {'_stext+0x40/0x100':<55} }} hitcount:          1",
        ),
        ("keys=common_cpu:vals=count:nohitcount", f"{CPU}  count:        500"),
        ("keys=common_cpu:vals=count.hex", f"{CPU} hitcount:          1  count:        1f4"),
        ("keys=common_cpu:vals=count.avg", f"{CPU} hitcount:          1  count.avg:        500"),
        ("keys=common_cpu:vals=got.min", f"{CPU} hitcount:          1  got.min:          7"),
        (
            "keys=common_cpu:vals=count.p99.9",
            f"{CPU} hitcount:          1  count.p99.9:        500",
        ),
        ("keys=common_cpu:vals=got.p50", f"{CPU} hitcount:          1  got.p50:          7"),
        ("keys=count-got:x=got", "{ count-got:        493 } hitcount:          1"),
        # As the kernel, which does not show it.
        ("keys=common_cpu:vals=count-got,got", f"{CPU} hitcount:          1  got:          7"),
    ],
)
def test_a_key_or_value_is_shown_as_its_modifier_says(trigger: str, entry: str) -> None:
    assert lines(counted(f"{trigger} if count == 500")) == [entry]


def test_shares_and_bars_are_of_the_column() -> None:
    found = counted("keys=comm:vals=count.percent,count.graph:sort=count:nohitcount if got != 99")

    # The second value of a field is another column; sorting is by the first.
    assert [line.partition("}")[2] for line in lines(found)] == [
        "  count (%):   0.00  count:                     ",
        "  count (%):   9.08  count: #                   ",
        "  count (%):  90.91  count: ####################",
    ]


@pytest.mark.parametrize(
    ("number", "whole", "share"),
    [
        (0, 0, 0),
        (1, 0, 0xFFFF_FFFF),
        (1, 3, 3333),
        (5, 5, 10_000),
        (U64, U64, 10_000),
        (U64, 9999, 0xFFFF_FFFF),
        (U64 // 10_000, 1, 0xFFFF_FFFF),
    ],
)
def test_hundredths_of_a_percent_are_the_kernels(number: int, whole: int, share: int) -> None:
    assert share_of(number, whole) == share


def test_signed_numbers_are_sorted_as_such_and_equal_ones_stay() -> None:
    found = counted("keys=got:sort=got")
    assert found.keys[0].view(np.int64).tolist() == [-300, -1, 0, 7]

    sums = counted("keys=common_cpu:vals=got:sort=got")
    assert sums.value(0).tolist() == [0, 7, -300, -1]
    last = counted("keys=got,count:sort=hitcount.descending,got.descending")
    assert last.keys[0].view(np.int64).tolist() == [7, 0, -1, -300]


def test_two_histograms_are_one() -> None:
    trigger = "keys=comm,count.log2:vals=got,wide.max,got.min:size=131072"
    rows = random_rows(random.Random(5), 300)

    def part(low: int, high: int) -> Histogram:
        return counted(trigger, in_order([make_batch(READ, rows[low:high])]))

    whole, both = part(0, 300), part(0, 120) + part(120, 300)

    assert entries(both) == entries(whole)
    assert both.hits == 300
    with pytest.raises(UsageError, match="other keys"):
        _ = both + counted("keys=comm")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "trigger",
    [
        "keys=comm:vals=got,duration.avg",
        "keys=pid,count.log2",
        "keys=pid:vals=wide.p50,wide.p99,count:size=131072",
        "keys=comm:vals=got.p25:size=131072",
    ],
)
def test_what_was_counted_in_between_is_the_difference(trigger: str, seed: int) -> None:
    rng = random.Random(seed)
    rounds = [in_order([make_batch(READ, random_rows(rng, 100))]) for _ in range(2)]

    first, second, both = (counted(trigger, *each) for each in (rounds[:1], rounds[1:], rounds))

    between = both - first
    assert entries(between) == entries(second)
    assert (between.hits, between.unmeasured) == (second.hits, second.unmeasured)
    assert len(both - both) == 0
    assert entries(first + between) == entries(both)


def test_what_cannot_be_told_in_between_is_refused() -> None:
    first, later = counted("keys=comm:vals=got.max"), counted("keys=comm:vals=got.max")

    with pytest.raises(UsageError, match=r"got\.max is known of all hits"):
        _ = later - first
    with pytest.raises(UsageError, match="other keys or values"):
        _ = counted("keys=pid") - counted("keys=comm")
    with pytest.raises(UsageError, match="lacks entries"):
        _ = counted("keys=comm").take(slice(1)) - counted("keys=comm")


_ACTION = "keys=comm:x=count:onmax($x).save(got,wide)"


def test_an_action_is_shown_as_the_kernel_shows_it() -> None:
    rows = [
        Row(ts=n, comm=b"cat", values=(number, -n, b"", 0, (0,) * 4, 0, 7 * n))
        for n, number in enumerate((5, 9, 9, 3), 1)
    ]

    found = counted(_ACTION, in_order([make_batch(READ, rows)]))

    assert str(found).splitlines()[5:7] == [
        f"{{ comm: {'cat':<50} }} hitcount:          4",
        f"\tmax:          9  got: {U64 - 1}  wide:         14",
    ]
    columns = found.columns()
    assert [*columns] == ["comm", "hitcount", "onmax(x)", "save(got)", "save(wide)"]
    assert [columns[name].tolist() for name in [*columns][2:]] == [[9], [-2], [14]]
    twice = counted("keys=comm:x=count:onmax($x).save(got,got)", in_order([make_batch(READ, rows)]))
    assert [*twice.columns()][-2:] == ["save(got)", "save(got).2"]


@pytest.mark.parametrize("cut", [1, 120, 299])
def test_actions_of_two_histograms_are_that_of_all_hits(cut: int) -> None:
    rows = random_rows(random.Random(6), 300)

    def part(low: int, high: int) -> Histogram:
        return counted(_ACTION, in_order([make_batch(READ, rows[low:high])]))

    whole, both = part(0, 300), part(cut, 300) + part(0, cut)

    def kept(found: Histogram) -> dict[object, tuple[object, ...]]:
        columns = [column.tolist() for column in found.columns().values()]
        return {row[0]: row for row in zip(*columns, strict=True)}

    assert kept(both) == kept(whole)
    with pytest.raises(UsageError, match="is known of all hits"):
        _ = whole - part(0, cut)
    with pytest.raises(UsageError, match="other keys or values"):
        _ = whole + counted("keys=comm")


TRIGGER = "keys=comm:vals=got.p50,got.min,got.p99,got:size=131072:sort=got.p99.descending"


def test_percentiles_are_of_the_numbers_of_their_key() -> None:
    rows = random_rows(random.Random(6), 500)
    found = counted(TRIGGER, in_order([make_batch(READ, rows)]))

    columns = found.columns()
    assert [*columns] == ["comm", "hitcount", "got.p50", "got.min", "got.p99", "got"]
    for at, comm in enumerate(columns["comm"].tolist()):
        own = sorted(value(row, 1) or 0 for row in rows if row.comm == comm.encode())
        half, most = (own[-(-len(own) * percent // 100) - 1] for percent in (50, 99))
        assert (columns["got.p50"][at], columns["got.p99"][at]) == (half, most)
        assert columns["got.min"][at] == own[0]
        assert columns["hitcount"][at] == len(own)
    assert columns["got.p99"].tolist() == sorted(columns["got.p99"].tolist(), reverse=True)
    last = found.take(slice(1, None))
    assert last.columns()["got.p50"].tolist() == columns["got.p50"].tolist()[1:]


@pytest.mark.parametrize("cut", [1, 120, 299])
def test_percentiles_of_two_histograms_are_those_of_all_hits(cut: int) -> None:
    rows = random_rows(random.Random(7), 300)
    rounds = [in_order([make_batch(READ, part)]) for part in (rows[:cut], rows[cut:])]
    whole, parts = counted(TRIGGER, *rounds), [counted(TRIGGER, each) for each in rounds]

    both = parts[0] + parts[1]

    assert entries(both) == entries(whole)


def test_what_has_no_room_for_its_bucket_is_dropped_and_what_is_known_counts() -> None:
    numbers = (*range(1, 1001), *range(1, 1001))
    rows = [Row(values=(n, 0, b"", 0, (0,) * 4, 0, 0)) for n in numbers]

    found = counted("keys=common_cpu:vals=count.p50:size=128", in_order([make_batch(READ, rows)]))

    # 512 entries: each number up to 128 has one, of the others some share one.
    assert found.hits + found.dropped == 2000
    assert found.dropped % 2 == 0
    (buckets,) = found.buckets
    assert len(buckets.entries) <= 512


def test_percentiles_of_several_fields_are_those_of_each() -> None:
    rng = random.Random(5)
    rows = random_rows(rng, 400)
    rounds = [in_order([make_batch(READ, part)]) for part in (rows[:90], rows[90:])]
    alone = [
        counted(f"keys=comm:vals={field}.p50,{field}.p99:size=4096", *rounds)
        for field in ("count", "got", "wide")
    ]

    found = counted(
        "keys=comm:vals=count.p50,got.p50,wide.p50,got.p99,count.p99,wide.p99:size=4096", *rounds
    )

    columns = found.columns()
    for each in alone:
        expected = each.columns()
        assert {name: columns[name].tolist() for name in expected} == {
            name: column.tolist() for name, column in expected.items()
        }
    # They add and subtract, too.
    first, second = (counted(found.trigger.text, each) for each in rounds)
    assert entries(first + second) == entries(found)
    assert entries(found - first) == entries(second)


def test_programs_get_columns() -> None:
    found = counted("keys=comm,got.log2,by:vals=got.avg,wide.hex:sort=hitcount.descending,comm")

    columns = found.columns()
    assert [*columns] == ["comm", "got.log2", "by", "hitcount", "got.avg", "wide.hex"]
    assert columns["comm"].tolist() == ["cat", "cat", "dd", "sh"]
    assert columns["got.log2"].tolist() == [U64, 1, 8, U64]
    assert columns["hitcount"].dtype == np.uint64
    assert columns["got.avg"].tolist() == [-1.0, 0.0, 7.0, -300.0]
    assert columns["wide.hex"].tolist() == [1 << 63, 5, 0, 1]
    frame: Any = found.to_pandas()
    assert {name: frame[name].tolist() for name in columns} == {
        name: column.tolist() for name, column in columns.items()
    }
    axes = found.plot()
    assert [patch.get_height() for patch in axes.patches] == [1, 1, 1, 1]
    assert axes.get_xticklabels()[2].get_text().startswith("dd, 8, ")
    assert repr(found).startswith("<Histogram: 4 hits in 4 entries by hist:keys=comm,got.log2,by:")


def test_the_idle_task_has_the_kernels_name() -> None:
    rows = [Row(pid=0, comm=b"swapper/0", values=(1,)), Row(pid=3, comm=b"sh", values=(1,))]
    events = in_order([make_batch(OTHER, rows)])

    assert counted("keys=common_pid.execname", events).columns()[
        "common_pid.execname"
    ].tolist() == [
        "<idle>[0]",
        "sh[3]",
    ]


def _system_call(number: int) -> str:
    return "sys_openat" if number == 257 else ""


def test_system_calls_have_their_names_where_these_are_known() -> None:
    events = in_order([make_batch(OTHER, [Row(values=(257,)), Row(values=(5,))])])
    found = counted("keys=size", events)
    (key,) = found.trigger.keys
    named = replace(
        found,
        trigger=replace(found.trigger, keys=(replace(key, modifier=Modifier.SYSCALL),)),
        source=replace(found.source, system_call=_system_call),
    )

    (names, _) = named.columns().values()
    assert sorted(names.tolist()) == ["sys_openat[257]", "unknown_syscall[5]"]
    lines = [line for line in named.text().decode().splitlines() if line.startswith("{")]
    assert sorted(lines) == [
        "{ size: sys_openat                    [257] } hitcount:          1",
        "{ size: unknown_syscall               [  5] } hitcount:          1",
    ]
