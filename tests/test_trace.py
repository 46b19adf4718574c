"""One recording, as programs see it."""

import numpy as np
import pytest
from msgspec.structs import replace

from kprobes.model.events import Counts, Hits
from kprobes.sinks.names import TraceSource
from kprobes.trace import Trace
from tests.build.events import Row, make_batch, make_events
from tests.build.json_lines import objects, parsed
from tests.build.recorded import read, recorded
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


def test_its_json_is_that_of_the_command_header_and_all() -> None:
    trace = make_trace()

    header, *_ = objects("line", trace.to_json(numbers="number"))

    assert (header["version"], header["cpus"], header["numbers"]) == ("1.0", 1, "number")
    assert [line["args"] for line in parsed(trace.to_json())] == [{"a0": 7}, {"a0": 8}]


def test_a_part_of_a_trace_is_a_trace() -> None:
    rounds, _ = read(recorded(300, every=30))
    trace = Trace(SOURCE)
    for events in rounds:
        trace.write(events)
    trace.end(lambda: replace(NOTHING, lost=5), tuple)
    every = list(trace)
    ids = {batch.layout.event: batch.layout.event_id for each in rounds for batch in each.batches}

    part = trace[100:200]

    assert (list(part), len(part), part.is_recording) == (every[100:200], 100, False)
    assert repr(part) == "<Trace: 100 events>"
    assert (trace[7], trace[-1], trace[np.int64(0)]) == (every[7], every[-1], every[0])
    assert list(part[10:20]) == every[110:120]
    assert list(trace[::-1]) == every[::-1]
    assert part["read"] == [event for event in every[100:200] if event.name == "read"]
    _, entries, text = part.to_text().partition("entries-written: 100/100   #P:1")
    assert entries
    assert text.partition("|\n")[2] in trace.to_text()
    assert part.to_text(options=["raw"]).splitlines()[-100:] == [
        f"{event.pid} {event.cpu} {event.ts} type: {ids[event.name]}" for event in part
    ]
    assert part.to_json().splitlines()[-100:] == trace.to_json().splitlines()[-200:-100]
    assert part.counts.lost == 5
    assert part.to_arrow().to_pylist() == trace.to_arrow().to_pylist()[100:200]
    assert sum(len(each) for each in part.batches()) == 100


def test_a_part_without_events_of_a_name_has_their_columns() -> None:
    trace = make_trace()

    assert trace[:0]["e1"] == []
    assert trace[:0]["e1"].columns == trace["e1"].columns
    assert trace[:0]["e1"]["a0"].tolist() == []
    assert trace[:0].to_arrow("e1").schema.equals(trace.to_arrow("e1").schema)


def test_a_part_of_a_trace_that_is_still_recorded_is_of_what_there_is() -> None:
    trace = make_trace()
    part, ones = trace[:], trace["e1"]

    trace.write(trace.events[0])

    assert (len(part), len(ones), len(trace)) == (2, 2, 3)
