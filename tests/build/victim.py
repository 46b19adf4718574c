"""Tracers that get killed, and a witness of what becomes of their guest."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import numpy as np

from kprobes.guest.attach import attach
from kprobes.guest.guest import Guest
from kprobes.plan.ftrace import read_sites
from kprobes.transport.debian import images
from kprobes.transport.qemu import Machine
from tests.build.waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).parents[2]
_COMPLAINTS = re.compile(
    r"BUG|WARNING|Oops|cut here|Call Trace|general protection|\blockup|rcu: INFO|Kernel panic"
    r"|ftrace failed|segfault|traps:|bad page"
)
_RECORD_SIZE = 16
LOAD_FILES = {
    "/load.sh": rb"""
cd /tmp
dd if=/dev/urandom of=src$1 bs=4k count=100 2> /dev/null
want=$(md5sum < src$1)
n=0
while :; do
    cp src$1 dst$1
    [ "$(md5sum < dst$1)" = "$want" ] || echo bad >> wrong
    ls -R /sys/kernel/mm /proc/self > /dev/null
    cat dst$1 | wc -c > /dev/null
    echo $((n += 1)) > new$1
    mv new$1 rounds$1
    usleep $2
done
"""
}
"""For a guest that is to be loaded."""


class Home:
    """A private home for journals and caches, so that nobody else's are touched.

    Images of kernels are everybody's: they take long to download.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment: Mapping[str, str] = {
            **os.environ,
            "XDG_STATE_HOME": str(directory / "state"),
            "XDG_CACHE_HOME": str(directory / "cache"),
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
        }
        cache = directory / "cache" / "kprobes"
        cache.mkdir(parents=True)
        (cache / "images").symlink_to(images())

    @property
    def journals(self) -> list[Path]:
        """Every journal that was left."""
        return sorted((self.directory / "state" / "kprobes" / "journal").glob("*"))

    @contextmanager
    def entered(self) -> Generator[None]:
        """Make it this process's home for a while."""
        names = ("XDG_STATE_HOME", "XDG_CACHE_HOME")
        before = {name: os.environ.get(name) for name in names}
        os.environ.update({name: self.environment[name] for name in names})
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None)
                os.environ.update({name: value} if value is not None else {})


class Tracer:
    """A tracer in a process of its own; see ``tests.build.tracer``."""

    def __init__(self, home: Home, target: str, definitions: str, *options: str) -> None:
        self._target = target
        file = home.directory / f"probes-{time.monotonic_ns()}"
        file.write_text(definitions)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.build.tracer", target, str(file), *options],
            cwd=ROOT,
            env=home.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_for(self, word: str) -> dict[str, Any]:
        """Return what the tracer tells with a word; it must come."""
        said: list[dict[str, Any]] = []
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said.append(json.loads(line))
            if said[-1]["word"] == word:
                return said[-1]
        raise AssertionError(f"the tracer ended without {word!r}: {said}")

    def go_on(self) -> None:
        """Let it end a cycle, now or when it comes to its end."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def guardians(self) -> list[int]:
        """Return the pids of guardians of its target."""
        return guardians_of(self._target)

    def kill_with_guardian(self) -> None:
        """Kill its guardian and it, as one: it has no time to end by itself."""
        self._process.send_signal(signal.SIGSTOP)
        # Until its last thread stands: on a busy machine the one that watches the guardian would
        # begin to disarm, and leave the guest paused.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        for pid in self.guardians():
            kill_and_wait(pid)
        self.kill()

    def kill(self) -> None:
        """Kill it, and return when it is dead."""
        self._process.kill()
        self._process.wait()

    def wait(self, timeout_s: float = 180) -> int:
        """Return how it ended."""
        return self._process.wait(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                assert stream is not None
                stream.close()


class Witness:
    """Sees a guest's RAM with no stub, whoever has that.

    Attributes:
        guest: as it was found once; its stub is closed.
    """

    def __init__(self, guest: Guest) -> None:
        self.guest = guest
        self._memory = guest.memory
        self._jiffies = self.address("jiffies_64")
        self._text = guest.memory.tables.mapped_runs(*guest.kernel.text)
        self._sites = read_sites(guest.memory, guest.kernel)
        places = np.sort(self._sites.records)
        borders = np.flatnonzero(np.diff(places) != _RECORD_SIZE) + 1
        self._records = [(int(p[0]), len(p) * _RECORD_SIZE) for p in np.split(places, borders)]
        self.before = self.state()

    def address(self, name: str) -> int:
        """Return where the kernel has a symbol."""
        return self.guest.kernel.symbols.named(name).addr

    def is_probeable(self, name: str) -> bool:
        """Whether one function has this name, and an ftrace site."""
        found = self.guest.kernel.symbols.all_named(name)
        offsets = self.guest.arch.site.offsets
        return len(found) == 1 and any(self._sites.find(found[0].addr + off) for off in offsets)

    def state(self) -> tuple[bytes, bytes]:
        """Return all that we may change: the kernel's whole text, and its ftrace's records."""
        ram, memory = self._memory.ram, self._memory
        text = b"".join(ram.read(run.phys, run.size) for run in self._text)
        return text, b"".join(memory.read(addr, size) for addr, size in self._records)

    def changes(self) -> list[str]:
        """Return what differs from the beginning, by name."""
        text, records = self.state()
        old, new = (np.frombuffer(each, np.uint8) for each in (self.before[0], text))
        start, find = self.guest.kernel.text[0], self.guest.kernel.symbols.at
        symbols = {find(start + at) for at in np.flatnonzero(old != new).tolist()}
        names = sorted({symbol.name if symbol else "?" for symbol in symbols})
        return names + (["ftrace records"] if records != self.before[1] else [])

    def has_its_text(self) -> bool:
        """Whether its text is as in the beginning."""
        return self.state()[0] == self.before[0]

    def is_pristine(self) -> bool:
        """Whether everything is as in the beginning."""
        return self.state() == self.before

    def runs_within(self, timeout_s: float) -> bool:
        """Whether the guest's time goes on within this time."""
        then = self._memory.u64(self._jiffies)
        return wait_until(lambda: self._memory.u64(self._jiffies) > then, timeout_s) is not None


def named_kernel() -> Path | None:
    """Return the kernel to try, KPROBES_TEST_KERNEL; None is Debian's."""
    named = os.environ.get("KPROBES_TEST_KERNEL")
    return Path(named) if named else None


def witness_of(target: str, home: Home) -> Witness:
    """Look at a guest once through its stub, and later without."""
    with home.entered():
        guest = attach(target)
    guest.stub.detach()
    return Witness(guest)


def settle(machine: Machine) -> None:
    """Wait until a guest has chosen its clock: newer kernels patch their text for it."""
    clock = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
    found = machine.run(
        f"until grep -qE '^(tsc|arch_sys_counter)$' {clock}; do usleep 50000; done", 180
    )
    assert found.status == 0, found.output


class Load:
    """Work on every CPU of a guest with LOAD_FILES, that would notice if anything went wrong.

    Between rounds it rests, for the sake of whoever shares this machine.
    """

    def __init__(self, machine: Machine, *, workers: int = 2, rest_us: int = 0) -> None:
        self._machine = machine
        self._workers = range(workers)
        self._running = [machine.start(f"sh /load.sh {n} {rest_us}") for n in self._workers]

    def rounds(self) -> int:
        """Return how much was done by all workers."""
        files = " ".join(f"/tmp/rounds{n}" for n in self._workers)
        found = self._machine.run(f"cat {files} 2> /dev/null", 180).output
        return sum(map(int, found.split()))

    def goes_on(self, timeout_s: float = PATIENCE_S) -> bool:
        """Whether more is done within a time."""
        then = self.rounds()
        return wait_until(lambda: self.rounds() > then, timeout_s) is not None

    def mistakes(self) -> str:
        """Return what went wrong: wrong checksums, and what the kernel complained about."""
        said = self._machine.run("cat /tmp/wrong 2> /dev/null; dmesg", 180).output.decode()
        return "\n".join(line for line in said.splitlines() if is_complaint(line))

    def stop(self) -> None:
        """End the workers."""
        for each in self._running:
            each.kill()
            each.wait(180)


def is_complaint(line: str) -> bool:
    """Whether a kernel's line, or our load's, says that something is wrong."""
    return line == "bad" or _COMPLAINTS.search(line) is not None


def guardians_of(target: str) -> list[int]:
    """Return the pids of the guardians that watch over a target."""
    found: list[int] = []
    for directory in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (directory / "cmdline").read_bytes().split(b"\0")
            if b"kprobes.guest.guardian" in words and target.encode() in words:
                found.append(int(directory.name))
    return found


def kill_and_wait(pid: int) -> None:
    """Kill somebody who need not be our child, and return when it is dead."""
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not _is_alive(pid)) is not None


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
