"""Tables of events in files, and where they are."""

import csv
import json
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

import kprobes
from kprobes.errors import KprobesError, UsageError
from kprobes.export import SUFFIXES, exporter
from kprobes.export.csv import CsvFiles
from kprobes.model.events import Batch
from kprobes.model.resolved import Field, Storage
from kprobes.open_recording import opened_recording
from kprobes.sinks.json import valid_text
from kprobes.sinks.names import TraceSource
from tests.build.events import Row, make_batch, make_events
from tests.build.recorded import CPUS, EVENTS, KERNEL, LAYOUTS, SYMBOLS, recorded
from tests.build.ring import make_layout

# What reads what we write: each has types of its own, or none.
duckdb: Any = import_module("duckdb")
pandas: Any = import_module("pandas")
polars: Any = import_module("polars")
pyarrow: Any = import_module("pyarrow")
parquet: Any = import_module("pyarrow.parquet")
NAMES = [layout.event for layout in LAYOUTS]
SOURCE = TraceSource(version=(6, 1), cpus=CPUS)


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "x.rec"
    path.write_bytes(recorded(EVENTS))
    return path


def convert(recording: Path, out: Path) -> Path:
    with opened_recording(recording) as found:
        for boot in found.boots():
            file = exporter(out)(out, boot.kernel, boot.source)
            try:
                for events in boot.rounds:
                    file.write(events)
                file.close()
            except KprobesError:
                file.discard()
                raise
    return out


def expected(recording: Path, name: str) -> list[dict[str, Any]]:
    """Return the events of one name, oldest first, by the batches alone."""
    rows: list[tuple[int, dict[str, Any]]] = []
    start = 0
    for events in kprobes.load(recording).batches():
        for index, batch in enumerate(events.batches):
            if batch.layout.event == name:
                at = (start + np.flatnonzero(events.batch == index)).tolist()
                rows += zip(at, _rows(batch.take(events.row[events.batch == index])), strict=True)
        start += len(events)
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def _rows(batch: Batch) -> Iterator[dict[str, Any]]:
    for row in range(len(batch)):
        found: dict[str, Any] = {
            "ts": int(batch.ts[row]),
            "cpu": int(batch.cpu[row]),
            "pid": int(batch.pid[row]),
            "comm": valid_text(bytes(batch.comm[row])),
            "function": batch.layout.function,
        }
        if batch.caller is not None:
            found["caller"] = int(batch.caller[row])
            found["caller_sym"] = _symbol(found["caller"])
        for i, field in enumerate(batch.layout.fields):
            found |= _value(batch, i, field, row)
        yield found


def _value(batch: Batch, i: int, field: Field, row: int) -> dict[str, Any]:
    value, mask = batch.values[i][row], batch.faulted[i]
    bad = mask is not None and mask.ndim == 1 and bool(mask[row])
    plain = None if bad else _plain(value)
    match field.type:
        case "symbol":
            named = None if plain is None else _symbol(plain)
            return {field.name: plain, f"{field.name}_sym": named}
        case "symstr":
            return {field.name: None if plain is None else _symbol(plain)}
        case _ if field.storage is Storage.TEXT:
            return {field.name: valid_text(field.text)}
        case _:
            return {field.name: plain}


def _plain(value: Any) -> Any:
    match value:
        case np.ndarray():
            found: list[Any] = value.tolist()
            return list(map(_plain, found))
        case bytes():
            return valid_text(value)
        case _:
            return value.item() if hasattr(value, "item") else value


def _symbol(addr: int) -> str:
    found = SYMBOLS.at(addr)
    return found.place(addr) if found is not None else f"{addr:#x}"


def _without(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in names}


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
@pytest.mark.parametrize("name", NAMES)
def test_arrows_values_are_the_batches(
    recording: Path, tmp_path: Path, suffix: str, name: str
) -> None:
    out = convert(recording, tmp_path / f"out{suffix}")
    file = out / f"event={name}" / f"part-0{suffix}"

    table = (
        parquet.read_table(file) if suffix == ".parquet" else pyarrow.ipc.open_file(file).read_all()
    )

    assert [_without(row, "flags", "event") for row in table.to_pylist()] == expected(
        recording, name
    )
    assert set(table.column("flags").to_pylist()) == {"d...."}
    facts = json.loads(table.schema.metadata[b"kprobes"])
    assert (facts["event"], facts["release"], facts["build_id"]) == (name, "6.1.0", "0102")
    assert table.schema.field("ts").type == pyarrow.int64()


@pytest.mark.parametrize("name", NAMES)
def test_csvs_values_are_the_batches(recording: Path, tmp_path: Path, name: str) -> None:
    out = convert(recording, tmp_path / "out.csv")

    with (out / f"event={name}" / "part-0.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))

    wanted = expected(recording, name)
    assert len(rows) == len(wanted) > 50
    for row, want in zip(rows, wanted, strict=True):
        if "caller" in want:
            want["caller"] = want.pop("caller_sym")
        for key in [each for each in want if each.endswith("_sym")]:
            want[key.removesuffix("_sym")] = want.pop(key)
        assert _without(row, "flags") == {key: _as_csv(value) for key, value in want.items()}


def _as_csv(value: Any) -> str:
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, list) else str(value)


def test_duckdb_pandas_and_polars_read_a_directory_as_one(recording: Path, tmp_path: Path) -> None:
    out = convert(recording, tmp_path / "out.parquet")
    counts = {name: len(expected(recording, name)) for name in NAMES}
    every = f"{out}/**/*.parquet"

    by_sql = duckdb.sql(
        f"select event, count(*) from read_parquet('{every}', hive_partitioning=true, "
        "union_by_name=true) group by event"
    ).fetchall()
    read = pandas.read_parquet(out / "event=read")
    lazy = (
        polars.scan_parquet(out / "event=read" / "*.parquet")
        .select(polars.col("a0").sum())
        .collect()
    )

    assert dict(by_sql) == counts
    assert len(read) == counts["read"]
    total = sum(row["a0"] for row in expected(recording, "read"))
    assert sum(map(int, read["a0"])) == total
    assert lazy.item() == total % 2**64


def test_one_event_is_one_file_and_replaces_what_was_there(tmp_path: Path) -> None:
    layout = make_layout(1, ("u32",), event="only")
    out = tmp_path / "out.csv"
    (out / "event=old").mkdir(parents=True)
    files = CsvFiles(out, KERNEL, SOURCE)
    files.write(make_events([make_batch(layout, [Row(ts=5, values=(7,))])]))

    files.close()

    assert out.read_text().splitlines()[1:] == ["5,0,1,sh,.....,vfs_read,7"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.csv"]


def test_groups_with_an_event_of_one_name_are_told_apart(tmp_path: Path) -> None:
    one = make_layout(1, ("u32",), event="read")
    two = replace(make_layout(2, ("u32",), event="read"), group="mine")
    files = CsvFiles(tmp_path / "out.csv", KERNEL, SOURCE)
    for layout in (one, two):
        files.write(make_events([make_batch(layout, [Row(values=(1,))])]))

    files.close()

    found = {path.name for path in (tmp_path / "out.csv").iterdir()}
    assert found == {"event=kprobes.read", "event=mine.read"}


def test_functions_whose_arguments_differ_are_parts_of_one_event(tmp_path: Path) -> None:
    one, two = make_layout(1, ("u32",), event="x"), make_layout(2, ("u32", "s8"), event="x")
    files = CsvFiles(tmp_path / "out.csv", KERNEL, SOURCE)
    files.write(make_events([make_batch(one, [Row(values=(1,))])]))
    files.write(make_events([make_batch(two, [Row(values=(1, 2))])]))

    files.close()

    assert {path.name for path in (tmp_path / "out.csv" / "event=x").iterdir()} == {
        "part-0.csv",
        "part-1.csv",
    }


def test_what_is_given_up_leaves_nothing(recording: Path, tmp_path: Path) -> None:
    for suffix in SUFFIXES:
        out = tmp_path / f"out{suffix}"
        file = exporter(out)(out, KERNEL, SOURCE)
        for events in kprobes.load(recording).batches():
            file.write(events)

        file.discard()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["out", "out.xls", "out.rec"])
def test_other_suffixes_are_refused_with_those_that_there_are(name: str) -> None:
    with pytest.raises(UsageError, match=r"suffix must be one of \.txt, .*\.parquet"):
        exporter(Path(name))


def test_frames_of_a_trace_have_what_its_events_have(recording: Path) -> None:
    trace = kprobes.load(recording)

    whole, read = trace.to_pandas(), trace.to_polars("read")

    assert whole["ts"].tolist() == sorted(whole["ts"])
    assert whole["event"].value_counts().to_dict() == {
        name: len(expected(recording, name)) for name in NAMES
    }
    assert read["a0"].to_list() == [row["a0"] for row in expected(recording, "read")]
    assert len(polars.DataFrame(trace)) == len(trace) == EVENTS
    with pytest.raises(KeyError):
        trace.to_arrow("none")


@pytest.mark.parametrize("name", NAMES)
def test_a_traces_tables_have_the_values_of_the_batches(recording: Path, name: str) -> None:
    table = kprobes.load(recording).to_arrow(name)

    assert [_without(row, "flags") for row in table.to_pylist()] == expected(recording, name)
    assert set(table.column("flags").to_pylist()) == {"d...."}
    assert table.schema.field("ts").type == pyarrow.int64()


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_rows_that_are_written_in_parts_are_all_there(
    recording: Path, tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kprobes.export.arrow._ROWS", 20)
    monkeypatch.setattr("kprobes.recording._AT_ONCE", 1)
    is_parquet = suffix == ".parquet"
    out = convert(recording, tmp_path / f"out{suffix}")

    for name in NAMES:
        file = out / f"event={name}" / f"part-0{suffix}"
        table = parquet.read_table(file) if is_parquet else pyarrow.ipc.open_file(file).read_all()
        rows = [_without(row, "flags", "event") for row in table.to_pylist()]
        assert rows == expected(recording, name)
        assert not is_parquet or parquet.ParquetFile(file).num_row_groups > 3


@pytest.mark.parametrize("suffix", [".txt", ".ndjson", ".pftrace", ".html"])
def test_what_is_given_up_leaves_what_was_there(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x{suffix}"
    path.write_text("mine")

    made = exporter(path)(path, KERNEL, SOURCE)
    assert path.read_text() == "mine"
    made.discard()
    kept = path.read_text(), [each.name for each in tmp_path.iterdir()]
    exporter(path)(path, KERNEL, SOURCE).close()

    assert kept == ("mine", [path.name])
    assert path.read_bytes() != b"mine"
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_a_directory_with_something_else_in_it_is_left_as_it_is(
    recording: Path, tmp_path: Path
) -> None:
    out = tmp_path / "x.csv"
    convert(recording, out)
    assert out.is_dir()
    convert(recording, out)
    (out / "mine").write_text("mine")

    with pytest.raises(KprobesError, match="has something else in it, mine"):
        convert(recording, out)

    assert (out / "mine").read_text() == "mine"
    assert [each.name for each in tmp_path.iterdir()] == ["x.csv"]


def test_a_directory_takes_the_place_of_a_file(recording: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.csv"
    out.write_text("a table of one event")

    convert(recording, out)

    assert out.is_dir()
