"""``kprobe convert`` of several recordings."""

import json
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from kprobes.cli.main import main
from kprobes.formats.recording import FRAME_SIZE, MARKER
from tests.build.recorded import KERNEL, SYMBOLS, Recorded
from tests.build.trace_dat import read_dat
from tests.cli.test_report_several import MS, keep
from tests.export.test_trace_dat_several import merged, samples_of

AHEAD = 7200_000 * MS


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two guests of which the second is two hours ahead, each with a read every 2 ms by turns."""
    keep(tmp_path / "web.rec", ahead=0, moments=range(0, 400, 2))
    keep(tmp_path / "db.rec", ahead=AHEAD, moments=range(1, 400, 2))
    monkeypatch.chdir(tmp_path)
    return ["web.rec", "db.rec"]


def manifest_of(archive: zipfile.ZipFile) -> Any:
    return json.loads(archive.read("perfetto_manifest.json"))["perfetto_manifest"]


def reads_in(trace: bytes) -> list[tuple[int, int]]:
    """Return when the reads were, and the number of each."""
    events = [p for p in Trace.FromString(trace).packet if p.HasField("track_event")]
    instants = [p for p in events if p.track_event.type == TrackEvent.TYPE_INSTANT]
    return [(p.timestamp, p.track_event.debug_annotations[-1].uint_value) for p in instants]


def test_a_zip_has_a_timeline_of_each_and_how_their_clocks_are_related(
    paths: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", *paths, "both.zip"]) == 0

    out, err = capsys.readouterr()
    told = re.fullmatch(r"kprobe: db.rec: times are shifted by (.+) s, \+-(.+) s\n", err)
    assert out == ""
    assert told is not None
    error = round(float(told[2]) * 1e9)
    with zipfile.ZipFile("both.zip") as archive:
        web, db = manifest_of(archive)["files"]
        found = {each["path"]: reads_in(archive.read(each["path"])) for each in (web, db)}
    assert [each["machine"]["name"] for each in (web, db)] == ["web", "db"]
    by = db["clocks"]["offset_ns"]
    assert abs(by + AHEAD) <= error < 3 * MS
    assert found["web.pftrace"] == [(moment * MS, moment) for moment in range(0, 400, 2)]
    assert [moment for _, moment in found["db.pftrace"]] == list(range(1, 400, 2))
    wrong = [abs(ts + by - moment * MS) for ts, moment in found["db.pftrace"]]
    assert max(wrong) <= error


def test_dat_is_a_directory_of_files_that_trace_cmd_puts_in_one_order(
    paths: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", *paths, "both.dat"]) == 0

    assert "kprobe: db.rec: times are shifted by -7200.0" in capsys.readouterr().err
    dats = {path.stem: read_dat(path.read_bytes()) for path in Path("both.dat").iterdir()}
    assert dats.keys() == {"web", "db"}
    assert [event["ts"] for event in dats["db"].events()] == [
        moment * MS + AHEAD for moment in range(1, 400, 2)
    ]
    assert samples_of(dats["db"]).peer.to_bytes(8, "little") == dats["web"].options[11][0]


@pytest.mark.skipif(shutil.which("trace-cmd") is None, reason="trace-cmd is not installed")
def test_trace_cmd_and_report_agree_on_the_times(
    paths: list[str], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    main(["convert", *paths, "both.dat"])
    main(["report", *paths, "--format", "json"])

    rows = [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]
    wanted = {int(row["args"]["a0"]): row["ts_ns"] for row in rows if row["event"] == "read"}
    found = merged(Path("both.dat/web.dat"), Path("both.dat/db.dat"))
    assert [ts for _, ts, _ in found] == sorted(ts for _, ts, _ in found)
    assert len(found) == len(wanted) == 400
    # Its samples are at other moments.
    assert max(abs(ts - int(wanted[moment])) for _, ts, moment in found) < 1000


def test_from_and_to_are_times_of_the_first_and_other_options_hold_for_all(
    paths: list[str],
) -> None:
    words = ["--from", "0.1", "--to", "0.2", "--filter", "a0 != 151"]

    assert main(["convert", *paths, "both.zip", *words]) == 0
    assert main(["convert", *words, *paths, "both.dat"]) == 0

    with zipfile.ZipFile("both.zip") as archive:
        web, db = (reads_in(archive.read(f"{name}.pftrace")) for name in ("web", "db"))
    assert [moment for _, moment in web] == list(range(100, 201, 2))
    moments = [moment for _, moment in db]
    assert 151 not in moments
    assert 47 <= len(moments) <= 50
    assert 97 <= moments[0] <= moments[-1] <= 203
    dat = read_dat(Path("both.dat/db.dat").read_bytes())
    assert [event["a0"] for event in dat.events()] == moments


def test_nothing_is_before_the_begin_of_the_timeline(paths: list[str]) -> None:
    keep(Path("young.rec"), ahead=-200 * MS, moments=range(200, 300))

    assert main(["convert", "young.rec", *paths, "all.zip"]) == 0

    with zipfile.ZipFile("all.zip") as archive:
        manifest = manifest_of(archive)
    assert manifest["trace_time"]["file"] == "db.pftrace"
    db, young, web = manifest["files"]
    assert [each["machine"]["name"] for each in (db, young, web)] == ["db", "young", "web"]
    assert "clocks" not in db
    assert abs(young["clocks"]["offset_ns"] - AHEAD - 200 * MS) < 3 * MS
    assert abs(web["clocks"]["offset_ns"] - AHEAD) < 3 * MS


def test_one_recording_becomes_a_zip_too(paths: list[str]) -> None:
    assert main(["convert", paths[1], "one.zip"]) == 0

    with zipfile.ZipFile("one.zip") as archive:
        assert manifest_of(archive)["files"] == [
            {"path": "db.pftrace", "machine": {"name": "db"}},
        ]
        assert len(reads_in(archive.read("db.pftrace"))) == 200


def test_recordings_of_one_name_are_told_apart_by_their_directories(tmp_path: Path) -> None:
    for name in ("h1", "h2\udcff"):
        (tmp_path / name).mkdir()
        keep(tmp_path / name / "kprobe.rec", ahead=0, moments=range(5))
    files = [str(tmp_path / name / "kprobe.rec") for name in ("h1", "h2\udcff")]

    assert main(["convert", *files, str(tmp_path / "x.zip")]) == 0
    assert main(["convert", *files, str(tmp_path / "x.dat")]) == 0

    stem = str(tmp_path).strip("/").replace("/", "-")
    wanted = [f"{stem}-h1-kprobe", rf"{stem}-h2\xff-kprobe"]
    with zipfile.ZipFile(tmp_path / "x.zip") as archive:
        assert [each["machine"]["name"] for each in manifest_of(archive)["files"]] == wanted
    assert sorted(path.stem for path in (tmp_path / "x.dat").iterdir()) == wanted


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["out.csv"], 2, "cannot convert several recordings to 'out.csv': they become .dat or"),
        (["out.pftrace"], 2, "`kprobe report FILE FILE --format json` prints them in one order"),
        (["-", "out.zip"], 2, "none can be standard input"),
        (["web.rec", "out.zip"], 2, "a recording is given twice"),
        (["twice.rec", "out.zip"], 2, "twice.rec has 2 boots: of several, each must have one"),
        (["none.rec", "out.dat"], 2, "cannot read none.rec"),
        (["web.dat", "out.dat"], 2, "files of two recordings would have one name"),
        (["in.dat/x.rec", "in.dat"], 2, "in.dat would take the place of what is read"),
        ([".", "out.zip"], 1, "kprobe: .: a directory"),
        (["none/out.dat"], 1, "cannot write none/out.dat: No such file"),
        (["none/out.zip"], 1, "cannot write none/out.zip: No such file"),
    ],
)
def test_what_is_wrong_is_said_in_a_line_and_nothing_is_left(
    paths: list[str],
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    status: int,
    told: str,
) -> None:
    twice = Recorded()
    twice.writer.begin(KERNEL, SYMBOLS)
    Path("twice.rec").write_bytes(twice.end())

    assert main(["convert", *paths, *words]) == status

    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
    assert {path.name for path in Path().iterdir()} == {"web.rec", "db.rec", "twice.rec"}


def test_a_filter_that_is_wrong_leaves_nothing(
    paths: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    for out in ("out.zip", "out.dat"):
        assert main(["convert", *paths, out, "--filter", "nothing == 1"]) == 4

    assert "nothing" in capsys.readouterr().err
    assert {path.name for path in Path().iterdir()} == set(paths)


def test_a_damaged_one_is_converted_and_told(
    paths: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    whole = Path("db.rec").read_bytes()
    # In the middle of the records.
    frames = [found.start() for found in re.finditer(re.escape(MARKER), whole)]
    at = frames[len(frames) // 2] + FRAME_SIZE
    damaged = bytearray(whole)
    damaged[at] ^= 1
    Path("db.rec").write_bytes(damaged)

    assert main(["convert", *paths, "both.zip"]) == 1

    assert "kprobe: db.rec: 1 damaged place; what is whole was read" in capsys.readouterr().err
    with zipfile.ZipFile("both.zip") as archive:
        assert 100 < len(reads_in(archive.read("db.pftrace"))) < 200
