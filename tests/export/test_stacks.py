"""Stacks in the files of other tools, and in what Python and statistics make of them."""

import csv
from importlib import import_module
from pathlib import Path
from typing import Any

from kprobes.export.arrow import table
from kprobes.export.csv import CsvFiles
from kprobes.export.kernel_records import KernelEvent
from kprobes.export.perfetto import PerfettoFile
from kprobes.model.columns import whole
from kprobes.model.events import each_event
from kprobes.sinks.names import Names, TraceSource
from tests.build.events import Row, make_batch, make_events
from tests.build.recorded import KERNEL
from tests.build.reference import packed
from tests.build.ring import make_layout

pyarrow: Any = import_module("pyarrow")
SOURCE = TraceSource(version=(6, 1), cpus=2, symbol_at=lambda addr: f"f{addr:x}+0x1/0x9 [m]")
LAYOUT = make_layout(1, ("stacktrace", "u8"), names=("st", "n"))
STACKS = [(0x10, 0x20), (), (0x10, 0x20), (0x30,)]
BATCH = make_batch(LAYOUT, [Row(ts=n, values=(packed(stack), n)) for n, stack in enumerate(STACKS)])
EVENTS = make_events([BATCH])
TEXTS = [" <- ".join(f"f{addr:x}+0x1/0x9 [m]" for addr in stack) for stack in STACKS]


def test_programs_get_addresses() -> None:
    assert [event["st"] for event in each_event(EVENTS)] == STACKS
    assert whole(BATCH).column("st").tolist() == STACKS


def test_arrow_has_lists() -> None:
    named = table(whole(BATCH), SOURCE).column("st").to_pylist()
    raw = table(whole(BATCH), SOURCE, is_raw=True).column("st")

    assert named == [text.split(" <- ") if text else [] for text in TEXTS]
    assert raw.type == pyarrow.list_(pyarrow.uint64())
    rows: list[list[int]] = raw.to_pylist()
    assert [tuple(row) for row in rows] == STACKS


def test_csv_has_texts(tmp_path: Path) -> None:
    file = CsvFiles(tmp_path / "x.csv", KERNEL, SOURCE)
    file.write(EVENTS)
    file.close()

    with (tmp_path / "x.csv").open(newline="") as found:
        assert [row["st"] for row in csv.DictReader(found)] == TEXTS


def test_the_kernels_records_have_texts() -> None:
    event = KernelEvent(LAYOUT, number=7, names=Names(SOURCE), version=(6, 1))

    words = event.records(BATCH).words.tobytes()

    assert "__data_loc char[] st;" in event.text
    assert words.count(TEXTS[0].encode() + b"\0") == 2


def test_a_timeline_has_texts(tmp_path: Path) -> None:
    file = PerfettoFile(tmp_path / "x.pftrace", KERNEL, SOURCE)
    file.write(EVENTS)
    file.close()

    assert TEXTS[0].encode() in (tmp_path / "x.pftrace").read_bytes()
