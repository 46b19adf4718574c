"""Booting with a shell script in QEMU's place: what goes wrong, and that nothing is left."""

import os
import signal
import struct
import time
from pathlib import Path

import pytest

from kprobes.errors import GuestGoneError, TargetError, UnreachableError
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions

# Finds the agent's FIFOs and the console's log in QEMU's own options.
_PLACES = """#!/bin/sh
directory=$(expr "$*" : '.*path=\\([^ ]*\\)/agent')
"""
ANSWERS = 'echo ready >"$directory/agent.out"; exec sleep 100\n'
PANICS = 'printf "Linux\\r\\nKernel panic - not syncing\\r\\n" >"$directory/console.log"; exit 0\n'
CRASHES = 'printf "Oops: int3\\r\\nKernel panic\\r\\n" >"$directory/console.log"; exit 0'
CRASHES_ONCE = "test -e {marker} || {{ touch {marker}; " + CRASHES + "; }}\n" + ANSWERS
COMPLAINS = "echo 'qemu: out of luck' >&2; exit 1\n"
HANGS = 'echo "Linux version 6.1" >"$directory/console.log"; exec sleep 100\n'
# struct Elf64_Ehdr of an x86-64 program without program headers, and so without a loader.
STATIC_PROGRAM = struct.pack(
    "<16sHHIQQQIHHHHHH", b"\x7fELF\x02\x01\x01", 2, 62, 1, 0, 0, 0, 0, 64, 56, 0, 64, 0, 0
)


@pytest.fixture
def qemu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "busybox").write_bytes(STATIC_PROGRAM)
    (programs / "busybox").chmod(0o755)
    runtime = tmp_path / "run"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    path = programs / "qemu-system-x86_64"
    path.touch(0o755)
    return path


@pytest.fixture
def options(tmp_path: Path) -> MachineOptions:
    kernel = tmp_path / "bzImage"
    kernel.write_bytes(bytes(0x202) + b"HdrS" + bytes(100))
    return MachineOptions(kernel=kernel, memory_mib=64, boot_timeout_s=10)


def unfinished(qemu: Path) -> list[Path]:
    return list((qemu.parent.parent / "run").iterdir())


def test_a_guest_that_answers_is_ready(qemu: Path, options: MachineOptions) -> None:
    qemu.write_text(_PLACES + ANSWERS)

    with Machine.boot(options) as machine:
        assert machine.is_alive
        assert machine.stub_address.parent.stat().st_mode & 0o777 == 0o700
        assert machine.kernel == options.kernel
        assert repr(machine) == f"<Machine with {machine.kernel.name}, pid {machine.pid}>"

    assert not machine.is_alive
    assert repr(machine).endswith(", ended>")
    assert unfinished(qemu) == []
    machine.close()


def test_a_panic_is_shown(qemu: Path, options: MachineOptions) -> None:
    qemu.write_text(_PLACES + PANICS)

    with pytest.raises(UnreachableError, match=r"did not boot(.|\n)*\n  Kernel panic - not sync"):
        Machine.boot(options)

    assert unfinished(qemu) == []


def test_a_kernel_that_crashes_is_booted_again(qemu: Path, options: MachineOptions) -> None:
    said: list[str] = []
    marker = qemu.parent / "crashed"
    qemu.write_text(_PLACES + CRASHES_ONCE.format(marker=marker))

    with Machine.boot(options, progress=said.append) as machine:
        assert machine.is_alive

    assert said[-1] == "its kernel crashed while it booted: once more"
    assert unfinished(qemu) == []


def test_a_kernel_that_always_crashes_is_told(qemu: Path, options: MachineOptions) -> None:
    said: list[str] = []
    qemu.write_text(_PLACES + CRASHES)

    with pytest.raises(UnreachableError, match="did not boot"):
        Machine.boot(options, progress=said.append)

    assert len(said) == 3
    assert unfinished(qemu) == []


def test_what_qemu_complains_about_is_shown(qemu: Path, options: MachineOptions) -> None:
    qemu.write_text(_PLACES + COMPLAINS)

    with pytest.raises(UnreachableError, match="qemu: out of luck"):
        Machine.boot(options)

    assert unfinished(qemu) == []


def test_a_guest_that_hangs_is_given_up(qemu: Path, options: MachineOptions) -> None:
    qemu.write_text(_PLACES + HANGS)
    hasty = MachineOptions(kernel=options.kernel, memory_mib=64, boot_timeout_s=3)

    with pytest.raises(UnreachableError, match=r"not up after 3 s(.|\n)*Linux version 6\.1"):
        Machine.boot(hasty)

    assert unfinished(qemu) == []


def test_no_qemu_names_the_package(
    qemu: Path, options: MachineOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    qemu.unlink()
    monkeypatch.setenv("PATH", str(qemu.parent))

    with pytest.raises(UnreachableError, match="install Debian's qemu-system-x86"):
        Machine.boot(options)


@pytest.mark.parametrize(
    ("content", "why"), [(None, "cannot read"), (b"text", "not a bootable"), (b"", "not a boot")]
)
def test_a_kernel_that_is_none_is_refused(
    qemu: Path, tmp_path: Path, content: bytes | None, why: str
) -> None:
    kernel = tmp_path / "kernel"
    if content is not None:
        kernel.write_bytes(content)

    with pytest.raises(UnreachableError, match=why):
        Machine.boot(MachineOptions(kernel=kernel))

    assert unfinished(qemu) == []


def test_a_kernel_that_is_no_file_is_not_waited_for(qemu: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "kernel")

    with pytest.raises(UnreachableError, match="not a regular file"):
        Machine.boot(MachineOptions(kernel=tmp_path / "kernel"))

    assert unfinished(qemu) == []


def test_a_dead_guest_runs_nothing(qemu: Path, options: MachineOptions) -> None:
    qemu.write_text(_PLACES + ANSWERS)
    with Machine.boot(options) as machine:
        os.kill(machine.pid, signal.SIGKILL)

        with pytest.raises(GuestGoneError, match="QEMU ended"):
            machine.run("true", 10)

    with pytest.raises(GuestGoneError):
        machine.run("true", 10)


def test_a_guest_that_is_silent_is_waited_for_until_the_time_is_over(
    qemu: Path, options: MachineOptions
) -> None:
    qemu.write_text(_PLACES + ANSWERS)
    with Machine.boot(options) as machine:
        start = time.monotonic()

        with pytest.raises(TargetError, match="did not end in the guest in time"):
            machine.run("true", 0.2)

        assert 0.2 <= time.monotonic() - start < 60


def test_a_guest_that_reads_nothing_more_is_told(qemu: Path, options: MachineOptions) -> None:
    qemu.write_text(_PLACES + ANSWERS)
    with Machine.boot(options) as machine:
        for _ in range(2):
            with pytest.raises(TargetError, match="did not start a command in time"):
                machine.start("x" * 30_000, 1.0)

        # The 64 KiB of the FIFO are full.
        with pytest.raises(TargetError, match="does not read its console"):
            machine.start("x" * 30_000, 1.0)
