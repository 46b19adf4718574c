"""Probes in modules that come and go while they are armed."""

import threading
import time
from collections.abc import Generator, Iterable
from contextlib import suppress

import pytest
from msgspec.structs import replace

import kprobes
from kprobes.errors import RefusedError
from kprobes.guest.arena import ArenaSize
from kprobes.guest.arm import StagedChange, TextPatcher
from kprobes.guest.link import Linker, Program
from kprobes.guest.places import places_of
from kprobes.model.plan import Plan, Strategy
from kprobes.open import GuestSession
from kprobes.plan.strategy import Wish
from kprobes.trace import Trace
from kprobes.transport.qemu_command import MachineOptions
from kprobes.units import MIB, Addr
from tests.build.defined import delete_all, plans_of
from tests.build.module import LOAD, UNLOAD, dummy
from tests.system.conftest import SUITES

pytestmark = [
    pytest.mark.guest,
    pytest.mark.arches("amd64", "arm64"),
    pytest.mark.kernels("7.x"),
]


@pytest.fixture(scope="module", params=list(SUITES))
def session(request: pytest.FixtureRequest, arch: str) -> Generator[GuestSession]:
    suite = SUITES[request.param]
    files = {"/dummy.ko": dummy(suite, arch)}
    options = MachineOptions(suite=suite, arch=arch, files=files)
    with kprobes.boot(options, size=ArenaSize(ring=1 * MIB)) as session:
        yield session


@pytest.fixture(autouse=True)
def well(session: GuestSession) -> Generator[None]:
    """No module is loaded before and after, and the kernel has nothing to complain of."""
    delete_all(session)
    session.options = replace(session.options, strategy=None)
    yield
    session.run("rmmod dummy 2>/dev/null", 180)
    found = session.run(r"dmesg | grep -E 'BUG:|WARNING:|Oops|Call Trace'", 180).output
    assert found == b""


def recorded(session: GuestSession, *commands: str) -> Trace:
    with session.record() as trace:
        done = session.run("; ".join(commands), 100)
        assert done.status == 0, done.output
    return trace


def counts(trace: Trace) -> list[int]:
    assert (trace.counts.lost, trace.counts.damaged) == (0, 0)
    return [hits.recorded for hits in trace.hits]


def test_a_probe_waits_for_its_module_and_is_there_before_its_init(session: GuestSession) -> None:
    session.probe("p:setup dummy:dummy_setup dev=$arg1\np:open do_sys_openat2")

    trace = recorded(session, LOAD, UNLOAD, LOAD, UNLOAD)

    setup, opened = counts(trace)
    assert setup == 2
    assert opened > 2
    hits = {each.event: (each.recorded, each.function) for each in trace.hits}
    assert hits == {"setup": (2, "dummy:dummy_setup"), "open": (opened, "do_sys_openat2")}
    session.probe("-:setup\np:write vfs_write")
    assert {each.event: each.recorded for each in session.hits()}["write"] == 0
    assert str(trace).count("[dummy]) dev=0xff") == 2
    assert "insmod" in next(line for line in str(trace).splitlines() if "dummy_setup" in line)


def test_events_come_one_by_one_while_a_command_runs(session: GuestSession) -> None:
    session.probe("p:open do_sys_openat2 path=+0($arg2):ustring")
    running = session.start("for i in 1 2 3 4 5 6 7 8 9; do cat /proc/version; sleep 1; done")

    found = next(event for event in session.events(timeout_s=180) if event.comm == "cat")

    running.kill()
    running.wait(180)
    assert (found.name, found.function) == ("open", "do_sys_openat2")


def test_waiting_goes_on_in_the_next_recording_and_ends_when_it_is_there(
    session: GuestSession,
) -> None:
    session.probe("p:setup dummy:dummy_setup")

    assert len(session.driver.waiting) == 1
    assert counts(recorded(session, "true")) == []
    assert counts(recorded(session, LOAD)) == [1]
    assert counts(recorded(session, UNLOAD, LOAD)) == [1]
    session.probe("p:again dummy:dummy_setup")
    assert session.driver.waiting == ()


def test_instructions_of_modules_are_probed_and_go_with_them(session: GuestSession) -> None:
    _probed_inside(session, Strategy.JUMP)


@pytest.mark.arches("amd64")
def test_so_are_they_by_breakpoints(session: GuestSession) -> None:
    _probed_inside(session, Strategy.BREAKPOINT)


def _probed_inside(session: GuestSession, strategy: Strategy) -> None:
    assert session.run(LOAD, 180).status == 0
    session.probe("p dummy:dummy_setup")
    delete_all(session)
    session.options = replace(session.options, strategy=strategy)
    session.probe(f"p:inside dummy:dummy_setup+{inside(session)}")

    trace = recorded(session, "ip link add d1 type dummy", UNLOAD, LOAD)

    assert counts(trace) == [2]
    placed = [plan.site.strategy for plan in plans_of(session) if plan.probes]
    assert placed == [strategy]


def inside(session: GuestSession) -> int:
    """Return the offset of the first instruction after the entry that a jump may replace."""
    guest = session.driver.guest
    look = places_of(guest).find_site(Wish(strategy=Strategy.JUMP))
    start = guest.kernel.symbols.named("dummy_setup").addr
    for offset in range(6, 99):
        with suppress(RefusedError):
            look(Addr(start + offset))
            return offset
    raise AssertionError("no jump fits into dummy_setup")


def test_init_text_is_refused_as_it_does_not_last(session: GuestSession) -> None:
    told: list[str] = []
    session.options = replace(session.options, warn=told.append)
    session.probe("p:init dummy:dummy_init_module\np:setup dummy:dummy_setup")

    trace = recorded(session, LOAD)

    assert counts(trace) == [0, 1]
    assert len(told) == 1
    assert "init text" in told[0]


def test_the_text_of_a_loaded_module_is_as_it_was(session: GuestSession) -> None:
    assert session.run(LOAD, 180).status == 0
    session.probe("p dummy:dummy_setup")
    guest = session.driver.guest
    where = session.driver.guest.kernel.symbols.named("dummy_setup").addr
    before = guest.memory.read(where, 64)

    with session.record():
        during = guest.memory.read(where, 64)

    assert during != before
    assert guest.memory.read(where, 64) == before


def test_a_module_that_was_loaded_again_is_another_one(session: GuestSession) -> None:
    # Unwatched, and where it was: its ftrace records are elsewhere, and it may be built anew.
    session.run(LOAD, 180)
    session.probe("p dummy:dummy_xmit")
    for _ in range(4):
        session.driver.refresh_modules()
        before = session.driver.guest.kernel
        assert session.run(f"{UNLOAD}; {LOAD}", 180).status == 0

        with session.record():
            memory = session.driver.guest.memory
            sites = [plan.site for plan in plans_of(session) if plan.probes]

        assert session.driver.guest.kernel is not before
        assert sites
        assert all(site.record and memory.u64(site.record) == site.addr for site in sites)
    session.driver.refresh_modules()
    before = session.driver.guest.kernel
    session.driver.refresh_modules()
    assert session.driver.guest.kernel is before


def test_a_definition_that_cannot_be_armed_is_told_and_waits_on(
    session: GuestSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(linker: Linker, plans: Iterable[Plan], checkpoint: object) -> list[Program]:
        del linker, checkpoint
        raise RefusedError(f"{len([*plans])} out of reach")

    told: list[str] = []
    session.options = replace(session.options, warn=told.append)
    session.probe("p:setup dummy:dummy_setup")

    with session.record() as trace:
        with monkeypatch.context() as broken:
            broken.setattr(Linker, "link", refuse)
            assert session.run(f"{LOAD}; {UNLOAD}", 180).status == 0
        assert session.run(f"{LOAD}; {UNLOAD}", 180).status == 0

    assert told == ["1 out of reach"]
    assert counts(trace) == [1]


def test_a_module_that_goes_between_two_pauses_is_noticed(
    session: GuestSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit, leaving = TextPatcher.commit, list[threading.Thread]()

    def between(patcher: TextPatcher, change: StagedChange) -> None:
        commit(patcher, change)
        if not leaving:
            # It may wait for us, until we are done. Whoever comes next has its memory.
            again = "; ".join((UNLOAD, LOAD, UNLOAD))
            leaving.append(threading.Thread(target=session.run, args=(again, 60)))
            leaving[0].start()
            time.sleep(0.5)

    start, stop = session.kernel.text
    before = session.driver.guest.memory.read(start, stop - start)
    assert session.run(LOAD, 180).status == 0
    session.limit(max_pause_s=0.001)
    session.probe("p:in dummy:dummy_xmit\nr:back dummy:dummy_get_stats64\np:many vfs_*")
    try:
        monkeypatch.setattr(TextPatcher, "commit", between)
        with session.record():
            leaving[0].join(180)
        assert not leaving[0].is_alive()
    finally:
        session.limit()
    assert session.driver.guest.memory.read(start, stop - start) == before
    assert b"dummy" not in session.run("lsmod", 180).output
