"""Changes of what is armed while it is recorded: everything else goes on, no event is missing.

The longer version makes KPROBES_CHANGES changes, and begins with KPROBES_SEED.
"""

import os
import random
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

import kprobes
from kprobes.errors import TargetError
from kprobes.guest.arm import StagedChange, TextPatcher
from kprobes.handlers.probe import Kretprobe
from kprobes.open import GuestSession
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions
from tests.build.changing import Changes
from tests.build.continuous import CALL, TIMES, recorded
from tests.build.module import dummy
from tests.build.programs import counting_loop
from tests.build.victim import ROOT, Home, Witness, is_complaint, settle, witness_of
from tests.build.waiting import wait_until
from tests.system.conftest import SUITES

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

CHANGES = int(os.environ.get("KPROBES_CHANGES", "150"))
SEED = int(os.environ.get("KPROBES_SEED", "0")) or random.randrange(1, 1 << 30)


@pytest.fixture
def seed() -> int:
    """Of what is random; shown where a test fails."""
    sys.stdout.write(f"KPROBES_SEED={SEED}\n")
    return SEED


@pytest.fixture(scope="module")
def machine(arch: str) -> Generator[Machine]:
    suite = SUITES["6.1"]
    loop, module = counting_loop(CALL, TIMES, arch=arch), dummy(suite, arch)
    files = {"/loop": loop, "/dummy.ko": module}
    with Machine.boot(MachineOptions(suite=suite, arch=arch, files=files)) as machine:
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


def test_whatever_changes_nothing_of_the_others_is_missing(
    machine: Machine, session: GuestSession, arch: str, seed: int
) -> None:
    def run(command: str) -> None:
        done = machine.run(command, 180)
        assert done.status == 0, done.output

    changes = Changes(session, seed, run)
    with recorded(session, arch):
        for _ in range(CHANGES):
            changes.make()
    machine.run("rmmod dummy 2> /dev/null", 180)


SLEEPERS = 1000


def test_tasks_that_sleep_in_what_is_probed_keep_nothing_from_changing(
    machine: Machine, session: GuestSession
) -> None:
    sleeping = "for n in $(seq {}); do sleep 1000 & done 2> /dev/null; echo there; wait"
    slept = session.probe("r:slept do_nanosleep $retval\nr:slept2 schedule_timeout a=$arg1")
    handled = Kretprobe(symbol_name="do_nanosleep", handler=_pass, entry_handler=_pass)
    with session.record() as trace:
        session.register_kretprobe(handled)
        jobs = [machine.start(sleeping.format(SLEEPERS // 2)) for _ in range(2)]
        assert wait_until(lambda: _sleepers(machine) >= SLEEPERS, 180) is not None
        for n in range(5):
            more = session.probe(f"r:more{n} do_nanosleep a=$arg1 got=$retval")
            session.probe(f"p:entry{n} do_nanosleep a=$arg1")
            more.disable()
            more.delete()
        session.unregister_kretprobe(handled)
        slept.disable()
        slept.delete()
        machine.run("sleep 0.01")
        session.select("entry0").disable()
        again = session.probe("r:again do_nanosleep $retval")
        machine.run("sleep 0.01")
        for job in jobs:
            job.kill()
        machine.run("killall sleep; sleep 1")
    assert again.hits >= 1
    assert {event.args["a"] for event in trace["entry1"]} - {0}


def _sleepers(machine: Machine) -> int:
    return int(machine.run("ps | grep -c '[s]leep 1000'").output)


def _pass(*_: object) -> None:
    pass


KILLS = int(os.environ.get("KPROBES_KILLS", "5"))
_WELL_S = 180


@pytest.fixture
def victim(machine: Machine, tmp_path: Path) -> tuple[Home, Witness]:
    home = Home(tmp_path)
    return home, witness_of(str(machine.stub_address), home)


def test_a_tracer_that_is_killed_between_changes_or_in_one_leaves_the_guest_well(
    machine: Machine,
    victim: tuple[Home, Witness],
    seed: int,
) -> None:
    home, witness = victim
    chance = random.Random(seed)
    noise = machine.start("while :; do cat /proc/version /etc/passwd | wc -c; ls /proc; done")
    try:
        for number in range(KILLS):
            command = [sys.executable, "-m", "tests.build.changing"]
            tracer = subprocess.Popen(
                [*command, str(machine.stub_address), str(seed + number)],
                cwd=ROOT,
                env=home.environment,
                stdout=subprocess.PIPE,
            )
            assert tracer.stdout is not None
            with tracer, tracer.stdout:
                assert tracer.stdout.readline() == b"armed\n"
                time.sleep(chance.uniform(0, 1.5))
                tracer.kill()
            assert wait_until(lambda: not home.journals, _WELL_S) is not None
            assert witness.changes() == []
            assert witness.runs_within(_WELL_S)
    finally:
        noise.kill()
    complaints = machine.run("dmesg").output.decode(errors="replace").splitlines()
    assert [line for line in complaints if is_complaint(line)] == []


def test_a_change_that_is_refused_leaves_code_that_looks_at_the_guard_when_it_must(
    session: GuestSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(patcher: TextPatcher, change: StagedChange) -> int:
        del patcher, change
        raise TargetError("the guest changed it")

    text = "p:text do_sys_openat2 path=+0($arg2):ustring"
    session.probe("p:plain vfs_read")
    with session.record():
        (plain,) = session.driver.plans
        with monkeypatch.context() as patched:
            patched.setattr(TextPatcher, "apply", refuse)
            with pytest.raises(TargetError, match="the guest changed it"):
                session.probe(text)
        assert [each is plain for each in session.driver.plans] == [True]

        session.probe(text)

        # What was armed before has other code, too.
        assert len(session.driver.plans) == 2
        assert not any(each is plain for each in session.driver.plans)
