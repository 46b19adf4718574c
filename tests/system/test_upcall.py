"""Hits that wait for Python in real guests: answers, deadlines, interrupts, load, death."""

import re
import threading
import time
from collections import Counter
from collections.abc import Generator

import pytest

import kprobes
from kprobes.errors import RefusedError
from kprobes.guest.attach import Access
from kprobes.model.upcall import WaitingVcpu
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions
from kprobes.units import Addr
from tests.build import hot
from tests.build.defined import ask, delete_all
from tests.build.dialect import DIALECTS
from tests.build.victim import Home, Load, Tracer, is_complaint, settle, witness_of
from tests.build.waiting import PATIENCE_S, becomes_true, wait_until
from tests.system.upcalls import PARENT, PATIENT, Kernel, Serve, files

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

SUITES = {"6.1": "bookworm", "7.x": "sid"}
_HOT = {"amd64": (3, 20), "arm64": (6, 10)}
"""Every how manyth hot function is served, and how many are seen at least: with all of them a guest
does little else than wait."""
_DEADLINE_S = 0.2
_TICK = ("tick_sched_handle", "tick_nohz_handler", "update_process_times")


@pytest.fixture(scope="module", params=SUITES.values(), ids=list(SUITES))
def kernel(request: pytest.FixtureRequest, arch: str) -> Generator[Kernel]:
    options = MachineOptions(arch=arch, suite=request.param, files=files(arch), append=PATIENT)
    with kprobes.boot(options) as session:
        assert session.machine is not None
        settle(session.machine)
        yield Kernel(session)


@pytest.fixture(autouse=True)
def _the_guest_does_not_complain(request: pytest.FixtureRequest) -> Generator[None]:
    yield
    if "kernel" in request.fixturenames:
        assert request.getfixturevalue("kernel").complaints() == []


def _nothing(waiting: WaitingVcpu) -> None:
    del waiting


def test_python_sees_every_hit_that_a_compiled_probe_records(kernel: Kernel) -> None:
    session, seen = kernel.session, Counter[int]()
    upcall = kernel.upcall(kernel.asked_name, lambda w: seen.update([w.registers["sp"]]))
    session.probe(f"p:asked {kernel.asked_name} sp=%sp")

    try:
        with kernel.asked(upcall), session.record() as trace:
            kernel.run("/two")
    finally:
        delete_all(session)

    assert kernel.missed(upcall) == 0
    recorded = Counter(re.findall(r"sp=(\w+)", str(trace)))
    assert recorded == {f"{sp:#x}": count for sp, count in seen.items()}
    assert recorded.total() >= 2000


def test_both_cpus_wait_at_once_and_both_are_served(kernel: Kernel) -> None:
    seen: Counter[int] = Counter()
    upcall = kernel.upcall(kernel.asked_name, lambda w: seen.update([w.cpu]))

    with kernel.asked(upcall):
        kernel.run("/two")

    assert min(seen[0], seen[1]) >= 1000
    assert kernel.missed(upcall) == 0


def test_a_handler_can_skip_the_function_and_return_for_it(kernel: Kernel) -> None:
    def skip(waiting: WaitingVcpu) -> None:
        kernel.leave(waiting, 4242)

    with kernel.asked(kernel.upcall(kernel.asked_name, skip)):
        skipped, _ = kernel.run(*PARENT).split()

    assert skipped == "4242"
    assert kernel.run(*PARENT).split()[0] != "4242"


def test_a_handler_can_send_the_cpu_elsewhere(kernel: Kernel) -> None:
    # Where the other function goes on after its own call of nobody.
    other = kernel.site(f"{kernel.dialect.syscall}getpid")

    def redirect(waiting: WaitingVcpu) -> None:
        waiting.registers["ip"] = other

    with kernel.asked(kernel.upcall(kernel.asked_name, redirect)):
        parent, own = kernel.run(*PARENT).split()

    assert parent == own


def test_a_handler_can_change_an_argument(kernel: Kernel) -> None:
    file, _, length, *_ = kernel.dialect.arguments

    # A length that the guest's agent never writes.
    def divert(waiting: WaitingVcpu) -> None:
        if (waiting.registers[file], waiting.registers[length]) == (1, 777):
            waiting.registers[file] = 9

    script = "exec 9>/tmp/nine; printf %777s x >/tmp/one; wc -c </tmp/one; wc -c </tmp/nine"

    with kernel.asked(kernel.upcall("ksys_write", divert)):
        found = kernel.run("sh", "-c", script)

    assert found.split() == ["0", "777"]


def test_compiled_probes_of_the_same_site_record_what_python_has_not_yet_changed(
    kernel: Kernel,
) -> None:
    session = kernel.session
    seen: list[int] = []

    def change(waiting: WaitingVcpu) -> None:
        kernel.leave(waiting, 4242)
        seen.append(waiting.cpu)

    upcall = kernel.upcall(kernel.asked_name, change)
    session.probe(f"p:asked {kernel.asked_name} sp=%sp got=%{kernel.dialect.value}")
    try:
        with kernel.asked(upcall), session.record() as trace:
            kernel.run("/one")
            found = kernel.run(*PARENT).split()[0]
    finally:
        delete_all(session)

    assert found == "4242"
    assert len(trace) == len(seen) >= 1000


def test_where_the_guest_s_own_ftrace_is_both_see_every_hit(kernel: Kernel) -> None:
    tracing, own = "/sys/kernel/tracing", f"p:own {kernel.asked_name}"
    script = f"cd {tracing} && echo '{own}' > kprobe_events && echo 1 > events/kprobes/own/enable"
    kernel.run("sh", "-c", f"{script} && : > trace")
    seen: list[int] = []
    try:
        with kernel.asked(kernel.upcall(kernel.asked_name, lambda w: seen.append(w.cpu))):
            kernel.run("/one")
        own = kernel.run("grep", "-c", " own: ", f"{tracing}/trace")
    finally:
        script = f"cd {tracing} && echo 0 > events/kprobes/own/enable && echo > kprobe_events"
        kernel.run("sh", "-c", script)

    assert len(seen) >= 1000
    assert int(own) >= 1000


@pytest.mark.alone
def test_a_handler_that_is_too_slow_lets_the_cpu_go_on_and_is_counted(kernel: Kernel) -> None:
    is_over, ended = threading.Event(), list[bool]()
    upcall = kernel.upcall(
        kernel.asked_name, lambda _: ended.append(is_over.wait(PATIENCE_S)), timeout_s=_DEADLINE_S
    )

    with kernel.asked(upcall):
        kernel.run("/one")
        before, missed = list(ended), kernel.missed(upcall)
        is_over.set()

    # The handler was still busy.
    assert before == []
    assert missed >= 1000


@pytest.mark.alone
def test_after_a_slow_moment_hits_are_served_again(kernel: Kernel) -> None:
    seen: list[int] = []

    def serve(waiting: WaitingVcpu) -> None:
        seen.append(waiting.cpu)
        if len(seen) == 1:
            time.sleep(2 * _DEADLINE_S)

    upcall = kernel.upcall(kernel.asked_name, serve, timeout_s=_DEADLINE_S)
    with kernel.asked(upcall):
        kernel.run("/one")
        time.sleep(2 * _DEADLINE_S)
        before, missed = len(seen), kernel.missed(upcall)
        kernel.run("/one")

    assert missed > 0
    assert len(seen) >= before + 1000
    assert kernel.missed(upcall) == missed


def test_a_hit_that_a_handler_causes_itself_goes_on_by_itself(kernel: Kernel) -> None:
    inner: list[str] = []

    def serve(waiting: WaitingVcpu) -> None:
        del waiting
        if not inner:
            inner.append("begun")
            inner.append(kernel.run(*PARENT))

    upcall = kernel.upcall(kernel.asked_name, serve, timeout_s=_DEADLINE_S)
    with kernel.asked(upcall):
        # Whoever comes too late to serve the first one serves another.
        assert becomes_true(lambda: bool(kernel.run(*PARENT)) and len(inner) == 2)

    assert len(inner[1].split()) == 2
    assert kernel.missed(upcall) >= 1


def test_a_timer_interrupt_of_a_task_that_waits_is_served_too(kernel: Kernel) -> None:
    name = next(n for n in _TICK if kernel.session.kernel.symbols.find(n))
    slow: list[tuple[int, int]] = []
    ticks: list[tuple[int, int]] = []

    def serve(waiting: WaitingVcpu) -> None:
        if len(slow) < 5:
            # Some ticks of the guest's.
            time.sleep(0.05)
            slow.append((waiting.cpu, waiting.task))

    tick = kernel.upcall(name, lambda w: ticks.append((w.cpu, w.task)))
    upcall = kernel.upcall(kernel.asked_name, serve)
    with kernel.asked(upcall, tick):
        kernel.run("/one")

    assert set(slow) & set(ticks)
    assert (kernel.missed(upcall), kernel.missed(tick)) == (0, 0)


def test_hot_functions_under_load_are_served_and_all_results_are_right(
    kernel: Kernel, arch: str
) -> None:
    symbols = kernel.session.kernel.symbols
    sites: dict[Addr, str] = {}
    every, least = _HOT[arch]
    for name in hot.ALL[::every]:
        if len(symbols.all_named(name)) == 1:
            try:
                sites.setdefault(kernel.site(name), name)
            except RefusedError:
                continue
    seen: Counter[str] = Counter()

    def count(name: str) -> Serve:
        return lambda _: seen.update([name])

    upcalls = [kernel.upcall(name, count(name)) for name in sites.values()]
    assert kernel.session.machine is not None
    load = Load(kernel.session.machine, rest_us=50_000)
    try:
        assert load.goes_on()
        with kernel.asked(*upcalls):
            assert becomes_true(lambda: len(seen) >= least and seen.total() >= 5_000)
            # Slower, but it goes on.
            assert load.goes_on()
        assert load.goes_on()
        assert load.mistakes() == ""
    finally:
        load.stop()


def test_hits_wait_where_ram_is_read_through_qemu_s_own_memory(arch: str) -> None:
    seen: list[int] = []
    options = MachineOptions(arch=arch, files=files(arch))
    with kprobes.boot(options, access=Access(backends=("process",))) as session:
        kernel = Kernel(session)

        with kernel.asked(kernel.upcall(kernel.asked_name, lambda w: seen.append(w.cpu))):
            kernel.run("/one")

    assert len(seen) >= 1000


def test_a_guest_whose_ram_is_behind_its_stub_only_is_refused(arch: str) -> None:
    with kprobes.boot(MachineOptions(arch=arch), access=Access(backends=("stub",))) as session:
        kernel = Kernel(session)
        upcall = kernel.upcall(kernel.asked_name, _nothing)

        with pytest.raises(RefusedError, match="share=on"):
            ask(session.driver, upcall)


@pytest.mark.alone
@pytest.mark.parametrize("suite", SUITES.values(), ids=list(SUITES))
def test_a_tracer_killed_while_a_cpu_waits_for_it_leaves_a_guest_that_runs(
    suite: str, arch: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = Home(tmp_path_factory.mktemp("home"))
    with Machine.boot(MachineOptions(arch=arch, suite=suite, files=files(arch))) as machine:
        settle(machine)
        target = str(machine.stub_address)
        witness = witness_of(target, home)
        with Tracer(
            home, target, "p vfs_read\n", "--asks", f"{DIALECTS[arch].syscall}getppid"
        ) as tracer:
            tracer.wait_for("armed")
            running = machine.start("/two")
            tracer.wait_for("waits")

            tracer.kill()

            # A thousand hits on each CPU: each would wait for a second if it did not know.
            assert running.wait(PATIENCE_S).status == 0
        assert wait_until(witness.is_pristine) is not None, witness.changes()
        said = machine.run("dmesg", 180).output.decode().splitlines()
        assert [line for line in said if is_complaint(line)] == []
