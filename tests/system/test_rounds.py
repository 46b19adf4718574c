"""Rounds of what once harmed a guest, on guests that are started by hand and busy on both CPUs.

KPROBES_ROUNDS says how many of each (50), KPROBES_SEED which; `make sweep` runs them.
"""

import json
import logging
import os
import random
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

import kprobes
from kprobes.arch.aarch64.machine import pointer
from kprobes.errors import RefusedError
from kprobes.guest.journal import read
from kprobes.inspect.check import checker_of_guest
from kprobes.plan.strategy import Wish
from kprobes.units import Addr
from tests.build.console_guest import ConsoleGuest, console_guest
from tests.build.harmed import AGAIN_S, FEW, SETTLED_S
from tests.build.turns import short_switch_interval
from tests.build.victim import (
    Home,
    Tracer,
    Witness,
    guardians_of,
    is_complaint,
    kill_and_wait,
    witness_of,
)
from tests.build.waiting import wait_until
from tests.system.conftest import SUITES
from tests.system.oracle import TRACING, accepted_offsets, try_offsets

pytestmark = [
    pytest.mark.guest,
    pytest.mark.sweep,
    pytest.mark.alone,
    pytest.mark.arches("amd64", "arm64"),
]

T = TypeVar("T")
_log = logging.getLogger(__name__)
ROUNDS = int(os.environ.get("KPROBES_ROUNDS", "50"))
SEED = int(os.environ.get("KPROBES_SEED", random.randrange(1 << 30)))
PROMISED_S = 1.0
FUNCTIONS = ("vfs_read", "vfs_write", "do_sys_openat2", "vfs_open")
SPAN = 40
"""Bytes of a function that are tried."""
SITES = {"amd64": (), "arm64": (0, 4)}
"""Offsets where the kernel's own kprobes may not be, and ours may."""
_THEIRS = re.compile("under the guest's own optimised kprobe|the guest's own kprobe is there")
_EVENTS, _ENABLE = f"{TRACING}/kprobe_events", f"{TRACING}/events/kprobes/nat/enable"
_ON = f"echo 'p:nat {{}}+{{}}' >{_EVENTS} && echo 1 >{_ENABLE}"
_OFF = f"echo 0 >{_ENABLE}; echo >{_EVENTS}"
_WORK = "while :; do cat /proc/version /etc/passwd /none; ls / >/tmp/w$$; done"
_TRACERS_ON = f"echo 'vfs_*' >{TRACING}/set_ftrace_filter; echo function >{TRACING}/current_tracer"
_TRACERS_OFF = f"echo nop >{TRACING}/current_tracer; echo >{TRACING}/set_ftrace_filter"
_HOSTILE = "from pathlib import Path; Path({!r}).touch(); raise SystemExit"
_READS = 500_000


class Victim:
    """A guest that was started by hand, what is seen of it from outside, and ``kprobe`` for it."""

    def __init__(self, guest: ConsoleGuest, home: Home, arch: str) -> None:
        self.guest = guest
        self.target = guest.target
        self.home = home
        self.arch = arch
        self.witness: Witness = witness_of(self.target, home)
        for cpu in (1, 2):
            guest.run(f"taskset {cpu} sh -c {shlex.quote(_WORK)} >/dev/null 2>&1 &")

    def start(self, *words: str, cwd: Path | None = None) -> subprocess.Popen[bytes]:
        """Start ``kprobe`` with nobody's home but ours, and no umask."""
        return subprocess.Popen(
            [Path(sys.executable).with_name("kprobe"), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=cwd,
            env=self.home.environment,
            umask=0,
        )

    def kprobe(self, *words: str) -> subprocess.CompletedProcess[bytes]:
        """Run ``kprobe`` to its end."""
        process = self.start(*words)
        out, said = process.communicate(timeout=120)
        return subprocess.CompletedProcess(words, process.returncode, out, said)

    def well_after(self) -> float | None:
        """Return how long it took until it ran with its own text, or None."""
        return wait_until(
            lambda: self.witness.has_its_text() and self.witness.runs_within(0.1), AGAIN_S
        )

    def assert_well(self) -> None:
        """It runs with its own text, has nothing of ours, and nothing to complain of."""
        assert self.well_after() is not None, self.witness.changes()
        assert wait_until(lambda: not guardians_of(self.target), SETTLED_S) is not None
        assert [path for path in self.home.journals if not read(path).is_done] == []
        assert [
            line for line in self.guest.run("dmesg -c").splitlines() if is_complaint(line)
        ] == []


@pytest.fixture(scope="module", params=["6.1", "7.x"])
def victim(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, arch: str
) -> Generator[Victim]:
    directory = tmp_path_factory.mktemp("victim")
    suite = SUITES[request.param]
    with console_guest(directory, suite=suite, arch=arch) as guest:
        clock = "/sys/devices/system/clocksource/clocksource0/current_clocksource"
        # Newer kernels patch their text for it.
        guest.run(f"while grep -E 'early|jiffies' {clock}; do usleep 50000; done")
        home = Home(tmp_path_factory.mktemp("home"))
        # What guests' tracefs patches when it is used first is not ours.
        guest.run(f"{_ON.format('vfs_read', 0)}; {_OFF}; {_TRACERS_ON}; {_TRACERS_OFF}; dmesg -c")
        yield Victim(guest, home, arch)


def rounds(victim: Victim, one: Callable[[random.Random], T]) -> list[T]:
    """Try something again and again; the guest must be well each time."""
    found: list[T] = []
    for number in range(ROUNDS):
        try:
            found.append(one(random.Random(SEED + number)))
            victim.assert_well()
        except BaseException as error:
            error.add_note(f"round {number}: KPROBES_SEED={SEED + number} KPROBES_ROUNDS=1")
            raise
    return found


def natively(victim: Victim, chance: random.Random, function: str) -> int:
    """Have the guest's own kprobe somewhere in a function; return its offset."""
    offsets = list(range(4, SPAN))
    chance.shuffle(offsets)
    for offset in offsets:
        words = f"({_ON.format(function, offset)}) 2>/dev/null && echo armed; true"
        if "armed" in victim.guest.run(words):
            return offset
    raise AssertionError(f"the guest refuses all of {function}")


def accepted_by_kernel(victim: Victim, function: str) -> set[int]:
    """Return the offsets at which the kernel would have a probe of its own."""
    return accepted_offsets(victim.guest.run(try_offsets(function, SPAN)))


def test_what_its_own_kprobes_hide_is_seen_as_it_was_compiled(victim: Victim) -> None:
    def one(chance: random.Random) -> int:
        function = chance.choice(FUNCTIONS)
        before = accepted_by_kernel(victim, function)
        offset = natively(victim, chance, function)
        try:
            # The kernel's optimiser waits a few ticks.
            time.sleep(0.4)
            kernel = accepted_by_kernel(victim, function)
            with victim.home.entered(), kprobes.attach(victim.target) as session:
                lines = "\n".join(f"p:e{n} {function}+{n}" for n in range(SPAN))
                verdicts = checker_of_guest(session.driver.guest).check(lines)
            refused = {
                n: f"{verdict.error} {verdict.advice}"
                for n, verdict in enumerate(verdicts)
                if verdict.error is not None
            }
            ours = set(range(SPAN)) - set(refused)
            assert ours - kernel <= {*SITES[victim.arch]}
            theirs = {n for n in before - ours if _THEIRS.search(refused[n])}
            assert theirs >= {offset}
            assert theirs <= set(range(offset, offset + 5))
            places = [f"p:e{n} {function}+{n}" for n in sorted(ours)]
            done = victim.kprobe(
                *("trace", "-t", victim.target, *places, "-o", "/dev/null", "--duration", "300ms")
            )
            assert done.returncode == 0, done.stderr.decode()
        finally:
            victim.guest.run(f"{_OFF}; sleep 0.3")
        return len(ours)

    tried = rounds(victim, one)

    _log.info("%d rounds, %d places of ours beside the guest's own", len(tried), sum(tried))


def test_its_own_kprobes_come_and_go_under_ours(victim: Victim) -> None:
    def one(chance: random.Random) -> int:
        function = chance.choice(FUNCTIONS)
        with victim.home.entered(), kprobes.attach(victim.target) as session:
            checker = checker_of_guest(session.driver.guest)
            lines = [f"p:e{n} {function}+{n}" for n in range(4, SPAN)]
            checked = zip(lines, checker.check("\n".join(lines)), strict=True)
            ours = chance.choice([line for line, result in checked if result.error is None])
        process = victim.start(
            "trace", "-t", victim.target, ours, "-o", "/dev/null", "--ready", "1"
        )
        assert process.stdout is not None
        assert process.stdout.readline()
        natively(victim, chance, function)
        time.sleep(chance.uniform(0, 0.5))
        is_first = chance.random() < 0.5
        if is_first:
            victim.guest.run(f"{_OFF}; sleep {chance.uniform(0, 0.3):.2f}")
        process.terminate()
        said = process.communicate(timeout=180)[1].decode()
        victim.guest.run(f"{_OFF}; sleep 0.3")
        # Over ours as ours ended: its bytes were neither ours nor the kernel's.
        assert process.returncode == 0 or (not is_first and "neither ours" in said), said
        restored = victim.kprobe("restore", "-t", victim.target)
        assert restored.returncode == 0, restored.stderr.decode()
        return process.returncode

    ended = rounds(victim, one)

    _log.info(
        "%d rounds, %d ended while the guest's own was over ours", len(ended), sum(map(bool, ended))
    )


@pytest.mark.arches("arm64")
def test_pointers_in_front_of_functions_are_no_code_while_its_tracer_uses_them(
    victim: Victim,
) -> None:
    def one(chance: random.Random) -> int:
        victim.guest.run(_TRACERS_ON)
        try:
            with victim.home.entered(), kprobes.attach(victim.target) as session:
                places = session.driver.places
                find_site = places.find_site(Wish())
                sites = chance.sample(places.sites.addrs.tolist(), 200)
                words = [pointer(site) + at for site in sites for at in (0, 4)]
                for addr in words:
                    with pytest.raises(RefusedError):
                        find_site(Addr(addr))
                session.probe("p vfs_*\nr vfs_read")
                with session.record() as trace:
                    time.sleep(0.5)
                assert len(trace) > 0
                return len(words)
        finally:
            victim.guest.run(_TRACERS_OFF)

    tried = rounds(victim, one)

    _log.info("%d rounds, %s words refused", len(tried), tried[0])


def test_nothing_of_the_directory_that_a_tracer_stands_in_is_run(
    victim: Victim, tmp_path: Path
) -> None:
    ran = tmp_path / "ran"
    here = tmp_path / "here"
    here.mkdir()
    for name in ("json", "kprobes", "sitecustomize", "numpy", "llvmlite", "signal", "kprobe"):
        (here / f"{name}.py").write_text(_HOSTILE.format(str(ran)))
    before = sorted(here.iterdir())

    def one(chance: random.Random) -> float:
        process = victim.start("trace", "-t", victim.target, *FEW.splitlines(), cwd=here)
        time.sleep(chance.uniform(0.5, 3))
        process.kill()
        process.communicate()
        took = victim.well_after()
        assert took is not None
        assert not ran.exists()
        assert sorted(here.iterdir()) == before
        return took

    took = sorted(rounds(victim, one))

    _log.info("%d killed tracers, text back after %.2f s at most", len(took), took[-1])


Forge = Callable[[random.Random, list[bytes]], bytes]


def _another_mark(chance: random.Random, lines: list[bytes]) -> bytes:
    head = json.loads(lines[0])
    return b"\n".join(
        [json.dumps(head | {"mark": chance.randbytes(16).hex()}).encode(), *lines[1:]]
    )


def _another_kernel(chance: random.Random, lines: list[bytes]) -> bytes:
    build_id = chance.randbytes(20).hex().encode()
    return re.sub(rb'"build_id": ?"\w*"', b'"build_id":"' + build_id + b'"', b"\n".join(lines))


def _as_it_was(chance: random.Random, lines: list[bytes]) -> bytes:
    del chance
    return b"\n".join(lines) + b"\n"


def _torn(chance: random.Random, lines: list[bytes]) -> bytes:
    data = b"\n".join(lines)
    return data[: chance.randrange(len(data))]


def _deep(chance: random.Random, lines: list[bytes]) -> bytes:
    return b"\n".join([*lines, b"[" * chance.randrange(1000, 1_000_000)])


def _damaged(chance: random.Random, lines: list[bytes]) -> bytes:
    data = bytearray(b"\n".join(lines))
    for _ in range(20):
        data[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(data)


FORGED: Sequence[Forge] = (*(_another_mark, _another_kernel, _as_it_was, _torn, _deep, _damaged),)


def _hostile(line: bytes) -> bytes:
    # Undos that would be made wherever the guest's text is as it should be.
    if not line.startswith(b'{"undos"'):
        return line
    told = json.loads(line)
    held = told["undos"]["old"]
    others = ["cc" * (len(each) // 2) for each in held]
    told["undos"] |= {"new": held, "old": others}
    return json.dumps(told, separators=(",", ":")).encode()


def test_a_forged_journal_is_never_a_reason_to_write(victim: Victim) -> None:
    with Tracer(victim.home, victim.target, FEW) as tracer:
        tracer.wait_for("armed")
        (journal,) = victim.home.journals
        lines = [_hostile(line) for line in journal.read_bytes().splitlines()]
        assert any(line.startswith(b'{"undos"') for line in lines)
        tracer.go_on()
        assert tracer.wait() == 0
    for directory in (journal.parent, journal.parent.parent):
        assert directory.stat().st_mode & 0o777 == 0o700

    def one(chance: random.Random) -> str:
        forge = chance.choice(FORGED)
        path = journal.with_name(f"{chance.randrange(2, 1 << 22)}-forged.jsonl")
        path.write_bytes(forge(chance, lines))
        try:
            done = victim.kprobe("restore", "-t", victim.target)
            assert done.returncode in (0, 1), done.stderr.decode()
            assert b"Traceback" not in done.stderr
            assert victim.witness.has_its_text(), (forge, victim.witness.changes())
        finally:
            path.unlink(missing_ok=True)
        return forge.__name__

    tried = rounds(victim, one)

    _log.info("%d rounds, %d ways", len(tried), len(set(tried)))


def test_of_tracer_and_guardian_one_is_killed_at_any_time(victim: Victim) -> None:
    with Tracer(victim.home, victim.target, FEW) as tracer:
        tracer.go_on()
        tracer.wait_for("begin")
        start = time.monotonic()
        tracer.wait()
        longest = time.monotonic() - start

    def one(chance: random.Random) -> float:
        with Tracer(victim.home, victim.target, FEW) as tracer:
            tracer.wait_for("begin")
            if chance.random() < 0.7:
                tracer.go_on()
            time.sleep(chance.uniform(0, longest))
            guardians = tracer.guardians()
            is_guardian = bool(guardians) and chance.random() < 0.5
            if is_guardian:
                kill_and_wait(guardians[0])
            else:
                tracer.kill()
            took = victim.well_after()
            assert took is not None, victim.witness.changes()
            if is_guardian:
                tracer.go_on()
                tracer.wait()
        return took

    took = sorted(rounds(victim, one))

    late = sum(each > PROMISED_S for each in took)
    _log.info("%d rounds: %.2f s at most, %d after the promised second", len(took), took[-1], late)


def test_a_busy_trace_loses_and_invents_nothing_while_threads_take_turns(victim: Victim) -> None:
    def one(_: random.Random) -> int:
        with victim.home.entered(), kprobes.attach(victim.target) as session:
            session.probe("p:put vfs_write count=$arg3", filter='count == 1 && comm == "dd"')
            work = f"dd if=/dev/zero of=/dev/null bs=1 count={_READS} 2>/dev/null"
            with short_switch_interval(), session.record() as trace:
                victim.guest.run(work, 120)
            assert len(trace) + trace.counts.lost == _READS
            return trace.counts.lost

    lost = rounds(victim, one)

    _log.info("%d rounds of %d hits, %d lost in rings", len(lost), _READS, sum(lost))
