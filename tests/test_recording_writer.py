"""Files that a writer leaves, on a full disk and after a kill: all that it said it had."""

import os
import random
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from kprobes.errors import KprobesError, UsageError
from kprobes.formats.recording import MARKER, FrameKind
from kprobes.open_recording import opened_recording
from kprobes.recording_writer import open_recording
from tests.build.recorded import KERNEL, LAYOUTS, SYMBOLS, Full, Recorded, hits, read
from tests.build.ring import Hit, make_layout


def test_a_full_disk_is_told_and_what_is_written_is_good() -> None:
    recorded = Recorded(file=Full())

    def fill() -> None:
        for cpu, hit in hits(5000):
            recorded.rings[cpu].write(hit)
            recorded.look()

    with pytest.raises(KprobesError, match="No space left on device"):
        fill()
    data = recorded.end()

    rounds, recording = read(data)

    assert recording.damaged == 0
    assert 0 < sum(map(len, rounds)) <= sum(map(len, recorded.traced))


def test_a_recording_is_its_owners_and_an_older_one_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "kprobe.rec"
    path.write_bytes(b"older")

    writer = open_recording(path)
    writer.begin(KERNEL, SYMBOLS)
    writer.close()

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (tmp_path / "kprobe.rec.old").read_bytes() == b"older"
    with opened_recording(path) as recording:
        assert [boot.kernel for boot in recording.boots()] == [KERNEL]


def test_a_directory_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(KprobesError, match="cannot write"):
        open_recording(tmp_path / "no" / "kprobe.rec")
    with pytest.raises(UsageError, match="cannot read"), opened_recording(tmp_path / "none"):
        pass


_VICTIM = """
import sys
from tests.build.recorded import Recorded, hits
from kprobes.recording_writer import FileWriter
recorded = Recorded()
recorded.writer = FileWriter(open(sys.argv[1], "wb", buffering=0))
from tests.build.recorded import KERNEL, SYMBOLS
recorded.writer.begin(KERNEL, SYMBOLS)
for number, (cpu, hit) in enumerate(hits(10**6)):
    assert recorded.rings[cpu].write(hit)
    if not number % 29:
        recorded.look()
        sys.stdout.write(f"{number + 1}\\n")
        sys.stdout.flush()
"""


def kill_a_writer(path: Path, after_s: float) -> None:
    """Kill a process that records, and compare what it said it had with what is there."""
    command = [sys.executable, "-c", _VICTIM, str(path)]
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root, text=True) as victim:
        assert victim.stdout is not None
        said = victim.stdout.readline()
        time.sleep(after_s)
        os.kill(victim.pid, signal.SIGKILL)
        said = (said + victim.stdout.read()).split("\n")
    # The last line may be cut.
    acknowledged = int(said[-2])
    with opened_recording(path) as recording:
        found = sum(len(events) for boot in recording.boots() for events in boot.rounds)

    assert recording.damaged == 0
    assert found >= acknowledged


@pytest.mark.parametrize("after_s", [0.0, 0.013, 0.2])
def test_what_was_acknowledged_is_there_after_a_kill(tmp_path: Path, after_s: float) -> None:
    kill_a_writer(tmp_path / "x.rec", after_s)


@pytest.mark.storm
def test_two_hundred_kills_lose_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    rng = random.Random(5)
    for number in range(200):
        kill_a_writer(tmp_path / f"{number}.rec", rng.random() / 2)


def test_text_that_is_none_is_kept_as_escapes() -> None:
    recorded = Recorded(layouts=(replace(LAYOUTS[0], definition="p:read f msg=\udcff"),))
    recorded.rings[0].write(Hit(layout=LAYOUTS[0], counter=1, values=(5,)))
    recorded.look()

    rounds, recording = read(recorded.end())

    assert sum(map(len, rounds)) == 1
    assert recording.layouts[1].definition == "p:read f msg=\\udcff"


def test_events_of_a_large_pattern_are_several_frames() -> None:
    layouts = tuple(make_layout(number, ("u32",)) for number in range(1, 10_000))
    recorded = Recorded(layouts=layouts)
    recorded.rings[0].write(Hit(layout=layouts[-1], counter=1, values=(5,)))
    recorded.look()

    data = recorded.end()
    rounds, recording = read(data)

    assert sum(map(len, rounds)) == 1
    assert recording.layouts == {layout.event_id: layout for layout in layouts}
    assert data.count(MARKER + bytes((FrameKind.EVENTS,))) == 3
