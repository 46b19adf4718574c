"""Files of trace-cmd of several machines: by the specification, and as trace-cmd puts them."""

import re
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec import Struct
from msgspec.structs import replace

from kprobes.export import Peer
from kprobes.export.trace_dat import TraceDatFiles
from kprobes.model.recording import RecordedKernel
from kprobes.timeline import Bounds, RealTime, Shift
from tests.build.recorded import CPUS, KERNEL
from tests.build.trace_dat import Dat, read_dat
from tests.export.test_manifest import SOURCE, S, clock, reads

_TRACE_ID, _TIME_SHIFT = 11, 12


class Samples(Struct, kw_only=True):
    """What the option of a clock has, of each CPU the same."""

    peer: int
    flags: int
    cpus: int
    times: list[int]
    offsets: list[int]


def samples_of(dat: Dat) -> Samples:
    """Read the option, as trace-cmd.dat.v7.5.txt and tsync_cpu_offsets_load() have it."""
    (data,) = dat.options[_TIME_SHIFT]
    peer, flags, cpus, count = struct.unpack_from("<QIII", data)
    each = struct.Struct(f"<I{count}q{count}q{count}q")
    rows = [each.unpack_from(data, 16 + each.size * cpu) for cpu in range(cpus)]
    assert len(set(rows)) == 1
    assert rows[0][0] == count
    assert rows[0][1 + 2 * count :] == (1,) * count  # the scaling
    assert data[16 + each.size * cpus :] == bytes(8 * count * cpus)  # its fraction bits
    times, offsets = list(rows[0][1 : 1 + count]), list(rows[0][1 + count : 1 + 2 * count])
    return Samples(peer=peer, flags=flags, cpus=cpus, times=times, offsets=offsets)


def write(
    out: Path, *machines: tuple[Peer, Sequence[int]], kernel: RecordedKernel = KERNEL
) -> dict[str, Dat]:
    """Write events of machines; return what is in their files."""
    files = TraceDatFiles(out)
    for peer, times in machines:
        file = files.add(peer, kernel, SOURCE)
        file.write(reads(times))
        file.close()
    files.close()
    return {path.stem: read_dat(path.read_bytes()) for path in out.iterdir()}


def shift_of(ahead: int, drift: float) -> Shift:
    """Return what brings a clock that is ahead of another to that."""
    return Shift(source=clock(since=100 * S + ahead, drift=drift), to=clock(since=100 * S))


def test_each_file_has_an_identity_and_all_but_the_first_a_relation_to_it(tmp_path: Path) -> None:
    dats = write(
        tmp_path / "x.dat",
        (Peer(name="a", shift=None), [101 * S]),
        (Peer(name="b", shift=shift_of(7200 * S, 0)), [7301 * S]),
        (Peer(name="same", shift=None), [101 * S]),
    )

    ids = {name: dat.options[_TRACE_ID] for name, dat in dats.items()}
    assert ids.keys() == {"a", "b", "same"}
    assert len({data for (data,) in ids.values()}) == 3
    assert [name for name, dat in dats.items() if dat.options[_TIME_SHIFT]] == ["b"]
    found = samples_of(dats["b"])
    assert found.peer.to_bytes(8, "little") == ids["a"][0]
    assert (found.flags, found.cpus) == (1, CPUS)
    assert set(found.offsets) == {-7200 * S}
    # What is in the rings is the machine's own.
    assert [event["ts"] for event in dats["b"].events()] == [7301 * S]


@pytest.mark.parametrize("drift", [0, 50e-6, -120e-6])
def test_samples_are_what_times_are_shifted_by(tmp_path: Path, drift: float) -> None:
    shift = shift_of(-70 * S, drift)
    first, second = (Peer(name="a", shift=None), [1]), (Peer(name="b", shift=shift), [1])

    found = samples_of(write(tmp_path / "x.dat", first, second)["b"])

    times = np.array(found.times)
    wanted = shift.apply(times.astype(np.uint64)).astype(np.int64) - times
    assert np.abs(np.array(found.offsets) - wanted).max() <= 1
    assert len(times) == 1003
    assert (np.diff(times) > 0).all()
    # Readers go on as between the outer two: level.
    assert found.times[1] - found.times[0] == 1 == found.times[-1] - found.times[-2]
    assert found.offsets[0] == found.offsets[1]
    assert found.offsets[-1] == found.offsets[-2]


@pytest.mark.skipif(shutil.which("trace-cmd") is None, reason="trace-cmd is not installed")
def test_times_long_before_and_after_the_samples_are_shifted_by_the_outer_ones(
    tmp_path: Path,
) -> None:
    to = clock(since=5000 * S, drift=37e-6)
    source = clock(since=7300 * S, drift=-61e-6)
    source = replace(source, times=source.times[45:49], offsets=source.offsets[45:49])
    own = [7000 * S, 7200 * S, 7345 * S, 7348 * S, 7400 * S, 7600 * S]
    first, second = (
        (Peer(name="a", shift=None), [1]),
        (Peer(name="b", shift=Shift(source=source, to=to)), own),
    )

    dats = write(tmp_path / "x.dat", first, second)

    found = samples_of(dats["b"])
    wanted = [ts + (found.offsets[0] if ts < 7346 * S else found.offsets[-1]) for ts in own]
    shown = merged(tmp_path / "x.dat" / "a.dat", tmp_path / "x.dat" / "b.dat")
    assert [ts for name, ts, _ in shown if name == "b.dat"] == wanted


def test_samples_are_few_whatever_a_recording_says(tmp_path: Path) -> None:
    bounds = Bounds()
    for ts in (0, 5, 1 << 62, 2**64 - 1):
        bounds.add(ts, ts, 2**64 - 1 - ts, 2**64 - 1)
    wild = bounds.real_time()
    assert wild is not None
    shift = Shift(source=wild, to=clock(since=0))
    first, second = (Peer(name="a", shift=None), [1]), (Peer(name="b", shift=shift), [1])

    dats = write(tmp_path / "x.dat", first, second, kernel=replace(KERNEL, cpus=1 << 10))

    assert len(samples_of(dats["b"]).times) <= 67
    assert len(dats["b"].options[_TIME_SHIFT][0]) < 3_000_000


def test_a_recording_is_the_same_file_each_time(tmp_path: Path) -> None:
    machines = [(Peer(name=n, shift=shift_of(S, 0)), [101 * S]) for n in "ab"]

    for out in ("x.dat", "y.dat"):
        write(tmp_path / out, *machines)

    for name in ("a.dat", "b.dat"):
        assert (tmp_path / "x.dat" / name).read_bytes() == (tmp_path / "y.dat" / name).read_bytes()


@pytest.mark.parametrize("kind", ["nothing", "file", "directory"])
def test_what_was_there_is_replaced_when_all_is_whole(tmp_path: Path, kind: str) -> None:
    out = tmp_path / "x.dat"
    if kind == "file":
        out.write_bytes(b"old")
    if kind == "directory":
        write(out, (Peer(name="old", shift=None), [1]))

    dats = write(out, (Peer(name="a", shift=None), [1]), (Peer(name="b", shift=None), [2]))

    assert dats.keys() == {"a", "b"}
    assert list(tmp_path.iterdir()) == [out]
    assert out.stat().st_mode & 0o777 == 0o755


def test_nothing_is_left_of_what_is_given_up(tmp_path: Path) -> None:
    files = TraceDatFiles(tmp_path / "x.dat")
    files.add(Peer(name="a", shift=None), KERNEL, SOURCE).close()
    file = files.add(Peer(name="b", shift=None), KERNEL, SOURCE)

    file.discard()
    files.discard()

    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(shutil.which("trace-cmd") is None, reason="trace-cmd is not installed")
@pytest.mark.parametrize("drift", [0, 50e-6, -120e-6])
@pytest.mark.parametrize("ahead", [7200 * S, -70 * S])
def test_trace_cmd_shows_them_in_one_order(tmp_path: Path, ahead: int, drift: float) -> None:
    shift = shift_of(ahead, drift)
    own = list(range(101 * S, 220 * S, S // 2))
    # From before its clock is known until after that.
    others = list(range(95 * S + ahead, 230 * S + ahead, S // 3))
    write(
        tmp_path / "x.dat", (Peer(name="a", shift=None), own), (Peer(name="b", shift=shift), others)
    )

    found = merged(tmp_path / "x.dat" / "a.dat", tmp_path / "x.dat" / "b.dat")

    times = [ts for _, ts, _ in found]
    assert times == sorted(times)
    assert [ts for name, ts, _ in found if name == "a.dat"] == own
    theirs = [(ts, value) for name, ts, value in found if name == "b.dat"]
    assert [value for _, value in theirs] == others
    wanted = shift.apply(np.array(others, np.uint64)).astype(np.int64)
    assert np.abs(np.array([ts for ts, _ in theirs]) - wanted).max() <= 1


def merged(*dats: Path) -> list[tuple[str, int, int]]:
    """Return what trace-cmd prints of files: of each event its file, time in ns, and argument."""
    words = [word for path in dats for word in ("-i", str(path))]
    done = subprocess.run(["trace-cmd", "report", "-t", *words], capture_output=True, check=True)
    assert done.stderr == b""
    lines = re.findall(r"(?m)^ *(\S+): .* (\d+)\.(\d{9}): read: .*=(\d+)$", done.stdout.decode())
    return [(name, int(s) * S + int(ns), int(value)) for name, s, ns, value in lines]


def test_a_clock_that_is_known_at_one_moment_is_shifted_by_one_number(tmp_path: Path) -> None:
    at = RealTime(times=np.array([5 * S]), offsets=np.array([S]), error=1)
    to = RealTime(times=np.array([2 * S]), offsets=np.array([4 * S]), error=1)
    first = (Peer(name="a", shift=None), [1])

    second = (Peer(name="b", shift=Shift(source=at, to=to)), [1])
    found = samples_of(write(tmp_path / "x.dat", first, second)["b"])

    assert found.times == [5 * S - 1, 5 * S, 5 * S + 1]
    assert found.offsets == [-3 * S] * 3
