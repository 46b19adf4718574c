"""Storms: many probes on what runs all the time, and every hit accounted for.

The longer version takes KPROBES_STORM seconds.
"""

import os
import re
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress

import numpy as np
import pytest

import kprobes
from kprobes.errors import MemoryFault
from kprobes.guest.arena import ArenaSize
from kprobes.guest.guest import Guest
from kprobes.guest.kernel_abi import per_cpu_bases
from kprobes.model.events import Batch, Counts, Events
from kprobes.model.resolved import CONTEXT_HARDIRQ
from kprobes.open import GuestSession
from kprobes.trace import Trace
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions
from tests.build import hot
from tests.build.command import WAIT_S
from tests.build.defined import plans_of
from tests.build.dialect import DIALECTS
from tests.build.programs import counting_loop
from tests.build.victim import LOAD_FILES, Home, Load, Witness, named_kernel, settle, witness_of
from tests.system.conftest import LONG

pytestmark = [pytest.mark.guest, pytest.mark.harm, pytest.mark.arches("amd64", "arm64")]

STORM_S = float(os.environ.get("KPROBES_STORM", "9"))
CYCLES = 3
LEAST = {"amd64": 10_000, "arm64": 1_000}
"""Hits of a cycle."""
CALL, TIMES = "sched_get_priority_min", 100_000
SYSCALL = {arch: dialect.syscall + CALL for arch, dialect in DIALECTS.items()}
"""A system call that nobody else in the guest makes."""
LOOPS = 4
WANDER = f"""
for n in $(seq {LOOPS}); do /loop & pids="$pids $!"; done
renice -n -20 $$ > /dev/null
while kill -0 $pids 2> /dev/null; do
    for pid in $pids; do
        taskset -p 1 $pid > /dev/null 2>&1
        taskset -p 2 $pid > /dev/null 2>&1
    done
done
wait
"""
"""Programs in a loop, moved from CPU to CPU all the while."""
NUMBERED = {
    "amd64": "number=+112($arg1):u64 text=+0($arg1):string",
    "arm64": "number=+0($arg1):u64 text=+8($arg1):string",
}
"""The first argument, in the pt_regs that a system call gets."""


class Scene:
    """A guest at work, and a witness."""

    def __init__(self, machine: Machine, home: Home, witness: Witness, load: Load) -> None:
        self.machine = machine
        self.home = home
        self.witness = witness
        self.load = load

    @contextmanager
    def session(self, definitions: Iterable[str], *, ring: int = 0) -> Generator[GuestSession]:
        size = ArenaSize(ring=ring) if ring else None
        with (
            self.home.entered(),
            kprobes.attach(str(self.machine.stub_address), size=size) as session,
        ):
            session.probe("\n".join(definitions))
            yield session


class Discard:
    """A sink that only counts, and says when it has enough."""

    def __init__(self, least: int = 0) -> None:
        self.count = 0
        self._least = least
        self._began_s: float | None = None

    def has_enough(self) -> bool:
        """Whether so many came, and a cycle is over; asked first when everything is armed."""
        now = time.monotonic()
        if self._began_s is None:
            self._began_s = now
        lasted_s = now - self._began_s
        return lasted_s > WAIT_S or (lasted_s > STORM_S / CYCLES and self.count > self._least)

    def write(self, events: Events) -> None:
        self.count += len(events)

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory, arch: str) -> Generator[Scene]:
    home = Home(tmp_path_factory.mktemp("home"))
    loop = counting_loop(CALL, TIMES, arch=arch)
    files = {**LOAD_FILES, "/loop": loop, "/wander.sh": WANDER.encode()}
    kernel = named_kernel() if arch == "amd64" else None
    with Machine.boot(MachineOptions(arch=arch, files=files, kernel=kernel)) as machine:
        settle(machine)
        machine.run("chmod 755 /loop")
        witness = witness_of(str(machine.stub_address), home)
        load = Load(machine)
        assert load.goes_on()
        yield Scene(machine, home, witness, load)


@pytest.fixture(autouse=True)
def _the_guest_is_well_afterwards(scene: Scene) -> Generator[None]:
    yield
    assert scene.witness.changes() == []
    assert scene.load.goes_on()
    assert scene.load.mistakes() == ""


@LONG
def test_probes_on_everything_that_is_hot_harm_nothing(
    scene: Scene, arch: str, record_property: Callable[[str, object], None]
) -> None:
    definitions = hot.definitions(scene.witness.is_probeable)
    assert len(definitions) >= 100
    with scene.session(definitions) as session:
        for cycle in range(CYCLES):
            sink = Discard(LEAST[arch])
            counts = session.stream(sink, is_done=sink.has_enough)

            assert scene.witness.changes() == []
            assert counts.damaged == 0
            assert sink.count == sum(counts.recorded.values()) > LEAST[arch]
            assert sum(count > 0 for count in counts.recorded.values()) >= 100
            # Our own reads run through these, and only a hit of another's is recorded.
            missed = {name: counts.missed[n] for n, name in _names(session).items()}
            assert missed["copy_from_kernel_nofault"] > 0
            record_property(f"cycle {cycle}", (sink.count, sum(missed.values()), counts.lost))


@LONG
def test_probes_are_armed_and_disarmed_in_a_storm_again_and_again(scene: Scene) -> None:
    with scene.session(hot.definitions(scene.witness.is_probeable)) as session:
        for _ in range(10):
            session.stream(Discard(), is_done=lambda: True)
            assert scene.witness.changes() == []


@LONG
@pytest.mark.parametrize("is_numbered", [False, True])
@pytest.mark.parametrize("ring", [0, 1 << 16])
def test_every_call_of_wandering_tasks_is_counted_once(
    scene: Scene, arch: str, ring: int, is_numbered: bool
) -> None:
    fetch = NUMBERED[arch] if is_numbered else ""
    with scene.session([f"p:calls {SYSCALL[arch]} {fetch}"], ring=ring) as session:
        counts, trace = _record(scene, session)

    assert _hits(counts) == LOOPS * TIMES
    assert counts.damaged == 0
    _check_order(trace, LOOPS * TIMES - counts.lost)


def test_every_call_is_counted_as_the_kernels_own_probe_counts_it(scene: Scene, arch: str) -> None:
    tracing, call = "/sys/kernel/tracing", SYSCALL[arch]
    arm = f"cd {tracing}; echo 'p:own {call}' > kprobe_events; echo 1 > events/kprobes/enable"
    disarm = f"cd {tracing}; echo 0 > events/kprobes/enable; echo > kprobe_events"
    assert scene.machine.run(arm, 20).status == 0
    try:
        # Its site holds the kernel's own call by now, or its breakpoint is in front of that.
        with scene.session([f"p:calls {call}"]) as session:
            counts, _ = _record(scene, session)
        profile = scene.machine.run(f"cat {tracing}/kprobe_profile", 20).output.split()
    finally:
        assert scene.machine.run(disarm, 20).status == 0
    # Since 6.5 the kernel marks records that it has ever used.
    scene.witness.before = scene.witness.state()

    assert _hits(counts) == LOOPS * TIMES
    assert profile[0] == b"own"
    assert sum(map(int, profile[1:])) == LOOPS * TIMES


@LONG
def test_timer_interrupts_on_top_of_probed_tasks_are_recorded_each(scene: Scene, arch: str) -> None:
    with scene.home.entered():
        places = _timer_counts(scene)
    timers = " ".join(f"n{cpu}=@{place:#x}:u32" for cpu, place in enumerate(places))
    tasks = "text=+0(+0($arg1)):string wild=+0(\\0xffffffff00000000):u64"
    definitions = [f"p:timer hrtimer_interrupt {timers}"]
    definitions += [f"p:t{n} {name} {tasks}" for n, name in enumerate(hot.VFS.split()[:4])]
    with scene.session([*definitions, f"p:calls {SYSCALL[arch]} {tasks}"]) as session:
        counts, trace = _record(scene, session, ["timer"])

    assert counts.damaged == 0
    (timer,) = [event for event, name in _layouts(trace).items() if name == "timer"]
    assert counts.missed[timer] == 0
    batches = [b for b in _batches(trace) if b.layout.event_id == timer]
    for cpu in range(len(places)):
        numbers = np.concatenate([b.values[cpu][b.cpu == cpu] for b in batches])
        steps = np.diff(numbers.astype(np.int64))
        assert len(numbers) > 50
        # One more at each: none twice, none out of order, and no more gaps than losses.
        assert steps.min() == 1
        assert steps.sum() - len(steps) <= counts.lost
    assert all((b.context & CONTEXT_HARDIRQ != 0).all() for b in batches)


def _record(
    scene: Scene, session: GuestSession, keep: Sequence[str] = ("calls",)
) -> tuple[Counts, Trace]:
    with session.record() as trace:
        found = scene.machine.run("sh /wander.sh", 120)
    assert found.status == 0, found.output
    assert set(keep) <= set(_layouts(trace).values())
    return trace.counts, trace


def _hits(counts: Counts) -> int:
    return sum(counts.recorded.values()) + sum(counts.missed.values()) + counts.lost


def _check_order(trace: Trace, count: int) -> None:
    """Check that every task's calls are there in the order in which it made them."""
    batches = _batches(trace)
    assert sum(map(len, batches)) == count
    ts = np.concatenate([b.ts for b in batches])
    pid = np.concatenate([b.pid for b in batches])
    cpu = np.concatenate([b.cpu for b in batches])
    # Losses can swallow a task.
    assert len(np.unique(pid)) == LOOPS or count < LOOPS * TIMES
    assert len(np.unique(cpu)) == 2
    if not batches[0].values:
        return
    number = np.concatenate([b.values[0] for b in batches]).astype(np.int64)
    moves = 0
    for task in np.unique(pid).tolist():
        mine = pid == task
        order = np.argsort(ts[mine], kind="stable")
        assert (np.diff(number[mine][order]) < 0).all()
        moves += np.count_nonzero(np.diff(cpu[mine][order].astype(int)))
    assert moves > 1


def _batches(trace: Trace) -> list[Batch]:
    return [batch for events in trace.events for batch in events.batches]


def _layouts(trace: Trace) -> dict[int, str]:
    return {batch.layout.event_id: batch.layout.event for batch in _batches(trace)}


def _names(session: GuestSession) -> dict[int, str]:
    layouts = [probe.layout for plan in plans_of(session) for probe in plan.probes]
    return {layout.event_id: layout.function for layout in layouts}


def _timer_counts(scene: Scene) -> list[int]:
    """Return where the kernel counts each CPU's calls of hrtimer_interrupt."""
    guest = scene.witness.guest
    assert guest.kernel.types is not None
    offset = guest.kernel.types.offset("hrtimer_cpu_base", "nr_events")
    bases = per_cpu_bases(guest.memory, guest.kernel)
    shown = scene.machine.run("grep nr_events /proc/timer_list", 20).output
    told = [int(count) for count in re.findall(rb": (\d+)", shown)]
    for base in _named_by(guest, "hrtimer_interrupt"):
        places = [(each + base + offset) % (1 << 64) for each in bases]
        with suppress(MemoryFault):
            found = [int.from_bytes(guest.memory.read(place, 4), "little") for place in places]
            if all(0 <= now - then < 1000 for now, then in zip(found, told, strict=True)):
                return places
    raise AssertionError(f"no per-CPU word that it uses is near {told}")


def _named_by(guest: Guest, name: str) -> Iterable[int]:
    # Not every kernel has a symbol of hrtimer_bases.
    function = guest.kernel.symbols.named(name)
    code = guest.memory.read(function.addr, function.size)
    return guest.arch.machine.text.references(code, function.addr)
