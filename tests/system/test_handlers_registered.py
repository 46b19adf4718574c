"""Python handlers on real kernels: how they come and go, and what is wrong in them."""

import time
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

import kprobes
from kprobes import Kprobe
from kprobes.errors import DefinitionError, MemoryFault, RefusedError, UsageError
from kprobes.handlers.registers import Registers
from kprobes.open import GuestSession
from kprobes.transport.qemu_command import MachineOptions
from tests.build.dialect import dialect_of
from tests.build.json_lines import parsed
from tests.build.waiting import wait_until
from tests.system.handling import PARENT, READ, comm, emptied, getppid, leave, output, text_of
from tests.system.test_find import modules

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

SUITES = {"6.1": "bookworm", "6.12": "bookworm-backports"}


@pytest.fixture(scope="module", params=SUITES.values(), ids=list(SUITES))
def shared(request: pytest.FixtureRequest, arch: str) -> Generator[GuestSession]:
    files = modules(request.param, arch)
    options = MachineOptions(arch=arch, suite=request.param, files=files)
    with kprobes.boot(options) as session:
        yield session


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def kernel(shared: GuestSession, told: list[str]) -> Generator[GuestSession]:
    """A guest whose handlers are gone, and whose text is as before, when a test ends."""
    yield from emptied(shared, told)


def _nothing(probe: Kprobe, regs: Registers) -> None: ...


def test_an_exception_is_told_once_and_changes_nothing(
    kernel: GuestSession, told: list[str]
) -> None:
    dialect = dialect_of(kernel)

    @kernel.kprobe(getppid(kernel))
    def before(probe: Kprobe, regs: Registers) -> None:
        regs[dialect.value] = regs[dialect.pc] = 1
        raise RuntimeError("no")

    kernel.run("for i in 1 2 3 4; do sh -c 'echo $PPID'; done")

    line = before.pre_handler.__code__.co_firstlineno + 3  # type: ignore[union-attr]
    where = f"{getppid(kernel)}: pre_handler at {__file__}:{line}"
    assert told == [f"{where}: RuntimeError: no (told once, counted from now on)"]
    assert before.errors == before.hits >= 4


def test_a_fault_goes_to_the_fault_handler(kernel: GuestSession, told: list[str]) -> None:
    faults: list[int] = []

    def handled(probe: Kprobe, regs: Registers, fault: MemoryFault) -> bool:
        faults.append(fault.addr)
        return len(faults) > 1

    @kernel.kprobe(getppid(kernel), fault_handler=handled)
    def before(probe: Kprobe, regs: Registers) -> None:
        kernel.read_u64(8)

    output(kernel, *PARENT)
    output(kernel, *PARENT)

    assert before.hits == len(faults) > 1
    assert set(faults) == {8}
    assert (before.errors, len(told)) == (1, 1)


def test_a_slow_handler_is_counted_and_the_guest_goes_on(
    kernel: GuestSession, told: list[str]
) -> None:
    @kernel.kprobe(getppid(kernel), timeout_s=0.05)
    def before(probe: Kprobe, regs: Registers) -> None:
        regs[dialect_of(kernel).value] = 7
        time.sleep(0.4)

    def is_told() -> bool:
        # On a busy machine Python may come too late even to begin.
        missed, found = before.nmissed, output(kernel, *PARENT).split()[0]
        # A vCPU without a CPU of ours for so long takes the answer that came meanwhile.
        assert found != "7" or before.nmissed == missed
        return any("took longer than 0.05 s" in line for line in told)

    assert wait_until(is_told) is not None
    assert before.nmissed >= 1


def test_probes_are_disabled_and_enabled_by_others_and_by_themselves(kernel: GuestSession) -> None:
    @kernel.kprobe(getppid(kernel))
    def once(probe: Kprobe, regs: Registers) -> None:
        probe.disable()

    @kernel.kprobe(getppid(kernel))
    def always(probe: Kprobe, regs: Registers) -> None:
        pass

    output(kernel, *PARENT)
    output(kernel, *PARENT)
    assert once.hits == 1
    hits = always.hits
    assert hits >= 2

    always.disable()
    output(kernel, *PARENT)
    assert (always.hits, once.hits) == (hits, 1)

    always.enable()
    once.enable()
    output(kernel, *PARENT)
    assert always.hits > hits
    assert once.hits == 2


def test_several_on_one_place_run_newest_first_until_one_goes_elsewhere(
    kernel: GuestSession,
) -> None:
    calls: list[str] = []

    def named(name: str, *, is_last: bool = False) -> Kprobe:
        def before(probe: Kprobe, regs: Registers) -> bool:
            if comm(regs) != "sh":
                return False
            calls.append(name)
            if is_last:
                leave(kernel, regs, 5)
            return is_last

        return Kprobe(symbol_name=getppid(kernel), pre_handler=before)

    kernel.register_kprobes([named("a"), named("b", is_last=True), named("c")])
    parent = output(kernel, *PARENT).split()[0]

    assert parent == "5"
    assert calls[:2] == ["c", "b"]
    assert "a" not in calls


def test_registration_is_all_or_nothing(kernel: GuestSession) -> None:
    before = text_of(kernel)
    fine, wrong = (
        Kprobe(symbol_name=name, pre_handler=lambda probe, regs: None)
        for name in ("vfs_open", "vfs_opne")
    )

    with pytest.raises(DefinitionError, match="Invalid probed address or symbol"):
        kernel.register_kprobes([fine, wrong])

    assert (fine.is_registered, kernel.handlers.probes) == (False, ())
    assert text_of(kernel) == before
    with pytest.raises(UsageError, match="names many functions"):
        kernel.register_kprobe(Kprobe(symbol_name="vfs_*", pre_handler=lambda probe, regs: None))


def test_registering_while_others_are_armed_and_recorded_loses_none_of_them(
    kernel: GuestSession,
) -> None:
    hits = Counter[str]()

    def counted(name: str) -> Kprobe:
        def before(probe: Kprobe, regs: Registers) -> None:
            hits[name] += comm(regs) == "cat"

        return Kprobe(symbol_name=name, pre_handler=before)

    kernel.probe("p:open do_sys_openat2 path=+0($arg2):ustring")
    kernel.register_kprobe(counted("vfs_open"))
    with kernel.record() as trace:
        kernel.run(list(READ))
        more = kernel.register_kprobe(counted("do_sys_openat2"))
        kernel.run(list(READ))
        more.unregister()
        kernel.run(list(READ))

    events = parsed(trace.to_json())
    opened = sum(event["comm"] == "cat" for event in events)
    assert opened == 9
    assert (hits["do_sys_openat2"], hits["vfs_open"]) == (3, 6)


def test_a_wrong_signature_is_answered_with_the_true_one(kernel: GuestSession) -> None:
    def opened(dfd: int, filname: Any) -> None:
        del dfd, filname

    with pytest.raises(UsageError) as caught:
        kernel.entry("do_sys_openat2")(opened)

    assert str(caught.value) == (
        "opened takes filname, which do_sys_openat2 has not: "
        "long int do_sys_openat2(int dfd, const char *filename, struct open_how *how)"
    )


def test_handlers_in_a_module_go_with_it(kernel: GuestSession) -> None:
    devices: list[int] = []
    create = "ip link add d0 type dummy && ip link del d0"

    def setup(probe: Kprobe, regs: Registers) -> None:
        devices.append(regs.args.dev.gso_max_size)

    with pytest.raises(RefusedError, match="dummy is not loaded"):
        kernel.kprobe("dummy:dummy_setup")(setup)
    assert kernel.run("insmod /modules/dummy.ko").status == 0
    probe = kernel.kprobe("dummy:dummy_setup")(setup)
    assert kernel.run(create).status == 0
    found = list(devices)
    assert kernel.run("ip link del dummy0; rmmod dummy").status == 0

    other = kernel.kprobe(getppid(kernel))(_nothing)
    output(kernel, *PARENT)

    assert found == [65536]
    assert other.hits > 0
    assert (probe.errors, devices) == (0, found)


def test_two_cpus_at_once_are_all_served(kernel: GuestSession) -> None:
    cpus = Counter[int]()

    @kernel.kprobe(getppid(kernel))
    def before(probe: Kprobe, regs: Registers) -> None:
        if comm(regs) == "sh":
            cpus[regs.cpu] += 1

    loop = "i=0; while [ $i -lt 20 ]; do sh -c :; i=$((i+1)); done"
    kernel.run(f"({loop}) & ({loop}) & wait")

    assert before.nmissed == 0
    assert cpus.total() >= 40
