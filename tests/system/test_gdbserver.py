"""A debugger beside our probes: it sees the kernel as if nothing were probed; no hit is lost.

The debugger is our own client of gdb stubs, where each packet matters, and gdb itself.
"""

import re
import subprocess
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

import kprobes
from kprobes.errors import DefinitionError, RefusedError, TargetError, UsageError
from kprobes.event_table import TraceProbe
from kprobes.model.options import Options
from kprobes.model.plan import ReturnMethod, Site, Strategy
from kprobes.open import GuestSession
from kprobes.transport.qemu_command import MachineOptions
from kprobes.transport.stub import SIGTRAP, Stub
from tests.build.command import Command, wait_for_words
from tests.build.plain_guest import plain_guest
from tests.build.waiting import becomes_true

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

_WAIT_S = 300.0
# BusyBox reads 1,024 bytes.
_LOAD = "while :; do head -c 20 /proc/version > /dev/null; done"
_PC = {"amd64": "rip", "arm64": "pc"}
_SP = {"amd64": "rsp", "arm64": "sp"}
_COUNT = {"amd64": "rdx", "arm64": "x2"}
"""The third argument."""
_SYSTEM_CALLS = {"amd64": "do_syscall_64", "arm64": "do_el0_svc"}
_CALLER = {"amd64": "do_syscall_64", "arm64": "__arm64_sys_read"}
"""Of ksys_read: on amd64 a wrapper jumps there."""
_UNWRITTEN = "X is not written: a probe has replaced what is there; disable it, or write elsewhere"
_UNSTOPPED = (
    "no breakpoint at X: it is in the middle of instructions that a probe has replaced; one at the "
    "probe's own address works, or after them"
)
_HARM = re.compile(b"Oops|BUG:|WARNING:|Internal error|general protection|Call [Tt]race")
_STACK, _PAGE = 1024, 4096
_STOPS, _STEPS, _CALLS = 100, 12, 20


@pytest.fixture(scope="module")
def booted(arch: str) -> Generator[GuestSession]:
    with kprobes.boot(MachineOptions(arch=arch)) as session:
        yield session


@pytest.fixture
def kernel(booted: GuestSession) -> Generator[GuestSession]:
    """What runs under load while a test has it."""
    job = booted.start(_LOAD)
    yield booted
    job.kill()
    booted.options = Options()
    assert not [each.text for each in booted.log() if _HARM.search(each.text)]
    booted.probe("\n".join(f"-:{each.event}" for each in booted.definitions))


@pytest.fixture
def kprobe(tmp_path: Path) -> Generator[Command]:
    """The command, with journals of this test's own."""
    with Command(tmp_path / "state") as command:
        yield command


@contextmanager
def joined(kernel: GuestSession, directory: Path) -> Generator[Stub]:
    """Yield a debugger that has joined a session: the guest stands."""
    with (
        kernel.gdbserver(str(directory / "gdb.sock")) as server,
        Stub.open(server.address, timeout_s=_WAIT_S) as debugger,
    ):
        yield debugger


def stop_at(debugger: Stub) -> int:
    """Let the guest run until it comes to a breakpoint; return the vCPU, which stands there."""
    debugger.resume()
    reply = debugger.wait(_WAIT_S)
    assert reply is not None
    assert reply.signal == SIGTRAP
    assert reply.cpu is not None
    return reply.cpu


def step(debugger: Stub, cpu: int) -> None:
    """Make a step, instead of which the stop may come of another vCPU that is at a breakpoint."""
    while debugger.step(cpu).cpu != cpu:
        pass


def step_over(debugger: Stub, cpu: int, addr: int) -> None:
    """Leave a breakpoint as debuggers do."""
    debugger.remove_breakpoint(addr)
    step(debugger, cpu)
    debugger.insert_breakpoint(addr)


def middle_of(kernel: GuestSession, first: int = 8) -> str:
    """Return a place in the middle of vfs_read that can be probed."""
    for offset in range(first, 120):
        try:
            kernel.probe(f"p:middle vfs_read+{offset}")
        except (DefinitionError, RefusedError):
            continue
        kernel.probe("-:middle")
        return f"vfs_read+{offset}"
    raise AssertionError("no place in the middle")


def told(probe: TraceProbe) -> int:
    """Return how many hits an event has had where the guest stands: it is counted soon."""
    time.sleep(1)
    return probe.hits


def chosen(kernel: GuestSession, **options: object) -> None:
    kernel.options = replace(kernel.options, **options)


def site_of(kernel: GuestSession) -> Site:
    """Return the only site that is armed."""
    (plan,) = [plan for plan in kernel.driver.plans if plan.probes]
    return plan.site


def words_at(data: bytes) -> set[int]:
    """Return the words of a stack, as addresses of the kernel's where they have a signature."""
    signed = np.uint64(0xFFFF << 48)
    return set((np.frombuffer(data, np.uint64) | signed).tolist())


def test_text_is_as_if_nothing_were_probed(kernel: GuestSession, tmp_path: Path) -> None:
    start = kernel.address("vfs_read")
    before = kernel.read(start, 256)
    kernel.probe("p:entry vfs_read")
    kernel.probe(f"p:middle {middle_of(kernel)}")

    with kernel.record(), joined(kernel, tmp_path) as debugger:
        assert kernel.read(start, 256) != before
        assert debugger.read(start, 256) == before
        assert all(debugger.read(start + at, 1) == before[at : at + 1] for at in range(64))
        assert debugger.read(start + 3, 200) == before[3:203]


@pytest.mark.parametrize("strategy", [None, Strategy.JUMP, Strategy.BREAKPOINT])
def test_breakpoints_at_probed_places_and_steps_from_there_lose_no_hit(
    kernel: GuestSession, tmp_path: Path, arch: str, strategy: Strategy | None
) -> None:
    chosen(kernel, strategy=strategy)
    probe = kernel.probe(f"p:at {'vfs_read' if strategy is None else middle_of(kernel)}")
    with kernel.record():
        site = site_of(kernel)
    with joined(kernel, tmp_path) as debugger:
        debugger.insert_breakpoint(site.addr)
        cpu = stop_at(debugger)
        debugger.remove_breakpoint(site.addr)
        step(debugger, cpu)
        unprobed = debugger.registers(cpu)[_PC[arch]]

    with kernel.record() as trace, joined(kernel, tmp_path) as debugger:
        assert strategy in (None, site_of(kernel).strategy)
        recorded = told(probe)
        debugger.insert_breakpoint(site.addr)
        for _ in range(_STEPS):
            cpu = stop_at(debugger)
            assert debugger.registers(cpu)[_PC[arch]] == site.addr
            step_over(debugger, cpu, site.addr)
            after = debugger.registers(cpu)[_PC[arch]]
            if site.displaced is None or site.displaced.count == 1:
                assert kernel.symbol(after) == kernel.symbol(unprobed)
            else:
                assert site.addr < after <= site.addr + len(site.old)
        debugger.remove_breakpoint(site.addr)
        assert told(probe) - recorded == _STEPS

    assert len(trace["at"]) >= _STEPS
    assert kernel.run("echo well", timeout_s=_WAIT_S).output == b"well\n"


def test_registers_and_stacks_are_as_if_no_call_were_taken_over(
    kernel: GuestSession, tmp_path: Path, arch: str
) -> None:
    chosen(kernel, return_method=ReturnMethod.RETHOOK)
    kernel.probe("r:got ksys_read")
    read = kernel.address("vfs_read")

    with kernel.record() as trace, joined(kernel, tmp_path) as debugger:
        tables = kernel.driver.view.trampolines
        assert len(tables) == 1
        debugger.insert_breakpoint(read)
        for _ in range(10):
            cpu = stop_at(debugger)
            stack = debugger.registers(cpu)[_SP[arch]] & -8
            size = min(_STACK, -stack % _PAGE)
            held, shown = (
                words_at(kernel.read(stack, size)),
                words_at(debugger.read(stack, size, cpu=cpu)),
            )
            assert tables & held
            assert not tables & shown
            callers = {kernel.symbol(word).partition("+")[0] for word in shown - held}
            assert callers == {_CALLER[arch]}
            step_over(debugger, cpu, read)

    assert len(trace["got"]) > 0
    assert kernel.run("echo well", timeout_s=_WAIT_S).output == b"well\n"


@pytest.mark.arches("arm64")
def test_a_link_register_has_the_caller_that_a_call_was_taken_over_from(
    kernel: GuestSession, tmp_path: Path
) -> None:
    chosen(kernel, return_method=ReturnMethod.RETHOOK)
    kernel.probe("r:got vfs_read")
    inside = kernel.address("vfs_read") + 12

    with kernel.record(), joined(kernel, tmp_path) as debugger:
        tables = kernel.driver.view.trampolines
        debugger.insert_breakpoint(inside)
        for _ in range(10):
            cpu = stop_at(debugger)
            link = debugger.registers(cpu)["x30"]
            assert link == debugger.register(cpu, "x30")
            assert not tables & words_at(link.to_bytes(8, "little"))
            # What was shown is written back, and the call still returns to us, signed as it was.
            debugger.set_registers(cpu, {"x30": link})
            step_over(debugger, cpu, inside)


def test_what_a_probe_has_replaced_is_not_written_nor_stopped_in(
    kernel: GuestSession, tmp_path: Path
) -> None:
    warned = list[str]()
    chosen(kernel, strategy=Strategy.JUMP, warn=warned.append)
    kernel.probe(f"p:middle {middle_of(kernel)}")

    with kernel.record(), joined(kernel, tmp_path) as debugger:
        site = site_of(kernel)
        with pytest.raises(TargetError, match="E01"):
            debugger.write(site.addr, b"\xcc")
        with pytest.raises(TargetError, match="E01"):
            debugger.write(site.addr - 2, bytes(4))
        with pytest.raises(TargetError, match="E01"):
            debugger.insert_breakpoint(site.addr + 1)
        assert debugger.read(site.addr, len(site.old)) == site.old
    shown = [re.sub("0x[0-9a-f]+", "X", each) for each in warned]
    assert shown == [f"the debugger: {each}" for each in (_UNWRITTEN, _UNWRITTEN, _UNSTOPPED)]


def test_probes_come_and_go_while_a_debugger_stops_where_calls_begin(
    kernel: GuestSession, tmp_path: Path, arch: str
) -> None:
    kernel.probe("p vfs_read")
    busy = kernel.address(_SYSTEM_CALLS[arch])
    stops, is_over = list[int](), threading.Event()

    with joined(kernel, tmp_path) as debugger:
        debugger.insert_breakpoint(busy)

        def stop_and_go() -> None:
            while not is_over.is_set():
                cpu = stop_at(debugger)
                stops.append(cpu)
                step_over(debugger, cpu, busy)
            debugger.remove_breakpoint(busy)
            debugger.resume()

        thread = threading.Thread(target=stop_and_go)
        thread.start()
        for number in range(_CALLS):
            # In a task that comes by, where the debugger stops it, too.
            assert kernel.call("int_sqrt", number * number, timeout_s=_WAIT_S) == number
        for _ in range(3):
            with kernel.record() as trace:
                assert becomes_true(lambda: kernel.select().hits > 3, _WAIT_S)
            assert len(trace) > 3
        is_over.set()
        thread.join(_WAIT_S)
        assert not thread.is_alive()
    assert len(stops) > 10


def test_it_is_interrupted_and_stands_until_it_is_let_run(
    kernel: GuestSession, tmp_path: Path
) -> None:
    kernel.probe("p vfs_read")
    with kernel.record(), joined(kernel, tmp_path) as debugger:
        for _ in range(3):
            debugger.resume()
            hits = kernel.select().hits
            assert becomes_true(lambda hits=hits: kernel.select().hits > hits, _WAIT_S)
            assert debugger.stop().signal == 2
            stood = told(kernel.select())
            assert told(kernel.select()) == stood


def test_whoever_joins_next_begins_anew(kernel: GuestSession, tmp_path: Path) -> None:
    read = kernel.address("vfs_read")
    with kernel.gdbserver(str(tmp_path / "gdb.sock")) as server:
        assert repr(server) == f"<GdbServer at {server.address}: no debugger>"
        first = Stub.open(server.address)
        assert repr(server).endswith(": a debugger is attached>")
        first.insert_breakpoint(read)
        # It hangs up with its breakpoint there, while the guest stands.
        first.close()
        with Stub.open(server.address) as second:
            second.resume()
            assert second.wait(0.5) is None
    assert not (tmp_path / "gdb.sock").exists()
    assert kernel.run("echo well", timeout_s=_WAIT_S).output == b"well\n"


@pytest.mark.parametrize(
    ("listen", "message"),
    [
        ("0.0.0.0:4444", "anybody could do anything"),
        ("a:b:c", "neither the path of a socket nor HOST:PORT"),
        ("/nonexistent/gdb.sock", "No such file"),
        ("./", "Address already in use"),
    ],
)
def test_what_cannot_be_listened_at_is_refused(
    kernel: GuestSession, listen: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        kernel.gdbserver(listen)


_GDB = """
set pagination off
set confirm off
set remotetimeout 300
target remote {address}
python
import gdb
place = {place}
gdb.execute(f"break *{{place:#x}}", to_string=True)
counts = []
for _ in range({stops}):
    gdb.execute("continue", to_string=True)
    frame = gdb.selected_frame()
    assert int(frame.pc()) == place, frame.pc()
    counts.append(int(frame.read_register("{count}")))
print("counts:", sorted(set(counts)))
gdb.execute("delete")
gdb.execute("watch *(unsigned long *){jiffies:#x}", to_string=True)
before = int(gdb.parse_and_eval("*(unsigned long *){jiffies:#x}"))
ticks = [0]
for _ in range(3):
    gdb.execute("continue", to_string=True)
    ticks.append(int(gdb.parse_and_eval("*(unsigned long *){jiffies:#x}")) - before)
print("ticks:", all(then < now for then, now in zip(ticks, ticks[1:])))
gdb.execute("delete")
print("text:", gdb.selected_inferior().read_memory(place, 32).tobytes().hex())
print("monitor:", gdb.execute("monitor info status", to_string=True).strip())
print("monitor:", gdb.execute("monitor cont", to_string=True).strip())
end
detach
"""


def test_gdb_stops_a_hundred_times_while_ten_probes_record(
    kernel: GuestSession, tmp_path: Path, arch: str
) -> None:
    place = kernel.address("vfs_read")
    text = kernel.read(place, 32)
    names = "vfs_read vfs_write vfs_open ksys_read do_sys_openat2 __fdget_pos rw_verify_area "
    names += "do_filp_open path_openat filp_close"
    kernel.probe("\n".join(f"p:{name}_ {name}" for name in names.split()))
    chosen(kernel, return_method=ReturnMethod.RETHOOK)
    kernel.probe("r:got vfs_read got=$retval:s64")
    script = tmp_path / "script"

    with kernel.gdbserver("localhost:0") as server, kernel.record() as trace:
        words = {"address": server.address, "place": place, "stops": _STOPS, "count": _COUNT[arch]}
        script.write_text(_GDB.format(**words, jiffies=kernel.address("jiffies_64")))
        said = subprocess.run(
            ["gdb-multiarch", "-q", "-nx", "-batch", "-x", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_WAIT_S,
            check=False,
        ).stdout
        hits = kernel.select("got").hits
        assert becomes_true(lambda: kernel.select("got").hits > hits, _WAIT_S)

    assert re.search(r"^counts: \[(\d+, )*1024(, \d+)*\]$", said, re.MULTILINE), said
    assert re.search(r"^ticks: True$", said, re.MULTILINE), said
    assert f"text: {text.hex()}" in said
    assert re.search(r"^monitor: VM status: paused", said, re.MULTILINE), said
    assert "monitor: the guest is stopped for the debugger: use gdb's `continue`" in said
    entered, got = len(trace["vfs_read_"]), len(trace["got"])
    assert entered >= _STOPS
    # Calls that were in progress at the beginning, and at the end.
    assert abs(entered - got) <= 20
    assert trace.counts.lost == 0
    assert kernel.run("echo well", timeout_s=_WAIT_S).output == b"well\n"


def test_a_guest_runs_on_when_the_trace_ends_that_a_debugger_has_stopped(
    kprobe: Command, tmp_path: Path, arch: str
) -> None:
    target, listen = str(tmp_path / "gdb.sock"), tmp_path / "debugger.sock"
    stub = "-gdb", "unix:gdb.sock,server=on,wait=off"
    with plain_guest(tmp_path, *stub, arch=arch) as guest:
        traced = kprobe.start(
            *("gdbserver", "-t", target, "--listen", str(listen), "p vfs_write", "--duration", "4s")
        )
        wait_for_words(traced, b"Ctrl-C ends")
        debugger = Stub.open(str(listen), timeout_s=_WAIT_S)
        debugger.insert_breakpoint(debugger.registers(1)[_PC[arch]])
        ticks = guest.ticks()

        assert traced.wait(_WAIT_S) == 0

        assert guest.wait_for_ticks(ticks + 3, _WAIT_S)
        debugger.close()
        assert kprobe("status", "--target", target).returncode == 0
        assert kprobe.is_idle(target)


def test_a_guest_runs_on_when_a_tracer_is_killed_whose_debugger_has_stopped_it(
    kprobe: Command, tmp_path: Path, arch: str
) -> None:
    target, listen = str(tmp_path / "gdb.sock"), tmp_path / "debugger.sock"
    stub = "-gdb", "unix:gdb.sock,server=on,wait=off"
    with plain_guest(tmp_path, *stub, arch=arch) as guest:
        for place in ("vfs_write", None):
            words = () if place is None else (f"p {place}",)
            traced = kprobe.start("gdbserver", "-t", target, "--listen", str(listen), *words)
            wait_for_words(traced, b"joins" if place is None else b"Ctrl-C ends")
            debugger = Stub.open(str(listen), timeout_s=_WAIT_S)
            debugger.insert_breakpoint(debugger.registers(1)[_PC[arch]])
            # Two vCPUs, one of which may be on the way to the breakpoint.
            ticks = guest.ticks()
            traced.kill()
            traced.wait()

            assert guest.wait_for_ticks(ticks + 3, _WAIT_S)
            debugger.close()
            assert becomes_true(lambda: kprobe.is_idle(target), _WAIT_S)
