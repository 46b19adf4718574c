"""Zips of several machines' timelines: their manifest, and the files as Perfetto reads them."""

import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from kprobes.export import Peer
from kprobes.export.manifest import PerfettoZip
from kprobes.model.events import Events
from kprobes.sinks.names import TraceSource
from kprobes.timeline import RealTime, Shift
from tests.build.events import Row, make_batch, make_events
from tests.build.recorded import CPUS, KERNEL
from tests.build.ring import make_layout

S = 10**9
BEGAN = 1_700_000_000 * S
"""A date."""
SOURCE = TraceSource(version=(6, 1), cpus=CPUS)
READ = make_layout(1, ("u64",), event="read")


def clock(*, since: int, drift: float = 0) -> RealTime:
    """Return how a clock that shows ``since`` at a date belongs to real time, for 100 s."""
    times = since + np.arange(0, 101 * S, S)
    offsets = BEGAN - since - ((times - since) * drift).astype(np.int64)
    return RealTime(times=times, offsets=offsets, error=100)


def reads(times: Sequence[int]) -> Events:
    """Return events at such times."""
    rows = [Row(ts=ts, cpu=i % CPUS, values=(ts,)) for i, ts in enumerate(times)]
    return make_events([make_batch(READ, rows)])


def write(out: Path, *machines: tuple[Peer, Sequence[int]]) -> tuple[Any, dict[str, list[int]]]:
    """Write events of machines; return the manifest, and by file the times of its events."""
    files = PerfettoZip(out)
    for peer, times in machines:
        file = files.add(peer, KERNEL, SOURCE)
        file.write(reads(times))
        file.close()
    files.close()
    return read(out)


def read(out: Path) -> tuple[Any, dict[str, list[int]]]:
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
        members = {name: archive.read(name) for name in archive.namelist()}
    manifest = members.pop("perfetto_manifest.json")
    # By this it is found.
    assert manifest.startswith(b'{"perfetto_manifest"')
    return json.loads(manifest)["perfetto_manifest"], {k: times_of(v) for k, v in members.items()}


def times_of(trace: bytes) -> list[int]:
    """Return when its instants are, all of the clock that the manifest relates."""
    packets = Trace.FromString(trace).packet
    (snapshot,) = (p.clock_snapshot for p in packets if p.HasField("clock_snapshot"))
    assert [each.clock_id for each in snapshot.clocks] == [6]  # BUILTIN_CLOCK_BOOTTIME
    instants = [p for p in packets if p.track_event.type == TrackEvent.TYPE_INSTANT]
    return [packet.timestamp for packet in instants]


def test_the_manifest_relates_each_machines_clock_to_the_firsts(tmp_path: Path) -> None:
    own = clock(since=100 * S)
    ahead = Shift(source=clock(since=7300 * S), to=own)
    later = Shift(source=clock(since=5 * S), to=own)

    manifest, times = write(
        tmp_path / "x.zip",
        (Peer(name="web", shift=None), [101 * S]),
        (Peer(name="db", shift=ahead), [7301 * S]),
        (Peer(name="same", shift=None), [102 * S]),
        (Peer(name="third", shift=later), [6 * S]),
    )

    def related(by: int) -> Any:
        sync_to = {"file": "web.pftrace", "clock": "BOOTTIME"}
        return {"clock": "BOOTTIME", "sync_to": sync_to, "offset_ns": by}

    assert manifest == {
        "version": 1,
        "trace_time": {"clock": "BOOTTIME", "file": "web.pftrace"},
        "files": [
            {"path": "web.pftrace", "machine": {"name": "web"}},
            {
                "path": "db.pftrace",
                "machine": {"name": "db"},
                "clocks": related(-7200 * S),
            },
            {"path": "same.pftrace", "machine": {"name": "same"}, "clocks": related(0)},
            {"path": "third.pftrace", "machine": {"name": "third"}, "clocks": related(95 * S)},
        ],
    }
    # Where clocks do not run apart, times are the recording's own.
    assert times == {
        "web.pftrace": [101 * S],
        "db.pftrace": [7301 * S],
        "same.pftrace": [102 * S],
        "third.pftrace": [6 * S],
    }


@pytest.mark.parametrize("drift", [50e-6, -120e-6])
def test_what_clocks_run_apart_is_in_the_times(tmp_path: Path, drift: float) -> None:
    shift = Shift(source=clock(since=7300 * S, drift=drift), to=clock(since=100 * S))
    own = list(range(7300 * S, 7401 * S, S // 3))

    manifest, times = write(
        tmp_path / "x.zip",
        (Peer(name="a", shift=None), [101 * S]),
        (Peer(name="b", shift=shift), own),
    )

    by = manifest["files"][1]["clocks"]["offset_ns"]
    found = np.array(times["b.pftrace"]) + by
    wanted = shift.apply(np.array(own, np.uint64)).astype(np.int64)
    assert np.abs(found - wanted).max() <= 1
    # Near the middle a time is as it was; in 50 s clocks run apart by some ms.
    apart = np.array(times["b.pftrace"]) - own
    assert abs(int(apart[len(apart) // 2])) < 100_000
    assert abs(int(apart[0])) > 2_000_000


def test_what_was_lost_and_that_there_was_nothing_is_in_it(tmp_path: Path) -> None:
    files = PerfettoZip(tmp_path / "x.zip")
    shift = Shift(source=clock(since=7300 * S), to=clock(since=100 * S))
    for name, times in (("a", [5, 6]), ("b", [])):
        file = files.add(Peer(name=name, shift=shift), KERNEL, SOURCE)
        file.write(reads(times))
        file.lose(1, 7)
        file.close()

    files.close()

    with zipfile.ZipFile(tmp_path / "x.zip") as archive:
        traces = [Trace.FromString(archive.read(f"{name}.pftrace")) for name in "ab"]
    lost = [[p for p in trace.packet if p.track_event.name == "lost"] for trace in traces]
    notes = [found.track_event.debug_annotations[0].uint_value for (found,) in lost]
    assert notes == [7, 7]


def test_what_was_there_is_replaced_when_all_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "x.zip"
    out.write_bytes(b"old")
    files = PerfettoZip(out)
    file = files.add(Peer(name="a", shift=None), KERNEL, SOURCE)
    file.write(reads([1]))
    file.close()
    assert out.read_bytes() == b"old"

    files.close()

    assert read(out)[1] == {"a.pftrace": [1]}
    assert list(tmp_path.iterdir()) == [out]


def test_nothing_is_left_of_what_is_given_up(tmp_path: Path) -> None:
    files = PerfettoZip(tmp_path / "x.zip")
    files.add(Peer(name="a", shift=None), KERNEL, SOURCE).close()
    file = files.add(Peer(name="b", shift=None), KERNEL, SOURCE)
    file.write(reads([1]))

    file.discard()
    files.discard()

    assert list(tmp_path.iterdir()) == []
