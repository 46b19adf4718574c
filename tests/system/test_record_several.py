"""``kprobe record`` of two guests in one command: each by its own words, in one order of time."""

import shlex
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kprobes.transport.qemu import Machine
from tests.build.command import OPEN, WAIT_S, Command, events_of, wait_for_words
from tests.build.json_lines import objects, parsed
from tests.build.waiting import becomes_true
from tests.system.conftest import Boot

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64", matrix="arm64")]

READ = "r:read vfs_read got=$retval:s64"
WRITE = "p:write vfs_write size=$arg3:u64"
FLOOD = "dd if=/dev/zero of=/dev/null bs=1"


@pytest.fixture
def kprobe(tmp_path: Path) -> Iterator[Command]:
    """The command, with journals of this test's own."""
    with Command(tmp_path / "state") as command:
        yield command


def target_of(guest: Machine) -> str:
    return f"qemu:{guest.stub_address}"


def test_two_guests_have_their_own_and_common_definitions_and_one_order(
    kprobe: Command, guest: Machine, boot: Boot, tmp_path: Path
) -> None:
    other, ready = boot(), tmp_path / "ready"
    targets = target_of(guest), target_of(other)
    own = ["-t", targets[0], READ, "-t", targets[1], WRITE]
    words = [OPEN, "--comm", "dd", *own, "-o", str(tmp_path / "x.rec"), "--ready", str(ready)]
    process = kprobe.start("record", *words)
    wait_for_words(process, b"recording on 2 targets; Ctrl-C ends")
    for count in (1000, 2000):
        guest.run(f"{FLOOD} count={count}")
        other.run(f"{FLOOD} count={count + 7}")

    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=WAIT_S)
    files = shlex.split(told.decode().splitlines()[-1])[-2:]
    done = kprobe("report", *files, "--format", "json")
    infos = [objects("info", kprobe("info", file, "--format", "json").stdout)[0] for file in files]

    rows = parsed(done.stdout)
    names = [Path(file).name for file in files]
    ones = [row["file"] for row in rows if {"got": "1"}.items() <= row["args"].items()]
    written = [row["file"] for row in rows if {"size": "1"}.items() <= row["args"].items()]
    times = [row["ts_ns"] for row in rows]
    assert process.returncode == 0, told.decode()
    assert done.returncode == 0, done.stderr.decode()
    assert ready.read_text() == "ready\n"
    assert Counter(ones) == {names[0]: 3000}
    assert Counter(written) == {names[1]: 3014}
    assert {(row["file"], row["event"]) for row in rows} == {
        *((name, "open") for name in names),
        (names[0], "read"),
        (names[1], "write"),
    }
    assert times == sorted(times)
    # Each guest's floods lie between those of the other.
    order = [row["file"] for row in rows if row["args"].get("path") == "/dev/zero"]
    assert order == [*names, *names]
    assert b"times are shifted by" in done.stderr
    assert [(info["missed"], info["lost"], info["is_ended"]) for info in infos] == [
        (0, 0, True)
    ] * 2
    assert all(map(kprobe.is_idle, targets))


def test_one_guest_that_cannot_be_reached_leaves_the_other_unpatched(
    kprobe: Command, guest: Machine, tmp_path: Path
) -> None:
    target = target_of(guest)
    words = [OPEN, "-t", target, READ, "-t", "qemu:/no/such.sock", "-o", str(tmp_path / "x.rec")]

    done = kprobe("record", *words)

    assert done.returncode == 3, done.stderr.decode()
    assert b"qemu-no-such.sock: kprobe: /no/such.sock: no such socket" in done.stderr
    assert b"kprobe: qemu-no-such.sock is not armed: the others are ended\n" in done.stderr
    assert b"recording on" not in done.stderr
    assert kprobe.is_idle(target)
    assert guest.run("echo well").output == b"well\n"


def test_one_guest_that_dies_lets_the_other_be_recorded_to_its_end(
    kprobe: Command, guest: Machine, boot: Boot, tmp_path: Path
) -> None:
    other = boot()
    targets = target_of(guest), target_of(other)
    words = [READ, "--comm", "dd", "-t", targets[0], "-t", targets[1]]
    process = kprobe.start("record", *words, "-o", str(tmp_path / "x.rec"))
    wait_for_words(process, b"recording on 2 targets; Ctrl-C ends")
    other.close()
    name = targets[1].replace(":", "").replace("/", "-")
    wait_for_words(process, f"{name}: kprobe: ".encode())
    # Who has said it has not ended by then, and would be interrupted, too.
    recorders = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    assert becomes_true(lambda: len(recorders.read_text().split()) == 1)
    guest.run(f"{FLOOD} count=500")

    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=WAIT_S)
    file = shlex.split(told.decode().splitlines()[-1])[-2]
    lines = events_of(kprobe("report", file).stdout)

    assert process.returncode == 1, told.decode()
    assert sum(b" got=1" in line for line in lines) == 500
    assert kprobe.is_idle(targets[0])
