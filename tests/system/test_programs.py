"""Addresses of programs, beside what the guest says of its own tasks."""

import io
import re
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

import kprobes
from kprobes.errors import DefinitionError
from kprobes.flame_graph import stacks_of
from kprobes.guest.programs import Programs
from kprobes.model.abi import WALK_USER_STACK
from kprobes.model.text_options import text_options
from kprobes.open import GuestSession, remember_programs
from kprobes.sinks.text import TextSink
from kprobes.trace import Trace
from kprobes.transport.qemu_command import MachineOptions
from tests.build.programs import PAGE, framed, framed_functions, mapping, with_functions
from tests.build.waiting import becomes_true
from tests.system.conftest import SUITES
from tests.system.oracle import TRACING, Tracefs

pytestmark = [
    pytest.mark.guest,
    pytest.mark.arches("amd64", "arm64"),
    pytest.mark.kernels("5.10", "7.x"),
]

_PROGRAM, _DEEP = "/mapping", "/tmp/a/b/mapped"
_FRAMED, _CALL, _DEPTH = "/deep", "getppid", 5
_ADDR, _COUNT = 0x1000_0000, 400
_MAPPED = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \d+ *(\S.*)?")
_READ = "p:{}read vfs_read"


@pytest.fixture(scope="module", params=["5.10", "6.1", "7.x"])
def guest(request: pytest.FixtureRequest, arch: str) -> Generator[GuestSession]:
    files = {_PROGRAM: mapping(_DEEP, _ADDR, _COUNT, arch=arch)}
    files[_FRAMED] = framed(_CALL, _DEPTH, arch=arch)
    options = MachineOptions(suite=SUITES[request.param], arch=arch, files=files)
    with kprobes.boot(options) as session:
        made = "mkdir /tmp/a; mount -t tmpfs none /tmp/a; mkdir /tmp/a/b"
        made += f"; chmod 755 {_PROGRAM} {_FRAMED}"
        assert session.run(f"{made}; head -c 4096 /bin/busybox > {_DEEP}").status == 0
        yield session


def mappings(guest: GuestSession, pid: int) -> Sequence[tuple[int, int, str]]:
    """Return (start, end, path or "") of a task's mappings, as its guest says."""
    text = guest.run(f"cat /proc/{pid}/maps").output.decode()
    found = [_MAPPED.fullmatch(line) for line in text.splitlines()]
    return [(int(m[1], 16), int(m[2], 16), m[3] or "") for m in found if m is not None]


@pytest.fixture
def pid(guest: GuestSession) -> Generator[int]:
    """Return a task that has mapped a file many times, and waits."""
    job = guest.start(f"exec sleep 1000 | {_PROGRAM}")
    try:
        assert becomes_true(lambda: guest.run("pidof mapping").output)
        found = int(guest.run("pidof mapping").output)
        assert becomes_true(lambda: len(mappings(guest, found)) >= _COUNT)
        yield found
    finally:
        job.kill()


def test_each_address_is_in_the_file_that_the_guest_has_there(
    guest: GuestSession, pid: int
) -> None:
    programs, listed = Programs(lambda: guest.driver.guest), mappings(guest, pid)

    def expected(addr: int) -> bytes | None:
        for start, end, path in listed:
            if start <= addr < end:
                return f"{path}[+{addr - start:#x}]".encode() if path.startswith("/") else None
        return None

    asked = [a + off for start, end, _ in listed for a in (start, end) for off in (-1, 0, 0x123)]
    assert {a: programs(pid, a) for a in asked} == {a: expected(a) for a in asked}
    assert programs(pid, _ADDR + 2 * PAGE * (_COUNT - 1)) == f"{_DEEP}[+0x0]".encode()


def test_a_file_that_is_gone_is_said_to_be_and_so_is_a_task(guest: GuestSession, pid: int) -> None:
    assert guest.run(f"cp {_DEEP} /tmp/kept; rm {_DEEP}").status == 0
    try:
        assert (
            Programs(lambda: guest.driver.guest)(pid, _ADDR) == f"{_DEEP} (deleted)[+0x0]".encode()
        )
    finally:
        assert guest.run(f"mv /tmp/kept {_DEEP}").status == 0
    programs = Programs(lambda: guest.driver.guest)
    assert programs(2, _ADDR) is None
    assert programs(1 << 22, _ADDR) is None
    assert programs(pid, _ADDR) is not None
    guest.run(f"kill {pid}")
    assert becomes_true(lambda: not mappings(guest, pid))
    # Events of a task may be printed after its end; another look would find nothing.
    assert programs(pid, _ADDR) is not None
    assert Programs(lambda: guest.driver.guest)(pid, _ADDR) is None


def text_of(guest: GuestSession, trace: Trace, *options: str) -> str:
    """Return a recording as it is printed with some options."""
    out = io.BytesIO()
    sink = TextSink(out, replace(guest.source, options=text_options(options)))
    for events in trace.events:
        sink.write(events)
    return out.getvalue().decode()


@pytest.mark.parametrize("options", [("sym-userobj",), ("sym-userobj", "sym-addr")], ids="-".join)
def test_the_option_has_the_kernels_own_lines(guest: GuestSession, options: Sequence[str]) -> None:
    if guest.kernel.symbols.find(WALK_USER_STACK) is None:
        # Of arm64 since 6.8.
        with pytest.raises(DefinitionError, match="CONFIG_USER_STACKTRACE_SUPPORT"):
            guest.probe(_READ.format(""), userstacktrace=True)
        return
    probe = guest.probe(_READ.format(""), userstacktrace=True)
    tracefs = Tracefs(guest)
    tracefs.arm([_READ.format("theirs/")], buffer_kib=4096)
    job = guest.start("while :; do read -r line; sleep 0.05; done </proc/version")
    try:
        filters = f"echo 'common_pid == {job.pid}' > events/theirs/read/filter"
        tracefs.run(f"{filters}; echo 1 > options/userstacktrace; : > trace")
        with guest.record(probe) as trace:
            tracefs.start()
            assert guest.run("sleep 0.5").status == 0
            tracefs.stop()
        on = "; ".join(f"echo {each} > trace_options" for each in options)
        off = "; ".join(f"echo no{each} > trace_options" for each in options)
        native = guest.run(f"cd {TRACING}; {on}; cat trace; {off}").output.decode()
        ours = text_of(guest, trace, *options)
    finally:
        job.kill()
        probe.delete()
        tracefs.run("echo 0 > options/userstacktrace")
        tracefs.disarm()

    theirs = [line for line in native.splitlines() if line.startswith(" => ")]
    assert len(theirs) > 3
    # Ours has other tasks' besides.
    left = iter(line for line in ours.splitlines() if line.startswith(" => "))
    assert all(line in left for line in theirs)
    assert all(line.startswith(" => /bin/busybox[+0x") for line in theirs)


def test_a_program_that_has_ended_is_known_where_its_end_was_waited_for(
    guest: GuestSession,
) -> None:
    if guest.kernel.symbols.find(WALK_USER_STACK) is None:
        return
    remember_programs(guest)
    (ends,) = guest.probes
    probe = guest.probe(_READ.format(""), userstacktrace=True)
    try:
        with guest.record(probe) as trace:
            for _ in range(20):
                assert guest.run("head -c 20 /proc/version").status == 0
        ours = text_of(guest, trace, "sym-userobj")
    finally:
        probe.delete()
        ends.unregister()

    pids = set(re.findall(r" head-(\d+) .*: read: ", ours))
    shown = re.findall(r" head-(\d+) .*<user stack trace>\n => (\S+)\[", ours)
    assert len(pids) >= 20
    assert dict(shown) == dict.fromkeys(pids, "/bin/busybox")
    assert ends.errors == 0
    assert ends.nmissed == 0


def _nowhere(path: bytes, offset: int) -> None:
    del path, offset


def test_functions_of_programs_are_named_in_counts_and_flame_graphs(
    guest: GuestSession, arch: str, tmp_path: Path
) -> None:
    if guest.kernel.symbols.find(WALK_USER_STACK) is None:
        return
    functions = framed_functions(_CALL, _DEPTH, arch=arch)
    code = with_functions(framed(_CALL, _DEPTH, arch=arch), functions)
    (tmp_path / "deep").write_bytes(code)
    remember_programs(guest, tmp_path)
    (ends,) = guest.probes
    entry = {"amd64": "__x64_sys", "arm64": "__arm64_sys"}[arch]
    probe = guest.probe(f"p:asks {entry}_{_CALL}", triggers=["hist:keys=comm,ustack"])
    try:
        with guest.record(probe):
            for _ in range(3):
                # A program is another one after its exec, whatever its process was before.
                assert guest.run(f"sh -c 'exec {_FRAMED}'").status == 0
        (histogram,) = probe.histograms
        shown, drawn = str(histogram), stacks_of(histogram)
    finally:
        probe.delete()
        ends.unregister()
        guest.driver.programs.find_function = _nowhere

    names = ["inner", *(f"outer{n}" for n in range(_DEPTH - 1, 0, -1)), "start"]
    frames = re.findall(r"^ +(\w+)\+0x\w+/0x\w+ \[/deep\]$", shown, re.MULTILINE)
    assert frames == 3 * names
    chain = "deep", *(f"{name} [/deep]" for name in reversed(names))
    assert drawn[chain] == 3
    # What has no symbols is named by its file; a program that was replaced had its own.
    others = {name for frames in drawn if frames != chain for name in frames}
    assert others == {"sh", "[busybox]"}
