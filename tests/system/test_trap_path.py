"""Path from a breakpoint of ours to its detour: nothing that a breakpoint may be on.

Of x86 only: on arm64 a branch can replace any instruction, and there are no breakpoints of ours.
"""

import bisect
from collections.abc import Generator, Sequence

import pytest
from msgspec.structs import replace

import kprobes
from kprobes.arch.x86_64.trampoline import TRAP_PATH
from kprobes.model.kernel import TextTables
from kprobes.model.plan import Strategy
from kprobes.open import GuestSession
from kprobes.transport.qemu_command import MachineOptions
from tests.build.defined import delete_all, plans_of
from tests.build.sweep import Sweeper
from tests.build.victim import is_complaint
from tests.system.conftest import SUITES

pytestmark = [pytest.mark.guest, pytest.mark.kernels("7.x")]

MOST_STEPS = 5_000
WORK = "for n in 1 2 3 4 5 6 7 8 9; do cat /proc/version; done > /dev/null"


@pytest.fixture(scope="module", params=SUITES.values(), ids=list(SUITES))
def session(request: pytest.FixtureRequest) -> Generator[GuestSession]:
    # One vCPU: a step is then one instruction of the guest.
    with kprobes.boot(MachineOptions(suite=request.param, cpus=1)) as booted:
        yield booted


def _steps(session: GuestSession) -> Sequence[int]:
    """Return every instruction from the next hit of an armed breakpoint to its detour."""
    guest, stub = session.driver.guest, session.driver.guest.stub
    (plan,) = session.driver.plans
    program = guest.memory.read(plan.site.addr, 1)
    assert program == b"\xcc"
    # It may have run for long when we are on a CPU again.
    work = session.start("while :; do read line < /proc/version; done")
    with stub.paused():
        stub.insert_breakpoint(plan.site.addr)
    assert stub.wait(20) is not None
    stub.remove_breakpoint(plan.site.addr)
    cpu = stub.ids()[0]
    assert stub.register(cpu, "rip") == plan.site.addr
    found: list[int] = []
    while len(found) < MOST_STEPS:
        stub.step(cpu)
        found.append(stub.register(cpu, "rip"))
        if _is_in_detour(session, found[-1]):
            break
    stub.resume()
    work.kill()
    work.wait(60)
    return found


def _is_in_detour(session: GuestSession, addr: int) -> bool:
    arena = session.driver._allocator.arena  # pyright: ignore[reportPrivateUsage] - nobody else asks
    assert arena is not None
    return any(start <= addr < stop for start, stop in arena.programs)


def _is_ours(session: GuestSession, addr: int) -> bool:
    arena = session.driver._allocator.arena  # pyright: ignore[reportPrivateUsage] - nobody else asks
    assert arena is not None
    return any(start <= addr < stop for start, stop in (arena.lookup, *arena.programs))


def _is_forbidden(tables: TextTables, addr: int) -> bool:
    after = bisect.bisect_right(tables.forbidden, addr, key=lambda range_: range_.start)
    return after > 0 and addr < tables.forbidden[after - 1].stop


def test_all_that_runs_before_a_detour_is_forbidden_ours_or_known_as_our_path(
    session: GuestSession,
) -> None:
    sweeper = Sweeper(session)
    function = sweeper.function("vfs_read")
    place = sweeper.acceptable(function, Strategy.BREAKPOINT)[2]
    session.options = replace(session.options, strategy=Strategy.BREAKPOINT)
    delete_all(session)
    session.probe(f"p {place:#x}")

    with session.record() as trace:
        steps = _steps(session)

    assert len(trace) >= 1
    assert _is_in_detour(session, steps[-1])
    symbols = session.kernel.symbols
    others = [a for a in steps if not _is_ours(session, a)]
    named = {
        s.name for a in others if not _is_forbidden(sweeper.tables, a) and (s := symbols.at(a))
    }
    passed = {s.name for a in others if (s := symbols.at(a))}
    assert all(symbols.at(addr) for addr in others)
    assert named <= TRAP_PATH, passed
    # It is the way that was meant: the kernel's own chain of callbacks.
    assert {"asm_exc_int3", "notify_die"} <= passed
    assert any(_is_ours(session, a) and not _is_in_detour(session, a) for a in steps)


def test_on_our_path_there_are_no_breakpoints_but_ftrace_probes(session: GuestSession) -> None:
    symbols = session.kernel.symbols
    there = sorted(name for name in TRAP_PATH if len(symbols.all_named(name)) == 1)
    sweeper = Sweeper(session)
    with_site: list[str] = []
    for name in there:
        function = sweeper.function(name)
        # Refused whole, whatever the instruction, as nobody else refuses it.
        assert sweeper.acceptable(function, Strategy.BREAKPOINT) == [], name
        if sweeper.tables.ftrace.isdisjoint(function.instructions):
            continue
        with_site.append(name)
    assert "notify_die" in there
    places = sweeper.only_breakpoint(sweeper.function("vfs_read"))
    session.options = replace(session.options, strategy=None)
    delete_all(session)
    session.probe("".join(f"p:path{n} {name}\n" for n, name in enumerate(with_site)))
    session.probe("".join(f"p:mine{n} {place:#x}\n" for n, place in enumerate(places)))

    with session.record() as trace:
        assert session.run(WORK, 180).status == 0

    assert {plan.site.strategy for plan in plans_of(session)} == {"ftrace", "breakpoint"}
    hits = [each.recorded for each in trace.hits]
    mine = sum(hits[len(with_site) :])
    assert mine >= 9
    # Each hit of ours came through some of them, which hits of ours do not keep from recording.
    assert max(hits[: len(with_site)]) >= mine
    assert trace.counts.lost == trace.counts.damaged == 0
    assert not is_complaint(session.run("dmesg").output.decode())
