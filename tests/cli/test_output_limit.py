"""Limiting and counting on the way to a sink."""

from kprobes.cli.output import LimitSink
from kprobes.model.events import Events
from tests.build.events import Row, make_batch, make_events
from tests.build.ring import make_layout


class Kept:
    """Keeps (event, ts) of all that is written."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, int]] = []
        self.writes = 0
        self.is_closed = False

    def write(self, events: Events) -> None:
        self.writes += 1
        which: list[int] = events.batch.tolist()
        rows: list[int] = events.row.tolist()
        for index, row in zip(which, rows, strict=True):
            batch = events.batches[index]
            self.rows.append((batch.layout.event, int(batch.ts[row])))

    def close(self) -> None:
        self.is_closed = True


def mixed() -> Events:
    """Two events of three tasks, in the order of time: a1 b2 a3 b4 a5."""
    a = [Row(ts=1, pid=7, comm=b"ls"), Row(ts=3, pid=8, comm=b"sh"), Row(ts=5, pid=7, comm=b"ls")]
    b = [Row(ts=2, pid=9, comm=b"kworker/0:1"), Row(ts=4, pid=7, comm=b"ls")]
    order = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]
    layouts = make_layout(1, event="a"), make_layout(2, event="b")
    return make_events([make_batch(layouts[0], a), make_batch(layouts[1], b)], order)


def test_the_limit_keeps_the_oldest_and_counts_them() -> None:
    kept = Kept()
    limit_sink = LimitSink(kept, limit=7)

    for _ in range(3):
        limit_sink.write(mixed())

    assert kept.rows == [("a", 1), ("b", 2), ("a", 3), ("b", 4), ("a", 5), ("a", 1), ("b", 2)]
    assert (limit_sink.events, limit_sink.is_full, kept.writes) == (7, True, 2)


def test_without_a_limit_everything_comes_through() -> None:
    kept = Kept()
    limit_sink = LimitSink(kept)

    limit_sink.write(mixed())

    assert (limit_sink.events, limit_sink.is_full) == (5, False)


def test_faults_are_counted_in_the_events_that_came_through_only() -> None:
    layout = make_layout(1, ["u32", "string"], can_fault=True)
    rows = [Row(values=(None, None)), Row(values=(1, b"x")), Row(values=(None, b"x"))]
    limit_sink = LimitSink(Kept(), limit=2)

    limit_sink.write(make_events([make_batch(layout, rows)]))

    assert (limit_sink.events, limit_sink.faulted) == (2, 2)


def test_durations_that_could_not_be_measured_are_no_faults() -> None:
    layout = make_layout(1, ["duration"], names=["duration"])
    limit_sink = LimitSink(Kept())

    limit_sink.write(make_events([make_batch(layout, [Row(values=(None,))])]))

    assert (limit_sink.events, limit_sink.faulted) == (1, 0)


def test_closing_reaches_the_sink_after() -> None:
    kept = Kept()

    LimitSink(kept).close()

    assert kept.is_closed
