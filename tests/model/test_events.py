"""Events as columns: how much memory they keep, and those of one name."""

import numpy as np

from kprobes.model.events import Events, columns_of
from tests.build.events import Row, make_batch, make_events
from tests.build.ring import make_layout


def test_columns_that_are_views_count_with_all_that_they_keep() -> None:
    batch = make_batch(make_layout(1), [Row(ts=ts) for ts in range(1000)])

    first = batch.take(slice(0, 1))

    assert first.nbytes == batch.nbytes
    assert batch.take(np.array([0])).nbytes < batch.nbytes / 100


def test_columns_of_one_buffer_count_once() -> None:
    rows = np.zeros(1000, [("ts", "<u8"), ("pid", "<i4"), ("context", "<u4")])
    plain = make_batch(make_layout(1), [Row()] * 1000)
    views = type(plain)(
        layout=plain.layout,
        ts=rows["ts"],
        cpu=np.broadcast_to(np.uint16(0), 1000),
        pid=rows["pid"],
        context=rows["context"],
        comm=np.broadcast_to(np.array(b"sh", "S16"), 1000),
        values=(),
        faulted=(),
    )

    assert rows.nbytes <= views.nbytes < rows.nbytes + 100


def test_strings_count_with_their_bytes() -> None:
    layout = make_layout(1, ["string"])
    short = make_batch(layout, [Row(values=(b"",)), Row(values=(None,))])
    long = make_batch(layout, [Row(values=(b"x" * 5000,)), Row(values=(None,))])

    assert long.nbytes - short.nbytes == 5000
    assert make_events([long]).nbytes > long.nbytes
    assert isinstance(make_events([long]), Events)


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
