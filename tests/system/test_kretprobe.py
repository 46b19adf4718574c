"""Python when functions of real kernels return: the kernel's own return probes are the oracle."""

import re
import time
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import kprobes
from kprobes import Kretprobe
from kprobes.arch.insn import Syntax
from kprobes.handlers.probe import Instance
from kprobes.handlers.registers import Registers
from kprobes.model.plan import ReturnMethod
from kprobes.open import GuestSession
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions
from tests.build.dialect import DIALECTS, dialect_of
from tests.build.victim import Home, Tracer, is_complaint, settle, witness_of
from tests.build.waiting import PATIENCE_S, wait_until
from tests.system.handling import PARENT, READ, comm, emptied, getppid, output
from tests.system.oracle import Tracefs

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

RETURN_METHODS = (None, ReturnMethod.RETHOOK)
_COMPARED = ("do_sys_openat2", "vfs_open", "filp_close", "getname_flags", "security_file_open")
"""Returns, tail jumps, and both."""
_NATIVE = re.compile(r"^ +cat-(\d+) .*: r(\d+): \(.*\) ret=0x([0-9a-f]+)$", re.MULTILINE)
_STORES = {
    "amd64": ("49894424", "488943", "488945"),
    # str x0, [x19]
    "arm64": ("600200f9",),
}
"""How a system call's caller stores what it returns."""
_STORED_AT = {"amd64": 80, "arm64": 0}
"""Where that goes in struct pt_regs, by which user space goes on."""
_CALLERS = {"amd64": {"do_syscall_64", "x64_sys_call"}, "arm64": {"invoke_syscall"}}


@pytest.fixture(scope="module", params=["bookworm"])
def shared(request: pytest.FixtureRequest, arch: str) -> Generator[GuestSession]:
    with kprobes.boot(MachineOptions(arch=arch, suite=request.param)) as session:
        yield session


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def kernel(shared: GuestSession, told: list[str]) -> Generator[GuestSession]:
    """A guest whose handlers are gone, and whose text is as before, when a test ends."""
    yield from emptied(shared, told)


@pytest.fixture(scope="module", params=["bullseye", "bookworm-backports", "sid"])
def other(request: pytest.FixtureRequest, arch: str) -> Generator[GuestSession]:
    with kprobes.boot(MachineOptions(arch=arch, suite=request.param)) as session:
        yield session


def nothing(instance: Instance, regs: Registers) -> None: ...


def compare_with_native(session: GuestSession, functions: Sequence[str]) -> int:
    """Check that handlers get what the kernel's own return probes record; return how much."""
    native, value = Tracefs(session), dialect_of(session).value
    native.arm([f"r:r{n} {f} ret=$retval:x64" for n, f in enumerate(functions)], buffer_kib=1024)
    hits: list[tuple[int, int, int]] = []
    cats: set[int] = set()

    def probe(number: int, function: str) -> Kretprobe:
        def handler(instance: Instance, regs: Registers) -> None:
            hits.append((regs.task.pid, number, regs[value]))
            cats.update({regs.task.pid} if comm(regs) == "cat" else ())

        return Kretprobe(symbol_name=function, handler=handler, timeout_s=5.0)

    probes = [probe(n, function) for n, function in enumerate(functions)]
    session.register_kretprobes(probes)
    session.run(list(READ))
    session.unregister_kretprobes(probes)
    text = native.read().text
    native.disarm()
    recorded = [(int(pid), int(n), int(value, 16)) for pid, n, value in _NATIVE.findall(text)]
    # Others have the same name: what reads the trace.
    (pid,) = cats
    seen = [each for each in hits if each[0] == pid]
    assert seen == [each for each in recorded if each[0] == pid]
    assert all((p.nmissed, p.errors) == (0, 0) for p in probes)
    # 5.10 has no use for one of them here.
    assert len({number for _, number, _ in seen}) >= len(functions) - 1
    return len(seen)


@pytest.mark.parametrize("return_method", RETURN_METHODS)
def test_handlers_get_what_the_kernel_s_own_return_probes_record(
    kernel: GuestSession, return_method: ReturnMethod | None
) -> None:
    kernel.options = replace(kernel.options, return_method=return_method)

    assert compare_with_native(kernel, _COMPARED) > 30


@pytest.mark.parametrize("return_method", RETURN_METHODS)
def test_other_kernels_agree(
    other: GuestSession, return_method: ReturnMethod | None, told: list[str]
) -> None:
    for session in emptied(other, told):
        session.options = replace(session.options, return_method=return_method)
        assert compare_with_native(session, _COMPARED) > 20
        check_data(session)
    assert told == []


def check_data(session: GuestSession) -> None:
    """Check that every call's data of its entry is there at its own return."""
    opened: list[tuple[str, bytes, int]] = []

    def entry(instance: Instance, regs: Registers) -> bool:
        if comm(regs) != "cat":
            return True
        path = regs.args.filename.string()
        instance.data[: len(path)] = path.encode()
        instance.slot = regs.sp
        return False

    def handler(instance: Instance, regs: Registers) -> None:
        assert regs.sp == instance.slot + dialect_of(session).pushed
        name = bytes(instance.data).rstrip(b"\0")
        opened.append((comm(regs), name, regs.retval))

    probe = Kretprobe(
        symbol_name="do_sys_openat2", handler=handler, entry_handler=entry, data_size=64
    )
    with session.register_kretprobe(probe):
        session.run(list(READ))

    files = [each for each in opened if each[1] in {name.encode() for name in READ[1:]}]
    assert files == [
        ("cat", b"/proc/version", 3),
        ("cat", b"/no/such/file", -2),
        ("cat", b"/etc/passwd", 3),
    ]
    assert (probe.errors, probe.nmissed, len(probe.instances)) == (0, 0, 0)


@pytest.mark.parametrize("return_method", RETURN_METHODS)
def test_an_entry_handler_keeps_data_and_declines(
    kernel: GuestSession, return_method: ReturnMethod | None
) -> None:
    kernel.options = replace(kernel.options, return_method=return_method)

    check_data(kernel)


@pytest.mark.parametrize("return_method", RETURN_METHODS)
def test_arguments_come_with_what_is_returned(
    kernel: GuestSession, return_method: ReturnMethod | None
) -> None:
    kernel.options = replace(kernel.options, return_method=return_method)
    seen: list[tuple[str, int, str]] = []

    @kernel.returns("do_sys_openat2")
    def opened(retval: int, filename: Any, *, regs: Registers, probe: Kretprobe) -> None:
        if comm(regs) == "cat":
            seen.append((filename.string(), retval, probe.place))

    output(kernel, *READ)

    assert ("/no/such/file", -2, "do_sys_openat2") in seen
    assert ("/etc/passwd", 3, "do_sys_openat2") in seen
    assert (opened.errors, opened.nmissed) == (0, 0)


@pytest.mark.parametrize("return_method", RETURN_METHODS)
def test_what_is_returned_is_changed(
    kernel: GuestSession, return_method: ReturnMethod | None
) -> None:
    kernel.options = replace(kernel.options, return_method=return_method)

    @kernel.returns("do_sys_openat2")
    def opened(retval: int, filename: Any, *, regs: Registers) -> None:
        if comm(regs) == "cat" and filename.string() == "/etc/passwd":
            regs.retval = -13

    found = kernel.run(["cat", "/etc/passwd"])

    assert (found.status, b"Permission denied" in found.output) == (1, True)
    opened.disable()
    assert kernel.run(["cat", "/etc/passwd"]).status == 0


@pytest.mark.parametrize("return_method", RETURN_METHODS)
def test_where_a_function_returns_to_is_shown_and_changed(
    kernel: GuestSession, arch: str, return_method: ReturnMethod | None
) -> None:
    kernel.options = replace(kernel.options, return_method=return_method)
    dialect, callers, kept = dialect_of(kernel), set[str](), set[int]()

    def entry(instance: Instance, regs: Registers) -> None:
        user = regs[dialect.arguments[0]]
        instance.stored = kernel.read_u64(user + _STORED_AT[arch])

    def handler(instance: Instance, regs: Registers) -> None:
        callers.add(kernel.symbol(regs[dialect.pc]).split("+")[0])
        after = behind_store(kernel, arch, regs[dialect.pc])
        if comm(regs) == "sh" and after is not None:
            # What was to be stored is left out.
            regs[dialect.pc] = after
            kept.add(instance.stored & 0xFFFF_FFFF)

    probe = Kretprobe(symbol_name=getppid(kernel), handler=handler, entry_handler=entry)
    with kernel.register_kretprobe(probe):
        shown = output(kernel, *PARENT).split()[0]

    assert callers <= _CALLERS[arch]
    assert int(shown) & 0xFFFF_FFFF in kept
    assert probe.errors == 0


def behind_store(kernel: GuestSession, arch: str, caller: int) -> int | None:
    """Return where code goes on that does not store a system call's result."""
    lines = kernel.driver.guest.arch.listing.lines(kernel.read(caller, 32), caller, Syntax.INTEL)
    stores = tuple(bytes.fromhex(each) for each in _STORES[arch])
    return next(
        (line.addr + len(line.code) for line in lines if line.code.startswith(stores)), None
    )


@pytest.mark.parametrize("return_method", RETURN_METHODS)
def test_definitions_and_handlers_share_a_function_s_returns(
    kernel: GuestSession, return_method: ReturnMethod | None
) -> None:
    kernel.options = replace(kernel.options, return_method=return_method)
    seen: list[int] = []

    @kernel.returns("vfs_open")
    def opened(retval: int, *, regs: Registers) -> None:
        seen.append(regs[dialect_of(kernel).value])

    kernel.probe("r:ours vfs_open ret=$retval:x64 file=$arg2:x64")
    with kernel.record() as trace:
        before = len(seen)
        output(kernel, *READ)
        during = len(seen) - before
    output(kernel, *READ)

    assert during == len(trace) > 2
    assert len(seen) > before + during
    assert opened.nmissed == 0


def test_an_exception_is_told_once_and_changes_nothing(
    kernel: GuestSession, told: list[str]
) -> None:
    @kernel.returns("do_sys_openat2")
    def broken(retval: int, *, regs: Registers) -> None:
        regs.retval = -1
        regs[dialect_of(kernel).pc] = 1
        raise RuntimeError("no")

    assert kernel.run(["cat", "/etc/passwd"]).status == 0

    where = f"do_sys_openat2: handler at {__file__}:"
    assert len(told) == 1
    assert told[0].startswith(where)
    assert told[0].endswith("RuntimeError: no (told once, counted from now on)")
    assert broken.errors == broken.hits >= 1


def test_a_slow_handler_is_counted_and_what_it_says_is_not_heard(
    kernel: GuestSession, told: list[str]
) -> None:
    def slow(instance: Instance, regs: Registers) -> None:
        regs[dialect_of(kernel).value] = 7
        time.sleep(0.4)

    probe = Kretprobe(symbol_name=getppid(kernel), handler=slow, timeout_s=0.05)
    kernel.register_kretprobe(probe)

    def is_told() -> bool:
        missed, found = probe.nmissed, output(kernel, *PARENT).split()[0]
        # A vCPU without a CPU of ours for so long takes the answer that came meanwhile.
        assert found != "7" or probe.nmissed == missed
        return any("took longer than 0.05 s" in line for line in told)

    assert wait_until(is_told) is not None
    assert probe.nmissed >= 1


def test_what_was_missed_stays_known_when_a_recording_takes_new_memory(
    kernel: GuestSession,
) -> None:
    def slow(instance: Instance, regs: Registers) -> None:
        time.sleep(0.3)

    probe = Kretprobe(symbol_name=getppid(kernel), handler=slow, timeout_s=0.02)
    kernel.register_kretprobe(probe)
    assert wait_until(lambda: bool(output(kernel, *PARENT)) and probe.nmissed > 0) is not None
    probe.disable()
    missed = probe.nmissed

    kernel.probe("r vfs_* $arg1")
    with kernel.record():
        output(kernel, *READ)

    assert probe.nmissed == missed


def test_handlers_that_come_while_one_records_have_room(kernel: GuestSession) -> None:
    kernel.probe("p vfs_open")
    with kernel.record() as trace:
        probes = [Kretprobe(symbol_name=name, handler=nothing) for name in _COMPARED]
        kernel.options = replace(kernel.options, return_method=ReturnMethod.RETHOOK)
        kernel.register_kretprobes(probes)
        output(kernel, *READ)

    assert len(trace) > 2
    assert all(probe.hits > 0 for probe in probes)


@pytest.mark.alone
@pytest.mark.parametrize("return_method", ["retinsn", "rethook"])
def test_a_guest_goes_on_when_its_tracer_is_killed_while_a_return_waits(
    tmp_path_factory: pytest.TempPathFactory, arch: str, return_method: str
) -> None:
    home = Home(Path(tmp_path_factory.mktemp("home")))
    with Machine.boot(MachineOptions(arch=arch)) as machine:
        settle(machine)
        target = str(machine.stub_address)
        witness = witness_of(target, home)
        options = (
            "--asks-at-return",
            f"{DIALECTS[arch].syscall}getppid",
            "--returns",
            return_method,
        )
        with Tracer(home, target, "p vfs_read\n", *options) as tracer:
            tracer.wait_for("armed")
            running = machine.start(["sh", "-c", "for i in 1 2 3 4; do sh -c 'echo $PPID'; done"])
            tracer.wait_for("waits")

            tracer.kill()

            assert running.wait(PATIENCE_S).status == 0
        assert wait_until(witness.is_pristine) is not None, witness.changes()
        said = machine.run("dmesg", 20).output.decode().splitlines()
        assert [line for line in said if is_complaint(line)] == []
