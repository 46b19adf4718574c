"""A guest that is migrated to another QEMU of this machine while it is traced."""

import os
import random
import signal
import subprocess
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from kprobes.transport.monitor import Monitor
from tests.build.command import WAIT_S, Command, events_of, wait_for_words
from tests.build.plain_guest import PlainGuest, kernel, plain_guest, qemu_command
from tests.build.waiting import becomes_true

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64", matrix="arm64")]

PROBES = "p:w vfs_write", "r:done vfs_write"
STUB, MONITOR = "unix:{}.gdb,server=on,wait=off", "unix:{}.qmp,server=on,wait=off"
ROUNDS = int(os.environ.get("KPROBES_ROUNDS", "20"))
SEED = int(os.environ.get("KPROBES_SEED", random.randrange(1 << 30)))


def ways_in(name: str) -> tuple[str, ...]:
    return "-gdb", STUB.format(name), "-qmp", MONITOR.format(name)


def monitored(guest: PlainGuest, name: str, *commands: str) -> str:
    """Run commands of a QEMU's monitor; return what the last prints."""
    said = ""
    with Monitor.open(str(guest.directory / f"{name}.qmp"), timeout_s=WAIT_S) as monitor:
        for command in commands:
            said = monitor.command(command)
            assert "rror" not in said, said
    return said


@pytest.fixture
def kprobe(tmp_path: Path) -> Iterator[Command]:
    with Command(tmp_path / "state") as command:
        yield command


@contextmanager
def two_qemus(directory: Path, arch: str) -> Generator[tuple[PlainGuest, PlainGuest]]:
    """Boot a guest, and start what it can be migrated to."""
    directory.mkdir(exist_ok=True)
    with plain_guest(directory, *ways_in("here"), arch=arch) as here:
        there = directory / "there"
        there.mkdir()
        (there / "initramfs").symlink_to(directory / "initramfs")
        options = *ways_in("there"), "-incoming", "unix:incoming"
        command = qemu_command(kernel(arch), arch, options)
        with subprocess.Popen(command, cwd=there, stdin=subprocess.DEVNULL) as qemu:
            try:
                assert becomes_true((there / "incoming").exists)
                yield here, PlainGuest(there, qemu.pid)
            finally:
                qemu.kill()


def migrate(here: PlainGuest, there: PlainGuest) -> None:
    begin = "migrate_set_parameter max-bandwidth 1G", f"migrate -d unix:{there.directory}/incoming"
    monitored(here, "here", *begin)


def has_moved(here: PlainGuest) -> bool:
    return "status: completed" in monitored(here, "here", "info migrate")


def test_a_trace_ends_with_all_events_and_the_guest_is_put_right_where_it_runs_now(
    kprobe: Command, tmp_path: Path, arch: str
) -> None:
    with two_qemus(tmp_path / "guest", arch) as (here, there):
        source, target = str(here.directory / "here.gdb"), str(there.directory / "there.gdb")
        tracer = kprobe.start("trace", "-t", source, "--rearm", *PROBES)
        wait_for_words(tracer, b"tracing 1 function")
        assert here.is_ticking()

        migrate(here, there)

        out, said = tracer.communicate(timeout=WAIT_S)
        assert tracer.returncode == 1
        assert said.decode().splitlines()[-1] == (
            "kprobe: the guest was migrated: it has its probes where it runs now, and `kprobe "
            "restore --target` ends them there"
        )
        assert b" 0 missed, 0 lost" in said
        events = events_of(out)
        assert sum(b" w: " in each for each in events) > 2
        assert unpaired(events) == []
        # What is left here stands still, and nothing is to be done.
        assert kprobe("status").stdout.startswith(b"no journal")
        assert "(postmigrate)" in monitored(here, "here", "info status")

        restored = kprobe("restore", "--target", target)
        assert restored.returncode == 0, restored.stderr
        assert b"put back" in restored.stdout
        assert there.is_ticking()
        again = kprobe("trace", "-t", target, "--max-events", "5", *PROBES)
        assert again.returncode == 0, again.stderr
        assert len(events_of(again.stdout)) == 5
        assert kprobe.is_idle(target)
        assert there.is_ticking()


def unpaired(events: Sequence[bytes]) -> list[bytes]:
    """Return what follows an event of its kind, task by task.

    A task's first one may be a return: its call was in progress when the probes were armed.
    """
    kinds: dict[bytes, bytes] = {}
    found: list[bytes] = []
    for line in events:
        task, _, rest = line.partition(b" [")
        kind = rest.split()[3]
        found += [line] if kinds.get(task) == kind else []
        kinds[task] = kind
    return found


@pytest.mark.sweep
@pytest.mark.alone
def test_whoever_is_killed_while_a_guest_is_migrated_it_runs_in_one_place(
    kprobe: Command, tmp_path: Path, arch: str
) -> None:
    drawn = random.Random(SEED)
    for number in range(ROUNDS):
        with two_qemus(tmp_path / str(number), arch) as (here, there):
            source, target = str(here.directory / "here.gdb"), str(there.directory / "there.gdb")
            tracer = kprobe.start("trace", "-t", source, "-o", os.devnull, *PROBES)
            wait_for_words(tracer, b"tracing 1 function")
            how = drawn.choice([signal.SIGKILL, signal.SIGINT, None])
            told = f"round {number} of seed {SEED}, {how}"

            migrate(here, there)
            if how is not None:
                time.sleep(drawn.uniform(0, 2))
                tracer.send_signal(how)
            tracer.communicate(timeout=WAIT_S)
            assert becomes_true(lambda: has_moved(here)), told

            where = monitored(there, "there", "info status")
            if "paused" in where:
                # It was stopped for a moment when it left, and stays so.
                monitored(there, "there", "cont")
            assert becomes_true(lambda: there.ticks() > 0), told
            assert becomes_true(lambda: "postmigrate" in monitored(here, "here", "info status"))
            restored = kprobe("restore", "--target", target)
            assert restored.returncode == 0, told + restored.stderr.decode()
            assert kprobe.is_idle(target), told
            assert there.is_ticking(), told
            assert "postmigrate" in monitored(here, "here", "info status"), told
