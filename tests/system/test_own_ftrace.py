"""Our probes at functions that the guest's own ftrace traces, too: neither harms the other."""

import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

import kprobes
from kprobes.errors import RefusedError
from kprobes.model.plan import ReturnMethod
from kprobes.transport.qemu import Machine
from tests.build.command import WAIT_S, Command, wait_for_words
from tests.build.victim import is_complaint
from tests.build.waiting import becomes_true
from tests.system.conftest import Boot
from tests.system.oracle import TRACING

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

_ON = f"""cd {TRACING}; echo vfs_read >set_ftrace_filter; echo function >current_tracer
echo 'p:own vfs_read' >kprobe_events; echo 1 >events/kprobes/own/enable; echo >trace"""
_OFF = f"""cd {TRACING}; echo 0 >events/kprobes/own/enable; echo >kprobe_events
echo nop >current_tracer; echo >set_ftrace_filter"""
_FOUND = f"""cd {TRACING}; echo 0 >tracing_on
grep -c ': vfs_read <-' trace; grep -c ' own: ' trace; echo 1 >tracing_on"""
_READS = "for n in 1 2 3 4 5 6 7 8; do cat /proc/version; done >/dev/null"
_ROUNDS = 3


@pytest.mark.parametrize("suite", ["bookworm"])
@pytest.mark.parametrize("return_method", [None, ReturnMethod.RETHOOK])
def test_its_tracers_may_end_and_begin_while_ours_records(
    boot: Boot, return_method: ReturnMethod | None, suite: str
) -> None:
    guest = boot(suite=suite)
    guest.run(_ON, 180)
    with kprobes.attach(str(guest.stub_address)) as session:
        session.options = replace(session.options, return_method=return_method)
        session.probe("p:ours vfs_read count=$arg3:u64\nr:back vfs_read ret=$retval:s64")
        with session.record() as trace:
            for _ in range(_ROUNDS):
                guest.run(f"{_READS}; {_OFF}; {_READS}; {_ON}", 180)
        # Ours is gone: the guest's own goes on.
        guest.run(_READS, 180)
        found = [int(count) for count in guest.run(_FOUND, 180).output.split()]
        guest.run(_OFF, 180)

    ours, back = (each.recorded for each in session.hits())
    assert (trace.counts.lost, trace.counts.damaged) == (0, 0)
    assert ours == back >= 2 * 8 * _ROUNDS
    assert min(found) >= 8
    log = guest.run("dmesg").output.decode().splitlines()
    assert [line for line in log if is_complaint(line)] == []


@pytest.mark.kernels("7.x")
@pytest.mark.parametrize("suite", ["bookworm", "sid"])
def test_a_tracer_that_begins_while_ours_records_may_end_afterwards(boot: Boot, suite: str) -> None:
    guest = boot(suite=suite)
    with kprobes.attach(str(guest.stub_address)) as session:
        session.probe("p:ours vfs_read count=$arg3:u64\nr:back vfs_read ret=$retval:s64")
        with session.record():
            guest.run(f"{_ON}; {_READS}", 180)
    guest.run(_OFF, 180)
    guest.run(f"{_ON}; {_READS}", 180)
    found = [int(count) for count in guest.run(_FOUND, 180).output.split()]
    guest.run(_OFF, 180)

    assert min(found) >= 8
    log = guest.run("dmesg").output.decode().splitlines()
    assert [line for line in log if is_complaint(line)] == []


_KPROBE_ON = f"""cd {TRACING}; echo 'p:own vfs_read' >kprobe_events
echo 1 >events/kprobes/own/enable; echo >trace"""
_KPROBE_OFF = f"cd {TRACING}; echo 0 >events/kprobes/own/enable; echo >kprobe_events"


@pytest.mark.arches("amd64")
@pytest.mark.parametrize("suite", ["bookworm", "sid"])
@pytest.mark.parametrize("is_killed", [False, True])
def test_a_kprobe_that_begins_while_ours_records_goes_on_and_may_end_afterwards(
    boot: Boot, tmp_path: Path, suite: str, *, is_killed: bool
) -> None:
    guest = boot(suite=suite)
    target = f"qemu:{guest.stub_address}"
    with Command(tmp_path / "state") as kprobe:
        tracer = kprobe.start("trace", "--target", target, "p:ours vfs_read")
        wait_for_words(tracer, b"Ctrl-C ends")
        guest.run(f"{_KPROBE_ON}; {_READS}", 180)
        tracer.send_signal(signal.SIGKILL if is_killed else signal.SIGINT)
        tracer.communicate(timeout=WAIT_S)
        assert becomes_true(lambda: kprobe("status").stdout.startswith(b"no journal"), WAIT_S)

    # It is called again, also though no other tracer has begun or ended since.
    guest.run(f"echo >{TRACING}/trace; {_READS}", 180)
    found = int(guest.run(_FOUND, 180).output.split()[1])
    guest.run(_KPROBE_OFF, 180)
    again = guest.run(f"{_KPROBE_ON} && {_KPROBE_OFF} && echo vfs_read >set_ftrace_filter", 180)
    guest.run(f"echo >{TRACING}/set_ftrace_filter", 180)

    assert found >= 8
    assert again.status == 0, again.output.decode()
    log = guest.run("dmesg").output.decode().splitlines()
    assert [line for line in log if is_complaint(line)] == []


@pytest.mark.arches("arm64")
def test_a_function_s_start_and_its_ftrace_site_after_it_are_one_place(guest: Machine) -> None:
    definitions = "p:start vfs_read\np:site vfs_read+4"
    with kprobes.attach(str(guest.stub_address)) as session:
        with pytest.raises(RefusedError, match="patched at the same instruction"):
            session.probe(definitions)
        session.probe("p:start vfs_read")
        with session.record() as trace:
            guest.run(_READS, 180)

    (start,) = trace.hits
    assert start.recorded >= 8


def test_one_place_is_not_patched_for_two(guest: Machine, arch: str, tmp_path: Path) -> None:
    after = {"amd64": 5, "arm64": 8}[arch]
    target = f"qemu:{guest.stub_address}"
    guest.run(_ON, 180)
    try:
        with Command(tmp_path / "state") as kprobe:
            there = f"p:there vfs_read+{after}"
            checked = kprobe("check", "--target", target, "p:here vfs_read", there, "-:here", there)
            shown = kprobe("xray", "--target", target, "vfs_read")
        with (
            kprobes.attach(str(guest.stub_address)) as session,
            pytest.raises(RefusedError, match="patched at the same instruction"),
        ):
            session.probe(f"p:here vfs_read\np:there vfs_read+{after}")
    finally:
        guest.run(_OFF, 180)
    # Of three definitions the second was refused, until the first was taken away.
    assert checked.returncode == 5
    assert checked.stdout.count(b"would be patched at the same instruction") == 1
    assert checked.stdout.count(b"at vfs_read+") == 2
    assert b"after its ftrace site, which the guest's own ftrace uses: " in shown.stdout
