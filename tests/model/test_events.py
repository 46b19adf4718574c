"""Events as columns: how much memory they keep."""

import numpy as np

from kprobes.model.events import Events
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
        columns=(),
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
