"""Kernels that people build for themselves: with less than a distribution has, or more checks.

All of what runs in them is probed at once, while their own work goes on.
"""

from collections.abc import Generator

import pytest

import kprobes
from kprobes.guest.arena import ArenaSize
from kprobes.model.plan import Strategy
from kprobes.open import GuestSession
from kprobes.transport.qemu_command import MachineOptions
from kprobes.units import MIB
from tests.build.continuous import CALL
from tests.build.defined import delete_all, plans_of
from tests.build.own_kernels import KERNELS, build
from tests.build.programs import counting_loop
from tests.build.victim import is_complaint

pytestmark = [pytest.mark.guest, pytest.mark.matrix, pytest.mark.timeout(4000)]

TIMES = 1_000
PREFIXES = {"amd64": "__x64_sys_", "arm64": "__arm64_sys_"}
ENTRIES = {"arm64-checked": 4}
"""Where what is first must stay, as calls through pointers land on it (BTI)."""
STRATEGIES = {"amd64": {Strategy.JUMP, Strategy.BREAKPOINT}, "arm64": {Strategy.JUMP}}
_WORK = "for n in 1 2 3; do ls -R /proc/1 > /dev/null 2>&1; (true); done; md5sum /bin/busybox"


@pytest.fixture(scope="module", params=list(KERNELS))
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def arch(name: str) -> str:
    return KERNELS[name].arch


@pytest.fixture(scope="module")
def function(arch: str) -> str:
    """What the system call of ``/loop`` runs."""
    return f"{PREFIXES[arch]}{CALL}"


@pytest.fixture(scope="module")
def session(name: str, arch: str) -> Generator[GuestSession]:
    files = {"/loop": counting_loop(CALL, TIMES, arch=arch)}
    options = MachineOptions(kernel=build(name), arch=arch, files=files)
    size = ArenaSize(code=32 * MIB, ring=16 * MIB)
    with kprobes.boot(options, size=size) as booted:
        booted.run("chmod 755 /loop")
        yield booted


@pytest.fixture(autouse=True)
def _the_guest_is_well_afterwards(session: GuestSession) -> Generator[None]:
    yield
    delete_all(session)
    assert not is_complaint(session.run("dmesg").output.decode(errors="replace"))


def test_every_call_is_seen_with_its_return_and_its_task(
    session: GuestSession, function: str, name: str
) -> None:
    place = f"{function}+{ENTRIES[name]}" if name in ENTRIES else f"{function} regs=$arg1"
    session.probe(f"p:in {place}\nr:out {function} ret=$retval")
    session.choose_tasks(follow=True)

    with session.record() as trace:
        assert session.run("/loop & /loop & wait").status == 0
    session.choose_tasks()

    found, returned = trace.columns("in"), trace.columns("out")
    assert len(found["ts"]) == len(returned["ts"]) == 2 * TIMES
    assert set(found["comm"].tolist()) == {"loop"}
    assert len(set(found["pid"].tolist())) == 2
    # Priorities of any policy, or EINVAL; without types it is an unsigned number.
    assert {value % (1 << 64) for value in returned["ret"].tolist()} == {0, 1, (1 << 64) - 22}
    assert trace.counts.lost == trace.counts.damaged == 0


def test_all_its_functions_are_probed_at_once(session: GuestSession, arch: str) -> None:
    before = session.run(_WORK).output

    session.probe("p *")
    plans = list(plans_of(session))
    with session.record() as trace:
        found = session.run(_WORK, 180)

    assert found.output == before
    assert len(plans) > 10_000
    assert {plan.site.strategy for plan in plans} == STRATEGIES[arch]
    assert sum(each.recorded > 0 for each in trace.hits) > 500


def test_a_handler_is_called_at_each_of_its_calls(
    session: GuestSession, function: str, name: str
) -> None:
    cpus: list[int] = []

    def called(probe: kprobes.Kprobe, regs: kprobes.Registers) -> None:
        del probe
        cpus.append(regs.cpu)

    probe = kprobes.Kprobe(symbol_name=function, offset=ENTRIES.get(name, 0), pre_handler=called)
    with session.register_kprobe(probe):
        assert session.run("/loop", 180).status == 0

    assert len(cpus) == TIMES
    assert set(cpus) <= {0, 1}
    assert (probe.nmissed, probe.errors) == (0, 0)


def test_types_come_from_the_tree_that_it_was_built_in(session: GuestSession, name: str) -> None:
    types = session.kernel.types

    assert (types is not None) == (name in {"dwarf", "shuffled"})
    if types is not None:
        session.probe("p:opened vfs_open name=path->dentry->d_name.name:string")
        with session.record() as trace:
            session.run("cat /etc/passwd")
        assert "passwd" in trace.columns("opened")["name"].tolist()
