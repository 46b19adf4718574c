# pyright: reportPrivateUsage=false
"""Recordings in several files, and of which the end is kept: each file is whole."""

import io
import re
from collections import Counter
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

from kprobes import recording_writer
from kprobes.cli.main import main
from kprobes.errors import KprobesError
from kprobes.formats.recording import FrameKind
from kprobes.model.events import NO_COUNTS, Pages
from kprobes.model.recording import RecordedInstance, RecordedRound, RecordingEnd
from kprobes.open_recording import opened_recording
from kprobes.recording import _decoded, _Frames
from kprobes.recording_files import RotatingWriter, SnapshotWriter, folded
from kprobes.recording_writer import RecordingWriter
from tests.build.recorded import KERNEL, LAYOUTS, SYMBOLS, Recorded, hits, printed, text_of
from tests.build.ring import Hit
from tests.build.waiting import becomes_true

_EVENT = re.compile(rb"\n(?= .*-\d+ +\[\d+\] )")


def events(text: bytes) -> list[bytes]:
    """Return what is printed of each event; a string may have a line feed."""
    return _EVENT.split(text.rstrip(b"\n"))[1:]


def fill(
    writer: RecordingWriter, count: int, *, then: Callable[[int], None] = lambda _: None
) -> list[bytes]:
    """Record so many hits; return what a trace prints of them."""
    recorded = Recorded()
    recorded.writer.close()
    recorded.writer = writer
    writer.begin(KERNEL, SYMBOLS)
    for number, (cpu, hit) in enumerate(hits(count)):
        assert recorded.rings[cpu].write(hit)
        if not number % 40:
            recorded.look()
            then(number)
    recorded.look()
    recorded.end()
    return events(text_of(recorded.traced))


def files_of(folder: Path) -> list[Path]:
    """Return the files of a recording, in their order."""
    return sorted(folder.glob("x*.rec"), key=lambda path: int((path.stem + ".1").split(".")[1]))


def test_the_end_alone_begins_no_file(tmp_path: Path) -> None:
    recorded = Recorded()
    recorded.writer.close()
    # One look is as large as a file may be.
    recorded.writer = RotatingWriter(tmp_path / "x.rec", most=1)
    recorded.writer.begin(KERNEL, SYMBOLS)
    for cpu, hit in hits(30):
        assert recorded.rings[cpu].write(hit)
    recorded.look()
    recorded.writer.end(RecordingEnd(real_ns=1, counts=NO_COUNTS))
    recorded.end()

    (file,) = files_of(tmp_path)
    assert len(events(printed(file.read_bytes()))) == 30


def test_each_of_several_files_prints_its_part(tmp_path: Path) -> None:
    traced = fill(RotatingWriter(tmp_path / "x.rec", most=20_000), 4000)

    files = files_of(tmp_path)
    parts = [events(printed(path.read_bytes())) for path in files]

    assert [path.name for path in files] == ["x.rec", *(f"x.{n}.rec" for n in range(2, 99))][
        : len(files)
    ]
    assert len(files) > 4
    assert all(20_000 <= path.stat().st_size < 40_000 for path in files[:-1])
    assert Counter(each for part in parts for each in part) == Counter(traced)
    assert all(parts)


def test_a_file_is_as_old_as_it_may_be(tmp_path: Path) -> None:
    traced = fill(RotatingWriter(tmp_path / "x.rec", most_s=1e-9), 400)

    found = [each for path in files_of(tmp_path) for each in events(printed(path.read_bytes()))]

    assert len(files_of(tmp_path)) > 8
    assert Counter(found) == Counter(traced)


def test_the_oldest_files_are_removed(tmp_path: Path) -> None:
    traced = fill(RotatingWriter(tmp_path / "x.rec", most=10_000, in_all=50_000), 6000)

    files = files_of(tmp_path)
    found = [each for path in files for each in events(printed(path.read_bytes()))]

    assert 30_000 < sum(path.stat().st_size for path in files) <= 50_000
    assert files[0].name != "x.rec"
    assert Counter(found) == Counter(traced[-len(found) :])


def test_info_says_where_it_goes_on(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    fill(RotatingWriter(tmp_path / "x.rec", most=20_000), 1000)

    main(["info", str(tmp_path / "x.rec")])

    assert b"ended     it goes on in x.2.rec\n" in capsysbinary.readouterr().out


def test_a_snapshot_of_one_large_look_has_its_end(tmp_path: Path) -> None:
    # Of any size: what is let go of is a part of it.
    for count in range(2000, 4000, 200):
        path = tmp_path / f"{count}.rec"
        recorded = Recorded()
        recorded.writer.close()
        recorded.writer = SnapshotWriter(path, most=20_000, report=print)
        recorded.writer.begin(KERNEL, SYMBOLS)
        for number, (cpu, hit) in enumerate(hits(count)):
            assert recorded.rings[cpu].write(hit)
            if not number % 40:
                recorded.look(is_whole=number == count - 40)
        recorded.look()
        recorded.end()

        assert path.stat().st_size < 40_000
        assert len(events(printed(path.read_bytes()))) > 200


def test_a_snapshot_has_the_last_events(tmp_path: Path) -> None:
    path = tmp_path / "x.rec"
    traced = fill(SnapshotWriter(path, most=20_000, report=print), 5000)

    found = events(printed(path.read_bytes()))

    assert 200 < len(found) < 2000
    assert Counter(found) == Counter(traced[-len(found) :])
    assert path.stat().st_size < 40_000
    assert not path.with_name("x.rec.old").exists()


def test_snapshots_are_written_when_they_are_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "x.rec"
    sizes: list[int] = []
    writer = SnapshotWriter(path, most=20_000, report=sizes.append)

    def ask(number: int) -> None:
        if number == 2000:
            writer.ask()
            assert becomes_true(lambda: bool(sizes))

    traced = fill(writer, 4000, then=ask)

    earlier, last = (path.with_name(name).read_bytes() for name in ("x.rec.old", "x.rec"))
    before, after = events(printed(earlier)), events(printed(last))
    assert sizes == [len(earlier)]
    assert Counter(before) <= Counter(traced[:2001])
    assert before[-1] in traced[1900:2001]
    assert Counter(after) == Counter(traced[-len(after) :])


def test_nothing_is_lost_of_less_than_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "x.rec"

    traced = fill(SnapshotWriter(path, most=1 << 20, report=print), 500)

    assert events(printed(path.read_bytes())) == traced


def test_a_snapshot_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    writer = SnapshotWriter(tmp_path / "none" / "x.rec", most=1000, report=print)

    with pytest.raises(KprobesError, match=r"cannot write .*x\.rec: No such file"):
        writer.close()


def test_frames_that_records_need_are_the_last_kernels() -> None:
    first = [(FrameKind.KERNEL, b"k"), (FrameKind.EVENTS, b"e"), (FrameKind.CLOCK, b"c")]

    again = folded(first, [(FrameKind.CLOCK, b"d"), (FrameKind.EVENTS, b"f")])

    assert [frame for _, frame in again] == [b"k", b"e", b"d", b"f"]
    assert folded(again, [(FrameKind.KERNEL, b"l")]) == [(FrameKind.KERNEL, b"l")]


def _fill_up(recorded: Recorded, looks: int) -> None:
    # In each look one ring is full, and some are lost.
    for number in range(looks):
        for _ in range(30_000):
            recorded.rings[0].write(Hit(layout=LAYOUTS[0], counter=number + 1, values=(number,)))
        recorded.look()


@pytest.mark.parametrize("kind", ["rotated", "snapshot"])
def test_each_file_has_what_was_lost_in_it(tmp_path: Path, kind: str) -> None:
    recorded, path = Recorded(), tmp_path / "x.rec"
    recorded.writer.close()
    if kind == "rotated":
        recorded.writer = RotatingWriter(path, most=1)
    else:
        recorded.writer = SnapshotWriter(path, most=1_000, report=lambda _: None)
    recorded.writer.begin(KERNEL, SYMBOLS)
    _fill_up(recorded, 4)
    recorded.writer.close()

    lost: list[int] = []
    for file in files_of(tmp_path):
        with opened_recording(file) as found:
            assert [*chain.from_iterable(boot.rounds for boot in found.boots())]
            lost.append(found.lost)

    in_all = recorded.rings[0].lost
    assert sum(lost) == in_all if kind == "rotated" else 0 < sum(lost) < in_all
    assert len(lost) == (4 if kind == "rotated" else 1)


@pytest.mark.parametrize("kind", ["rotated", "snapshot"])
def test_a_later_file_has_the_names_that_tasks_have_then(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, names = tmp_path / "x.rec", {7: b"now", 8: b"new"}
    monkeypatch.setattr(recording_writer, "running_comms", lambda: names)
    writer: RecordingWriter = RotatingWriter(path, most=1)
    if kind == "snapshot":
        writer.close()
        writer = SnapshotWriter(path, most=1, report=lambda _: None)
    writer.begin(KERNEL, SYMBOLS)
    instance = RecordedInstance(
        page_size=4096, page_data=16, page_commit=8, namings=(), comms={7: b"old", 9: b"gone"}
    )
    writer.write_instance(instance)
    for number in range(3):
        page = Pages(
            data=np.full((1, 4096), number, np.uint8),
            cpu=np.zeros(1, np.uint16),
            skips=np.zeros(1, np.int64),
        )
        end = RecordedRound(since_ns=0, real_ns=number, lost=(0,))
        writer.write_pages((), [page], end)
    writer.close()

    last = files_of(tmp_path)[-1].read_bytes()
    (found,) = (frame for kind, frame in _Frames(io.BytesIO(last)) if kind == FrameKind.INSTANCE)

    assert _decoded(found, RecordedInstance).comms == {7: b"now", 8: b"new", 9: b"gone"}
