"""Stopping a guest at a breakpoint: it stands still, shows what is there, and goes on."""

import re
import time
from collections.abc import Generator
from pathlib import Path

import pytest

import kprobes
from kprobes.errors import DefinitionError, UsageError
from kprobes.handlers.registers import Registers
from kprobes.open import GuestSession
from kprobes.transport.agent import Job
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions
from tests.build.command import Command

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

_WAIT_S = 300
_WRITER = "while :; do echo hello > /tmp/written; head -c 7 /proc/version > /dev/null; done"
_STACK = {
    "amd64": ["vfs_write", "ksys_write", "do_syscall_64"],
    "arm64": ["vfs_write", "ksys_write", "__arm64_sys_write"],
}


@pytest.fixture(scope="module")
def kernel(arch: str) -> Generator[GuestSession]:
    with kprobes.boot(MachineOptions(arch=arch)) as session:
        yield session


@pytest.fixture
def writer(kernel: GuestSession) -> Generator[Job]:
    job = kernel.start(_WRITER)
    yield job
    job.kill()


def writes_six(regs: Registers) -> bool:
    """Whether a call of vfs_write is the writer's: hello, and a newline."""
    return regs.args.count == 6


def stands(kernel: GuestSession) -> bool:
    """Whether no tick comes for a while."""
    before = kernel.drgn["jiffies_64"].value_()
    time.sleep(0.3)
    return kernel.drgn["jiffies_64"].value_() == before


def goes_on(kernel: GuestSession) -> bool:
    """Whether a tick comes, of which a guest that has nothing to do, or no CPU, may have few."""
    before, deadline = kernel.drgn["jiffies_64"].value_(), time.monotonic() + _WAIT_S
    while kernel.drgn["jiffies_64"].value_() == before:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_guest_stands_where_the_condition_holds_and_goes_on(
    kernel: GuestSession, writer: Job, arch: str
) -> None:
    with kernel.breakpoint("vfs_write", writes_six) as point:
        for _ in range(3):
            stop = point.wait(_WAIT_S)
            assert stop is not None
            with stop:
                assert stands(kernel)
                assert stop.regs.args.count == 6
                assert stop.regs.args.buf.drgn_().value_() == stop.regs.args.buf.address_
                assert stop.regs.args.file.drgn_().f_path.dentry.d_name.name.string_() == b"written"
                assert stop.regs.task.drgn_().comm.string_() == b"sh"
                assert stop.regs.task.pid == writer.pid
                assert [frame.name for frame in stop.stack()][:3] == _STACK[arch]
            # No stop is waited for: hits go on.
            assert goes_on(kernel)
    assert re.fullmatch(r"<Breakpoint at vfs_write: [1-9]\d* hits>", repr(point))
    assert kernel.run("echo on", timeout_s=_WAIT_S).output == b"on\n"


def test_what_is_changed_while_it_stands_is_what_the_cpu_goes_on_with(
    kernel: GuestSession, writer: Job
) -> None:
    def six(regs: Registers) -> bool:
        return regs.task.pid == writer.pid and regs.args.count == 6

    wrote = kernel.probe("p:wrote vfs_write count=$arg3:u64", filter=f"common_pid == {writer.pid}")
    with kernel.record(wrote) as trace, kernel.breakpoint("vfs_write", six) as point:
        stop = point.wait(_WAIT_S)
        assert stop is not None
        stop.regs.args.count = 2
        stop.go()
        # Once is enough.
        stop.go()

        again = point.wait(_WAIT_S)

        assert again is not None
        stop.go()
        assert stands(kernel)
    wrote.delete()
    # It has written the rest meanwhile; what nobody waits for is not stopped at.
    assert trace["wrote"]["count"].tolist().count(4) == 1


def test_one_that_is_not_hit_is_waited_for_as_long_as_it_is_meant(kernel: GuestSession) -> None:
    point = kernel.breakpoint("vfs_write", lambda _: False)

    assert point.wait(0.2) is None
    assert goes_on(kernel)
    point.close()
    point.close()
    with pytest.raises(UsageError, match="closed"):
        point.wait()


@pytest.mark.usefixtures("writer")
def test_where_it_stands_already_it_is_not_waited_for(kernel: GuestSession) -> None:
    point = kernel.breakpoint("vfs_write", writes_six)
    assert point.wait(_WAIT_S) is not None

    with pytest.raises(UsageError, match="let it go on first"):
        point.wait()
    assert stands(kernel)
    point.close()

    assert goes_on(kernel)


@pytest.mark.usefixtures("writer")
def test_a_condition_that_fails_stops_nothing(
    kernel: GuestSession, caplog: pytest.LogCaptureFixture
) -> None:
    with kernel.breakpoint("vfs_write", lambda regs: regs.args.nosuch) as point:
        assert point.wait(1) is None
    assert "nosuch" in caplog.text
    assert goes_on(kernel)


def test_there_is_none_where_no_probe_can_be(kernel: GuestSession) -> None:
    with pytest.raises(DefinitionError):
        kernel.breakpoint("nosuch_function")


def test_a_guest_whose_debugger_is_killed_while_it_stands_runs_on(
    guest: Machine, tmp_path: Path
) -> None:
    script = tmp_path / "stop.py"
    script.write_text(
        "stop = breakpoint('vfs_write').wait()\n"
        "print('stands', flush=True)\n"
        "import time; time.sleep(1000)\n"
    )
    job = guest.start(_WRITER)
    try:
        with Command(tmp_path / "state") as command:
            process = command.start("repl", "-t", f"qemu:{guest.stub_address}", str(script))
            assert process.stdout is not None
            assert process.stdout.readline() == b"stands\n"

            process.kill()
            process.wait()

            assert guest.run("echo on", 60).output == b"on\n"
            deadline = time.monotonic() + 60
            while not command.is_idle(f"qemu:{guest.stub_address}"):
                assert time.monotonic() < deadline
    finally:
        job.kill()
