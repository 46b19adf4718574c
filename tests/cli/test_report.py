"""``kprobe report`` and ``kprobe info`` on recordings of no guest."""

import fcntl
import io
import os
import re
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from msgspec.structs import replace

from kprobes.cli.main import main
from kprobes.formats.recording import MARKER, FrameKind
from tests.build.json_lines import objects, parsed
from tests.build.recorded import KERNEL, LAYOUTS, SYMBOLS, record, recorded, text_of
from tests.build.ring import Hit


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "x.rec"
    found.write_bytes(recorded(200))
    return found


def run(capsysbinary: pytest.CaptureFixture[bytes], *words: str | Path) -> tuple[int, bytes, str]:
    """Return what the command ends with and prints."""
    status = main(list(map(str, words)))
    out, err = capsysbinary.readouterr()
    return status, out, err.decode()


def events(out: bytes) -> list[bytes]:
    # A string may have a line feed.
    return re.split(rb"\n(?= .*-\d+ +\[\d+\] )", out)[1:]


def test_a_report_is_the_traces_text(
    path: Path, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    traced = record(200)
    traced.end()

    status, out, err = run(capsysbinary, "report", path)
    to_file = run(capsysbinary, "report", path, "-o", tmp_path / "out.txt")

    assert (status, err) == (0, "")
    assert events(out) == events(text_of(traced.traced))
    # A file has the number of events in its header.
    assert to_file == (0, b"", "")
    assert (tmp_path / "out.txt").read_bytes() == text_of(traced.traced)


def test_after_ctrl_c_what_a_pipe_still_brings_is_printed(
    path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, data = run(capsysbinary, "report", path), path.read_bytes()
    monkeypatch.setattr("kprobes.cli.report._FINISH_S", 100.0)

    def write(pipe: BinaryIO) -> None:
        pipe.write(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGINT)
        pipe.write(data[len(data) // 2 :])

    with fed(monkeypatch, write):
        assert run(capsysbinary, "report", "-") == whole


def test_after_ctrl_c_a_pipe_that_does_not_end_is_not_waited_for(
    path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kprobes.cli.report._FINISH_S", 0.05)
    is_over = threading.Event()

    def write(pipe: BinaryIO) -> None:
        pipe.write(path.read_bytes())
        os.kill(os.getpid(), signal.SIGINT)
        is_over.wait(100)

    with fed(monkeypatch, write):
        status, _, err = run(capsysbinary, "report", "-")
        is_over.set()

    assert (status, err) == (130, "kprobe: interrupted\n")


@contextmanager
def fed(monkeypatch: pytest.MonkeyPatch, write: Callable[[BinaryIO], None]) -> Generator[None]:
    """Have standard input be a pipe that a thread writes to, and closes."""
    reader, writer = os.pipe()
    # What is written was read, but for a page.
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)

    def feed() -> None:
        with os.fdopen(writer, "wb", buffering=0) as pipe:
            write(pipe)

    with os.fdopen(reader) as stdin:
        monkeypatch.setattr("sys.stdin", stdin)
        thread = threading.Thread(target=feed)
        thread.start()
        yield
        thread.join()


Kept = Callable[[dict[str, Any]], bool]
CHOICES: list[tuple[list[str], Kept]] = [
    (["--event", "read"], lambda e: e["event"] == "read"),
    (["--event", "e[23]"], lambda e: e["event"] in ("e2", "e3")),
    (["--event", "kprobes/e5"], lambda e: e["event"] == "e5"),
    (["--comm", "ca*"], lambda e: e["comm"] == "cat"),
    (["--pid", "7", "--pid", "8"], lambda e: e["pid"] in (7, 8)),
    (["--cpu", "1"], lambda e: e["cpu"] == 1),
    (["--from", "0.000004", "--to", "0.000005"], lambda e: 4000 <= e["ts_ns"] <= 5000),
    (
        ["--event", "read", "--filter", "a0 > 0x8000000000000000"],
        lambda e: e["event"] == "read" and int(e["args"]["a0"]) >> 63 == 1,
    ),
    (["--filter", 'comm == "cat" && cpu == 1'], lambda e: (e["comm"], e["cpu"]) == ("cat", 1)),
    (["--event", "read", "--cpu", "0"], lambda e: (e["event"], e["cpu"]) == ("read", 0)),
]


@pytest.mark.parametrize(("words", "kept"), CHOICES, ids=[" ".join(w) for w, _ in CHOICES])
def test_events_are_chosen(
    path: Path,
    capsysbinary: pytest.CaptureFixture[bytes],
    words: list[str],
    kept: Kept,
) -> None:
    whole = parsed(run(capsysbinary, "report", path, "--format", "json")[1])
    status, out, _ = run(capsysbinary, "report", path, "--format", "json", *words)

    chosen = parsed(out)
    assert status == 0
    assert 0 < len(chosen) < len(whole) == 200
    assert chosen == [line for line in whole if kept(line)]


def test_a_damaged_file_is_printed_as_far_as_it_is_whole_and_told(
    path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    data = bytearray(path.read_bytes())
    data[data.rindex(MARKER + bytes((FrameKind.CHUNK,))) + 50] ^= 1
    path.write_bytes(data)

    status, out, err = run(capsysbinary, "report", path)

    assert status == 1
    assert 50 < len(events(out)) < 200
    assert err == f"kprobe: {path}: 1 damaged place; what is whole was read\n"


@pytest.mark.parametrize("command", ["report", "info"])
@pytest.mark.parametrize(
    "wrong",
    [
        (None, 2, "cannot read"),
        (b"", 1, "not a recording"),
        (b"text\n", 1, "not a recording"),
        (b"kprobes\n\7\0\0\0\0\0\0\0", 1, "version 7"),
    ],
)
def test_what_is_no_recording_is_refused_in_a_line(
    tmp_path: Path,
    capsysbinary: pytest.CaptureFixture[bytes],
    command: str,
    wrong: tuple[bytes | None, int, str],
) -> None:
    path, (data, status, told) = tmp_path / "x.rec", wrong
    if data is not None:
        path.write_bytes(data)

    found, out, err = run(capsysbinary, command, path)

    assert (found, out) == (status, b"")
    assert err.startswith("kprobe: ")
    assert told in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("time", ["x", "-1", "1e40", "nan"])
def test_a_time_that_is_none_is_refused(
    path: Path, capsysbinary: pytest.CaptureFixture[bytes], time: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["report", str(path), f"--from={time}"])

    assert caught.value.code == 2
    assert b"invalid time" in capsysbinary.readouterr().err


def test_a_recording_comes_from_standard_input_too(
    path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    stdin = io.TextIOWrapper(io.BufferedReader(io.BytesIO(path.read_bytes())))
    monkeypatch.setattr("sys.stdin", stdin)

    _, out, _ = run(capsysbinary, "report", "-")

    assert len(events(out)) == 200


@pytest.mark.parametrize("command", [["report"], ["convert"]])
def test_a_filter_that_is_wrong_is_refused_with_a_caret(
    path: Path, capsysbinary: pytest.CaptureFixture[bytes], command: list[str]
) -> None:
    out = [path.with_name("out.csv")] if command == ["convert"] else []

    status, _, err = run(capsysbinary, *command, path, *out, "--filter", "none > 5")

    assert status == 4
    assert "Field not found" in err
    assert [each.name for each in path.parent.iterdir()] == ["x.rec"]


def test_the_longest_calls_are_what_sorting_by_their_duration_begins_with(
    path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    words = ["report", path, "--format", "json"]
    whole = parsed(run(capsysbinary, *words, "--event", "e5")[1])

    few = ["--event", "e5", "--event", "read", "--sort", "a1", "--top", "5"]
    status, out, err = run(capsysbinary, *words, *few)
    _, every, _ = run(capsysbinary, *words, "--sort", "duration", "--event", "e5")

    calls = [row for row in whole if row["args"]["a1"] is not None]
    by_duration = sorted(calls, key=lambda row: (-int(row["args"]["a1"]), row["ts_ns"]))
    assert status == 0
    assert len(calls) > 10
    assert parsed(out) == by_duration[:5]
    assert parsed(every) == by_duration
    assert re.fullmatch(r"kprobe: \d+ events without a1\n", err)


def test_of_a_guest_that_was_rebooted_there_is_one_header(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    out, found = tmp_path / "out.json", record(30)
    found.writer.begin(replace(KERNEL, release="6.2"), SYMBOLS)
    found.begin_anew()
    found.rings[0].write(Hit(layout=LAYOUTS[0], values=(1,)))
    found.look()
    (tmp_path / "x.rec").write_bytes(found.end())
    words = ["report", tmp_path / "x.rec", "--format", "json"]

    _, printed, _ = run(capsysbinary, *words)
    run(capsysbinary, *words, "-o", out)

    assert out.read_bytes() == printed
    header, *lines = objects("line", printed)
    assert header["release"] == "6.1.0"
    assert lines == parsed(printed)
    assert lines[30] == {"event": "reboot", "group": "kprobes", "args": {"release": "6.2"}}
    assert [line["event"] for line in lines[31:]] == ["read"]


def test_only_some_arguments_are_shown(
    path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    words = ["report", path, "--format", "json", "--fields", "a1,a3"]
    whole = parsed(run(capsysbinary, "report", path, "--format", "json")[1])

    found = parsed(run(capsysbinary, *words)[1])

    for row in whole:
        row["args"] = {k: v for k, v in row["args"].items() if k in ("a1", "a3")}
    assert found == whole


def test_csv_is_what_a_converted_file_has(
    path: Path, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    words = ["--event", "e5", "--cpu", "0"]
    run(capsysbinary, "convert", path, tmp_path / "x.csv", *words)

    status, out, _ = run(capsysbinary, "report", path, "--format", "csv", *words)

    assert status == 0
    assert out.count(b"\n") > 10
    assert out == (tmp_path / "x.csv").read_bytes()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--format", "csv"], "a table of one event"),
        (["--format", "csv", "--fields", "a0", "--event", "read", "--event", "e2"], "one event"),
        (["--top", "5"], "--top needs --sort"),
        (["-O", "raw", "--format", "json"], "-O raw is for text, not for --format json"),
        (["-O", "record-tgid", "--format", "csv"], "-O record-tgid is for text, not for --format"),
        (["-O", "raw", "--count", "comm"], "-O raw is for events, not for --count and --hist"),
        (["--sort", "none"], "no event has a number 'none'"),
        (["--sort", "comm"], "no event has a number 'comm'"),
        (["--event", "e3", "--sort", "a1"], "a1 of e3 is no number"),
        (["--fields", "a1,none"], "no event has a field 'none'; there are: a0, a1, a10"),
    ],
)
def test_what_cannot_be_shown_so_is_refused(
    path: Path, capsysbinary: pytest.CaptureFixture[bytes], words: list[str], told: str
) -> None:
    status, _, err = run(capsysbinary, "report", path, *words)

    assert status == 2
    assert told in err
    assert err.count("\n") == 1
