"""The trigger ``pause``: the guest stands at the hit, for a debugger or for a time, and goes on."""

import os
import re
import signal
import time
from collections.abc import Generator
from pathlib import Path

import pytest
from msgspec.structs import replace

import kprobes
from kprobes.guest.attach import Access
from kprobes.open import GuestSession
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions
from kprobes.transport.stub import SIGTRAP, Stub
from tests.build.command import Command, wait_for_words
from tests.build.plain_guest import plain_guest
from tests.build.victim import guardians_of, kill_and_wait
from tests.build.waiting import becomes_true

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

_WAIT_S = 300.0
_READ = "p:read vfs_read count=$arg3:u64"
_LARGE = "pause if count > 4096"
_DD = "dd if=/bin/busybox of=/dev/null bs=64k count={} 2> /dev/null; head -c 20 /proc/version"
_COUNT = {"amd64": "rdx", "arm64": "x2"}
"""The third argument."""
_PC = {"amd64": "rip", "arm64": "pc"}
_STOPPED = re.compile(
    r"a trigger has stopped the guest at vfs_read\+0x\w+/0x\w+, CPU [01] \(pause if count > 4096\)"
)


@pytest.fixture(scope="module")
def booted(arch: str) -> Generator[GuestSession]:
    with kprobes.boot(MachineOptions(arch=arch)) as session:
        yield session


@pytest.fixture
def told() -> list[str]:
    """What people are told."""
    return []


@pytest.fixture
def kernel(booted: GuestSession, told: list[str]) -> Generator[GuestSession]:
    before = booted.options
    booted.options = replace(before, warn=told.append)
    yield booted
    booted.options = before
    booted.probe("\n".join(f"-:{each.event}" for each in booted.definitions))
    assert booted.run("echo well", timeout_s=_WAIT_S).output == b"well\n"


@pytest.fixture
def kprobe(tmp_path: Path) -> Generator[Command]:
    with Command(tmp_path / "state") as command:
        yield command


def large(trace: kprobes.Trace) -> int:
    """Return how many large reads were recorded."""
    return int((trace["read"]["count"] > 4096).sum())


def test_the_guest_stands_for_a_time_at_each_hit_and_no_hit_is_lost(
    kernel: GuestSession, told: list[str]
) -> None:
    kernel.options = replace(kernel.options, pause_timeout_s=1)
    kernel.probe(_READ, triggers=[_LARGE])

    began, paused_s = time.monotonic(), kernel.driver.guest.stub.paused_s
    with kernel.record() as trace:
        assert kernel.run(_DD.format(3), timeout_s=_WAIT_S).status == 0
    took_s = time.monotonic() - began

    assert large(trace) == 3
    assert (trace.counts.lost, sum(trace.counts.missed.values())) == (0, 0)
    assert len(told) == 3
    assert all(_STOPPED.match(each) and each.endswith("; it goes on in 1 s") for each in told), told
    assert took_s >= 3
    # It is no pause of ours, which people are told the sum of.
    assert kernel.driver.guest.stub.paused_s - paused_s < took_s - 2


def test_a_count_says_how_often(kernel: GuestSession, told: list[str]) -> None:
    kernel.options = replace(kernel.options, pause_timeout_s=0.2)
    probe = kernel.probe(_READ, triggers=["pause:1 if count > 4096"])

    with kernel.record() as trace:
        assert kernel.run(_DD.format(3), timeout_s=_WAIT_S).status == 0

    assert large(trace) == 3
    assert len(told) == 1
    assert probe.triggers == ("pause:count=0 if count > 4096",)


def test_a_debugger_stands_at_the_hit_and_lets_it_go_on(
    kernel: GuestSession, told: list[str], tmp_path: Path, arch: str
) -> None:
    kernel.options = replace(kernel.options, pause_timeout_s=0.1)
    kernel.probe(_READ, triggers=[_LARGE])
    start = kernel.address("vfs_read")

    with (
        kernel.record() as trace,
        kernel.gdbserver(str(tmp_path / "gdb.sock")) as server,
        Stub.open(server.address, timeout_s=_WAIT_S) as debugger,
    ):
        debugger.resume()
        job = kernel.start(_DD.format(3))
        for _ in range(3):
            reply = debugger.wait(_WAIT_S)
            assert reply is not None
            assert reply.signal == SIGTRAP
            assert reply.cpu is not None
            # For longer than the time that is for those who have no debugger.
            time.sleep(0.3)
            registers = debugger.registers(reply.cpu)
            assert registers[_COUNT[arch]] == 65536
            assert 0 <= registers[_PC[arch]] - start <= 16
            debugger.resume()
        assert job.wait(_WAIT_S).status == 0

    assert large(trace) == 3
    assert len(told) == 3
    assert all(_STOPPED.match(each) and each.endswith(" for the debugger") for each in told), told


def test_a_debugger_that_joins_meanwhile_takes_the_guest_over(
    kernel: GuestSession, told: list[str], tmp_path: Path, arch: str
) -> None:
    kernel.options = replace(kernel.options, pause_timeout_s=20)
    kernel.probe(_READ, triggers=[_LARGE])

    with kernel.record() as trace, kernel.gdbserver(str(tmp_path / "gdb.sock")) as server:
        job = kernel.start(_DD.format(1))
        assert becomes_true(lambda: bool(told), _WAIT_S)
        with Stub.open(server.address, timeout_s=_WAIT_S) as debugger:
            counts = [debugger.registers(cpu)[_COUNT[arch]] for cpu in debugger.ids()]
            assert 65536 in counts
            debugger.resume()
            # At once, as the debugger says; and it is not let run once more.
            assert job.wait(_WAIT_S).status == 0
            debugger.stop()
            assert kernel.driver.guest.stub.is_debugged

    assert large(trace) == 1


def test_a_recording_that_ends_lets_the_guest_run(kernel: GuestSession, told: list[str]) -> None:
    kernel.options = replace(kernel.options, pause_timeout_s=10_000)
    kernel.probe(_READ, triggers=[_LARGE])

    with kernel.record() as trace:
        job = kernel.start(_DD.format(2))
        assert becomes_true(lambda: bool(told), _WAIT_S)

    assert job.wait(_WAIT_S).status == 0
    assert large(trace) >= 1


def test_it_is_told_where_nobody_looks(arch: str, told: list[str]) -> None:
    # Of a guest whose memory is behind its stub nobody looks at anything until the end.
    with kprobes.boot(MachineOptions(arch=arch), access=Access(backends=("stub",))) as session:
        session.options = replace(session.options, warn=told.append)
        session.probe(_READ, triggers=[_LARGE])
        with session.record() as trace:
            assert session.run(_DD.format(3), timeout_s=_WAIT_S).status == 0

    assert large(trace) == 3
    assert told == [
        "a trigger has asked for the guest to be stopped when nobody looked; it was not"
    ]


def test_two_cpus_that_come_at_once_go_on_together(kernel: GuestSession, told: list[str]) -> None:
    kernel.options = replace(kernel.options, pause_timeout_s=0.01)
    kernel.probe(_READ, triggers=[_LARGE])
    job = f"for n in 1 2 3 4 5; do {_DD.format(4)}; done"

    with kernel.record() as trace:
        jobs = [kernel.start(f"taskset {cpu} sh -c '{job}'") for cpu in (1, 2)]
        for each in jobs:
            assert each.wait(_WAIT_S).status == 0

    assert large(trace) == 40
    assert 20 <= len(told) <= 40
    assert (trace.counts.lost, sum(trace.counts.missed.values())) == (0, 0)


@pytest.mark.parametrize("has_guardian", [True, False], ids=["guardian", "nobody"])
def test_a_killed_tracer_leaves_no_guest_that_stands(
    kprobe: Command, tmp_path: Path, arch: str, *, has_guardian: bool
) -> None:
    target = str(tmp_path / "gdb.sock")
    with plain_guest(tmp_path, "-gdb", "unix:gdb.sock,server=on,wait=off", arch=arch) as guest:
        options = "--trigger", "pause", "--pause-timeout", "1h"
        traced = kprobe.start("trace", "-t", target, "p vfs_write", *options)
        wait_for_words(traced, b"a trigger has stopped the guest")
        ticks = guest.ticks()
        time.sleep(0.5)
        assert guest.ticks() == ticks

        if not has_guardian:
            traced.send_signal(signal.SIGSTOP)
            (guardian,) = guardians_of(target)
            kill_and_wait(guardian)
        traced.kill()
        traced.wait()

        if has_guardian:
            assert guest.is_ticking(_WAIT_S)
            assert becomes_true(lambda: kprobe.is_idle(target), _WAIT_S)
        else:
            # Both are dead: it stands until somebody puts it right, which the next command says.
            assert kprobe("restore").returncode == 0
            assert guest.is_ticking(_WAIT_S)


def test_a_hit_goes_on_by_itself_when_nobody_stops_the_guest(kprobe: Command, arch: str) -> None:
    with Machine.boot(MachineOptions(arch=arch)) as machine:
        target = str(machine.stub_address)
        options = "--trigger", _LARGE, "--pause-timeout", "10ms", "--duration", "1h"
        traced = kprobe.start("trace", "-t", target, _READ, *options)
        wait_for_words(traced, b"tracing 1 function")
        # It looks no more.
        traced.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, traced.pid, os.WSTOPPED | os.WNOWAIT)
        # Only the first hit waits, for seconds.
        assert machine.run(_DD.format(500), _WAIT_S).status == 0
        traced.send_signal(signal.SIGCONT)
        wait_for_words(traced, b"; it came too late, and the hit has gone on")

        job = machine.start(_DD.format(1))
        wait_for_words(traced, b"goes on in 0.01 s\n")
        assert job.wait(_WAIT_S).status == 0
        traced.send_signal(signal.SIGINT)
        assert traced.wait(_WAIT_S) == 0
        assert kprobe.is_idle(target)
