"""What is armed changes while it is recorded: everything else goes on, without an event missing.

The longer version makes KPROBES_CHANGES changes, and begins with KPROBES_SEED.
"""

import os
import random
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

import numpy as np
import pytest

import kprobes
from kprobes.errors import DefinitionError, RefusedError
from kprobes.event_table import TraceProbe
from kprobes.handlers.probe import Kprobe, Kretprobe
from kprobes.model.events import Counts, Events
from kprobes.open import GuestSession
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions
from tests.build.dialect import DIALECTS
from tests.build.hot import VFS
from tests.build.programs import counting_loop
from tests.build.victim import Home, is_complaint, settle

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

CHANGES = int(os.environ.get("KPROBES_CHANGES", "150"))
SEED = int(os.environ.get("KPROBES_SEED", "0")) or random.randrange(1, 1 << 30)
CALL = "sched_get_priority_min"
TIMES = 200_000_000
COUNTED = {"amd64": "+112($arg1):u64", "arm64": "+0($arg1):u64"}
"""The first argument, in the pt_regs that a system call gets."""
_LEAST = {"amd64": 20_000, "arm64": 2_000}


class Continuous:
    """A sink that counts by how much more than one a task's numbers go down.

    Attributes:
        events: how many came.
        missing: how many did not.
        mistakes: where numbers go up, or stay.
    """

    def __init__(self) -> None:
        self.events = 0
        self.missing = 0
        self.mistakes: list[str] = []
        self._last: dict[tuple[str, int], int] = {}

    def write(self, events: Events) -> None:
        for number, batch in enumerate(events.batches):
            if batch.layout.event not in ("entered", "returned"):
                continue
            # In the order of time, whatever CPU a task was on.
            rows = events.row[events.batch == number]
            for pid in np.unique(batch.pid[rows]).tolist():
                values = batch.values[0][rows][batch.pid[rows] == pid].astype(np.int64)
                key = batch.layout.event, pid
                before = self._last.get(key, int(values[0]) + 1)
                steps = np.diff(np.concatenate(([before], values)))
                self.missing += int((-1 - steps).sum())
                if (steps >= 0).any():
                    at = int(np.flatnonzero(steps >= 0)[0])
                    self.mistakes.append(f"{key}: {steps[at]} at {values[at]}")
                self._last[key] = int(values[-1])
                self.events += len(values)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def machine(arch: str) -> Generator[Machine]:
    files = {"/loop": counting_loop(CALL, TIMES, arch=arch)}
    with Machine.boot(MachineOptions(arch=arch, files=files)) as machine:
        settle(machine)
        machine.run("chmod 755 /loop")
        yield machine


@pytest.fixture
def session(machine: Machine, tmp_path_factory: pytest.TempPathFactory) -> Generator[GuestSession]:
    home = Home(tmp_path_factory.mktemp("home"))
    loops = [machine.start(["/loop"]) for _ in range(2)]
    noise = machine.start("while :; do cat /proc/version /etc/passwd | wc -c; ls /proc; done")
    try:
        with home.entered(), kprobes.attach(str(machine.stub_address)) as session:
            before = _text(session)
            yield session
            assert _text(session) == before
        assert not list(home.directory.glob("**/*.jsonl"))
    finally:
        for job in (*loops, noise):
            job.kill()
    complaints = machine.run("dmesg").output.decode(errors="replace").splitlines()
    assert [line for line in complaints if is_complaint(line)] == []


def _text(session: GuestSession) -> bytes:
    start, stop = session.kernel.text
    return session.driver.guest.memory.read(start, stop - start)


@contextmanager
def recorded(session: GuestSession, arch: str) -> Generator[Continuous]:
    """Record what the loops do; at the end every call of theirs was recorded or counted."""
    function = f"{DIALECTS[arch].syscall}{CALL}"
    session.probe(
        f"p:entered {function} n={COUNTED[arch]}\nr:returned {function} n={COUNTED[arch]}"
    )
    sink, is_over = Continuous(), threading.Event()
    found: list[Counts] = []

    def stream() -> None:
        found.append(session.stream(sink, is_done=is_over.is_set))

    thread = threading.Thread(target=stream)
    thread.start()
    try:
        yield sink
    finally:
        is_over.set()
        thread.join(60)
    (counts,) = found
    hits = {each.event: each for each in session.hits()}
    assert [hits[name].all_missed for name in ("entered", "returned")] == [0, 0]
    assert sink.mistakes == []
    # What a full ring loses is counted; of the other events, too.
    assert sink.missing <= counts.lost
    assert counts.lost or not sink.missing
    assert sink.events >= _LEAST[arch]


FORMS = (
    "p:{name} {function}",
    "p:{name} {function} a=$arg1 b=$arg2",
    "p:{name} {function} text=+0($arg1):string",
    "r:{name} {function} $retval",
    "r:{name} {function} a=$arg1 got=$retval",
    "r64:{name} {function} a=$arg1 b=$arg2 c=$arg3",
    "p:{name} {function}+{offset}",
)


class Changes:
    """Random changes of what is recorded."""

    def __init__(self, session: GuestSession, seed: int) -> None:
        self.random = random.Random(seed)
        self.done = 0
        self._session = session
        self._probes: list[TraceProbe] = []
        self._functions = [
            name for name in VFS.split() if len(session.kernel.symbols.all_named(name)) == 1
        ]

    def make(self) -> None:
        """Make one; what is refused changes nothing."""
        steps: list[Callable[[], None]] = [self._define, self._define, self._handle]
        if self._probes:
            steps += [self._delete, self._disable, self._enable, self._filter]
        with suppress(DefinitionError, RefusedError):
            self.random.choice(steps)()
        self.done += 1

    def _define(self) -> None:
        text = self.random.choice(FORMS).format(
            name=f"e{self.done}",
            function=self.random.choice(self._functions),
            offset=self.random.randrange(4, 64, 4),
        )
        self._probes.append(self._session.probe(text, enabled=self.random.random() < 0.8))

    def _delete(self) -> None:
        probe = self.random.choice(self._probes)
        if probe.is_enabled:
            with pytest.raises(RefusedError, match="Device or resource busy"):
                probe.delete()
            probe.disable()
        probe.delete()
        self._probes.remove(probe)

    def _disable(self) -> None:
        self.random.choice(self._probes).disable()

    def _enable(self) -> None:
        self.random.choice(self._probes).enable()

    def _filter(self) -> None:
        filter_text = self.random.choice(("", "common_pid > 10", 'comm == "cat"', "nothing == 1"))
        self.random.choice(self._probes).set_filter(filter_text)

    def _handle(self) -> None:
        name, calls = self.random.choice(self._functions), list[int]()
        probes = [
            Kprobe(symbol_name=name, pre_handler=lambda probe, regs: calls.append(1)),
            Kretprobe(symbol_name=name, handler=lambda instance, regs: calls.append(2)),
        ]
        self._session.register_kprobes(probes)
        self._session.unregister_kprobes(probes)


def test_whatever_changes_nothing_of_the_others_is_missing(
    session: GuestSession, arch: str, record_property: Callable[[str, object], None]
) -> None:
    record_property("seed", SEED)
    print(f"KPROBES_SEED={SEED}")
    changes = Changes(session, SEED)
    with recorded(session, arch):
        for _ in range(CHANGES):
            changes.make()
