"""``kprobe record`` on a guest: all is in the file, however the recording ends."""

import re
import resource
import signal
import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest

import kprobes
from kprobes.transport.qemu import Machine
from tests.build.command import OPEN, WAIT_S, Command, events_of, wait_for_words
from tests.build.json_lines import objects
from tests.build.waiting import becomes_true

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64", matrix="arm64")]

READ = "r:read vfs_read got=$retval:s64 file=$arg1:x64"
FLOOD = "dd if=/dev/zero of=/dev/null bs=1"


@pytest.fixture
def kprobe(tmp_path: Path) -> Iterator[Command]:
    """The command, with journals of this test's own."""
    with Command(tmp_path / "state") as command:
        yield command


@pytest.fixture
def target(guest: Machine) -> str:
    """The shared guest as a target."""
    return f"qemu:{guest.stub_address}"


@contextmanager
def flooded(guest: Machine) -> Generator[None]:
    """Keep the shared guest reading."""
    job = guest.start(f"while :; do {FLOOD} count=1000 2>/dev/null; done")
    yield
    job.kill()
    job.wait(WAIT_S)


def printed(kprobe: Command, *words: str | Path) -> list[bytes]:
    done = kprobe("report", *map(str, words))
    assert done.returncode == 0, done.stderr.decode()
    return events_of(done.stdout)


def test_each_read_is_in_the_file(
    kprobe: Command, guest: Machine, target: str, tmp_path: Path
) -> None:
    file = tmp_path / "x.rec"
    words = ["--comm", "dd", "-o", str(file), "--call-duration"]
    process = kprobe.start("record", "--target", target, OPEN, READ, *words)
    wait_for_words(process, b"Ctrl-C ends")
    guest.run(f"{FLOOD} count=5000")

    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=WAIT_S)
    lines = printed(kprobe, file)
    (info,) = objects("info", kprobe("info", str(file), "--format", "json").stdout)

    assert process.returncode == 0, told.decode()
    assert sum(b" got=1 file=0x" in line for line in lines) == 5000
    assert sum(b' path="/dev/zero"' in line for line in lines) == 1
    assert re.search(rb"\n  read +5,0\d\d  vfs_read\n", told)
    assert told.endswith(f"  {file}: {file.stat().st_size:,} bytes\n".encode())
    assert info["recorded"] == len(lines)
    assert (info["missed"], info["lost"], info["is_ended"]) == (0, 0, True)
    durations = [int(line.rpartition(b"duration=")[2]) for line in lines if b" got=1 " in line]
    assert min(durations) > 0
    assert kprobe.is_idle(target)


def test_a_killed_recorder_leaves_a_good_file_and_the_guest_well(
    kprobe: Command, guest: Machine, target: str, tmp_path: Path
) -> None:
    file = tmp_path / "x.rec"
    with flooded(guest):
        process = kprobe.start("record", "--target", target, READ, "-o", str(file))
        wait_for_words(process, b"Ctrl-C ends")
        assert becomes_true(lambda: file.stat().st_size > 900_000)
        process.kill()
        process.wait(WAIT_S)
    lines = printed(kprobe, file)
    told = kprobe("info", str(file)).stdout

    assert becomes_true(lambda: kprobe.is_idle(target))
    assert len(lines) > 1000
    assert b"ended     its writer was stopped; all that is there was read\n" in told
    assert guest.run("echo well").output == b"well\n"


def test_a_full_disk_ends_it_with_words_and_what_was_written_is_good(
    kprobe: Command, guest: Machine, target: str, tmp_path: Path
) -> None:
    file = tmp_path / "x.rec"
    with flooded(guest):
        process = kprobe.start("record", "--target", target, READ, "-o", str(file))
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (1_200_000, 1_200_000))
        _, told = process.communicate(timeout=WAIT_S)
    lines = printed(kprobe, file)

    assert process.returncode == 1
    assert f"kprobe: cannot write {file}: File too large".encode() in told
    assert file.stat().st_size == 1_200_000
    assert len(lines) > 1000
    assert kprobe.is_idle(target)


def test_a_recording_goes_through_a_pipe(
    kprobe: Command, guest: Machine, target: str, tmp_path: Path
) -> None:
    with flooded(guest):
        done = kprobe("record", "--target", target, READ, "-o", "-", "--duration", "3s")
    (tmp_path / "x.rec").write_bytes(done.stdout)

    lines = printed(kprobe, tmp_path / "x.rec", "--comm", "dd", "--event", "read")

    assert done.returncode == 0, done.stderr.decode()
    assert len(lines) > 100
    assert all(b"dd-" in line and b": read: (" in line for line in lines)


def test_python_keeps_a_recording_and_reads_it_again(guest: Machine, tmp_path: Path) -> None:
    with kprobes.attach(str(guest.stub_address)) as kernel:
        event = kernel.probe(READ)
        kernel.choose_tasks(comms=["dd"])
        with kernel.record(path=tmp_path / "x.rec") as trace:
            guest.run(f"{FLOOD} count=700")
            others = kernel.probe(OPEN)
            guest.run(f"{FLOOD} count=1")
            event.disable()
            guest.run(f"{FLOOD} count=50")
        ones = [each for each in trace["read"] if each["got"] == 1]
        opened = [each["path"] for each in trace["open"]]
        others.delete()

    again = kprobes.load(tmp_path / "x.rec")

    assert len(ones) == 701
    assert opened.count("/dev/zero") == 2
    assert str(again) == str(trace)
    assert again.counts == trace.counts
    assert list(again.hits) == list(trace.hits)


def test_the_last_events_are_written_at_a_signal_and_at_the_end(
    kprobe: Command, guest: Machine, target: str, tmp_path: Path
) -> None:
    file = tmp_path / "x.rec"
    words = ["--target", target, READ, "-o", str(file), "--snapshot", "100K"]
    with flooded(guest):
        process = kprobe.start("record", *words)
        wait_for_words(process, b"Ctrl-C ends")
        assert becomes_true(lambda: len(printed_now(kprobe, process, file)) > 1000)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=WAIT_S)
    last, before = printed(kprobe, file), printed(kprobe, file.with_name("x.rec.old"))

    assert process.returncode == 0, told.decode()
    assert len(last) > 1000
    assert file.stat().st_size < 1_200_000
    assert time_of(before[-1]) < time_of(last[0]) or before[-1] in last
    assert kprobe.is_idle(target)


def printed_now(kprobe: Command, process: "subprocess.Popen[bytes]", file: Path) -> list[bytes]:
    """Return what a snapshot has that is asked for now."""
    process.send_signal(signal.SIGUSR2)
    return printed(kprobe, file) if becomes_true(file.exists) else []


def time_of(line: bytes) -> float:
    found = re.search(rb" (\d+\.\d{6}): ", line)
    assert found is not None
    return float(found[1])


def test_files_are_rotated_and_the_oldest_removed(
    kprobe: Command, guest: Machine, target: str, tmp_path: Path
) -> None:
    file = tmp_path / "x.rec"
    words = ["--target", target, READ, "-o", str(file), "--rotate", "100K", "--max-size", "4M"]
    with flooded(guest):
        process = kprobe.start("record", *words)
        wait_for_words(process, b"Ctrl-C ends")
        assert becomes_true(lambda: not file.exists())
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=WAIT_S)
    files = sorted(tmp_path.glob("x.*.rec"), key=lambda path: int(path.name.split(".")[1]))
    lines = [printed(kprobe, each) for each in files]

    assert process.returncode == 0, told.decode()
    assert len(files) > 2
    assert all(lines)
    assert all(time_of(a[-1]) <= time_of(b[0]) for a, b in pairwise(lines))
    assert kprobe.is_idle(target)


def test_a_recording_ends_when_it_is_as_large_as_it_may_be(
    kprobe: Command, guest: Machine, target: str, tmp_path: Path
) -> None:
    file = tmp_path / "x.rec"
    with flooded(guest):
        done = kprobe("record", "-t", target, READ, "-o", str(file), "--max-size", "900K")
    (info,) = objects("info", kprobe("info", str(file), "--format", "json").stdout)

    assert done.returncode == 0, done.stderr.decode()
    assert file.stat().st_size >= 900 << 10
    assert info["is_ended"]
    assert info["recorded"] == len(printed(kprobe, file))
