"""Our probes beside the guest's own kprobes: what its kernel refuses we refuse."""

from collections.abc import Generator
from contextlib import contextmanager

import pytest
from msgspec.structs import replace

import kprobes
from kprobes.inspect.check import checker_of_guest
from kprobes.model.plan import Strategy
from kprobes.open import GuestSession
from kprobes.transport.qemu import Machine
from tests.build.defined import plans_of
from tests.build.kernel import read
from tests.build.sweep import Sweeper
from tests.build.victim import is_complaint
from tests.build.waiting import becomes_true
from tests.system.oracle import accepted_offsets, try_offsets

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

NATIVE = {"amd64": (5, 7, 9, 11, 13), "arm64": (8, 12, 16)}
"""Offsets in vfs_read of the guest's own kprobe."""
SITES = {"amd64": (), "arm64": (4,)}
"""Offsets of ftrace sites that the kernel's own kprobes may not be at."""
SPAN = 40
JUMP = 5
_JUMPS = b"\xe9"
"""The first byte of one."""
COVERED = "under the guest's own optimised kprobe"
HELD = "the guest's own kprobe is there"
_ON = """cd /sys/kernel/tracing; echo 'p:nat vfs_read+{}' >kprobe_events
echo 1 >events/kprobes/nat/enable; cat /sys/kernel/debug/kprobes/list"""
_OFF = "cd /sys/kernel/tracing; echo 0 >events/kprobes/nat/enable; echo >kprobe_events"
_READS = "for n in 1 2 3 4 5 6 7 8; do cat /proc/version /etc/passwd; done >/dev/null 2>&1"


@contextmanager
def own_kprobe(guest: Machine, session: GuestSession, at: int, arch: str) -> Generator[str]:
    """Have the guest's own kprobe in vfs_read; on x86-64 its kernel soon makes it a jump."""
    addr, memory = session.kernel.symbols.named("vfs_read").addr + at, session.driver.guest.memory
    before = memory.read(addr, JUMP)
    try:
        listed = guest.run(_ON.format(at), 180).output.decode()
        # The kernel lists it as optimised before its text is.
        assert arch == "arm64" or becomes_true(lambda: memory.read(addr, 1) == _JUMPS)
        yield listed
    finally:
        guest.run(_OFF, 180)
        assert becomes_true(lambda: memory.read(addr, JUMP) == before)


def accepted_by_kernel(guest: Machine) -> set[int]:
    return accepted_offsets(guest.run(try_offsets("vfs_read", SPAN), 120).output.decode())


def our_answers(session: GuestSession) -> dict[int, str]:
    """Return "" or the reason, by offset."""
    checker = checker_of_guest(session.driver.guest)
    verdicts = checker.check("\n".join(f"p:e{n} vfs_read+{n}" for n in range(SPAN)))
    return {n: _reason(v.error, v.advice) for n, v in enumerate(verdicts)}


def _reason(error: Exception | None, advice: str) -> str:
    return "" if error is None else f"{error} {advice}"


def test_what_the_kernel_refuses_is_refused_and_only_its_own_places_besides(
    guest: Machine, arch: str
) -> None:
    with kprobes.attach(str(guest.stub_address)) as session:
        before = our_answers(session)
        ways_out = _ways_out(session)
        for at in NATIVE[arch]:
            with own_kprobe(guest, session, at, arch) as listed:
                assert ("[OPTIMIZED]" in listed) is (arch == "amd64")
                during, kernel = our_answers(session), accepted_by_kernel(guest)
                assert _ways_out(session) == ways_out

            size, words = (JUMP, COVERED) if arch == "amd64" else (4, HELD)
            covered = {n for n in range(at, at + size) if not before[n]}
            assert covered >= {at}
            assert [n for n in covered if words not in during[n]] == []
            others = before.keys() - covered
            assert {n: bool(during[n]) for n in others} == {n: bool(before[n]) for n in others}
            assert [n for n in before if n not in {*kernel, *SITES[arch]} and not during[n]] == []
        assert our_answers(session) == before


@pytest.mark.parametrize("strategy", [Strategy.JUMP, Strategy.BREAKPOINT])
def test_under_ours_the_kernel_refuses_its_own_and_accepts_all_else_as_before(
    guest: Machine, strategy: Strategy
) -> None:
    before = accepted_by_kernel(guest)
    with kprobes.attach(str(guest.stub_address)) as session:
        session.options = replace(session.options, strategy=strategy)
        sweeper = Sweeper(session)
        function = sweeper.function("vfs_read")
        sizes: set[int] = set()
        for addr in sweeper.acceptable(function, strategy):
            at = addr - function.addr
            if at >= SPAN:
                break
            probe = session.probe(f"p vfs_read+{at}")
            with session.record():
                (plan,) = plans_of(session)
                # The kernel's own kprobe may be on a jump of ours, and goes on to it.
                taken = range(at + (strategy is Strategy.JUMP), at + len(plan.site.old))
                assert accepted_by_kernel(guest) == before - {*taken}, at
                sizes.add(len(plan.site.old))
            probe.delete()
    assert sizes


def _ways_out(session: GuestSession) -> list[int]:
    driver = session.driver
    probe = driver.places.resolve(read("r vfs_read"), event_id=1)
    found = driver.places.exits(probe)
    assert found is not None
    return [exit_.addr for exit_ in found.exits.exits]


def test_all_beside_the_guests_own_is_traced_and_both_hit(guest: Machine, arch: str) -> None:
    at = NATIVE[arch][0]
    with (
        kprobes.attach(str(guest.stub_address)) as session,
        own_kprobe(guest, session, at, arch),
    ):
        places = [n for n, why in our_answers(session).items() if not why]
        session.probe("\n".join([*(f"p:e{n} vfs_read+{n}" for n in places), "r:back vfs_read"]))
        with session.record() as trace:
            guest.run(_READS, 180)
        own = guest.run("grep nat /sys/kernel/tracing/kprobe_profile").output.decode()

    counts = trace.counts
    assert counts is not None
    assert len(places) > 5
    assert min(counts.recorded.values()) >= 16
    assert int(own.split()[1]) >= 16
    log = guest.run("dmesg").output.decode().splitlines()
    assert [line for line in log if is_complaint(line)] == []
