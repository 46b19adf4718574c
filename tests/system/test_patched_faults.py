"""Faults at patched instructions, nesting, others' breakpoints, the guest's own.

Nothing crashes, nothing is lost uncounted, and what cannot work is refused.
"""

import time
from collections.abc import Generator

import pytest
from msgspec.structs import replace

import kprobes
from kprobes.errors import DefinitionError, RefusedError, TargetError
from kprobes.guest.places import places_of
from kprobes.guest.stops import breakpoint_at, run_until_stop
from kprobes.model.plan import Strategy
from kprobes.open import GuestSession
from kprobes.trace import Trace
from kprobes.transport.qemu_command import MachineOptions
from kprobes.units import Addr
from tests.build.defined import delete_all, plans_of
from tests.build.dialect import DIALECTS
from tests.build.programs import program
from tests.build.sweep import Sweeper
from tests.build.victim import is_complaint
from tests.system.conftest import STRATEGIES, SUITES
from tests.system.oracle import TRACING

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

WORK = "for n in 1 2 3 4 5 6 7 8 9; do cat /proc/version; ls -l /; done > /dev/null"
FILES = {"/int3": program(b"\xcc")}
SIGTRAP_STATUS = 128 + 5
AMD64 = pytest.mark.arches("amd64")
"""Of our breakpoints, which arm64 has not."""
BOTH = [Strategy.JUMP, Strategy.BREAKPOINT]


@pytest.fixture(scope="module", params=[SUITES["6.1"], SUITES["7.x"]], ids=["6.1", "7.x"])
def shared(request: pytest.FixtureRequest, arch: str) -> Generator[GuestSession]:
    with kprobes.boot(MachineOptions(suite=request.param, arch=arch, files=FILES)) as booted:
        # Where there is such a thing.
        booted.run("echo 0 > /proc/sys/debug/kprobes-optimization")
        yield booted


@pytest.fixture
def session(shared: GuestSession) -> Generator[GuestSession]:
    """The guest, which is well afterwards, and its text as it was."""
    before = _text(shared)
    yield shared
    delete_all(shared)
    shared.options = replace(shared.options, strategy=None)
    said = shared.run("dmesg").output.decode().splitlines()
    assert [line for line in said if is_complaint(line) and "int3[" not in line] == []
    assert _text(shared) == before


def _text(session: GuestSession) -> bytes:
    """Return the kernel's text without jump labels, which it flips as it likes."""
    guest = session.driver.guest
    start, stop = (session.kernel.symbols.named(name).addr for name in ("_stext", "_etext"))
    text = bytearray(guest.memory.read(start, stop - start))
    size = len(guest.arch.patch.jump(start, start))
    for label in places_of(guest).text.tables.jump_labels:
        text[label - start : label - start + size] = bytes(size)
    return bytes(text)


@pytest.fixture
def sweeper(session: GuestSession) -> Sweeper:
    return Sweeper(session)


def _place(sweeper: Sweeper, strategy: Strategy) -> Addr:
    """Return an instruction near the beginning of a function, where all calls come by."""
    function = sweeper.function("vfs_read")
    addrs = [a for a in sorted(function.instructions) if a not in sweeper.tables.ftrace][2:]
    return next(Addr(addr) for addr in addrs if sweeper.can_carry(Addr(addr), strategy))


def _record(session: GuestSession, text: str, strategy: Strategy | None, work: str = WORK) -> Trace:
    session.options = replace(session.options, strategy=strategy)
    delete_all(session)
    session.probe(text)
    with session.record() as trace:
        assert session.run(work, 180).status == 0
    assert trace.counts.damaged == 0
    assert len(trace) == sum(trace.counts.recorded.values())
    return trace


CONTEXTS = ("hrtimer_interrupt", "run_timer_softirq", "handle_mm_fault", "do_wp_page")
"""A timer's interrupt, its softirq, and page faults."""
WILD = (
    "null=+0(\\0):u64 wild=+8(\\0xdead000000000000):x32 low=+0(\\0x1000):string "
    "user=+u0(\\0x7ffffffff000):x64 deep=+0(+8(%sp)):x64 text=+0({first}):string stack=+0(%sp):x64"
)


def test_wild_fetches_in_interrupts_softirqs_and_page_faults_are_faults_and_nothing_else(
    session: GuestSession, sweeper: Sweeper, arch: str
) -> None:
    wild = WILD.format(first=f"%{DIALECTS[arch].value}")
    names = [name for name in CONTEXTS if len(session.kernel.symbols.all_named(name)) == 1]
    assert len(names) >= 3
    # Not all: each hit faults several times, and a timer's interrupt must end before the next.
    addrs = [a for n in names for a in sweeper.acceptable(sweeper.function(n), None)[1::24]]

    trace = _record(session, "\n".join(f"p:f{n} {a:#x} {wild}" for n, a in enumerate(addrs)), None)

    used = {plan.site.strategy for plan in plans_of(session)}
    assert used >= {*STRATEGIES[arch]}
    assert sum(map(bool, trace.counts.recorded.values())) > len(addrs) // 5
    lines = [line for line in str(trace).splitlines() if "null=" in line]
    assert lines
    assert all("null=0x0" in line or "null=0 " in line for line in lines)
    assert all("low=(fault)" in line and "wild=0x0" in line for line in lines)


def test_patches_in_what_our_own_readers_call_are_guarded_and_counted(
    session: GuestSession, sweeper: Sweeper, arch: str
) -> None:
    strategy = STRATEGIES[arch][-1]
    reader = sweeper.function("copy_from_kernel_nofault")
    inside = sweeper.acceptable(reader, strategy)
    place = _place(sweeper, strategy)
    text = "".join(f"p:in{n} {addr:#x}\n" for n, addr in enumerate(inside))

    trace = _record(session, f"p:out {place:#x} there=+0(%sp):x64\n{text}", strategy)

    found = {each.event: each for each in trace.hits}
    hits = found["out"].recorded
    assert hits >= 9
    # Each read of ours came by: its hits are counted, not recorded, and harm nothing.
    assert max(found[f"in{n}"].missed for n in range(len(inside))) >= hits
    assert found["out"].missed == 0


@AMD64
def test_user_space_that_runs_into_an_int3_of_its_own_gets_its_signal(
    session: GuestSession, sweeper: Sweeper
) -> None:
    assert session.run("/int3").status == SIGTRAP_STATUS
    place = _place(sweeper, Strategy.BREAKPOINT)
    work = f"{WORK}; for n in 1 2 3; do /int3; [ $? = {SIGTRAP_STATUS} ] || exit 1; done; {WORK}"

    trace = _record(session, f"p {place:#x}", Strategy.BREAKPOINT, work)

    assert len(trace) >= 18


@pytest.mark.parametrize("strategy", BOTH)
def test_a_debugger_s_breakpoint_nearby_stops_as_ever_and_ours_is_hit(
    session: GuestSession, sweeper: Sweeper, arch: str, strategy: Strategy
) -> None:
    ours = _place(sweeper, strategy)
    stub, pc = session.driver.guest.stub, session.driver.guest.arch.machine.task.pc
    session.options = replace(session.options, strategy=strategy)
    delete_all(session)
    session.probe(f"p {ours:#x} first=%{DIALECTS[arch].value}")
    (plan,) = plans_of(session)
    assert plan.site.displaced is not None
    nearby = plan.site.displaced.stop

    with session.record() as trace:
        # Long enough for the breakpoint to be there before the last of them.
        work = session.start(f"for again in 1 2 3 4 5 6 7 8 9; do {WORK}; done")
        with stub.paused(), breakpoint_at(stub, nearby):
            thread = run_until_stop(stub, time.monotonic() + 60)
            stopped = {stub.register(cpu, pc) for cpu in stub.ids()}
        assert work.wait(180).status == 0

    assert thread is not None
    assert nearby in stopped
    assert len(trace) >= 1


def _natively(session: GuestSession, line: str) -> bool:
    found = session.run(f"cd {TRACING}; echo '{line}' >> kprobe_events", 180)
    return found.status == 0


def _switch_natively(session: GuestSession, name: str, value: int) -> None:
    found = session.run(f"cd {TRACING}; echo {value} > events/kprobes/{name}/enable", 180)
    assert found.status == 0, found.output


def _forget_natively(session: GuestSession, name: str) -> None:
    _switch_natively(session, name, 0)
    assert _natively(session, f"-:{name}")


@pytest.mark.parametrize("strategy", [None, *BOTH])
def test_where_the_guest_has_a_kprobe_of_its_own_ours_is_refused_with_the_reason(
    session: GuestSession, sweeper: Sweeper, arch: str, strategy: Strategy | None
) -> None:
    function = sweeper.function("vfs_read")
    place = _place(sweeper, STRATEGIES[arch][-1])
    offset = place - function.addr
    assert _natively(session, f"p:own vfs_read+{offset}")
    _switch_natively(session, "own", 1)
    session.options = replace(session.options, strategy=strategy)
    delete_all(session)

    try:
        with pytest.raises(
            (RefusedError, DefinitionError), match=r"own kprobe is there at .* \(event own\)"
        ):
            session.probe(f"p {place:#x}")
    finally:
        _forget_natively(session, "own")


@AMD64
def test_the_guest_refuses_a_kprobe_where_our_breakpoint_is(
    session: GuestSession, sweeper: Sweeper
) -> None:
    function = sweeper.function("vfs_read")
    place = _place(sweeper, Strategy.BREAKPOINT)
    session.options = replace(session.options, strategy=Strategy.BREAKPOINT)
    delete_all(session)
    session.probe(f"p {place:#x}")

    with session.record() as trace:
        assert not _natively(session, f"p:own vfs_read+{place - function.addr}")
        assert session.run(WORK, 180).status == 0

    assert len(trace) >= 9


def test_a_kprobe_of_the_guest_s_over_our_jump_is_told_and_nothing_is_freed_before_it_is_gone(
    session: GuestSession, sweeper: Sweeper
) -> None:
    function = sweeper.function("vfs_read")
    place = _place(sweeper, Strategy.JUMP)
    session.options = replace(session.options, strategy=Strategy.JUMP)
    delete_all(session)
    session.probe(f"p {place:#x}")
    allocations = session.driver._journal.allocations  # pyright: ignore[reportPrivateUsage] - nobody else asks

    definitions = session.definitions
    session.driver.apply(
        lambda wanted: replace(wanted, definitions=definitions, options=session.options),
        begins=True,
    )
    assert _natively(session, f"p:own vfs_read+{place - function.addr}")
    _switch_natively(session, "own", 1)
    assert session.run(WORK, 180).status == 0

    with pytest.raises(TargetError, match="neither ours nor the kernel's"):
        session.driver.disarm()

    # The guest's kprobe goes on to our jump: its memory stays, whatever is asked.
    allocated = allocations.memory
    with pytest.raises(TargetError):
        session.driver.close()
    assert allocations.memory == allocated > 0
    assert session.run(WORK, 180).status == 0
    _forget_natively(session, "own")
    session.driver.disarm()
    assert session.run(WORK, 180).status == 0
