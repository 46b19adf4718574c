"""Traces as notebooks show them."""

from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import import_module
from typing import Any

import numpy as np
import pytest

from kprobes import Trace
from kprobes.errors import UsageError
from kprobes.model.events import NO_COUNTS, Counts
from kprobes.model.kernel import place_of
from kprobes.sinks.names import TraceSource
from tests.build.events import Row, make_batch, make_events
from tests.build.recorded import SYMBOLS, read, recorded
from tests.build.ring import make_layout

matplotlib: Any = import_module("matplotlib")
pyplot: Any = import_module("matplotlib.pyplot")
HOSTILE = b"<script>alert(1)</script>&\x1b[31m\xff\"'"
COUNTS = Counts(recorded={}, missed={1: 2}, lost=3, damaged=0, nmissed={2: 4})
TABLE = {"table", "caption", "thead", "tbody", "tr", "th", "td"}


class Tables(HTMLParser):
    """Rows of cells, and the elements that there are; those that are not closed are an error."""

    def __init__(self, text: str) -> None:
        """Read a whole text."""
        super().__init__()
        self.rows: list[list[str]] = []
        self.captions: list[str] = []
        self.tags: set[str] = set()
        self._open: list[str] = []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        """Begin an element."""
        assert attrs == []
        self.tags.add(tag)
        self._open.append(tag)
        match tag:
            case "tr":
                self.rows.append([])
            case "td" | "th":
                self.rows[-1].append("")
            case _:
                pass

    def handle_endtag(self, tag: str) -> None:
        """End the last element."""
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        """Add to a cell."""
        match self._open[-1:]:
            case ["td"] | ["th"]:
                self.rows[-1][-1] += data
            case ["caption"]:
                self.captions.append(data)
            case _:
                assert not data.strip()


@pytest.fixture(autouse=True)
def no_window() -> Iterator[None]:
    matplotlib.use("Agg")
    yield
    pyplot.close("all")


def trace_of(*rows: Row, types: tuple[str, ...] = ("u64",), has_ns: bool = True) -> Trace:
    found = Trace(TraceSource(version=(6, 1), cpus=1, symbol_at=hex, has_ns=has_ns))
    layout = make_layout(1, types, event="x", can_fault=True, names=["n", "path", "at"])
    found.write(make_events([make_batch(layout, rows)]))
    found.end(lambda: COUNTS, tuple)
    return found


def recorded_trace() -> Trace:
    rounds, recording = read(recorded(300, every=30))
    trace = Trace(TraceSource(version=(6, 1), cpus=2, symbol_at=recording.symbol_at))
    for events in rounds:
        trace.write(events)
    trace.end(lambda: NO_COUNTS, tuple)
    return trace


def shown(value: object) -> Tables:
    html: str = getattr(value, "_repr_html_")()  # noqa: B009 - as IPython asks for it
    return Tables(html)


def test_events_are_a_table_of_the_first_and_the_last() -> None:
    rows = [Row(ts=ts, pid=7, values=(ts * 2, b"/a", ts)) for ts in range(12)]
    trace = trace_of(*rows, types=("u64", "string", "x64"))

    found = shown(trace["x"])

    assert found.captions == ["12 events of x"]
    assert found.rows[0] == ["", "ts", "cpu", "pid", "comm", "function", "n", "path", "at"]
    assert found.rows[1] == ["0", "0", "0", "7", "sh", "vfs_read", "0", "/a", "0x0"]
    assert [row[0] for row in found.rows[1:]] == [
        *"01234",
        "\N{HORIZONTAL ELLIPSIS}",
        *"789",
        "10",
        "11",
    ]
    assert found.rows[-1] == ["11", "11", "0", "7", "sh", "vfs_read", "22", "/a", "0xb"]
    assert {len(row) for row in found.rows} == {9}


def test_few_events_are_all_shown_and_none_too() -> None:
    trace = trace_of(*(Row(ts=ts, values=(ts,)) for ts in range(10)))

    assert [row[0] for row in shown(trace["x"]).rows[1:]] == list("0123456789")
    assert shown(trace["x"][:1]).captions == ["1 event of x"]
    assert shown(trace["x"][:0]).rows == [["", "ts", "cpu", "pid", "comm", "function", "n"]]


def test_a_trace_is_a_table_of_its_events_and_one_of_the_first_and_the_last() -> None:
    trace = recorded_trace()

    found = shown(trace)

    assert found.captions == ["300 events; 0 lost, 0 missed"]
    kinds = {row[0]: int(row[1]) for row in found.rows[1:6]}
    assert kinds == {name: len(trace[name]) for name in kinds}
    assert sum(kinds.values()) == 300
    first, last = trace[0], trace[-1]
    for row, event in ((found.rows[7], first), (found.rows[-1], last)):
        base = event.ts, event.cpu, event.pid, event.comm, event.name, event.function
        assert row[1:7] == list(map(str, base))
        assert [word.partition("=")[0] for word in row[7].split()][:1] == list(event.args)[:1]
    assert shown(trace_of(Row(values=(1,)))).captions == ["1 event; 3 lost, 6 missed"]


def test_values_are_shown_as_what_they_are() -> None:
    trace = recorded_trace()
    columns = trace["e5"].columns

    rows = [dict(zip(columns, row[1:], strict=True)) for row in shown(trace["e5"][:3]).rows[1:]]

    for row, event in zip(rows, trace["e5"][:3], strict=True):
        assert event.caller is not None
        place = None if event["a2"] is None else place_of(SYMBOLS, event["a2"])
        assert row["a0"] == ("" if event["a0"] is None else str(event["a0"]))
        assert row["a2"] == (place or "")
        assert row["caller"] == place_of(SYMBOLS, event.caller)
    unknown = trace_of(Row(values=(0, None, (1, 255))), types=("duration", "string", "x8[2]"))
    assert shown(unknown["x"]).rows[1][-3:] == ["", "", "[0x1, 0xff]"]


def test_nothing_of_a_guests_text_is_markup() -> None:
    trace = trace_of(Row(comm=HOSTILE[:15], values=(1, HOSTILE)), types=("u8", "string"))

    for found in (shown(trace), shown(trace["x"])):
        assert found.tags <= TABLE
        assert any("<script>alert(1)</script>&\\x1b[31m\\xff\"'" in cell for cell in found.rows[-1])
        assert HOSTILE[:15].decode() in found.rows[-1]


def test_hits_are_drawn_over_time() -> None:
    trace = recorded_trace()

    axes = trace.plot()

    drawn: dict[str, Any] = {each.get_label(): each.get_data() for each in axes.patches}
    assert {name: int(data.values.sum()) for name, data in drawn.items()} == {
        name: len(trace[name]) for name in drawn
    }
    assert set(drawn) == {"read", "e2", "e3", "e4", "e5"}
    edges = drawn["read"].edges
    assert edges[[0, -1]].tolist() == pytest.approx([trace[0].ts / 1e9, trace[-1].ts / 1e9])
    assert axes.get_xlabel() == "time (s)"
    assert [each.get_label() for each in trace["read"].plot().patches] == ["read"]
    axes.figure.canvas.draw()


def test_a_field_is_drawn_over_time() -> None:
    rows = [Row(ts=ts * 10**9, values=(value,)) for ts, value in ((1, 5), (2, None), (3, 7))]

    axes = trace_of(*rows)["x"].plot("n")

    (line,) = axes.lines
    assert line.get_xydata().tolist() == [[1.0, 5.0], [3.0, 7.0]]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("time (s)", "n")
    assert trace_of(*rows, has_ns=False)["x"].plot("ts").get_xlabel() == "time"


def test_durations_are_drawn_as_they_are_distributed() -> None:
    took = [0, 1, 10, 100, 1000, 1000, 10**9]
    trace = trace_of(*(Row(values=(ns,)) for ns in took), types=("duration",))

    axes = trace["x"].plot(kind="hist")

    data = axes.patches[0].get_data()
    assert (int(data.values.sum()), int(data.values.max())) == (6, 2)
    assert np.diff(np.log(data.edges)) == pytest.approx(np.log(data.edges[1] / data.edges[0]))
    assert (axes.get_xscale(), axes.get_xlabel(), axes.get_ylabel()) == ("log", "n (ns)", "events")


def test_numbers_are_drawn_as_they_are_distributed() -> None:
    trace = trace_of(*(Row(values=(number,)) for number in (5, 5, None, (1 << 64) - 1)))

    axes = trace["x"].plot("n", kind="hist")

    data = axes.patches[0].get_data()
    assert (data.values[[0, -1]].tolist(), axes.get_xscale()) == ([2, 1], "linear")
    assert axes.get_xlabel() == "n"


def test_plots_are_drawn_on_the_axes_that_are_given() -> None:
    trace = trace_of(Row(values=(1,)), Row(ts=5, values=(2,)))
    _, (one, two) = pyplot.subplots(2)
    before = pyplot.get_fignums()

    assert trace.plot(ax=one) is one
    assert trace["x"].plot("n", ax=two) is two
    assert pyplot.get_fignums() == before


@pytest.mark.parametrize("kind", ["time", "hist"])
def test_what_has_no_events_is_drawn_too(kind: Any) -> None:
    trace = trace_of(Row(values=(0,)), types=("duration",))

    for found in (trace["x"], trace["x"][:0]):
        assert found.plot("n", kind=kind).figure.canvas.draw() is None
    assert trace[:0].plot().patches[:] == []


def test_what_is_no_number_is_not_drawn() -> None:
    trace = trace_of(Row(values=(1, b"/a", (1, 2))), types=("u8", "string", "u8[2]"))

    for name in ("path", "at", "comm", "function"):
        with pytest.raises(UsageError, match=f"^{name} is no number$"):
            trace["x"].plot(name)
    with pytest.raises(KeyError, match="x has no column 'm'"):
        trace["x"].plot("m")
    with pytest.raises(KeyError, match="x has no column 'duration'"):
        trace["x"].plot(kind="hist")
    with pytest.raises(UsageError, match="no such kind of a plot: 'pie'"):
        trace["x"].plot("n", kind="pie")  # pyright: ignore[reportArgumentType] - what is tested
