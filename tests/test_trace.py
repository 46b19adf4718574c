"""One recording, as programs see it."""

import pytest
from msgspec.structs import replace

from kprobes.model.events import Counts, Hits
from kprobes.sinks.names import TraceSource
from kprobes.trace import Trace
from tests.build.events import Row, make_batch, make_events
from tests.build.ring import make_layout

NOTHING = Counts(recorded={}, missed={}, lost=0, damaged=0)
SOURCE = TraceSource(version=(6, 1), cpus=1, symbol_at=hex)


def make_trace() -> Trace:
    trace = Trace(SOURCE)
    layout = make_layout(1, ["u32"])
    trace.write(make_events([make_batch(layout, [Row(ts=1, values=(7,))])]))
    trace.write(make_events([make_batch(layout, [Row(ts=2, values=(8,))])]))
    return trace


def test_a_trace_has_events_one_by_one_and_by_name() -> None:
    trace = make_trace()
    name = next(iter(trace)).name

    assert ([event.ts for event in trace], len(trace)) == ([1, 2], 2)
    assert [list(event.args.values()) for event in trace[name]] == [[7], [8]]
    assert trace.columns(name)["ts"].tolist() == [1, 2]


def test_an_event_without_hits_is_an_empty_list_and_an_unknown_one_an_error() -> None:
    trace = make_trace()
    trace.end(
        lambda: NOTHING, lambda: [Hits(event="quiet", function="vfs_read", recorded=0, missed=0)]
    )

    assert trace["quiet"] == []
    assert trace.columns("quiet") == {}
    with pytest.raises(KeyError, match="no such event: 'nosuch'"):
        trace.columns("nosuch")
    with pytest.raises(KeyError, match="no such event: 'nosuch'"):
        trace["nosuch"]


def test_a_trace_says_what_it_is() -> None:
    trace = make_trace()
    assert repr(trace) == "<Trace: 2 events, still recording>"
    trace.end(lambda: NOTHING, tuple)
    assert repr(trace) == "<Trace: 2 events>"


def test_counts_are_those_until_now_and_then_those_of_the_end() -> None:
    lost = iter([3, 4])
    trace = Trace(SOURCE, count=lambda: replace(NOTHING, lost=next(lost)))

    assert (trace.counts.lost, trace.counts.lost, trace.is_recording) == (3, 4, True)
    trace.end(lambda: replace(NOTHING, lost=5), tuple)
    assert (trace.counts.lost, trace.counts.lost, trace.is_recording) == (5, 5, False)
