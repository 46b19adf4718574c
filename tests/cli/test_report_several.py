"""``kprobe report`` of several recordings."""

import re
from pathlib import Path

import pytest

from kprobes.cli.main import main
from kprobes.model.clock import Unscaled
from tests.build.json_lines import parsed
from tests.build.recorded import KERNEL, LAYOUTS, SYMBOLS, Recorded, record
from tests.build.ring import Hit

MS = 10**6
BEGAN = 1_700_000_000 * 1000 * MS
"""A date."""


def keep(path: Path, *, ahead: int, moments: range) -> Path:
    """Record a read at each moment, in ms, by a guest's clock that is ahead of the first one's."""
    recorded = Recorded(clock=Unscaled(), real_ns=BEGAN)
    for moment in moments:
        recorded.since_ns, recorded.real_ns = recorded.real_ns, BEGAN + (moment + 1) * MS
        now = moment * MS + ahead
        recorded.rings[0].write(Hit(layout=LAYOUTS[0], counter=now, values=(moment,)))
        recorded.look()
    path.write_bytes(recorded.end())
    return path


def run(capsysbinary: pytest.CaptureFixture[bytes], *words: str | Path) -> tuple[int, bytes, str]:
    """Return what the command ends with and prints."""
    status = main(["report", *map(str, words)])
    out, err = capsysbinary.readouterr()
    return status, out, err.decode()


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Three guests: the second is two hours ahead, the third's clock is the first's."""
    return [
        keep(tmp_path / "one.rec", ahead=0, moments=range(0, 300, 3)),
        keep(tmp_path / "second.rec", ahead=7200_000 * MS, moments=range(1, 300, 3)),
        keep(tmp_path / "c.rec", ahead=0, moments=range(2, 300, 3)),
    ]


def test_events_of_several_guests_are_one_timeline(
    paths: list[Path], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    status, out, err = run(capsysbinary, *paths, "--format", "json")

    rows = parsed(out)
    by = re.fullmatch(r"kprobe: second.rec: times are shifted by (.+) s, \+-(.+) s\n", err)
    assert status == 0
    assert by is not None
    assert abs(float(by[1]) + 7200) <= float(by[2]) < 0.0025
    assert not out.startswith(b'{"file":')
    assert {row["file"] for row in rows} == {"one.rec", "second.rec", "c.rec"}
    assert [row["ts_ns"] for row in rows] == sorted(row["ts_ns"] for row in rows)
    moments = [int(row["args"]["a0"]) for row in rows]
    assert sorted(moments) == [*range(300)]
    assert max(abs(moment - at) for at, moment in enumerate(moments)) <= 3
    own = [int(row["args"]["a0"]) for row in rows if row["file"] != "second.rec"]
    assert own == sorted(own)


def test_lines_of_text_begin_with_the_recordings_names(
    paths: list[Path], capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path
) -> None:
    _, alone, _ = run(capsysbinary, paths[0])

    _, out, _ = run(capsysbinary, *paths)
    _, _, _ = run(capsysbinary, *paths, "-o", tmp_path / "out.txt")

    # Only of one recording the events are counted.
    alone = re.sub(rb"written: 100/100", b"written: 0/0", alone)
    heads = [line for line in out.splitlines(keepends=True) if line.startswith(b"#")]
    own = [line for line in out.splitlines(keepends=True) if line.startswith(b"one.rec")]
    assert b"".join(heads) + b"".join(line[len("one.rec   : ") :] for line in own) == alone
    assert sum(line.startswith(b"second.rec: ") for line in out.splitlines()) == 100
    assert (tmp_path / "out.txt").read_bytes() == out


def test_options_hold_for_all_of_them(
    paths: list[Path], capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    words = ["--format", "json", "--sort", "a0", "--top", "5", "--fields", "a0"]

    _, out, _ = run(capsysbinary, *paths, *words)
    _, between, _ = run(capsysbinary, *paths, "--format", "json", "--from", "0.1", "--to", "0.2")

    rows = parsed(out)
    assert [int(row["args"]["a0"]) for row in rows] == [299, 298, 297, 296, 295]
    assert abs(len(parsed(between)) - 101) <= 2


def test_each_kernels_addresses_have_its_own_names(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    for seed, name in enumerate(("a.rec", "b.rec")):
        (tmp_path / name).write_bytes(record(300, seed=seed).end())
    words = ["--format", "json", "--event", "e5"]
    alone = [run(capsysbinary, tmp_path / name, *words)[1] for name in ("a.rec", "b.rec")]

    _, out, _ = run(capsysbinary, tmp_path / "a.rec", tmp_path / "b.rec", *words)

    for name, want in zip((b"a.rec", b"b.rec"), alone, strict=True):
        head = b'{"file":"%b",' % name
        lines = [line for line in out.splitlines() if line.startswith(head)]
        assert [b"{" + line[len(head) :] for line in lines] == want.splitlines()[1:]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["one.rec", "-"], "none can be standard input"),
        (["one.rec", "one.rec"], "a recording is given twice"),
        (["one.rec", "twice.rec"], "twice.rec has 2 boots: of several, each must have one"),
        (["one.rec", "c.rec", "--format", "csv"], "--format csv is for one recording"),
        (["one.rec", "none.rec"], "cannot read"),
    ],
)
def test_what_cannot_be_put_together_is_refused(
    paths: list[Path],
    capsysbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    told: str,
) -> None:
    twice = Recorded()
    twice.writer.begin(KERNEL, SYMBOLS)
    paths[0].with_name("twice.rec").write_bytes(twice.end())
    monkeypatch.chdir(paths[0].parent)

    status, out, err = run(capsysbinary, *words)

    assert (status, out) == (2, b"")
    assert told in err
    assert err.count("\n") == 1
