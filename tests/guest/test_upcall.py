"""Hits that wait for Python in real guests: answers, deadlines, interrupts, load, death."""

import re
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager

import pytest

import kprobes
from bench.elf_program import GETPPID, Loop
from kprobes.arch.x86_64.decode import decode_function
from kprobes.arch.x86_64.function import Flow, Function, Instruction
from kprobes.drivers.guest.attach import Access
from kprobes.drivers.places import places_of
from kprobes.errors import RefusedError
from kprobes.image.function_text import read_function
from kprobes.model.plan import Strategy
from kprobes.model.upcall import Upcall, Waiting
from kprobes.session import Session
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions
from kprobes.units import Addr
from tests.build import hot
from tests.build.victim import (
    LOAD_FILES,
    Home,
    Load,
    Tracer,
    is_complaint,
    settle,
    wait_until,
    witness_of,
)

pytestmark = pytest.mark.guest

SUITES = {"6.1": "bookworm", "7.x": "sid"}
_ONE = Loop(step=GETPPID, steps=1000)
_TWO = Loop(step=GETPPID, steps=1000, cpus=2)
_FILES = {**LOAD_FILES, "/one": _ONE.program(), "/two": _TWO.program()}
_PATIENT = "nosoftlockup rcupdate.rcu_cpu_stall_suppress=1"
"""A guest that measured its TSC on a busy machine has seconds that are much shorter than ours."""
_SITE, _OTHER = "__x64_sys_getppid", "__x64_sys_getpid"
_PARENT = ["sh", "-c", "echo $PPID $$"]
_DEADLINE_S = 0.2
_TICK = ("tick_sched_handle", "tick_nohz_handler", "update_process_times")

Serve = Callable[[Waiting], None]


class Kernel:
    """A guest whose functions can be given to Python."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self._places = places_of(session.driver.guest)
        self._next = 0

    def site(self, name: str) -> Addr:
        return self._places.locate(self.session.kernel.symbols.named(name))

    def upcall(self, name: str, serve: Serve, timeout_s: float = 5.0) -> Upcall:
        """Return an upcall at a function's entry, with a number of its own."""
        return self.upcall_at(self.site(name), serve, timeout_s=timeout_s)

    def upcall_at(
        self, addr: Addr, serve: Serve, *, is_after: bool = False, timeout_s: float = 5.0
    ) -> Upcall:
        """Return an upcall at any instruction."""
        self._next += 1
        return Upcall(
            number=self._next, addr=addr, is_after=is_after, timeout_s=timeout_s, serve=serve
        )

    def function(self, name: str) -> Function:
        """Decode a function as it is now."""
        kernel, memory = self.session.kernel, self.session.driver.guest.memory
        return decode_function(*read_function(memory, kernel, kernel.symbols.named(name).addr))

    @contextmanager
    def asked(self, *upcalls: Upcall) -> Generator[None]:
        """Have upcalls armed, and nothing else."""
        driver = self.session.driver
        driver.upcalls = upcalls
        driver.prepare([])
        driver.arm()
        try:
            yield
        finally:
            driver.disarm()

    def missed(self, upcall: Upcall) -> int:
        return self.session.driver.missed_upcall(upcall.number)

    def run(self, *command: str) -> str:
        """Return what a command prints; it must succeed."""
        done = self.session.run(list(command), 60)
        assert done.status == 0, done.output
        return done.output.decode(errors="replace").strip()

    def complaints(self) -> list[str]:
        return [line for line in self.run("dmesg").splitlines() if is_complaint(line)]

    def back(self, waiting: Waiting) -> int:
        """Return the probed function's return address."""
        return self.session.driver.guest.memory.u64(waiting.registers["sp"])


@pytest.fixture(scope="module", params=SUITES.values(), ids=list(SUITES))
def kernel(request: pytest.FixtureRequest) -> Generator[Kernel]:
    options = MachineOptions(suite=request.param, files=_FILES, append=_PATIENT)
    with kprobes.boot(options) as session:
        assert session.machine is not None
        settle(session.machine)
        yield Kernel(session)


@pytest.fixture(autouse=True)
def _the_guest_does_not_complain(request: pytest.FixtureRequest) -> Generator[None]:
    yield
    if "kernel" in request.fixturenames:
        assert request.getfixturevalue("kernel").complaints() == []


def _nothing(waiting: Waiting) -> None:
    del waiting


def test_python_sees_every_hit_that_a_compiled_probe_records(kernel: Kernel) -> None:
    session, seen = kernel.session, Counter[int]()
    upcall = kernel.upcall(_SITE, lambda w: seen.update([w.registers["sp"]]))
    session.driver.upcalls = [upcall]
    session.probe(f"p:asked {_SITE} sp=%sp")

    try:
        with session.record() as trace:
            kernel.run("/two")
    finally:
        session.definitions = []

    assert kernel.missed(upcall) == 0
    recorded = Counter(re.findall(r"sp=(\w+)", str(trace)))
    assert recorded == {f"{sp:#x}": count for sp, count in seen.items()}
    assert recorded.total() >= 2000


def test_both_cpus_wait_at_once_and_both_are_served(kernel: Kernel) -> None:
    seen: Counter[int] = Counter()
    upcall = kernel.upcall(_SITE, lambda w: seen.update([w.cpu]))

    with kernel.asked(upcall):
        kernel.run("/two")

    assert min(seen[0], seen[1]) >= 1000
    assert kernel.missed(upcall) == 0


def test_a_handler_can_skip_the_function_and_return_for_it(kernel: Kernel) -> None:
    def skip(waiting: Waiting) -> None:
        waiting.registers["ip"] = kernel.back(waiting)
        waiting.registers["sp"] += 8
        waiting.registers["ax"] = 4242

    with kernel.asked(kernel.upcall(_SITE, skip)):
        skipped, _ = kernel.run(*_PARENT).split()

    assert skipped == "4242"
    assert kernel.run(*_PARENT).split()[0] != "4242"


def test_a_handler_can_send_the_cpu_elsewhere(kernel: Kernel) -> None:
    # Where the other function goes on behind its own call of nobody.
    other = kernel.site(_OTHER)

    def redirect(waiting: Waiting) -> None:
        waiting.registers["ip"] = other

    with kernel.asked(kernel.upcall(_SITE, redirect)):
        parent, own = kernel.run(*_PARENT).split()

    assert parent == own


def test_a_handler_can_change_an_argument(kernel: Kernel) -> None:
    # A length that the guest's agent never writes.
    def divert(waiting: Waiting) -> None:
        if (waiting.registers["di"], waiting.registers["dx"]) == (1, 777):
            waiting.registers["di"] = 9

    script = "exec 9>/tmp/nine; printf %777s x >/tmp/one; wc -c </tmp/one; wc -c </tmp/nine"

    with kernel.asked(kernel.upcall("ksys_write", divert)):
        found = kernel.run("sh", "-c", script)

    assert found.split() == ["0", "777"]


def test_compiled_probes_of_the_same_site_record_what_python_has_not_yet_changed(
    kernel: Kernel,
) -> None:
    session = kernel.session
    seen: list[int] = []

    def change(waiting: Waiting) -> None:
        waiting.registers["ip"] = kernel.back(waiting)
        waiting.registers["sp"] += 8
        waiting.registers["ax"] = 4242
        seen.append(waiting.cpu)

    session.driver.upcalls = [kernel.upcall(_SITE, change)]
    session.probe(f"p:asked {_SITE} sp=%sp ax=%ax")
    try:
        with session.record() as trace:
            kernel.run("/one")
            found = kernel.run(*_PARENT).split()[0]
    finally:
        session.definitions = []

    assert found == "4242"
    assert len(trace) == len(seen) >= 1000


def test_where_the_guest_s_own_ftrace_is_both_see_every_hit(kernel: Kernel) -> None:
    tracing = "/sys/kernel/tracing"
    script = f"cd {tracing} && echo 'p:own {_SITE}' > kprobe_events && echo 1 > events/kprobes/own"
    kernel.run("sh", "-c", f"{script}/enable && : > trace")
    seen: list[int] = []
    try:
        with kernel.asked(kernel.upcall(_SITE, lambda w: seen.append(w.cpu))):
            kernel.run("/one")
        own = kernel.run("grep", "-c", " own: ", f"{tracing}/trace")
    finally:
        script = f"cd {tracing} && echo 0 > events/kprobes/own/enable && echo > kprobe_events"
        kernel.run("sh", "-c", script)

    assert len(seen) >= 1000
    assert int(own) >= 1000


def test_a_handler_that_is_too_slow_lets_the_cpu_go_on_and_is_counted(kernel: Kernel) -> None:
    upcall = kernel.upcall(_SITE, lambda _: time.sleep(1.0), timeout_s=_DEADLINE_S)
    start = time.monotonic()

    with kernel.asked(upcall):
        kernel.run("/one")
        took = time.monotonic() - start
        missed = kernel.missed(upcall)

    assert took < 1.0
    assert missed >= 1000


def test_after_a_slow_moment_hits_are_served_again(kernel: Kernel) -> None:
    seen: list[int] = []

    def serve(waiting: Waiting) -> None:
        seen.append(waiting.cpu)
        if len(seen) == 1:
            time.sleep(2 * _DEADLINE_S)

    upcall = kernel.upcall(_SITE, serve, timeout_s=_DEADLINE_S)
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

    def serve(waiting: Waiting) -> None:
        del waiting
        if not inner:
            inner.append("begun")
            inner.append(kernel.run(*_PARENT))

    upcall = kernel.upcall(_SITE, serve, timeout_s=_DEADLINE_S)
    with kernel.asked(upcall):
        running = kernel.session.start(_PARENT)
        assert wait_until(lambda: len(inner) == 2, 20) is not None
        running.wait(20)

    assert len(inner[1].split()) == 2
    assert kernel.missed(upcall) >= 1


def test_a_timer_interrupt_of_a_task_that_waits_is_served_too(kernel: Kernel) -> None:
    name = next(n for n in _TICK if kernel.session.kernel.symbols.find(n))
    slow: list[tuple[int, int]] = []
    ticks: list[tuple[int, int]] = []

    def serve(waiting: Waiting) -> None:
        if len(slow) < 5:
            # Some ticks of the guest's.
            time.sleep(0.05)
            slow.append((waiting.cpu, waiting.task))

    tick = kernel.upcall(name, lambda w: ticks.append((w.cpu, w.task)))
    upcall = kernel.upcall(_SITE, serve)
    with kernel.asked(upcall, tick):
        kernel.run("/one")

    assert set(slow) & set(ticks)
    assert (kernel.missed(upcall), kernel.missed(tick)) == (0, 0)


def test_hot_functions_under_load_are_served_and_all_results_are_right(kernel: Kernel) -> None:
    symbols = kernel.session.kernel.symbols
    sites: dict[Addr, str] = {}
    # Every third: with all of them the guest does little else than wait.
    for name in hot.ALL[::3]:
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
            time.sleep(5)
            # Slower, but it goes on.
            assert load.goes_on(60)
        assert load.goes_on()
        assert load.mistakes() == ""
    finally:
        load.stop()
    assert len(seen) >= 20
    assert sum(seen.values()) >= 5_000


@pytest.mark.parametrize("strategy", [None, Strategy.BREAKPOINT], ids=["cheapest", "breakpoint"])
def test_behind_every_instruction_python_sees_where_it_leads(
    kernel: Kernel, strategy: Strategy | None
) -> None:
    # Pushes, calls, moves, and the return: all that the function has.
    driver = kernel.session.driver
    function = kernel.function(_SITE)
    driver.strategy = strategy
    nexts: dict[int, set[int]] = {}
    try:
        for addr in sorted(function.instructions):
            _see(kernel, Addr(addr), nexts)
    finally:
        driver.strategy = None

    for addr, seen in nexts.items():
        instruction = function.instructions[Addr(addr)]
        if instruction.flow in (Flow.NEXT, Flow.BRANCH):
            assert seen <= {instruction.next, instruction.target}
        elif instruction.flow is Flow.CALL:
            assert seen == {instruction.target}
        else:
            # To its caller, or to the thunk that returns there.
            assert not any(addr in function.instructions for addr in seen)
    assert len(nexts) >= 10


def _see(kernel: Kernel, addr: Addr, nexts: dict[int, set[int]]) -> None:
    """Have Python before and behind an instruction, where that may be."""
    before: list[int] = []
    behind: list[int] = []
    pre = kernel.upcall_at(addr, lambda w: before.append(w.registers["ip"]))
    post = kernel.upcall_at(addr, lambda w: behind.append(w.registers["ip"]), is_after=True)
    try:
        with kernel.asked(pre, post):
            kernel.run(*_PARENT)
    except RefusedError:
        return
    if before:
        assert set(before) == {addr}
        assert len(before) == len(behind)
        nexts[addr] = set(behind)
    assert (kernel.missed(pre), kernel.missed(post)) == (0, 0)


def test_a_handler_behind_a_return_can_change_the_result(kernel: Kernel) -> None:
    function = kernel.function(_SITE)
    ends = [a for a, each in function.instructions.items() if each.flow is Flow.RETURN]

    def change(waiting: Waiting) -> None:
        waiting.registers["ax"] = 777

    with kernel.asked(*(kernel.upcall_at(Addr(end), change, is_after=True) for end in ends)):
        found = kernel.run(*_PARENT).split()[0]

    assert found == "777"


@pytest.mark.parametrize("strategy", [Strategy.JUMP, Strategy.BREAKPOINT])
def test_an_instruction_can_be_skipped_whatever_the_patch_covers(
    kernel: Kernel, strategy: Strategy
) -> None:
    # Its result is made in ax just before it returns: `movslq %ebx, %rax`, or the like.
    driver, function = kernel.session.driver, kernel.function(_SITE)
    addr = next(a for a, each in function.instructions.items() if _makes_result(each))
    following = function.instructions[addr].next

    def skip(waiting: Waiting) -> None:
        waiting.registers["ip"] = following
        waiting.registers["ax"] = 1234

    driver.strategy = strategy
    try:
        with kernel.asked(kernel.upcall_at(Addr(addr), skip)):
            found = kernel.run(*_PARENT).split()[0]
    except RefusedError as refused:
        pytest.skip(f"no {strategy} at {addr:#x} of this kernel: {refused}")
    finally:
        driver.strategy = None

    assert found == "1234"


def _makes_result(instruction: Instruction) -> bool:
    # movslq REG, %rax
    return instruction.code[:2] == b"\x48\x63" and instruction.code[2] >> 3 == 0b11_000


def test_hits_wait_where_ram_is_read_through_qemu_s_own_memory() -> None:
    seen: list[int] = []
    with kprobes.boot(MachineOptions(files=_FILES), access=Access(ways=("process",))) as session:
        kernel = Kernel(session)

        with kernel.asked(kernel.upcall(_SITE, lambda w: seen.append(w.cpu))):
            kernel.run("/one")

    assert len(seen) >= 1000


def test_a_guest_whose_ram_is_behind_its_stub_only_is_refused() -> None:
    with kprobes.boot(access=Access(ways=("stub",))) as session:
        kernel = Kernel(session)
        session.driver.upcalls = [kernel.upcall(_SITE, _nothing)]

        with pytest.raises(RefusedError, match="share=on"):
            session.driver.prepare([])


@pytest.mark.parametrize("suite", SUITES.values(), ids=list(SUITES))
def test_a_tracer_killed_while_a_cpu_waits_for_it_leaves_a_guest_that_runs(
    suite: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    home = Home(tmp_path_factory.mktemp("home"))
    with Machine.boot(MachineOptions(suite=suite, files=_FILES)) as machine:
        settle(machine)
        target = str(machine.stub_address)
        witness = witness_of(target, home)
        with Tracer(home, target, "p vfs_read\n", "--asks", _SITE) as tracer:
            tracer.wait_for("armed")
            running = machine.start("/two")
            tracer.wait_for("waits")

            tracer.kill()

            killed = time.monotonic()
            assert running.wait(20).status == 0
            # A thousand hits on each CPU: one deadline of a second, and what the guardian needs.
            assert time.monotonic() - killed < 6
        assert wait_until(witness.is_pristine, 5) is not None, witness.changes()
        said = machine.run("dmesg", 20).output.decode().splitlines()
        assert [line for line in said if is_complaint(line)] == []
