"""Columns of events that came in rounds, and single ones of them."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprobes.errors import UsageError
from kprobes.model.columns import Selection, select, whole
from kprobes.model.events import Column, Events, each_event
from tests.build.events import Row, make_batch, make_events
from tests.build.recorded import read, recorded
from tests.build.ring import Value, make_layout

ROUNDS, _ = read(recorded(300, every=30))
EVENTS = [event for events in ROUNDS for event in each_event(events)]
PLACES = st.none() | st.integers(-320, 320)


def columns_of(rounds: Sequence[Events], name: str) -> dict[str, Column]:
    chosen = select(rounds, name)
    return {each: chosen.column(each) for each in chosen.names}


def functions(*kinds: tuple[str, Sequence[Value]]) -> Selection:
    """Return events of one name, of as many functions, that have one field of these types."""
    batches = [
        make_batch(
            make_layout(
                number + 1,
                [kind],
                event="x",
                where=f"f{number}+0x0/0x10",
                names=["n"],
                can_fault=True,
            ),
            [Row(ts=number, values=(value,)) for value in values],
        )
        for number, (kind, values) in enumerate(kinds)
    ]
    return select([make_events(batches)], "x")


def test_columns_of_a_name_are_in_the_order_of_time_whatever_batches_they_came_in() -> None:
    first = make_layout(1, ["u32", "string"], event="open", where="f+0x0/0x10", names=["n", "path"])
    second = make_layout(
        2, ["u32", "string"], event="open", where="g+0x0/0x10", names=["n", "path"]
    )
    other = make_batch(make_layout(3), [Row(ts=2)])
    before = make_events(
        [
            make_batch(first, [Row(ts=1, values=(7, b"/a")), Row(ts=4, values=(10, b"/d"))]),
            other,
            make_batch(second, [Row(ts=3, cpu=1, comm=b"ls", values=(9, None))]),
        ],
        [(0, 0), (1, 0), (2, 0), (0, 1)],
    )
    after = make_events([make_batch(first, [Row(ts=5, values=(11, b"\xff"))])])

    columns = columns_of([before, after], "open")

    assert list(columns) == ["ts", "cpu", "pid", "comm", "function", "n", "path"]
    assert {name: values.tolist() for name, values in columns.items()} == {
        "ts": [1, 3, 4, 5],
        "cpu": [0, 1, 0, 0],
        "pid": [1] * 4,
        "comm": ["sh", "ls", "sh", "sh"],
        "function": ["f", "g", "f", "f"],
        "n": [7, 9, 10, 11],
        "path": ["/a", None, "/d", "\\xff"],
    }
    assert (columns["ts"].dtype, columns["n"].dtype) == ("uint64", "uint32")
    assert columns_of([before], "nosuch") == {}


def test_numbers_that_could_not_be_read_are_none() -> None:
    layout = make_layout(1, ["u32", "u16[2]"], can_fault=True, has_caller=True)
    rows = [Row(values=(7, (1, 2)), caller=5), Row(values=(None, (3, 4)), caller=6)]

    columns = columns_of([make_events([make_batch(layout, rows)])], "e1")

    assert columns["a0"].tolist() == [7, None]
    assert columns["a1"].tolist() == [[1, 2], [3, 4]]
    assert columns["caller"].tolist() == [5, 6]


def test_a_column_that_some_functions_lack_is_none_there() -> None:
    one = make_layout(1, ["u32"], event="x", names=["n"])
    two = make_layout(2, ["comm", "s64"], event="x", names=["who", "m"], has_caller=True)
    rounds = [
        make_events([make_batch(one, [Row(ts=1, values=(7,))])]),
        make_events([make_batch(two, [Row(ts=2, comm=b"ls", caller=9, values=(None, -1))])]),
    ]

    columns = columns_of(rounds, "x")

    assert {name: columns[name].tolist() for name in ("ts", "caller", "n", "who", "m")} == {
        "ts": [1, 2],
        "caller": [None, 9],
        "n": [7, None],
        "who": [None, "ls"],
        "m": [None, -1],
    }


def test_integers_of_several_types_lose_no_bits() -> None:
    small = functions(("u8", [200]), ("s32", [-2, None]))
    large = functions(("u64", [(1 << 64) - 1]), ("s64", [-1, None]))
    texts = functions(("u64", [(1 << 64) - 1]), ("string", [b"\xff", None]))

    assert small.field("n")[0].dtype == np.int32
    assert small.column("n").tolist() == [200, -2, None]
    assert large.column("n").tolist() == [(1 << 64) - 1, -1, None]
    assert texts.column("n").tolist() == [(1 << 64) - 1, "\\xff", None]


def test_an_array_in_some_functions_only_is_an_error() -> None:
    with pytest.raises(UsageError, match="an array in some functions"):
        functions(("u8", [1]), ("u8[2]", [(1, 2)])).column("n")


def test_texts_that_are_alike_are_one_object() -> None:
    chosen = whole(make_batch(make_layout(1, ["string"]), [Row(values=(b"/a",))] * 3))

    assert len({id(text) for text in chosen.column("a0")}) == 1
    assert len({id(text) for text in chosen.column("comm")}) == 1


def test_columns_are_copies() -> None:
    batch = make_batch(make_layout(1, ["u32"]), [Row(values=(7,))])
    chosen = whole(batch)

    chosen.column("a0")[0] = chosen.column("ts")[0] = 9

    assert (batch.values[0].tolist(), batch.ts.tolist()) == ([7], [0])


@given(st.builds(slice, PLACES, PLACES, st.none() | st.integers(-40, 40).filter(bool)))
def test_a_part_is_what_the_same_part_of_a_list_is(places: slice) -> None:
    chosen = select(ROUNDS).cut(places)

    assert (list(chosen), len(chosen)) == (EVENTS[places], len(EVENTS[places]))
    assert chosen.column("ts").tolist() == [event.ts for event in EVENTS[places]]
    assert [int(batch.ts[0]) for batch in chosen.one_by_one()] == chosen.column("ts").tolist()
    reads = select(chosen.rounds, "read")
    numbers = reads.column("a0") if reads.kinds else np.empty(0)
    assert numbers.tolist() == [event["a0"] for event in EVENTS[places] if event.name == "read"]


def test_a_part_without_events_has_the_columns_and_their_types() -> None:
    chosen = select(ROUNDS, "read").cut(slice(0, 0))

    assert chosen.names == select(ROUNDS, "read").names
    assert {name: chosen.column(name).dtype for name in ("a0", "ts", "pid", "comm")} == {
        "a0": np.uint64,
        "ts": np.uint64,
        "pid": np.int32,
        "comm": object,
    }


def test_events_are_at_their_places_from_both_ends() -> None:
    chosen = select(ROUNDS)

    assert [chosen.at(place) for place in (0, 35, 299, -1, -300)] == [
        EVENTS[place] for place in (0, 35, 299, -1, -300)
    ]
    for place in (300, -301):
        with pytest.raises(IndexError, match=f"no event {place} of 300"):
            chosen.at(place)


def test_what_all_have_is_beside_a_field_of_its_name() -> None:
    layout = make_layout(1, ["u32", "string"], event="waking", names=["pid", "comm"])
    rows = [Row(ts=1, pid=5, comm=b"sh", values=(7, b"cat"))]

    found = columns_of([make_events([make_batch(layout, rows)])], "waking")

    names = ("pid", "comm", "common_pid", "common_comm", "ts")
    assert {name: found[name].tolist() for name in names} == {
        "pid": [7], "comm": ["cat"], "common_pid": [5], "common_comm": ["sh"], "ts": [1],
    }  # fmt: skip


def test_events_are_counted_by_name() -> None:
    names = [event.name for event in EVENTS]

    assert select(ROUNDS).counts() == {name: names.count(name) for name in set(names)}
    assert select(ROUNDS, "read").counts() == {"read": names.count("read")}
