"""Guests that panic, hang, reboot or are not there yet, beside a tracer that goes on to the end."""

import os
import random
import re
import signal
import threading
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

import kprobes
from kprobes.errors import GuestCrashedError, RefusedError
from kprobes.guest import inject
from kprobes.model.events import Events
from kprobes.open import GuestSession
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MACHINE_TYPES, MachineOptions
from tests.build.command import WAIT_S, Command, events_of, wait_for_words
from tests.build.console_guest import ConsoleGuest, console_guest
from tests.build.json_lines import objects, parsed
from tests.build.plain_guest import plain_guest
from tests.build.waiting import becomes_true
from tests.system.conftest import SUITES, Boot

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

ONE = pytest.mark.arches("amd64", "arm64", matrix="arm64")
"""Alike on both."""
ARMED = b"tracing 1 function"
WRITES = "p:w vfs_write count=$arg3:u64"
PANIC = "echo c > /proc/sysrq-trigger"
FIRST_CALLS = {"amd64": b"ipc_ns_init", "arm64": b"populate_rootfs"}
"""Of the first level; and of a later one, as newer kernels are probed after the first few."""
SELF_JUMPS = {"amd64": b"\xeb\xfe", "arm64": b"\x00\x00\x00\x14"}
MASKED = {"amd64": ("eflags", ~0x200, 0), "arm64": ("cpsr", ~0x1F, 0x3C5)}
"""A register, what of it stays and what is set, so that the kernel runs without interrupts."""


@pytest.fixture
def kprobe(tmp_path: Path) -> Iterator[Command]:
    """The command, with journals of this test's own."""
    with Command(tmp_path / "state") as command:
        yield command


@contextmanager
def rebooting_guest(directory: Path, arch: str) -> Generator[ConsoleGuest]:
    """Boot a guest that boots again when it reboots or panics."""
    board = MACHINE_TYPES[arch]
    words = f"console={board.console} quiet panic=1 {board.words}"
    options = ("-action", "reboot=reset", "-append", words)
    with console_guest(directory, *options, suite="bookworm", arch=arch) as guest:
        yield guest


def journals(tmp_path: Path) -> list[str]:
    return [each.name for each in (tmp_path / "state" / "kprobes" / "journal").glob("*")]


def writes(text: bytes) -> list[int]:
    """Return the sizes that the shell and its children wrote, in order."""
    return [int(each) for each in re.findall(rb": w: .* count=(\d+)\n", text)]


def test_a_panic_ends_the_trace_with_the_last_events_and_the_log(
    kprobe: Command, tmp_path: Path, arch: str
) -> None:
    with rebooting_guest(tmp_path, arch) as guest:
        tracer = kprobe.start(
            *("trace", "-t", guest.target, "--until-panic", "1M", WRITES, "--comm", "dd"),
            *("--comm", "sh", "--summary", f"json:{tmp_path / 'summary'}"),
        )
        wait_for_words(tracer, ARMED)
        guest.run("for i in $(seq 301 320); do dd if=/dev/zero of=/dev/null bs=$i count=1; done")
        guest.send(PANIC)
        # It goes on to what its kernel does after a panic, with text as it was.
        guest.wait_ready()
        out, said = tracer.communicate(timeout=WAIT_S)

    assert tracer.returncode == 1, said.decode()
    found = writes(out)
    assert [each for each in found if 301 <= each <= 320] == [*range(301, 321)]
    # The last one of all has triggered it.
    assert found[-1] == len("c\n")
    lines = said.decode().splitlines()
    assert any("Kernel panic - not syncing: sysrq triggered crash" in each for each in lines)
    assert not any("Linux version" in each for each in lines)
    assert lines[-1] == "kprobe: the guest panicked"
    (summary,) = objects("summary", (tmp_path / "summary").read_bytes())
    assert (summary["lost"], summary["written"]) == (0, len(events_of(out)))
    assert journals(tmp_path) == []


def test_a_command_that_ends_its_guest_is_told_by_its_last_events(
    kprobe: Command, arch: str
) -> None:
    command = f"echo before; {PANIC}"

    traced = kprobe("trace", "--arch", arch, "--until-panic", "1M", WRITES, "--", command)

    said = traced.stderr.decode()
    assert traced.returncode == 1, said
    assert writes(traced.stdout)[-2:] == [len("before\n"), len("c\n")]
    assert "Kernel panic - not syncing: sysrq triggered crash" in said
    assert said.endswith("kprobe: the guest panicked\n")


@ONE
def test_only_the_last_events_are_kept(kprobe: Command, tmp_path: Path, arch: str) -> None:
    out = tmp_path / "out"
    with rebooting_guest(tmp_path, arch) as guest:
        tracer = kprobe.start(
            *("trace", "-t", guest.target, "--until-panic", "256K", WRITES),
            *("--format", "json", "-o", str(out)),
        )
        wait_for_words(tracer, ARMED)
        guest.run("dd if=/dev/zero of=/dev/null bs=77 count=60000")
        guest.send(PANIC)
        guest.wait_ready()
        _, said = tracer.communicate(timeout=WAIT_S)

    events = parsed(out.read_bytes())
    assert 10 < len(events) < 30_000, said.decode()
    assert events[-1]["args"] == {"count": "2"}
    total = re.search(rf"^{len(events):,} of ([\d,]+) events".encode(), said, re.MULTILINE)
    assert total is not None, said.decode()
    assert int(total[1].replace(b",", b"")) > 60_000


@ONE
def test_a_killed_tracer_leaves_no_breakpoint_at_a_panic(
    kprobe: Command, tmp_path: Path, arch: str
) -> None:
    with rebooting_guest(tmp_path, arch) as guest:
        tracer = kprobe.start("trace", "-t", guest.target, "--until-panic", "1M", WRITES)
        wait_for_words(tracer, ARMED)
        tracer.kill()
        tracer.wait()
        assert becomes_true(lambda: kprobe.is_idle(guest.target))

        guest.send(PANIC)
        guest.wait_ready()


@ONE
def test_a_trace_that_ends_before_anything_happens_prints_what_is_kept(
    kprobe: Command, tmp_path: Path, arch: str
) -> None:
    with rebooting_guest(tmp_path, arch) as guest:
        tracer = kprobe.start("trace", "-t", guest.target, "--until-panic", "1M", WRITES)
        wait_for_words(tracer, ARMED)
        guest.run("dd if=/dev/zero of=/dev/null bs=4321 count=3")
        tracer.send_signal(signal.SIGINT)
        out, said = tracer.communicate(timeout=WAIT_S)

        assert tracer.returncode == 0, said.decode()
        assert writes(out).count(4321) == 3
        # Nor a breakpoint is left: it reboots.
        guest.send(PANIC)
        guest.wait_ready()


def test_a_guest_that_reboots_is_probed_again_in_one_run(
    kprobe: Command, tmp_path: Path, arch: str
) -> None:
    out = tmp_path / "out"
    with rebooting_guest(tmp_path, arch) as guest:
        tracer = kprobe.start("trace", "-t", guest.target, "--rearm", WRITES, "-o", str(out))
        wait_for_words(tracer, ARMED)
        guest.run("dd if=/dev/zero of=/dev/null bs=3001 count=1")
        for size in (3002, 3003):
            guest.send("reboot -f" if size == 3002 else PANIC)
            guest.wait_ready()
            wait_for_words(tracer, b"the guest was rebooted")
            wait_for_words(tracer, ARMED)
            guest.run(f"dd if=/dev/zero of=/dev/null bs={size} count=1")
        tracer.send_signal(signal.SIGINT)
        _, said = tracer.communicate(timeout=WAIT_S)

        assert tracer.returncode == 0, said.decode()
        assert kprobe.is_idle(guest.target)
        guest.run("true")
    boots = out.read_bytes().split(b"# the guest was rebooted: Linux 6.1.")
    assert len(boots) == 3
    for number, boot in enumerate(boots, 3001):
        assert boot.count(b"# tracer: nop") == 1
        assert [each for each in writes(boot) if 3001 <= each <= 3003] == [number]
    assert journals(tmp_path) == []


def test_a_guest_that_is_not_there_yet_is_waited_for(
    kprobe: Command, tmp_path: Path, arch: str
) -> None:
    target = str(tmp_path / "gdb.sock")
    tracer = kprobe.start("trace", "-t", target, "--wait", "--max-events", "5", WRITES)
    wait_for_words(tracer, b"no such socket")
    with plain_guest(tmp_path, "-gdb", "unix:gdb.sock,server=on,wait=off", arch=arch) as guest:
        out, said = tracer.communicate(timeout=WAIT_S)

        assert tracer.returncode == 0, said.decode()
        assert len(events_of(out)) == 5
        assert guest.is_ticking()
    assert journals(tmp_path) == []


@pytest.mark.parametrize("suite", SUITES.values(), ids=list(SUITES))
def test_a_guest_that_is_waited_for_is_probed_before_its_initcalls(
    kprobe: Command, tmp_path: Path, arch: str, suite: str
) -> None:
    # To a file: what waits in a pipe until the end must be written within two seconds then.
    target, file = str(tmp_path / "gdb.sock"), tmp_path / "out.txt"
    probes = "p:call do_one_initcall fn=$arg1:symbol", "r:done do_one_initcall"
    tracer = kprobe.start("trace", "-t", target, "--wait", "-o", str(file), *probes)
    wait_for_words(tracer, b"no such socket")
    stub = "-gdb", "unix:gdb.sock,server=on,wait=off"
    with plain_guest(tmp_path, *stub, arch=arch, suite=suite) as guest:
        wait_for_words(tracer, ARMED)
        tracer.send_signal(signal.SIGINT)
        _, said = tracer.communicate(timeout=WAIT_S)

        assert tracer.returncode == 0, said.decode()
        assert guest.is_ticking()
    out = file.read_bytes()
    calls = re.findall(rb": call: .* fn=(\w+)\+0x0/", out)
    assert unpaired(out) == [], said.decode()
    if (arch, suite) != ("arm64", SUITES["6.1"]):
        # The other one does not tell its state.
        assert {FIRST_CALLS[arch], b"deferred_probe_initcall"} < set(calls)
    assert journals(tmp_path) == []


def unpaired(text: bytes) -> list[bytes]:
    """Return, with the line before, the returns of initcalls of which no entry is there."""
    depth: Counter[bytes] = Counter()
    found: list[bytes] = []
    before = b""
    for line in text.splitlines():
        task, _, what = line.partition(b" [")
        if b": call: " in what:
            depth[task] += 1
        elif b": done: " in what:
            depth[task] -= 1
            found += [before, line] if depth[task] < 0 else []
        before = line
    return found + [task for task, calls in depth.items() if calls > 0]


@pytest.mark.parametrize("suite", SUITES.values(), ids=list(SUITES))
def test_a_guest_that_we_boot_is_probed_before_its_initcalls(
    kprobe: Command, arch: str, suite: str
) -> None:
    probes = "p:call do_one_initcall fn=$arg1:symbol", "r:done do_one_initcall"
    machine = "--boot", "--arch", arch, "--suite", suite

    traced = kprobe("trace", *machine, *probes, "--", "echo it is up")

    assert traced.returncode == 0, traced.stderr.decode()
    assert b"it is up\n" in traced.stderr
    calls = re.findall(rb": call: .* fn=(\w+)\+0x0/", traced.stdout)
    assert unpaired(traced.stdout) == [], traced.stderr.decode()
    is_early = {FIRST_CALLS[arch], b"deferred_probe_initcall"} < set(calls)
    assert is_early == (b"initcalls are over" not in traced.stderr)
    assert is_early == ((arch, suite) != ("arm64", SUITES["6.1"]))


def test_a_guest_stands_before_its_initcalls_however_slow_it_is(
    monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    # On a busy machine nobody in it runs for longer than a busy guest is waited for.
    monkeypatch.setattr(inject, "_BUSY_WAIT_S", 0.0)
    with kprobes.boot(MachineOptions(arch=arch, suite="sid"), is_early=True) as session:
        session.probe("p:call do_one_initcall fn=$arg1:x64")
        session.probe("r:done do_one_initcall")

        with session.record() as trace:
            assert session.run("echo up").output == b"up\n"

        first = session.driver.kernel.symbols.named(FIRST_CALLS[arch].decode())
        assert first.addr in [event["fn"] for event in trace["call"]]
        assert len(trace["call"]) == len(trace["done"])


@pytest.mark.parametrize("suite", [SUITES["5.10"], SUITES["7.x"]], ids=["5.10", "7.x"])
def test_functions_that_only_boot_uses_are_probed_until_it_frees_them(
    arch: str, suite: str
) -> None:
    with kprobes.boot(MachineOptions(arch=arch, suite=suite), is_early=True) as session:
        kernel, has_site = session.driver.kernel, session.driver.places.has_site
        assert kernel.init_text is not None
        names = {s.name for s in kernel.symbols.glob("*_init") if has_site(s)}
        session.probe("p:call do_one_initcall fn=$arg1:x64")
        session.probe("p:entry *_init")
        session.probe("r:return *_init")

        with session.record() as trace:
            assert session.run("echo up").output == b"up\n"

        places = [addr for event in trace["call"] if isinstance(addr := event["fn"], int)]
        called = {s.name for addr in places if (s := kernel.symbols.at(addr)) is not None}
        called = {name for name in called & names if kernel.symbols.is_unique(name)}
        is_init = range(*kernel.init_text)
        assert sum(kernel.symbols.named(name).addr in is_init for name in called) > 200
        entered, returned = (Counter(e.function for e in trace[n]) for n in ("entry", "return"))
        assert [name for name in called if not entered[name]] == []
        # Some were in progress when they were armed.
        unpaired = {n: (entered[n], returned[n]) for n in entered | returned}
        unpaired = {n: found for n, found in unpaired.items() if found[1] - found[0] not in (0, 1)}
        counts = trace.counts
        left = counts.lost + sum((*counts.missed.values(), *counts.nmissed.values()))
        assert len(unpaired) <= left, unpaired

        with pytest.raises(RefusedError, match="can be probed while a guest boots"):
            session.probe("p:late start_kernel")


def test_handlers_of_functions_that_boot_frees_end_with_them() -> None:
    names = list[str]()

    def note(probe: kprobes.Kprobe, _: kprobes.Registers) -> None:
        names.append(probe.symbol_name)

    with kprobes.boot(is_early=True) as session:
        session.kprobe("populate_rootfs")(note)
        with session.record():
            session.run("true")
        assert names == ["populate_rootfs"]

        session.kprobe("vfs_mkdir")(note)
        session.run("mkdir /tmp/some")
        assert names == ["populate_rootfs", "vfs_mkdir"]
        with pytest.raises(RefusedError, match="can be probed while a guest boots"):
            session.kprobe("start_kernel")(note)
        with pytest.raises(RefusedError, match="can be probed while a guest boots"):
            session.override("start_kernel", returns=0)


@pytest.mark.arches("amd64")
def test_a_guest_goes_on_well_with_memory_that_had_breakpoints(
    kprobe: Command, tmp_path: Path
) -> None:
    # Boot fills what it frees with bytes that are breakpoints. To a file: see above.
    target, file = str(tmp_path / "gdb.sock"), tmp_path / "out.txt"
    how = "--strategy", "breakpoint", "-o", str(file)
    tracer = kprobe.start("trace", "-t", target, "--wait", *how, "r:return *_init")
    wait_for_words(tracer, b"no such socket")
    with plain_guest(tmp_path, "-gdb", "unix:gdb.sock,server=on,wait=off") as guest:
        wait_for_words(tracer, b"functions; Ctrl-C ends")
        assert guest.is_ticking()
        tracer.send_signal(signal.SIGINT)
        _, said = tracer.communicate(timeout=WAIT_S)

        # A busy machine may not write the last of them in time, and says so; the guest is judged.
        assert tracer.returncode in (0, 6), said.decode()
        assert file.read_bytes().count(b": return: (do_one_initcall") > 200
        assert guest.is_ticking()
    assert journals(tmp_path) == []


@ONE
def test_a_definition_that_is_wrong_does_not_keep_a_guest_from_booting(
    kprobe: Command, tmp_path: Path, arch: str
) -> None:
    target = str(tmp_path / "gdb.sock")
    tracer = kprobe.start("trace", "-t", target, "--wait", "p no_such_function")
    wait_for_words(tracer, b"no such socket")
    with plain_guest(tmp_path, "-gdb", "unix:gdb.sock,server=on,wait=off", arch=arch) as guest:
        _, said = tracer.communicate(timeout=WAIT_S)
        assert tracer.returncode == 4, said.decode()
        assert guest.is_ticking()
    assert journals(tmp_path) == []


@ONE
@pytest.mark.parametrize("option", ["--wait", "--rearm"])
def test_ctrl_c_while_nothing_is_there_is_as_before_arming(
    kprobe: Command, tmp_path: Path, option: str
) -> None:
    tracer = kprobe.start("trace", "-t", str(tmp_path / "gdb.sock"), option, WRITES)
    wait_for_words(tracer, b"no such socket")
    tracer.send_signal(signal.SIGINT)

    _, said = tracer.communicate(timeout=WAIT_S)

    assert (tracer.returncode, said) == (130, b"kprobe: interrupted\n")


class Counted:
    """Counts events, and does something once some have come."""

    def __init__(self) -> None:
        self.events = 0

    def write(self, events: Events) -> None:
        self.events += len(events)

    def close(self) -> None:
        pass


def hang(session: GuestSession, arch: str) -> str:
    """Have the second vCPU run in the kernel for ever, with interrupts off; return where."""
    guest = session.driver.guest
    start, stop = guest.kernel.text
    jump, text = SELF_JUMPS[arch], guest.memory.read(start, stop - start)
    step = 4 if arch == "arm64" else 1
    at = next(n for n in range(0, len(text), step) if text[n : n + len(jump)] == jump)
    name, kept, added = MASKED[arch]
    pc = "rip" if arch == "amd64" else "pc"
    with guest.stub.paused():
        flags = guest.stub.registers(2)[name]
        guest.stub.set_registers(2, {pc: start + at, name: flags & kept | added})
    return session.symbol(start + at)


def test_a_cpu_that_hangs_ends_the_recording_and_is_named(machine: Machine, arch: str) -> None:
    with kprobes.attach(str(machine.stub_address)) as session:
        session.probe(WRITES)
        session.options = replace(session.options, hang_timeout_s=3.0)
        place, sink = "", Counted()

        def is_done() -> bool:
            nonlocal place
            place = place or hang(session, arch)
            return False

        with pytest.raises(GuestCrashedError) as error:
            session.stream(sink, is_done=is_done)

    assert re.fullmatch(
        r"the guest hangs: a CPU has had interrupts off for \d+ s, in (.*)", str(error.value)
    )
    assert str(error.value).endswith(place)


@pytest.fixture
def machine(boot: Boot, arch: str) -> Machine:
    """A guest of this test's own, which it may ruin."""
    return boot(arch=arch)


@pytest.mark.parametrize("suite", SUITES.values(), ids=list(SUITES))
def test_the_log_is_what_dmesg_prints(boot: Boot, arch: str, suite: str) -> None:
    machine = boot(arch=arch, suite=suite)
    with kprobes.attach(str(machine.stub_address)) as session:
        machine.run("echo '<3>tests: one more' > /dev/kmsg")
        log = session.log()
        theirs = machine.run("dmesg").output

        ours = b"\n".join(line for each in log for line in each.lines())
        # It may have said more meanwhile.
        assert theirs.startswith(ours + b"\n")
        (at,) = (n for n, each in enumerate(log) if each.text == b"tests: one more")
        assert log[at].level == 3
        assert session.log(log[at].seq)[0] == log[at]


ROUNDS = int(os.environ.get("KPROBES_ROUNDS", "20"))
SEED = int(os.environ.get("KPROBES_SEED", random.randrange(1 << 30)))


@pytest.mark.sweep
@pytest.mark.alone
def test_a_tracer_that_is_killed_while_its_guest_boots_harms_nobody(
    kprobe: Command, tmp_path: Path, arch: str
) -> None:
    drawn = random.Random(SEED)
    for number in range(ROUNDS):
        directory = tmp_path / str(number)
        directory.mkdir()
        target = str(directory / "gdb.sock")
        options = drawn.choice([(), ("--strategy", "breakpoint")])
        probes = *options, "p:call do_one_initcall", "p:entry *_init", "r:return *_init"
        tracer = kprobe.start("trace", "-t", target, "--wait", *probes, "-q", "-o", os.devnull)
        killer = threading.Timer(drawn.uniform(0.5, 6), tracer.kill)
        killer.start()
        with plain_guest(directory, "-gdb", "unix:gdb.sock,server=on,wait=off", arch=arch) as guest:
            killer.join()
            tracer.wait()
            assert guest.is_ticking(), f"round {number} of seed {SEED}"
            assert becomes_true(partial(kprobe.is_idle, target)), f"round {number} of seed {SEED}"
            assert guest.is_ticking(), f"round {number} of seed {SEED}"


@pytest.mark.sweep
@pytest.mark.alone
def test_rounds_of_reboots_and_panics_lose_no_event(
    kprobe: Command, tmp_path: Path, arch: str
) -> None:
    drawn, out = random.Random(SEED), tmp_path / "out"
    with rebooting_guest(tmp_path, arch) as guest:
        tracer = kprobe.start("trace", "-t", guest.target, "--rearm", WRITES, "-o", str(out))
        wait_for_words(tracer, ARMED)
        counts = list[int]()
        for number in range(ROUNDS):
            counts.append(drawn.randrange(1, 5000))
            guest.run(f"dd if=/dev/zero of=/dev/null bs=3001 count={counts[-1]}")
            # What was not drained ends with its boot.
            guest.run("sleep 1")
            guest.send(drawn.choice(["reboot -f", PANIC]))
            guest.wait_ready()
            wait_for_words(tracer, ARMED)
            guest.run(f"echo {number}")
        tracer.send_signal(signal.SIGINT)
        _, said = tracer.communicate(timeout=WAIT_S)
        assert tracer.returncode == 0, said.decode()
        assert kprobe.is_idle(guest.target)
    boots = out.read_bytes().split(b"# the guest was rebooted: ")
    assert [writes(boot).count(3001) for boot in boots] == [*counts, 0], f"seed {SEED}"
