"""``kprobe stats`` on recordings of no guest."""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from kprobes.cli.main import main
from kprobes.formats.recording import MARKER, FrameKind
from kprobes.model.clock import Unscaled
from kprobes.model.resolved import RecordLayout
from tests.build.json_lines import objects
from tests.build.kernel import TEXT
from tests.build.recorded import KERNEL, SYMBOLS, Recorded, recorded
from tests.build.ring import Hit, make_layout

READ = make_layout(
    1, ("s64", "x64", "ustring", "duration"), event="read", has_caller=True, can_fault=True
)
OPEN = make_layout(2, ("u32",), event="open")
MS = 10**6


def made(layouts: Sequence[RecordLayout], hits: Sequence[Hit]) -> Recorded:
    """Record hits whose counters are nanoseconds, on the first CPU."""
    found = Recorded(clock=Unscaled(), layouts=layouts)
    for number, hit in enumerate(hits):
        assert found.rings[0].write(hit)
        if number % 40 == 39:
            found.look()
    found.look()
    return found


def some_hits() -> list[Hit]:
    """Return 100 reads and 20 opens in a second."""
    hits: list[Hit] = []
    for number in range(100):
        now = 5 * 10**9 + number * 10 * MS
        path = (b"/etc/passwd", b"/dev/null", None)[number % 10 // 4]
        values = (number - 50, 1 << number % 3, path, now - 1500 * (number + 1))
        hits.append(
            Hit(
                layout=READ,
                counter=now,
                pid=number % 4 + 1,
                comm=(b"cat", b"dd")[number % 4 == 0],
                values=values,
                caller=TEXT + 256 + number % 2,
            )
        )
        if number % 5 == 0:
            hits.append(Hit(layout=OPEN, counter=now + 10 * MS, pid=9, values=(7,)))
    return hits


@pytest.fixture
def path(tmp_path: Path) -> Path:
    found = tmp_path / "x.rec"
    found.write_bytes(made((READ, OPEN), some_hits()).end())
    return found


def run(capsysbinary: pytest.CaptureFixture[bytes], *words: str | Path) -> tuple[int, str, str]:
    """Return what the command ends with and prints."""
    status = main(list(map(str, words)))
    out, err = capsysbinary.readouterr()
    return status, out.decode(), err.decode()


def as_object(capsysbinary: pytest.CaptureFixture[bytes], *words: str | Path) -> dict[str, Any]:
    """Return what JSON the command prints."""
    status, out, _ = run(capsysbinary, *words, "--format", "json")
    assert status == 0
    (found,) = objects("stats", out)
    return found


TABLES = """\
kernel  Linux 6.1.0
events  120 in 0.990000 s

EVENT  HITS   SHARE  RATE/S  TASKS
read    100  83.3 %   101.0      4
open     20  16.7 %    20.2      1

FIELD        MIN     MEAN      P50     P90     P99     MAX  FAULTS
read.a0      -50     -0.5       -1      39      48      49       0
read.a1      0x1      0x2      0x2     0x4     0x4     0x4       0
read.a3  1.50 us  75.8 us  75.0 us  135 us  148 us  150 us       0
open.a0        7      7.0        7       7       7       7       0

FIELD        HITS    SHARE  VALUE
read.a1        34   34.0 %  0x1
               33   33.0 %  0x2
               33   33.0 %  0x4
read.comm      75   75.0 %  cat
               25   25.0 %  dd
read.caller    50   50.0 %  ext_read+0x0/0x40
               50   50.0 %  ext_read+0x1/0x40
read.a2        40   40.0 %  "/dev/null"
               40   40.0 %  "/etc/passwd"
               20   20.0 %  (fault)
open.a0        20  100.0 %  7
open.comm      20  100.0 %  sh
"""


def test_the_text_is_tables_of_figures(
    path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    status, out, err = run(capsysbinary, "stats", path)

    assert (status, out, err) == (0, TABLES, "")
    assert max(map(len, out.splitlines())) <= 80


def test_the_json_has_the_same_and_the_numbers_whole(
    path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    found = as_object(capsysbinary, "stats", path, "--top", "1")

    read, opened = found.pop("events")
    assert found == {
        "release": "6.1.0",
        "boots": 1,
        "hits": 120,
        "lost": 0,
        "span_ns": 990 * MS,
    }
    assert (read["event"], read["group"], read["hits"]) == ("read", "kprobes", 100)
    assert read["share"] == 100 / 120
    assert read["rate_hz"] == 100 / 0.99
    assert (read["tasks"], read["has_all_tasks"]) == (4, True)
    assert read["comms"] == {
        "is_exact": True,
        "top": [{"value": "cat", "hits": 75, "share": 0.75}],
    }
    fields = {field["name"]: field for field in read["fields"]}
    times = 1500 * np.arange(1, 101)
    assert fields["a3"]["is_duration"]
    assert fields["a3"]["numbers"] == {
        "count": 100,
        "min": 1500,
        "mean": times.mean(),
        "max": 150_000,
        **{
            f"p{each}": int(np.percentile(times, each, method="inverted_cdf"))
            for each in (50, 90, 99)
        },
        "is_exact": True,
        "different": 100,
    }
    assert fields["a3"]["values"] is None
    assert (fields["a2"]["faulted"], fields["a2"]["numbers"]) == (20, None)
    assert fields["a2"]["values"]["top"] == [{"value": "/dev/null", "hits": 40, "share": 0.4}]
    assert opened["callers"] is None
    assert opened["fields"][0]["values"]["top"] == [{"value": 7, "hits": 20, "share": 1.0}]


def test_events_are_chosen_and_rates_stay_those_of_the_recording(
    path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    (own,) = as_object(capsysbinary, "stats", path, "--event", "open")["events"]
    (slow,) = as_object(capsysbinary, "stats", path, "--filter", "a3 > 75000")["events"]
    late = as_object(capsysbinary, "stats", path, "--from", "5.5", "--to", "5.6")

    assert own["rate_hz"] == 20 / 0.99
    assert (slow["hits"], slow["fields"][3]["numbers"]["min"]) == (50, 76_500)
    assert late["span_ns"] == 100 * MS
    assert late["hits"] == 11 + 2


def test_a_filter_that_is_wrong_is_refused_with_a_caret(
    path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    status, out, err = run(capsysbinary, "stats", path, "--filter", "none > 5")

    assert (status, out) == (4, "")
    assert "Field not found" in err


def test_boots_are_counted_together(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    both = made((READ, OPEN), some_hits())
    both.writer.begin(KERNEL, SYMBOLS)
    both.begin_anew()
    for hit in some_hits()[:40]:
        both.rings[0].write(hit)
    both.look()
    (tmp_path / "x.rec").write_bytes(both.end())

    _, out, _ = run(capsysbinary, "stats", tmp_path / "x.rec")

    first, second = out.splitlines()[:2]
    assert first == "kernel  Linux 6.1.0, 2 boots"
    # Of the second boot it is from the first read to the 33rd, 320 ms later.
    assert second == "events  160 in 1.310000 s"
    assert re.search(r"(?m)^read +133 +83\.1 % +101\.5 +4$", out)


def test_lost_events_are_told(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    found = made((OPEN,), [Hit(layout=OPEN, counter=1, values=(1,))])
    while found.rings[0].write(Hit(layout=OPEN, counter=2, values=(1,))):
        pass
    found.look()
    (tmp_path / "x.rec").write_bytes(found.end())

    status, out, err = run(capsysbinary, "stats", tmp_path / "x.rec")

    assert status == 0
    assert ", 1 lost\n" in out
    assert err == "kprobe: 1 event lost when it was recorded: rings were full\n"


def test_what_a_guest_wrote_cannot_act_on_a_terminal_or_look_like_a_row(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    text = b"\x1b[2J\nread 9\xff" + b"x" * 100 + b"\x9b"
    values = (1, 1 << 63, text, 1)
    hits = [Hit(layout=READ, counter=5, comm=b"\x1b]0;\a", values=values)]
    (tmp_path / "x.rec").write_bytes(made((READ,), hits).end())

    _, out, _ = run(capsysbinary, "stats", tmp_path / "x.rec")

    assert out.replace("\n", "").isprintable()
    assert len(re.findall(r"(?m)^read\b", out)) == len(re.findall(r"(?m)^read[ .]", out)) == 8
    assert r"\x1b[2J\nread 9\xffxxxx" in out
    assert "..." in out
    assert r"\x1b]0;\x07" in out
    assert "0x8000000000000000" in out


def test_of_many_events_those_with_the_most_hits_are_shown(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    layouts = [make_layout(number, (), event=f"e{number}") for number in range(1, 26)]
    hits = [
        Hit(layout=layout, counter=time)
        for number, layout in enumerate(layouts, 1)
        for time in range(number)
    ]
    (tmp_path / "x.rec").write_bytes(made(layouts, hits).end())

    _, out, _ = run(capsysbinary, "stats", tmp_path / "x.rec")
    whole = as_object(capsysbinary, "stats", tmp_path / "x.rec")

    shown = re.findall(r"(?m)^(e\d+) ", out)
    assert shown == [f"e{number}" for number in range(25, 5, -1)]
    assert "... and 5 events with fewer hits" in out
    assert len(whole["events"]) == 25


def test_events_of_one_name_are_told_apart_by_their_groups(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    other = replace(make_layout(3, (), event="open"), group="mine")
    hits = [Hit(layout=OPEN, counter=1, values=(1,)), Hit(layout=other, counter=2)]
    (tmp_path / "x.rec").write_bytes(made((OPEN, other), hits).end())

    _, out, _ = run(capsysbinary, "stats", tmp_path / "x.rec")

    assert re.findall(r"(?m)^(\S+/open) ", out) == ["kprobes/open", "mine/open"]


def test_a_recording_without_events_has_no_figures(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    (tmp_path / "x.rec").write_bytes(made((OPEN,), []).end())

    status, out, _ = run(capsysbinary, "stats", tmp_path / "x.rec")

    assert (status, out) == (0, "kernel  Linux 6.1.0\nevents  0 in 0.000000 s\n")
    assert as_object(capsysbinary, "stats", tmp_path / "x.rec")["events"] == []


def test_one_event_has_no_rate(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    hits = [Hit(layout=OPEN, counter=1, values=(1,))]
    (tmp_path / "x.rec").write_bytes(made((OPEN,), hits).end())

    _, out, _ = run(capsysbinary, "stats", tmp_path / "x.rec")

    assert re.search(r"(?m)^open +1 +100\.0 % +- +1$", out)


def test_a_damaged_file_is_counted_as_far_as_it_is_whole_and_told(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    data = bytearray(recorded(200))
    data[data.rindex(MARKER + bytes((FrameKind.CHUNK,))) + 50] ^= 1
    (tmp_path / "x.rec").write_bytes(data)

    status, out, err = run(capsysbinary, "stats", tmp_path / "x.rec")

    assert status == 1
    assert 50 < int(out.splitlines()[1].split()[1]) < 200
    assert err == f"kprobe: {tmp_path / 'x.rec'}: 1 damaged place; what is whole was read\n"


def test_a_file_that_is_cut_anywhere_gives_one_message_at_most(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    data, path = recorded(60), tmp_path / "x.rec"
    seen: set[tuple[int, bool, int]] = set()
    for size in [*range(400), *range(400, len(data), 97)]:
        path.write_bytes(data[:size])

        status, out, err = run(capsysbinary, "stats", path)

        assert "internal error" not in err
        seen.add((status, bool(out), err.count("\n")))
    assert seen == {(1, False, 1), (0, True, 0)}


@pytest.mark.parametrize("bit", [0, 5])
def test_a_file_with_a_byte_that_is_wrong_gives_one_message_at_most(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes], bit: int
) -> None:
    data, path = recorded(60), tmp_path / "x.rec"
    for at in range(0, len(data), 61):
        harmed = bytearray(data)
        harmed[at] ^= 1 << bit
        path.write_bytes(harmed)

        status, _, err = run(capsysbinary, "stats", path)

        assert status in (0, 1)
        assert "internal error" not in err
        assert err.count("\n") <= 1


def test_a_recording_comes_from_standard_input_too(
    path: Path, capsysbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(path.read_bytes())))
    )

    assert run(capsysbinary, "stats", "-") == (0, TABLES, "")
