"""Events of functions and of tracepoints: as the kernel's own, beside them, and not without notice.

A tracepoint that we switch on is off again afterwards, for whoever looks at the guest's own memory.
That it is also when its tracer is killed is in ``test_invariants.py``.
"""

import re
from collections.abc import Generator
from pathlib import Path

import pytest
from msgspec import Struct

import kprobes
from kprobes.errors import RefusedError
from kprobes.guest.kernel_abi import possible_cpus
from kprobes.guest.places import places_of
from kprobes.open import GuestSession
from kprobes.transport.qemu_command import MachineOptions
from tests.build.victim import is_complaint
from tests.system.conftest import SUITES
from tests.system.error_corpus import Case
from tests.system.judge import insn_verdict
from tests.system.oracle import TRACING
from tests.system.test_errors import our_verdict

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

_LINES = Path(__file__).parent.parent / "golden" / "dynamic_events.txt"
_WAITING = {
    "f vfs_read @nosuchsymbol",
    "t nosuchtracepoint",
    "t vfs_read",
}
"""What the kernel accepts, and waits for a module that has it."""
_CPUS = 6
_WORKLOAD = "dd if=/dev/zero of=/dev/null bs=77 count=20 2>/dev/null; true"
_FILTER = 'comm == "dd"'
_TOGETHER = (
    "f:wrote vfs_write count buf=+0(buf):u8 task=$comm",
    "t:switched sched_switch prev=prev->comm:string next=next->comm preempt",
    "t:called sys_enter id nr=regs->ax:s64 first=$arg1",
    "t:left sys_exit ret again=$arg2:x64",
    "t:stat sched_process_exit p->pid",
)
_AX = {"amd64": "regs->orig_ax:s64", "arm64": "regs->syscallno:s32"}
_RETURN = "f:back vfs_write%return got=$retval:s64 asked=count"
_HEAD = re.compile(r"^ *(\S+)-\d+ +\[\d+\] \S+ +[\d.]+: ", re.MULTILINE)


class Recorded(Struct, frozen=True, kw_only=True):
    """Lines without pids, CPUs and times, sorted, of the same hits."""

    ours: list[str]
    theirs: list[str]


@pytest.fixture(scope="module", params=["7.x"])
def new_guest(request: pytest.FixtureRequest, arch: str) -> Generator[GuestSession]:
    with kprobes.boot(MachineOptions(suite=SUITES[request.param], arch=arch)) as session:
        yield session


@pytest.fixture(scope="module", params=["5.10", "6.1", "7.x"])
def any_guest(request: pytest.FixtureRequest, arch: str) -> Generator[GuestSession]:
    with kprobes.boot(MachineOptions(suite=SUITES[request.param], arch=arch)) as session:
        yield session


def run(guest: GuestSession, script: str) -> str:
    """Run a script among the tracing files and return what it wrote; it must succeed."""
    found = guest.run(f"cd {TRACING}; set -e\n{script}", timeout_s=300)
    output = found.output.decode(errors="backslashreplace")
    assert found.status == 0, output
    return output


def arm_theirs(guest: GuestSession, definitions: tuple[str, ...]) -> None:
    """Arm the kernel's own, of group ``theirs``, of dd alone."""
    adds = "".join(
        f"echo '{each.replace(':', ':theirs/', 1)}' >> dynamic_events\n" for each in definitions
    )
    names = " ".join(each.split()[0].partition(":")[2] for each in definitions)
    run(
        guest,
        f"echo 0 > tracing_on; echo 2048 > buffer_size_kb; {adds}for e in {names}; do\n"
        f"echo '{_FILTER}' > events/theirs/$e/filter; echo 1 > events/theirs/$e/enable; done",
    )


def disarm_theirs(guest: GuestSession) -> None:
    """Remove them."""
    run(guest, "echo 0 > events/theirs/enable; : > dynamic_events; : > trace; echo 1 > tracing_on")


def lines_of(text: str) -> list[str]:
    """Return what is compared of events' lines."""
    found = [line for line in text.splitlines() if not line.startswith("#") and line.strip()]
    return sorted(_HEAD.sub(r"\1: ", line) for line in found)


def words_of(definitions: tuple[str, ...], arch: str) -> tuple[str, ...]:
    """Return definitions in the words of an architecture."""
    return tuple(each.replace("regs->ax:s64", _AX[arch]) for each in definitions)


def listeners(guest: GuestSession, name: str) -> int:
    """Return how many listen to a tracepoint, by the guest's own list of them."""
    memory, kernel = guest.driver.guest.memory, guest.kernel
    point = kernel.symbols.named(f"__tracepoint_{name}").addr
    assert kernel.types is not None
    at, count = memory.u64(point + kernel.types.offset("tracepoint", "funcs")), 0
    while at and memory.u64(at):
        at, count = at + 24, count + 1
    return count


@pytest.fixture(scope="module")
def recorded(new_guest: GuestSession, arch: str) -> Recorded:
    definitions = words_of(_TOGETHER, arch)
    # Ours at an ftrace site is after its call.
    arm_theirs(new_guest, definitions)
    new_guest.probe("\n".join(definitions), filter=_FILTER)
    with new_guest.record() as trace:
        run(new_guest, ": > trace; echo 1 > tracing_on")
        assert new_guest.run(_WORKLOAD).status == 0
        run(new_guest, "echo 0 > tracing_on")
    theirs = run(new_guest, "cat trace")
    disarm_theirs(new_guest)
    assert trace.counts.lost == 0
    return Recorded(ours=lines_of(trace.to_text()), theirs=lines_of(theirs))


@pytest.mark.kernels("7.x")
def test_each_hit_is_printed_as_by_the_kernel(recorded: Recorded) -> None:
    names = [line.split(": ")[1] for line in recorded.theirs]

    assert recorded.ours == recorded.theirs
    assert min(names.count(name) for name in ("wrote", "called", "left")) > 15
    assert {"switched", "stat"} <= {*names}


@pytest.mark.kernels("7.x")
def test_a_functions_return_is_printed_as_by_the_kernel(new_guest: GuestSession) -> None:
    # One after the other: the kernel's own takes the return address over.
    arm_theirs(new_guest, (_RETURN,))
    run(new_guest, ": > trace; echo 1 > tracing_on")
    assert new_guest.run(_WORKLOAD).status == 0
    theirs = run(new_guest, "echo 0 > tracing_on; cat trace")
    disarm_theirs(new_guest)
    probe = new_guest.probe(_RETURN, filter=_FILTER)
    with new_guest.record(probe) as trace:
        assert new_guest.run(_WORKLOAD).status == 0

    assert lines_of(trace.to_text()) == lines_of(theirs)
    assert len(trace) >= 20


@pytest.mark.kernels("7.x")
@pytest.mark.arches("amd64", "arm64", matrix="arm64")
def test_the_kernel_and_we_agree_on_their_definitions(arch: str) -> None:
    lines = [line for line in _LINES.read_text().splitlines() if not line.startswith("##")]
    cases = [Case(line) for line in lines]
    options = MachineOptions(suite=SUITES["7.x"], arch=arch, cpus=_CPUS)
    _, theirs = insn_verdict([case.lines for case in cases], options, "dynamic_events")
    with kprobes.boot(options) as session:
        guest = session.driver.guest
        places, cpus = places_of(guest), possible_cpus(guest.memory, guest.kernel)
        ours = [our_verdict(case, places, cpus) for case in cases]

    wrong = [
        f"{case.text}\n   ours: {mine}\n   theirs: {kernels}"
        for case, mine, kernels in zip(cases, ours, theirs, strict=True)
        if (mine.verdict != kernels or mine.refusal)
        and case.text not in _WAITING
        # Without a word of why.
        and not (mine.code in ("NO_PLACE", "NO_EVENT") and not kernels.is_accepted)
    ]
    assert not wrong, "\n".join(wrong)
    accepted = [case.text for case, v in zip(cases, theirs, strict=True) if v.is_accepted]
    assert {*accepted} >= _WAITING
    assert len(accepted) > 35


def test_a_tracepoint_is_on_only_while_it_is_recorded(any_guest: GuestSession) -> None:
    probe = any_guest.probe("t:on sched_switch prev=prev->comm:string")
    before = listeners(any_guest, "sched_switch")
    with any_guest.record(probe) as trace:
        during = listeners(any_guest, "sched_switch")
        assert any_guest.run(_WORKLOAD).status == 0

    assert (before, during, listeners(any_guest, "sched_switch")) == (0, 1, 0)
    assert len(trace) > 2
    assert any_guest.kernel.symbols.find("__traceiter_sched_switch") is not None


def test_names_and_numbers_of_arguments_count_from_the_first(
    any_guest: GuestSession, arch: str
) -> None:
    definition = words_of(("t:both sys_enter a=$arg2:s64 id nr=regs->ax:s64",), arch)[0]
    probe = any_guest.probe(definition, filter=_FILTER)
    with any_guest.record(probe) as trace:
        assert any_guest.run(_WORKLOAD).status == 0

    found = trace["both"]
    assert len(found) > 20
    assert list(found["a"]) == list(found["id"])
    assert [int(n) & 0xFFFF_FFFF for n in found["nr"]] == [
        int(n) & 0xFFFF_FFFF for n in found["id"]
    ]


def test_a_pattern_names_tracepoints(any_guest: GuestSession) -> None:
    probe = any_guest.probe("t sched_process_*")
    with any_guest.record(probe) as trace:
        assert any_guest.run("true; /bin/true").status == 0

    names = {line.split(": ")[1] for line in lines_of(trace.to_text())}
    assert {"sched_process_fork", "sched_process_exec", "sched_process_exit"} <= names
    assert listeners(any_guest, "sched_process_fork") == 0


def test_a_stack_is_that_of_whoever_came_to_the_tracepoint(any_guest: GuestSession) -> None:
    probe = any_guest.probe("t:stacked sched_process_exec", stacktrace=True)
    with any_guest.record(probe) as trace:
        assert any_guest.run("/bin/true").status == 0

    stack = [line.split()[1] for line in trace.to_text().splitlines() if line.startswith(" => ")]
    assert stack[0] in ("__traceiter_sched_process_exec", "__probestub_sched_process_exec")
    assert any("execve" in name for name in stack[1:5])
    assert len(stack) > 6


def test_too_many_tracepoints_are_refused_and_none_stays_on(any_guest: GuestSession) -> None:
    many = [
        symbol.name.removeprefix("__tracepoint_")
        for symbol in any_guest.kernel.symbols.glob("__tracepoint_*")
        if not symbol.module
        and any_guest.kernel.symbols.find(symbol.name.replace("point_", "iter_")) is not None
    ][:33]
    probe = any_guest.probe("\n".join(f"t:m{n} {name}" for n, name in enumerate(many)))

    with pytest.raises(RefusedError, match="33 tracepoints: at most 32"), any_guest.record(probe):
        pass

    assert [name for name in many if listeners(any_guest, name)] == []


@pytest.mark.kernels("7.x")
def test_the_guests_own_events_of_a_tracepoint_notice_nothing(new_guest: GuestSession) -> None:
    guest = new_guest
    arm_theirs(guest, ("t:before sched_process_exit $comm",))
    probe = guest.probe("t:ours sched_process_exit $comm", filter=_FILTER)
    run(guest, ": > trace; echo 1 > tracing_on")
    with guest.record(probe) as trace:
        assert guest.run(_WORKLOAD).status == 0
        # The kernel's own go and come while ours is there.
        run(guest, "echo 0 > events/theirs/before/enable; echo '-:theirs/before' >> dynamic_events")
        assert guest.run(_WORKLOAD).status == 0
        arm_theirs(guest, ("t:after sched_process_exit $comm",))
        run(guest, "echo 1 > tracing_on")
        assert guest.run(_WORKLOAD).status == 0
    assert guest.run(_WORKLOAD).status == 0
    theirs = lines_of(run(guest, "echo 0 > tracing_on; cat trace"))
    disarm_theirs(guest)

    assert len(trace) == 3
    # Each exactly once, also when ours had gone.
    assert [line.split(": ")[1] for line in theirs] == ["after", "after"]
    assert listeners(guest, "sched_process_exit") == 0
    complaints = filter(is_complaint, guest.run("dmesg").output.decode().splitlines())
    assert list(complaints) == []


def test_others_that_listen_go_on(any_guest: GuestSession) -> None:
    events = "events/sched/sched_process_exit"
    run(any_guest, f"echo '{_FILTER}' > {events}/filter; echo 1 > {events}/enable; : > trace")
    before = listeners(any_guest, "sched_process_exit")
    probe = any_guest.probe("t:too sched_process_exit", filter=_FILTER)
    with any_guest.record(probe) as trace:
        assert any_guest.run(_WORKLOAD).status == 0
        during = listeners(any_guest, "sched_process_exit")
    assert any_guest.run(_WORKLOAD).status == 0
    text = run(any_guest, f"cat trace; echo 0 > {events}/enable; echo 0 > {events}/filter")

    assert (len(trace), text.count(": sched_process_exit: ")) == (1, 2)
    assert (before, during) == (1, 2)
    assert listeners(any_guest, "sched_process_exit") == 0


def test_a_tracepoint_that_comes_and_goes_while_others_are_recorded(
    any_guest: GuestSession,
) -> None:
    first = any_guest.probe("t:first sched_process_exit", filter=_FILTER)
    with any_guest.record(first) as trace:
        second = any_guest.probe("t:second sched_process_fork")
        assert listeners(any_guest, "sched_process_fork") == 1
        assert any_guest.run(_WORKLOAD).status == 0
        second.disable()
        assert listeners(any_guest, "sched_process_fork") == 0
        assert listeners(any_guest, "sched_process_exit") == 1
        assert any_guest.run(_WORKLOAD).status == 0

    assert (len(trace["first"]), len(trace["second"]) > 0) == (2, True)
