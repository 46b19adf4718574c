"""Events of one name, as a list and as columns."""

import importlib
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kprobes
from kprobes import EventColumns, Trace
from kprobes.errors import UsageError
from kprobes.model.events import NO_COUNTS, Hits
from kprobes.sinks.json import valid_text
from kprobes.sinks.names import TraceSource
from tests.build.events import Row, make_batch, make_events
from tests.build.recorded import LAYOUTS, recorded
from tests.build.ring import make_layout

pandas: Any = importlib.import_module("pandas")
polars: Any = importlib.import_module("polars")
pyarrow: Any = importlib.import_module("pyarrow")
NAMES = [layout.event for layout in LAYOUTS]
SOURCE = TraceSource(version=(6, 1), cpus=1, symbol_at=hex)
HOSTILE = (b"\xff\xfe", b"/etc/passwd", b"\xc3\x28 no UTF-8", b"\\xff", b"")

WITHOUT = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {0!r}:
            raise ModuleNotFoundError(name=name)

sys.meta_path.insert(0, Hidden())
import kprobes
trace = kprobes.load("x.rec")
{1}
"""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    path = tmp_path_factory.mktemp("columns") / "x.rec"
    path.write_bytes(recorded(400))
    return kprobes.load(path)


def trace_of(*rows: Row, types: tuple[str, ...] = ("u64",), can_fault: bool = False) -> Trace:
    found = Trace(SOURCE)
    layout = make_layout(1, types, event="x", can_fault=can_fault)
    found.write(make_events([make_batch(layout, rows)]))
    found.end(lambda: NO_COUNTS, lambda: [Hits(event="quiet", function="f", recorded=0, missed=0)])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_it_is_the_list_of_its_events(trace: Trace, name: str) -> None:
    events = [event for event in trace if event.name == name]

    found = trace[name]

    assert found == events
    assert events == found
    assert found == trace[name]
    assert found != events[:-1]
    assert found != [*events[:-1], events[0]]
    assert found != tuple(events)
    assert (len(found), list(found), bool(found)) == (len(events), events, True)
    assert (found[0], found[-1], found[np.int64(3)]) == (events[0], events[-1], events[3])
    assert (found[2:20:3], found[::-1], found[5:5]) == (events[2:20:3], events[::-1], [])
    assert (list(reversed(found)), events[2] in found) == (events[::-1], True)
    assert isinstance(found[2:4], EventColumns)
    with pytest.raises(IndexError):
        found[len(events)]
    with pytest.raises(TypeError):
        hash(found)


def test_it_has_a_column_of_each_field_and_of_what_all_have(trace: Trace) -> None:
    found = trace["e5"]
    events = list(found)

    assert found.columns == (
        "ts",
        "cpu",
        "pid",
        "comm",
        "function",
        "caller",
        "a0",
        "a1",
        "a2",
        "a3",
    )
    for name in ("ts", "cpu", "pid", "comm", "function", "caller"):
        assert found[name].tolist() == [getattr(event, name) for event in events]
    for name in ("a0", "a1", "a2", "a3"):
        assert found[name].tolist() == [event[name] for event in events]
    assert found[3:9]["a1"].tolist() == [event["a1"] for event in events[3:9]]
    assert {*trace.columns("e5")} == {*found.columns}


def test_a_column_that_is_not_there_is_an_error_with_those_that_are(trace: Trace) -> None:
    with pytest.raises(KeyError, match=r"read has no column 'path'; its columns: ts, cpu, .*, a0"):
        trace["read"]["path"]
    with pytest.raises(KeyError, match="quiet has no column 'path'; its columns: none, as it was"):
        trace_of(Row(values=(1,)))["quiet"]["path"]


def test_it_prints_how_many_events_there_are_and_the_first() -> None:
    found = trace_of(*(Row(ts=ts, values=(7,)) for ts in range(5)))["x"]

    assert repr(found[:1]) == f"<EventColumns: 1 of x: [{found[0]!r}]>"
    assert repr(found).count("Event(name='x'") == 3
    assert repr(found).endswith("), ...]>")


def test_nothing_is_made_of_events_that_are_not_asked_for() -> None:
    trace = trace_of(*[Row(values=(7,))] * 20_000)
    tracemalloc.start()

    found = trace["x"][10:-10][::-1]
    number = found[-1]["a0"]

    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (number, len(found)) == (7, 19_980)
    # A list of them took 16 MB.
    assert peak < 100_000


def test_durations_are_those_that_were_measured() -> None:
    rows = [Row(values=(1, took)) for took in (5, 0, 1 << 40, 0)]
    trace = trace_of(*rows, types=("u64", "duration"))

    found = trace.durations("x")

    assert (found.dtype, found.tolist()) == (np.uint64, [5, 1 << 40])
    assert trace["x"][2:].durations().tolist() == [1 << 40]
    with pytest.raises(KeyError, match="x has no duration; its fields: a0"):
        trace_of(Row(values=(1,))).durations("x")
    with pytest.raises(KeyError, match="no such event: 'nosuch'"):
        trace.durations("nosuch")
    assert trace.durations("quiet").tolist() == []


@pytest.mark.parametrize("name", NAMES)
def test_frames_of_a_part_are_rows_of_the_whole_frame(trace: Trace, name: str) -> None:
    whole = trace.to_arrow(name).to_pylist()

    part = trace[name][10:40:3]

    assert part.to_arrow().to_pylist() == whole[10:40:3]
    assert part.to_polars().rows(named=True) == part.to_arrow().to_pylist()
    assert pyarrow.table(part).equals(part.to_arrow())
    assert polars.DataFrame(part).equals(part.to_polars())
    assert part.to_pandas()["ts"].tolist() == part["ts"].tolist()
    assert list(part.to_pandas().columns) == part.to_arrow().column_names


def test_raw_texts_are_the_bytes_of_the_guest() -> None:
    rows = [Row(comm=text[:15], values=(text, (text, None))) for text in HOSTILE]
    trace = trace_of(*rows, types=("string", "string[2]"))

    for raw in (trace.to_arrow("x", raw=True), trace["x"].to_arrow(raw=True)):
        assert raw["comm"].to_pylist() == list(HOSTILE)
        assert raw["a0"].to_pylist() == list(HOSTILE)
        assert raw["a1"].to_pylist() == [[text, None] for text in HOSTILE]
        assert raw["function"].to_pylist() == ["vfs_read"] * len(HOSTILE)
    assert trace.to_pandas("x", raw=True)["a0"].tolist() == list(HOSTILE)
    assert trace.to_polars("x", raw=True)["a0"].to_list() == list(HOSTILE)
    assert trace.to_polars(raw=True)["comm"].to_list() == list(HOSTILE)
    assert trace.to_arrow("x")["a0"].to_pylist() == [valid_text(text) for text in HOSTILE]


def test_integers_that_could_not_be_read_leave_the_others_whole() -> None:
    big = (1 << 64) - 1
    trace = trace_of(Row(values=(big,)), Row(values=(None,)), can_fault=True)

    frame = trace.to_pandas("x")

    assert str(frame["a0"].dtype) == "UInt64"
    assert (int(frame["a0"][0]), frame["a0"].isna().tolist()) == (big, [False, True])
    assert list(frame.columns)[-2:] == ["function", "a0"]


def test_a_frame_is_the_users_own() -> None:
    trace = trace_of(Row(values=(1,)), Row(values=(2,)))
    frame = trace.to_pandas("x")

    frame.loc[0, "a0"] = 9
    frame["ts"] += 1

    assert frame["a0"].tolist() == [9, 2]
    assert (trace["x"]["a0"].tolist(), trace["x"]["ts"].tolist()) == ([1, 2], [0, 0])


def test_contexts_that_print_alike_are_one_category() -> None:
    # Bit 31 of the softirq depth's byte is in neither text.
    trace = trace_of(*(Row(context=context, values=(1,)) for context in (0x400, 0x600, 0)))

    flags = trace.to_pandas("x")["flags"]

    assert flags.tolist()[0] == flags.tolist()[1] != flags.tolist()[2]
    assert len(flags.cat.categories) == 2


def test_functions_whose_arguments_differ_are_one_frame() -> None:
    trace = Trace(SOURCE)
    layouts = [
        make_layout(1, ("u32",), event="x", where="one+0x0/0x10", names=("n",)),
        make_layout(2, ("s8", "string"), event="x", where="two+0x0/0x10", names=("n", "path")),
    ]
    one = make_batch(layouts[0], [Row(ts=1, values=(7,)), Row(ts=3, values=(8,))])
    two = make_batch(layouts[1], [Row(ts=2, values=(-1, b"/a"))])
    trace.write(make_events([one, two], [(0, 0), (1, 0), (0, 1)]))

    table = trace.to_arrow("x").select(["ts", "function", "n", "path"])

    assert table.to_pydict() == {
        "ts": [1, 2, 3],
        "function": ["one", "two", "one"],
        "n": [7, -1, 8],
        "path": [None, "/a", None],
    }


def test_types_that_no_column_can_have_are_an_error() -> None:
    trace = Trace(SOURCE)
    for number, kind, value in ((1, "u64", (1 << 64) - 1), (2, "s64", -1)):
        layout = make_layout(number, (kind,), event="x", names=("n",))
        trace.write(make_events([make_batch(layout, [Row(values=(value,))])]))

    with pytest.raises(UsageError, match="n has no one type in all functions"):
        trace.to_arrow("x")
    assert trace["x"]["n"].tolist() == [(1 << 64) - 1, -1]


@pytest.mark.parametrize(
    ("package", "call"),
    [("pandas", "trace.to_pandas()"), ("matplotlib", "trace.plot()")],
)
def test_without_a_package_it_is_said_how_to_get_it(
    tmp_path: Path, package: str, call: str
) -> None:
    (tmp_path / "x.rec").write_bytes(recorded(10))
    command = [sys.executable, "-c", WITHOUT.format(package, call)]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert f"UsageError: {package} is not installed: pip install {package}" in done.stderr


def test_events_of_a_file_that_nobody_wrote_to_an_end_are_there(tmp_path: Path) -> None:
    path = tmp_path / "cut.rec"
    path.write_bytes(recorded(200)[:-100])

    found = kprobes.load(path)

    assert len(found["read"]) == len(found["read"]["a0"]) == len(found.to_arrow("read")) > 0
