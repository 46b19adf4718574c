"""``kprobe info`` on recordings of no guest."""

from pathlib import Path

import pytest

from kprobes.cli.main import main
from kprobes.model.events import Counts, Hits
from kprobes.model.recording import RecordingEnd
from tests.build.json_lines import objects
from tests.build.recorded import record, recorded


def run(capsysbinary: pytest.CaptureFixture[bytes], *words: str | Path) -> tuple[int, bytes, str]:
    """Return what the command ends with and prints."""
    status = main(["info", *map(str, words)])
    out, err = capsysbinary.readouterr()
    return status, out, err.decode()


def test_it_says_what_there_is(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    path = tmp_path / "x.rec"
    path.write_bytes(recorded(200))

    status, out, err = run(capsysbinary, path)
    (found,) = objects("info", run(capsysbinary, path, "--format", "json")[1])

    assert (status, err) == (0, "")
    lines = out.decode().splitlines()
    assert lines[0] == "kernel    Linux 6.1.0, x86_64, 2 CPUs, build id 0102"
    assert lines[1] == "target    qemu:here"
    assert "events    200, 0 missed, 0 lost" in lines
    assert "ended     its writer was stopped; all that is there was read" in lines
    assert (found["recorded"], found["lost"], found["is_ended"]) == (200, 0, False)
    assert sum(each["recorded"] for each in found["events"]) == 200
    assert found["first_ns"] < found["last_ns"]


def test_of_a_file_that_is_a_part_it_says_so(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    path, found = tmp_path / "x.2.rec", record(50)
    counts = Counts(recorded={1: 900, 2: 334}, missed={1: 4}, lost=7, damaged=0)
    found.writer.end(RecordingEnd(real_ns=1, counts=counts, hits=(), pauses=None))
    path.write_bytes(found.end())

    out = run(capsysbinary, path)[1].decode()
    (said,) = objects("info", run(capsysbinary, path, "--format", "json")[1])

    assert "events    50 of the 1,234 of its session, 0 missed, 7 lost" in out.splitlines()
    assert said["recorded"] == sum(each["recorded"] for each in said["events"]) == 50


def test_it_says_how_it_ended(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    path, found = tmp_path / "x.rec", record(50)
    hits = Hits(event="read", function="vfs_read", recorded=9, missed=4, event_id=1, nmissed=1)
    counts = Counts(recorded={1: 9}, missed={1: 4}, lost=7, damaged=0)
    found.writer.end(
        RecordingEnd(
            real_ns=1_795_766_224_040_000_000,
            counts=counts,
            hits=(hits,),
            pauses=(0.25, 3),
            why="the guest panicked",
        )
    )
    path.write_bytes(found.end())

    status, out, _ = run(capsysbinary, path)

    lines = out.decode().splitlines()
    assert status == 0
    assert "events    50, 5 missed, 7 lost" in lines
    assert "paused    250.0 ms in 3 stops" in lines
    assert "ended     the guest panicked" in lines
    assert "to 2026-11-27 07:57:04.040+00:00, by kprobe test" in lines[2]
