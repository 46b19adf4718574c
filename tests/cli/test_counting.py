"""``kprobe count``, ``kprobe hist`` and ``report --count --hist``, on a recording and no guest."""

import csv
import io
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from kprobes.cli.counting import Counting, Shown
from kprobes.cli.histograms import HistogramSink, shown_text
from kprobes.cli.main import main
from kprobes.model.events import NO_EVENTS
from tests.build.json_lines import parsed
from tests.build.recorded import recorded
from tests.test_column_filter import SOURCE, events
from tests.test_column_hist import counted


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "x.rec"
    found.write_bytes(recorded(200))
    return found


def run(capsysbinary: pytest.CaptureFixture[bytes], *words: str | Path) -> tuple[int, str, str]:
    status = main(list(map(str, words)))
    out, err = capsysbinary.readouterr()
    return status, out.decode(), err.decode()


def test_a_recording_is_counted(path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    lines = parsed(run(capsysbinary, "report", path, "--format", "json")[1].encode())
    wanted = Counter((line["comm"], line["cpu"]) for line in lines)

    status, out, err = run(capsysbinary, "report", path, "--count", "comm,cpu", "--format", "csv")
    text = run(capsysbinary, "report", path, "--count", "comm,cpu", "--top", "1")[1]

    rows = [*csv.DictReader(io.StringIO(out))]
    found = {(row["comm"], int(row["common_cpu"])): int(row["hitcount"]) for row in rows}
    assert (status, err, found) == (0, "", dict(wanted))
    assert [*found.values()] == sorted(found.values(), reverse=True)
    head, first, *rest = text.splitlines()
    assert head.split() == ["HITS", "SHARE", "COMM", "COMMON_CPU"]
    assert first.split()[0] == str(max(wanted.values()))
    assert rest == [f"... and {len(wanted) - 1} more", "", f"200 hits, {len(wanted)} entries"]


def test_a_hist_trigger_is_asked_of_chosen_events(
    path: Path, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    words = ("report", path, "--event", "read", "--hist", "keys=a0.log2:vals=a0.avg,a0.max")

    status, out, _ = run(capsysbinary, *words, "--format", "json")
    events_of = ("report", path, "--event", "read", "--format", "json")
    lines = parsed(run(capsysbinary, *events_of)[1].encode())
    kernels = run(capsysbinary, *words, "--format", "hist", "-o", tmp_path / "out")

    found: dict[str, Any] = json.loads(out)
    assert status == 0
    assert found["hits"] == len(lines) == sum(each["hitcount"] for each in found["entries"])
    assert max(each["vals"]["a0.max"] for each in found["entries"]) == max(
        int(line["args"]["a0"]) for line in lines
    )
    assert kernels == (0, "", "")
    text = (tmp_path / "out").read_text()
    assert text.startswith("# event histogram\n#\n# trigger info: hist:keys=a0.log2:")
    assert f"    Hits: {len(lines)}\n" in text


@pytest.mark.parametrize(
    ("words", "status", "told"),
    [
        (["--hist", "keys=nosuch"], 4, "Couldn't find field"),
        (["--count", "comm", "--hist", "keys=a0"], 2, "not allowed with"),
        (["--count", "comm", "--format", "table"], 2, "--format table is for events"),
        (["--format", "hist"], 2, "--format hist is for"),
        (["--count", "comm", "--sort", "pid"], 2, "--sort and --fields are for events"),
        (["--count", "a,,b"], 2, "invalid list"),
    ],
)
def test_what_cannot_be_counted_is_refused(
    path: Path,
    capsysbinary: pytest.CaptureFixture[bytes],
    words: list[str],
    status: int,
    told: str,
) -> None:
    try:
        found = main(["report", str(path), *words])
    except SystemExit as ended:
        found = ended.code

    out, err = capsysbinary.readouterr()
    assert (found, out) == (status, b"")
    assert told in err.decode()


def test_two_recordings_are_not_counted(
    path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    status, _, err = run(capsysbinary, "report", path, path, "--count", "comm")
    assert (status, err) == (2, "kprobe: --count and --hist are of one recording\n")


SIZE = "size=16384"
SIZED = ("--size", "1000")


@pytest.mark.parametrize(
    ("words", "trigger"),
    [
        (["count", "p vfs_*"], "keys=function:sort=hitcount.descending:size=65536"),
        (
            ["count", "p f a=$arg1", "--by", "comm,pid,a.log2"],
            f"keys=comm,common_pid,a.log2:sort=hitcount.descending:{SIZE}",
        ),
        (
            ["count", "r f", "--vals", "duration.avg,duration.p99", "--sort", "duration.p99"],
            "keys=function:vals=duration.avg,duration.p99:sort=duration.p99.descending:size=65536",
        ),
        (
            ["count", "p f a=$arg1", "--by", "a.log2,pid", "--sort", "a.log2.ascending", *SIZED],
            "keys=a.log2,common_pid:sort=a.ascending:size=1000",
        ),
        (
            ["count", "p f duration=$arg1", "--vals", "duration.p50"],
            "keys=function:vals=duration.p50:sort=hitcount.descending:size=65536",
        ),
        (
            ["count", "r f", "--by", "100-duration/1000", "--sort", "100-duration/1000"],
            f"keys=100-duration/1000:sort=100-duration/1000.descending:{SIZE}",
        ),
        (["hist", "p f a=$arg1", *SIZED], "keys=a.log2:sort=a:size=1000"),
        (["hist", "r f"], f"keys=duration.log2:sort=duration:{SIZE}"),
        (["hist", "r f", "--by", "comm"], f"keys=comm,duration.log2:sort=duration:{SIZE}"),
        (["hist", "p f a=$arg1"], f"keys=a.log2:sort=a:{SIZE}"),
        (["hist", "p f a=$arg1 b=$arg2", "--of", "b"], f"keys=b.log2:sort=b:{SIZE}"),
        (
            ["hist", "p f a=$arg1", "--linear", "0:100:10"],
            f"keys=a.buckets=10:sort=a:{SIZE}",
        ),
    ],
)
def test_short_words_stand_for_a_hist_trigger(
    capsysbinary: pytest.CaptureFixture[bytes], words: list[str], trigger: str
) -> None:
    assert run(capsysbinary, *words, "--print-trigger") == (0, f"hist:{trigger}\n", "")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["p f"], "nothing to show: the definition has no argument"),
        (["p f a=$arg1 b=$arg2"], "--of FIELD is needed: which one of a, b"),
        ([], "nothing to count: give a definition"),
        (["p f a=$arg1", "--of", "duration"], "only returns have a duration: define one"),
        (["p f a=$arg1", "--of", "100-duration"], "an expression has no buckets"),
        (["p f a=$arg1", "--by", "100-duration"], "only returns have a duration: define one"),
        (["p f a=$arg1", "--linear", "5"], "invalid buckets"),
        (["p f a=$arg1", "--linear", "9:5:1"], "invalid buckets"),
        (["p f a=$arg1", "--linear", "0:5:0"], "invalid buckets"),
    ],
)
def test_what_is_not_said_is_asked_for(
    capsysbinary: pytest.CaptureFixture[bytes], words: list[str], told: str
) -> None:
    try:
        status = main(["hist", *words, "--print-trigger"])
    except SystemExit as ended:
        status = ended.code

    assert status == 2
    assert told in capsysbinary.readouterr().err.decode()


def test_a_field_is_named_once_where_several_values_of_it_are_in_a_row() -> None:
    vals = "got.avg,got.p99,got,count,count.max"

    head = shown_text(counted(f"keys=comm:vals={vals}"), Shown()).decode().splitlines()[0]

    named = ["GOT.AVG", ".P99", "GOT", "COUNT", ".MAX"]
    assert head.split() == ["HITS", "SHARE", *named, "COMM"]


def test_buckets_are_bars_with_the_empty_ones_between() -> None:
    text = shown_text(counted("keys=count.buckets=1000:sort=count"), Shown()).decode()

    rows = text.splitlines()[1:-2]
    assert [row.split("|")[0].split() for row in rows] == [
        ["[0,", "1000)", "3"],
        ["[1000,", "2000)", "0"],
        ["[2000,", "3000)", "0"],
        ["[3000,", "4000)", "0"],
        ["[4000,", "5000)", "0"],
        ["[5000,", "6000)", "1"],
    ]
    full, _, _, _, _, third = (row.count("#") for row in rows)
    assert full == 3 * third or full // 3 + 1 == third


@pytest.mark.parametrize(
    ("key", "labels"),
    [
        ("got.log2", ["< 0", "[0, 1]", "(1, 2]", "(2, 4]", "(4, 8]"]),
        ("got.buckets=200", ["[-416, -216)", "[-16, 0)", "[0, 200)"]),
    ],
)
def test_numbers_below_zero_come_first(key: str, labels: list[str]) -> None:
    text = shown_text(counted(f"keys={key}"), Shown()).decode()

    rows = text.splitlines()[1:-2]
    assert [row.split("|")[0].strip().rsplit(maxsplit=1)[0] for row in rows] == labels


def test_each_key_has_its_bars_the_one_with_the_most_hits_first() -> None:
    text = shown_text(counted("keys=comm,got.log2"), Shown(top=2)).decode()

    heads = [line for line in text.splitlines() if line.startswith("comm: ")]
    assert heads[0] == "comm: cat"
    assert len(heads) == 2
    assert "... and 1 more" in text


def test_what_is_outside_of_the_buckets_is_one_each() -> None:
    shown = Shown(bounds=(100, 1000))
    text = shown_text(counted("keys=count.buckets=100:sort=count"), shown).decode()

    rows = [row.split("|")[0].split() for row in text.splitlines()[1:-2]]
    assert rows == [["<", "100", "2"], ["[500,", "600)", "1"], [">=", "1000", "1"]]


def test_a_share_is_of_all_entries_however_many_are_shown() -> None:
    histogram = counted("keys=common_pid:vals=hitcount.percent:sort=common_pid")

    whole, some = (shown_text(histogram, Shown(top=top)).decode().splitlines() for top in (9, 2))

    assert len(histogram) > 2
    assert [line.split() for line in some[:3]] == [line.split() for line in whole[:3]]
    shares = [line.split()[1::2] for line in some[1:3]]
    assert all(first == second for first, second, *_ in shares)


def test_bars_are_of_a_key_and_not_of_what_it_is_called() -> None:
    histogram = counted("keys=count.sym,got.log2")
    named = replace(histogram, source=replace(SOURCE, symbol_at="f+{}".format))

    text = shown_text(named, Shown()).decode()

    different = len(set(histogram.keys[0].tolist()))
    assert text.count("count: f") == different > 1
    hits = [int(line.split("|")[0].split()[-1]) for line in text.splitlines() if "|" in line]
    assert sum(hits) == histogram.hits


def test_a_bucket_of_numbers_without_a_sign_has_none() -> None:
    histogram = counted("keys=count.buckets=4096")
    high = replace(histogram, keys=(np.full(len(histogram), 0xFFFF_8880_0000_0000, np.uint64),))

    rows = shown_text(high.take(slice(0, 1)), Shown()).decode().splitlines()[1:-2]

    assert rows[0].split("|")[0].split()[:2] == ["[18446612682070032384,", "18446612682070036480)"]


def test_it_is_shown_each_interval_and_at_the_end() -> None:
    out = io.BytesIO()
    sink = HistogramSink(out, SOURCE, Counting(trigger="keys=comm", shown=Shown(interval_s=1e-9)))

    sink.write(NO_EVENTS)
    assert out.getvalue() == b""
    sink.write(events())
    first = out.getvalue()
    sink.write(events())
    second = out.getvalue()[len(first) :]
    sink.close()

    assert b"7 hits" in first
    assert b"14 hits" in second
    assert out.getvalue()[len(first) + len(second) :] == second


def test_with_delta_each_interval_has_its_own_hits_and_the_end_all() -> None:
    out = io.BytesIO()
    shown = Shown(interval_s=1e-9, is_delta=True)
    sink = HistogramSink(out, SOURCE, Counting(trigger="keys=comm", shown=shown))

    sink.write(NO_EVENTS)
    for _ in range(2):
        sink.write(events())
    sink.close()

    head, *_ = out.getvalue().splitlines()
    assert head.split() == [b"HITS", b"HITS/S", b"SHARE", b"COMM"]
    ends = [line for line in out.getvalue().splitlines() if b"entries" in line]
    assert [re.sub(rb"in \d+\.\d\d s", b"in a while", each) for each in ends] == [
        b"7 hits in a while, 3 entries",
        b"7 hits in a while, 3 entries",
        b"14 hits, 3 entries",
    ]


def test_hits_a_second_are_those_of_the_time_that_they_took() -> None:
    text = shown_text(counted("keys=comm"), Shown(is_delta=True), seconds=0.5).decode()

    rows = [line.split() for line in text.splitlines()[1:-2]]
    assert rows
    assert all(float(rate) == 2 * float(hits) for hits, rate, *_ in rows)


@pytest.mark.parametrize("words", [["count", "p f"], ["hist", "r f"], ["flame", "p f"]])
def test_what_is_counted_has_no_profile_of_events(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "-t", "guest", "--summary", "kprobe_profile"]) == 2
    assert "--summary kprobe_profile is of events" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["count", "p f"], ["hist", "r f"]])
def test_what_is_new_is_new_since_some_time(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "-t", "guest", "--delta"]) == 2
    assert capsys.readouterr().err == "kprobe: --delta needs --interval TIME: since when\n"


def test_a_sink_without_an_interval_is_quiet_until_the_end() -> None:
    out = io.BytesIO()
    sink = HistogramSink(out, SOURCE, Counting(trigger="keys=comm", shown=Shown()))

    sink.write(NO_EVENTS)
    sink.write(events())
    assert out.getvalue() == b""
    sink.close()

    assert b"7 hits, 3 entries" in out.getvalue()


def test_dropped_and_unmeasured_hits_are_told() -> None:
    full = counted("keys=wide,count,got:size=128")

    text = shown_text(replace(full, dropped=5, unmeasured=3), Shown()).decode()

    assert "4 hits, 4 entries, 5 hits dropped: the table is full, 3 without a duration" in text
