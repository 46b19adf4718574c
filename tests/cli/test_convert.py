"""``kprobe convert`` on recordings of no guest."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from kprobes.cli.main import main
from kprobes.export import SUFFIXES
from tests.build.json_lines import objects, parsed
from tests.build.recorded import KERNEL, SYMBOLS, hits, record, recorded


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "x.rec"
    found.write_bytes(recorded(200))
    return found


def test_each_kind_of_file_is_written(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for suffix in SUFFIXES:
        out = path.with_name(f"out{suffix}")

        assert main(["convert", str(path), str(out)]) == 0
        assert out.exists()

    assert capsys.readouterr() == ("", "")
    assert len(parsed(path.with_name("out.ndjson").read_bytes())) == 200
    assert len(list(path.with_name("out.parquet").rglob("*.parquet"))) == 5


def test_events_are_chosen(path: Path) -> None:
    out = path.with_name("out.ndjson")

    assert main(["convert", str(path), str(out), "--event", "read", "--cpu", "0"]) == 0

    rows = parsed(out.read_bytes())
    assert {(row["event"], row["cpu"]) for row in rows} == {("read", 0)}


@pytest.mark.parametrize(
    "wrong",
    [
        (["x.rec", "out.xls"], 2, "its suffix must be one of .txt, .ndjson,"),
        (["none.rec", "out.csv"], 2, "cannot read none.rec"),
        (["x.rec", "none/out.csv"], 1, "cannot write none/out.csv: No such file"),
        (["x.rec", "none/out.txt"], 1, "cannot write none/out.txt: No such file"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    wrong: tuple[list[str], int, str],
) -> None:
    words, status, told = wrong
    monkeypatch.chdir(path.parent)

    assert main(["convert", *words]) == status

    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
    assert [each.name for each in path.parent.iterdir()] == ["x.rec"]


def test_each_boot_has_a_file_of_its_own(tmp_path: Path) -> None:
    found = record(30)
    found.writer.begin(replace(KERNEL, release="6.2"), SYMBOLS)
    found.begin_anew()
    for cpu, hit in hits(20):
        found.rings[cpu].write(hit)
    found.look()
    (tmp_path / "x.rec").write_bytes(found.end())

    assert main(["convert", str(tmp_path / "x.rec"), str(tmp_path / "out.ndjson")]) == 0

    written = {p.name: p.read_bytes() for p in tmp_path.glob("*.ndjson")}
    lengths = {name: len(parsed(data)) for name, data in written.items()}
    releases = {name: objects("line", data)[0]["release"] for name, data in written.items()}
    assert lengths == {"out.ndjson": 30, "out.2.ndjson": 20}
    assert releases == {"out.ndjson": "6.1.0", "out.2.ndjson": "6.2"}
