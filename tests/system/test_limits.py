"""Limits of what probes may take of a guest: what passes one is disabled, and all else goes on."""

import time
from collections.abc import Generator
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

import kprobes
from kprobes.errors import TargetError
from kprobes.guest.arm import StagedChange, TextPatcher
from kprobes.guest.pauses import PacedChange
from kprobes.model.options import Limits
from kprobes.open import GuestSession
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions
from tests.build.continuous import CALL, TIMES, recorded
from tests.build.dialect import DIALECTS
from tests.build.programs import counting_loop
from tests.build.victim import settle
from tests.build.waiting import wait_until

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

WAIT_S = 180
CPUS = 2
ROUNDS = 20


@pytest.fixture(scope="module")
def machine(arch: str) -> Generator[Machine]:
    files = {"/loop": counting_loop(CALL, TIMES, arch=arch)}
    with Machine.boot(MachineOptions(arch=arch, files=files)) as machine:
        settle(machine)
        machine.run("chmod 755 /loop")
        yield machine


@pytest.fixture
def told() -> list[str]:
    """What people are told."""
    return []


@pytest.fixture
def session(machine: Machine, told: list[str]) -> Generator[GuestSession]:
    loops = [machine.start(["/loop"]) for _ in range(CPUS)]
    loops.append(machine.start("while :; do cat /proc/version; sleep 0.01; done"))
    try:
        with kprobes.attach(str(machine.stub_address)) as session:
            start, stop = session.kernel.text
            before = session.driver.guest.memory.read(start, stop - start)
            session.options = replace(session.options, warn=told.append)
            yield session
            session.options = replace(session.options, limits=Limits())
            assert session.driver.guest.memory.read(start, stop - start) == before
    finally:
        for loop in loops:
            loop.kill()


def limit(session: GuestSession, limits: Limits) -> None:
    session.options = replace(session.options, limits=limits)


def test_an_event_that_is_hit_too_often_is_disabled_and_others_go_on(
    session: GuestSession, arch: str, told: list[str]
) -> None:
    limit(session, Limits(max_rate=5000))
    hot = session.probe(f"p:hot {DIALECTS[arch].syscall}{CALL}")
    # Every hit of it is rejected, and costs time all the same.
    rejected = session.probe(
        f"r:rejected {DIALECTS[arch].syscall}{CALL} got=$retval", filter="got == 77"
    )
    calm = session.probe("p:calm do_sys_openat2 path=+0($arg2):ustring")
    with session.record() as trace:
        assert wait_until(lambda: not (hot.is_enabled or rejected.is_enabled), WAIT_S) is not None
        loads, before = session.driver.loads(), calm.hits
        assert wait_until(lambda: calm.hits > before + 20, WAIT_S) is not None
        calls = session.driver.loads().hits - loads.hits
        assert calm.is_enabled
    over = {each.event for each in trace.hits if each.is_over_limit}
    assert over == {"hot", "rejected"}
    # What was on its way on a CPU goes on.
    assert max(calls.tolist()[1:3]) <= CPUS
    assert sorted(words.partition(" ")[0] for words in told) == ["hot", "rejected"]
    assert all("times a second, over the limit of 5,000: it is disabled" in w for w in told)


def test_every_hit_is_counted_in_the_guest(session: GuestSession, arch: str) -> None:
    limit(session, Limits(max_rate=1e12))
    function = f"{DIALECTS[arch].syscall}{CALL}"
    session.probe(f"p:all {function}\nr:returned {function} $retval")
    session.probe(f"p:few {function}", filter="common_pid == 1")
    with session.record() as trace:
        ids = [each.event_id for each in session.hits()]
        before = session.driver.loads().hits[ids]

        def are_all_hit() -> bool:
            return bool((session.driver.loads().hits[ids] > before).all())

        # A call that has not returned has not been counted at its return.
        assert wait_until(are_all_hit, WAIT_S) is not None
    assert trace.counts is not None
    after = session.driver.loads()
    all_, returned, few = (
        next(each for each in trace.hits if each.event == name)
        for name in ("all", "returned", "few")
    )
    hits = {each.event: int(after.hits[each.event_id]) for each in trace.hits}
    assert hits["all"] == hits["few"]
    assert all_.recorded + returned.recorded + trace.counts.lost == hits["all"] + hits["returned"]
    assert few.recorded == 0
    assert after.code_s is not None
    assert all(after.code_s[each.event_id] > 0 for each in (all_, returned, few))


def test_hits_that_are_on_their_way_at_the_end_are_recorded(
    session: GuestSession, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = PacedChange.make

    def make_and_go_on(change: PacedChange, *args: Any) -> None:
        # What comes after the change comes before any vCPU goes on.
        with session.driver.guest.stub.paused():
            make(change, *args)

    limit(session, Limits(max_rate=1e12))
    function = f"{DIALECTS[arch].syscall}{CALL}"
    session.probe(f"p:all {function}\nr:returned {function} $retval")
    monkeypatch.setattr(PacedChange, "make", make_and_go_on)
    found = 0
    for _ in range(ROUNDS):
        with session.record() as trace:
            assert wait_until(partial(_hits_beyond, session, found), WAIT_S) is not None
        assert trace.counts is not None
        found += sum(trace.counts.recorded.values()) + trace.counts.lost
        # The guest's own counters go on from recording to recording.
        assert found == session.driver.loads().hits.sum()


def _hits_beyond(session: GuestSession, count: int) -> bool:
    return bool(session.driver.loads().hits.sum() > count)


def test_the_dearest_event_is_disabled_when_hits_take_too_much(
    session: GuestSession, arch: str, told: list[str]
) -> None:
    limit(session, Limits(max_overhead=0.002))
    hot = session.probe(f"p:hot {DIALECTS[arch].syscall}{CALL}")
    calm = session.probe("p:calm vfs_write")
    with session.record():
        assert wait_until(lambda: not hot.is_enabled, WAIT_S) is not None
        assert calm.is_enabled
    assert told[0].startswith("hot ")
    assert "of the CPUs' time" in told[0]


def test_a_change_in_several_pauses_loses_nothing_of_others(
    session: GuestSession, arch: str
) -> None:
    stub = session.driver.guest.stub
    limit(session, Limits(max_pause_s=0.001))
    with recorded(session, arch):
        many = session.probe("p:many vfs_*\nr:back vfs_*", enabled=False)
        stops = stub.stops
        many.enable()
        assert stub.stops - stops > 5
        assert session.driver.plans
        stops = stub.stops
        many.disable()
        assert stub.stops - stops > 5


def test_many_sites_are_changed_in_several_pauses_also_when_no_limit_is_given(
    session: GuestSession, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts: list[StagedChange] = []
    apply = TextPatcher.apply

    def count(patcher: TextPatcher, change: StagedChange) -> int:
        parts.append(change)
        return apply(patcher, change)

    limit(session, Limits())
    with recorded(session, arch):
        many = session.probe("p:many [st]*", enabled=False)
        # Not by the stub's stops: memory is allocated in some, too.
        monkeypatch.setattr(TextPatcher, "apply", count)
        many.enable()
        assert len(parts) > 1
        parts.clear()
        many.disable()
        assert len(parts) > 1


def test_several_pauses_are_undone_as_a_whole(
    session: GuestSession, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(session, Limits(max_pause_s=0.001))
    changes: list[StagedChange] = []
    apply = TextPatcher.apply

    def fail(patcher: TextPatcher, change: StagedChange) -> int:
        changes.append(change)
        if len(changes) == 4:
            raise TargetError("the guest changed it")
        return apply(patcher, change)

    with recorded(session, arch):
        armed = {plan.site.addr for plan in session.driver.plans}
        before = _bytes(session)
        with monkeypatch.context() as patched:
            patched.setattr(TextPatcher, "apply", fail)
            with pytest.raises(TargetError, match="the guest changed it"):
                session.probe("p:many vfs_*\nr:back vfs_*\np:same vfs_read")
        assert len(changes) == 3 + 1 + 3
        assert {plan.site.addr for plan in session.driver.plans} == armed
        assert _bytes(session) == before
        again = session.probe("p:many vfs_*\nr:back vfs_*")
        assert again.is_enabled


def test_what_a_refused_event_has_recorded_between_two_pauses_is_in_no_trace(
    session: GuestSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(session, Limits(max_pause_s=0.001))
    stages: list[int] = []
    stage = TextPatcher.stage

    def fail(patcher: TextPatcher, *args: Any) -> StagedChange:
        stages.append(1)
        if len(stages) == 4:
            # The guest runs, and hits what the first parts have armed.
            time.sleep(0.3)
            raise TargetError("no room on the disk")
        return stage(patcher, *args)

    calm = session.probe("p:calm do_sys_openat2")
    with session.record() as trace:
        with monkeypatch.context() as patched:
            patched.setattr(TextPatcher, "stage", fail)
            with pytest.raises(TargetError, match="no room"):
                session.probe("p:many vfs_*\nr:back vfs_*")
        before = calm.hits
        assert wait_until(lambda: calm.hits > before, WAIT_S) is not None
    assert {event.name for event in trace} == {"calm"}


def _bytes(session: GuestSession) -> bytes:
    start, stop = session.kernel.text
    return session.driver.guest.memory.read(start, stop - start)
