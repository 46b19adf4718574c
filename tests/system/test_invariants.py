"""Attempts to harm a guest: its tracer dies, its guardian or both, while probes are armed.

The guest is QEMU with a gdb stub, and outlives its tracers. What must hold is DESIGN section 8.
"""

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable

import pytest

from kprobes.errors import GuestReplacedError
from kprobes.guest.allocations import Kind
from kprobes.guest.journal import read
from kprobes.guest.recovery import free_after_crash
from kprobes.guest.rescue import rescue
from kprobes.transport.connect import connect
from tests.build.harmed import (
    AGAIN_S,
    FEW,
    ONE,
    SETTLED_S,
    TRACEPOINTS,
    Scene,
    length_of_a_run,
)
from tests.build.victim import kill_and_wait
from tests.system.conftest import LONG, ONCE

pytestmark = [
    pytest.mark.guest,
    pytest.mark.harm,
    pytest.mark.arches("amd64", "arm64"),
    pytest.mark.usefixtures("well_afterwards"),
]
STORM = os.environ.get("KPROBES_STORM")
"""How many seconds the long loops take, when they are wanted."""
RANDOM_S = float(STORM or 15)
_LEAST = 5
"""How often something is tried at random however slow this machine is."""


def test_a_tracer_killed_over_hot_probes_leaves_a_guest_as_before_within_a_second(
    scene: Scene,
) -> None:
    definitions = scene.hot_probes()
    with scene.tracer("\n".join(definitions)) as tracer:
        tracer.wait_for("armed")
        time.sleep(1)
        assert len(scene.witness.changes()) >= 100

        tracer.kill()

        assert scene.is_well_within(AGAIN_S) is not None, scene.witness.changes()


def test_with_the_guardian_killed_too_the_guest_works_on_until_it_is_restored(
    scene: Scene,
) -> None:
    # Small rings: they are full at once, and what comes then is dropped.
    with scene.tracer("\n".join(scene.hot_probes()), "--ring", "65536") as tracer:
        tracer.wait_for("armed")

        tracer.kill_with_guardian()

        assert scene.load.goes_on()
        assert scene.load.goes_on()
    assert len(scene.witness.changes()) >= 100
    (journal,) = scene.home.journals

    assert len(scene.allocated()) >= 2

    rescued = rescue(scene.target, journal)

    assert rescued.places >= 200
    assert rescued.memory > 1 << 20
    assert scene.witness.changes() == []


def test_a_tracer_whose_guardian_is_killed_puts_the_guest_right_and_says_so(scene: Scene) -> None:
    with scene.tracer() as tracer:
        tracer.wait_for("armed")
        (guardian,) = tracer.guardians()

        kill_and_wait(guardian)

        # At once, though the tracer itself is in the middle of something else.
        assert scene.is_well_within(AGAIN_S) is not None, scene.witness.changes()
        tracer.go_on()
        assert "guardian" in tracer.wait_for("error")["text"]
        assert tracer.wait() == 1
    assert scene.home.journals == []


def test_calls_that_are_skipped_run_again_when_their_tracer_is_dead(
    scene: Scene, arch: str
) -> None:
    # -12, as the shell prints a pid.
    ask, failed = "sh -c 'echo $PPID'", b"4294967284\n"
    failing = f"__{'x64' if arch == 'amd64' else 'arm64'}_sys_getppid"
    for is_guarded in (True, False):
        with scene.tracer(ONE, "--fails", failing) as tracer:
            tracer.wait_for("armed")
            assert scene.machine.run(ask, 20).output == failed
            if is_guarded:
                tracer.kill()
                assert scene.is_well_within(AGAIN_S) is not None, scene.witness.changes()
            else:
                tracer.kill_with_guardian()
                # Nobody is there, and nobody is needed.
                assert scene.machine.run(ask, 20).output == failed
                assert scene.load.goes_on()
                (journal,) = scene.home.journals
                rescue(scene.target, journal)
        assert scene.machine.run(ask, 20).output != failed


@pytest.mark.parametrize("is_late", [False, True])
def test_a_tracer_that_dies_in_a_call_of_its_user_s_leaves_a_guest_that_is_well(
    scene: Scene, is_late: bool
) -> None:
    # Whoever comes after it waits two seconds for the call.
    sleep_ms = 8000 if is_late else 1500
    with scene.tracer(ONE, "--sleeps", str(sleep_ms)) as tracer:
        tracer.wait_for("calling")
        time.sleep(0.7)

        tracer.kill()

        assert scene.is_let_go_within(SETTLED_S)
    time.sleep(sleep_ms / 1000)


@ONCE
def test_a_guest_without_the_dead_tracers_mark_is_left_alone(scene: Scene) -> None:
    with scene.tracer() as tracer:
        tracer.wait_for("armed")
        tracer.kill_with_guardian()
    (journal,) = scene.home.journals
    copy, entry = journal.read_bytes(), read(journal)
    ram, place = scene.witness.guest.memory.ram, entry.mark_place
    assert place is not None
    ram.write(place, bytes(len(entry.mark)))
    changes = scene.witness.changes()

    # As if the guest had been put back to a snapshot: what lies there is somebody else's.
    with pytest.raises(GuestReplacedError, match="the guest was restored to an earlier state"):
        rescue(scene.target, journal)

    assert scene.witness.changes() == changes
    assert len(scene.allocated()) >= 2
    assert not journal.exists()
    ram.write(place, entry.mark)
    journal.write_bytes(copy)
    assert rescue(scene.target, journal).memory == entry.allocations.memory


@ONCE
def test_with_the_guardian_killed_while_the_guest_is_stopped_restoring_lets_it_run(
    scene: Scene,
) -> None:
    with scene.tracer(FEW, "--fail", "write:5", "--with-guardian") as tracer:
        tracer.wait()
    assert not scene.witness.runs_within(0.3)
    (journal,) = scene.home.journals

    assert rescue(scene.target, journal).places == 4


@pytest.mark.parametrize("strategy", ["jump", "breakpoint"])
def test_killed_over_patched_instructions_under_load_nothing_of_it_stays(
    scene: Scene, strategy: str
) -> None:
    definitions = scene.instructions(strategy)
    chain = scene.callbacks()
    with scene.tracer("\n".join(definitions), "--strategy", strategy) as tracer:
        tracer.wait_for("armed")
        assert len(scene.witness.changes()) >= 5
        assert (scene.callbacks() != chain) is (strategy == "breakpoint")
        assert scene.load.goes_on()

        tracer.kill()

        assert scene.is_well_within(AGAIN_S) is not None, scene.witness.changes()
    assert scene.is_let_go_within(SETTLED_S)
    assert scene.callbacks() == chain


@pytest.mark.parametrize("strategy", ["jump", "breakpoint"])
def test_patched_instructions_without_tracer_and_guardian_work_on_until_restored(
    scene: Scene, strategy: str
) -> None:
    chain = scene.callbacks()
    options = ("--strategy", strategy, "--ring", "65536")
    with scene.tracer("\n".join(scene.instructions(strategy)), *options) as tracer:
        tracer.wait_for("armed")
        tracer.kill_with_guardian()
        assert scene.load.goes_on()
    (journal,) = scene.home.journals

    rescued = rescue(scene.target, journal)

    assert rescued.memory > 1 << 20
    assert scene.witness.changes() == []
    assert scene.callbacks() == chain


def test_a_hot_tracepoint_is_off_soon_when_its_tracer_is_killed(scene: Scene) -> None:
    with scene.tracer(TRACEPOINTS) as tracer:
        tracer.wait_for("armed")
        time.sleep(1)
        assert scene.witness.changes() != []

        tracer.kill()

        assert scene.is_well_within(AGAIN_S) is not None, scene.witness.changes()


def test_with_the_guardian_killed_too_tracepoints_do_nothing_until_they_are_off(
    scene: Scene,
) -> None:
    with scene.tracer(TRACEPOINTS, "--ring", "65536") as tracer:
        tracer.wait_for("armed")
        tracer.kill_with_guardian()
        assert scene.load.goes_on()
    (journal,) = scene.home.journals
    assert scene.witness.changes() != []

    rescue(scene.target, journal)

    assert scene.witness.changes() == []


def test_killed_before_the_first_call_of_a_task_that_call_is_made_after_all(scene: Scene) -> None:
    with scene.tracer(ONE, "--fail", "frees:0", "--with-guardian") as tracer:
        tracer.go_on()
        tracer.wait()
    (path,) = scene.home.journals
    entry = read(path)
    call = entry.allocations.call
    assert call is not None
    assert call.returns is not None
    # With breakpoints it would be the callback for exceptions, which may be taken back twice.
    assert call.returns.kind is Kind.PER_CPU

    with connect(scene.target) as stub:
        # It was its tracer that left it stopped.
        stub.is_held = False
        free_after_crash(stub, entry, [])

    lines = [json.loads(line) for line in path.read_text().splitlines()]
    begun = [line["begin"]["returns"] for line in lines if "begin" in line]
    assert [line for line in lines if "cancel" in line] == [{"cancel": True}]
    assert [each["kind"] for each in begun if each].count(Kind.PER_CPU) == 2
    path.unlink()


@ONCE
def test_a_tracer_killed_in_its_second_cycle_is_rolled_back(scene: Scene) -> None:
    with scene.tracer(FEW, "--cycles", "2") as tracer:
        tracer.wait_for("armed")
        tracer.go_on()
        tracer.wait_for("disarmed")
        tracer.wait_for("armed")

        tracer.kill()

        assert scene.is_well_within(AGAIN_S) is not None, scene.witness.changes()


@LONG
@pytest.mark.parametrize("sent", [1, 700, 1403, 2106, 2809, 3512, 4215, 4918, 5621, 6324])
def test_a_packet_cut_in_two_by_death_does_not_hold_up_the_guardian(
    scene: Scene, sent: int
) -> None:
    with scene.tracer(FEW, "--fail", f"sent:{sent}") as tracer:
        tracer.go_on()
        assert tracer.wait() == -signal.SIGKILL

        assert scene.is_well_within(AGAIN_S) is not None, scene.witness.changes()


@ONCE
def test_killed_at_random_instants_it_is_left_well(
    scene: Scene, record_property: Callable[[str, object], None]
) -> None:
    longest = length_of_a_run(scene)
    chance, tried, slowest = random.Random(1), 0, 0.0
    until = time.monotonic() + RANDOM_S
    while tried < _LEAST or time.monotonic() < until:
        with scene.tracer() as tracer:
            tracer.go_on()
            tracer.wait_for("begin")
            time.sleep(chance.uniform(0, longest))

            tracer.kill()

            took = scene.is_well_within(AGAIN_S)
            assert took is not None, f"{tried} killed before: {scene.witness.changes()}"
            assert scene.is_let_go_within(SETTLED_S), f"{tried} killed before"
            left = [each.read_text() for each in scene.home.journals]
            assert scene.allocated() == [], f"{tried} killed before: {left}"
        tried, slowest = tried + 1, max(slowest, took)
    record_property("killed", tried)
    record_property("slowest_s", round(slowest, 3))


@ONCE
@pytest.mark.parametrize("silent_s", [7, 40] if STORM else [7])
def test_a_guest_whose_stub_falls_silent_is_put_right_when_it_speaks_again(
    scene: Scene, silent_s: float
) -> None:
    with scene.tracer() as tracer:
        tracer.wait_for("armed")
        os.kill(scene.machine.pid, signal.SIGSTOP)
        try:
            tracer.go_on()
            time.sleep(silent_s)
        finally:
            os.kill(scene.machine.pid, signal.SIGCONT)
        error = tracer.wait_for("error")
        assert tracer.wait() == error["code"]

    assert error["kind"] == "GuestGoneError"
    assert re.fullmatch(r"the guest did not stop within 5 s", error["text"])
    for journal in scene.home.journals:
        # The tracer and its guardian have given up: this is what `kprobe restore` does.
        rescue(scene.target, journal)
    assert scene.is_well_within(AGAIN_S) is not None, scene.witness.changes()


def test_the_guests_own_tracing_works_on_the_same_functions_after_all_that(scene: Scene) -> None:
    # Last of all: it changes records by itself.
    script = """set -e
        cd /sys/kernel/tracing
        echo vfs_read > set_ftrace_filter
        echo function > current_tracer
        md5sum /etc/passwd > /dev/null
        echo 0 > tracing_on
        grep -c 'vfs_read <-' trace
        echo nop > current_tracer
        echo > set_ftrace_filter
        echo 1 > tracing_on
        echo 'p:own vfs_open' > kprobe_events
        echo 1 > events/kprobes/own/enable
        md5sum /etc/passwd > /dev/null
        grep -c 'own: (vfs_open' trace
        echo 0 > events/kprobes/own/enable
        echo > kprobe_events"""

    found = scene.machine.run(["sh", "-c", script], 30)

    # With tracefs' touched_functions (v6.4) a record tells for ever that it was used once.
    scene.witness.before = scene.witness.before[0], scene.witness.state()[1]
    assert found.status == 0, found.output
    assert all(int(count) > 0 for count in found.output.split())
