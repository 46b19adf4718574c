"""The embedded guest, with real kernels."""

import hashlib
import os
import pty
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import kprobes
from kprobes.errors import (
    FormatError,
    GuestGoneError,
    TargetError,
    UnreachableError,
    UsageError,
)
from kprobes.transport import console
from kprobes.transport.qemu import Machine
from kprobes.transport.qemu_command import MachineOptions
from tests.build.waiting import becomes_true
from tests.system.backtraces import backtraces
from tests.system.conftest import SUITES, Boot

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64", matrix="arm64")]

LARGE_RAM = {"amd64": 4 << 30, "arm64": 1 << 30}
"""Where the last piece of it begins."""

PARENT = """
import time
from kprobes.transport import console
from kprobes.transport.qemu import Machine
machine = Machine.boot()
print(machine.pid, machine.stub_address.parent, machine.ram_path.parent, flush=True)
time.sleep(100)
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def text(machine: Machine, command: str | list[str]) -> str:
    finished = machine.run(command, 180)
    assert finished.status == 0, finished
    return finished.output.decode()


def test_the_guest_runs_debians_kernel(guest: Machine) -> None:
    release = text(guest, "uname -r").strip()

    assert release.startswith("6.1.")
    assert release in guest.kernel.name


@pytest.mark.arches("amd64", "arm64")
@pytest.mark.kernels("5.10", "7.x")
def test_every_kernel_boots(any_guest: Machine) -> None:
    wanted = next(version for version, suite in SUITES.items() if suite == any_guest.options.suite)

    release = text(any_guest, "uname -r")

    assert release.startswith(wanted.rstrip("x"))
    assert text(any_guest, "cat /sys/kernel/tracing/trace_clock").startswith("[local]")


def test_status_and_output_are_the_commands(guest: Machine) -> None:
    finished = guest.run("echo out; echo err >&2; exit 3", 180)

    assert (finished.status, finished.output) == (3, b"out\nerr\n")


def test_binary_output_is_exact(guest: Machine) -> None:
    finished = guest.run(r"printf 'a\0\377\r\n\n\001\003\004\021\023\032\177'", 180)

    assert finished.output == b"a\0\xff\r\n\n\1\3\4\x11\x13\x1a\x7f"


def test_quotes_pass_unchanged(guest: Machine) -> None:
    nasty = "'\"\\ $HOME `id` \t\n* é ;&|"

    assert guest.run(["printf", "%s", nasty], 180).output == nasty.encode()


def test_two_megabytes_of_noise_are_whole(guest: Machine) -> None:
    finished = guest.run("head -c 2000000 /dev/urandom | tee /tmp/noise", 120)

    assert len(finished.output) == 2_000_000
    assert hashlib.md5(finished.output).hexdigest() in text(guest, "md5sum /tmp/noise")


def test_ten_megabytes_of_text_are_whole(guest: Machine) -> None:
    finished = guest.run("yes a line of text | head -c 10000000", 120)

    assert finished.output == (b"a line of text\n" * 700_000)[:10_000_000]


def test_the_pid_is_the_commands_own(guest: Machine) -> None:
    finished = guest.run("echo $$; grep ^Pid: /proc/self/status", 180)

    assert finished.output.startswith(b"%d\n" % finished.pid)


def test_a_hundred_commands_in_a_row_lose_nothing(guest: Machine) -> None:
    for i in range(100):
        assert text(guest, f"echo {i}") == f"{i}\n"


def test_commands_leave_no_zombies_and_no_files(guest: Machine) -> None:
    for _ in range(5):
        guest.run("true", 180)

    assert becomes_true(lambda: text(guest, "grep -l '^State:.Z' /proc/[0-9]*/status; true") == "")
    # The command that looks has a file and a pid of its own.
    assert becomes_true(lambda: len(text(guest, "ls /run/kprobes").split()) == 3)


def test_a_started_command_runs_beside_others(guest: Machine) -> None:
    running = guest.start("sleep 100", 180)

    # It is told of before it is what it was started as.
    assert becomes_true(lambda: text(guest, f"cat /proc/{running.pid}/comm") == "sleep\n")

    running.kill()
    assert running.wait(30).status == 137
    assert guest.run(f"test -e /proc/{running.pid}", 180).status == 1


def test_a_command_that_takes_too_long_is_killed(guest: Machine) -> None:
    with pytest.raises(TargetError, match="did not end in the guest in time"):
        guest.run("exec sleep 4321", 0.5)

    assert becomes_true(lambda: guest.run("pidof sleep", 180).status == 1)


def test_tracing_is_there_and_runs_as_root(guest: Machine) -> None:
    assert "sched_switch" in text(guest, "cat /sys/kernel/tracing/available_events")
    assert text(guest, "id -u") == "0\n"


def test_the_agent_sleeps_while_a_command_runs(guest: Machine) -> None:
    # Of the processes of this name the agent is the eldest; the other keeps the command.
    agent = "$(ps -o pid,args | grep '[k]probes-agent /dev' | sort -n | awk '{print $1; exit}')"
    look = "grep -E '^(State|voluntary)' /proc/$a/status"

    seen = text(guest, f"a={agent}; {look}; sleep 0.3; {look}").splitlines()

    assert seen[:2] == seen[2:]
    assert seen[0].split()[1] == "S"


def test_two_guests_do_not_see_each_other(guest: Machine, boot: Boot) -> None:
    other = boot(append="kprobes.second=1")

    guest.run("echo first >/tmp/who", 180)
    other.run("echo second >/tmp/who", 180)

    assert text(guest, "cat /tmp/who") == "first\n"
    assert text(other, "cat /tmp/who") == "second\n"
    assert guest.stub_address != other.stub_address
    assert guest.ram_path != other.ram_path
    assert guest.pid != other.pid


def test_options_are_seen_inside(boot: Boot, tmp_path: Path) -> None:
    tool = tmp_path / "tool"
    tool.write_text("#!/bin/sh\necho tool runs\n")
    tool.chmod(0o755)
    files = {"/opt/tool": tool, "/etc/note": b"\0bytes"}

    machine = boot(memory_mib=300, cpus=3, append="kprobes.word=seen", files=files)

    assert text(machine, "nproc") == "3\n"
    assert 230_000 < int(text(machine, "grep MemTotal /proc/meminfo").split()[1]) < 300 * 1024
    assert text(machine, "cat /proc/cmdline").endswith("kprobes.word=seen\n")
    assert text(machine, "/opt/tool") == "tool runs\n"
    assert machine.run("cat /etc/note", 180).output == b"\0bytes"


def test_a_large_guests_ram_lies_where_the_runs_say(boot: Boot, arch: str) -> None:
    machine = boot(memory_mib=3700)

    seen = [line.split(" : ")[0] for line in text(machine, "cat /proc/iomem").splitlines()]
    last = machine.ram_runs[-1]

    assert last.start == LARGE_RAM[arch]
    assert any(f"{last.start + last.size - 1:x}" in line for line in seen)
    assert machine.ram_path.stat().st_size == 3700 << 20
    assert 0 <= (3700 << 20) - sum(run.size for run in machine.ram_runs) <= 0x60000


def test_guest_memory_is_in_the_file(guest: Machine) -> None:
    guest.run("echo -n 'a word ''to be found' >/tmp/mark", 180)

    # The command itself lies in memory as two words; only the file's page has one.
    assert b"a word to be found" in guest.ram_path.read_bytes()


def test_nothing_is_left_of_a_closed_guest(boot: Boot) -> None:
    machine = boot()
    places = (machine.stub_address.parent, machine.ram_path.parent)
    assert all(place.exists() for place in places)

    machine.close()

    assert not is_running(machine.pid)
    assert not any(place.exists() for place in places)


def test_a_killed_qemu_is_a_guest_that_is_gone(boot: Boot) -> None:
    machine = boot()
    running = machine.start("sleep 100", 180)
    os.kill(machine.pid, signal.SIGKILL)

    with pytest.raises(GuestGoneError):
        running.wait(30)
    with pytest.raises(GuestGoneError):
        machine.run("true", 180)
    machine.close()

    assert not machine.stub_address.parent.exists()
    assert not machine.ram_path.parent.exists()


def test_a_guest_that_powers_off_is_gone(boot: Boot) -> None:
    machine = boot()

    with pytest.raises(GuestGoneError):
        machine.run("poweroff -f", 180)


def test_a_panic_later_on_shows_in_the_error(boot: Boot) -> None:
    machine = boot()

    with pytest.raises(GuestGoneError, match="Kernel panic - not syncing: sysrq"):
        machine.run("echo c >/proc/sysrq-trigger", 180)


def test_a_panic_at_boot_shows_in_the_error() -> None:
    with pytest.raises(UnreachableError, match=r"did not boot(.|\n)*Kernel panic - not syncing"):
        Machine.boot(MachineOptions(append="rdinit=/none root=none"))


def test_too_little_memory_ends_in_an_error_not_a_hang() -> None:
    with pytest.raises(UnreachableError, match=r"did not boot|was not up"):
        Machine.boot(MachineOptions(memory_mib=64, boot_timeout_s=20))


def test_nothing_is_left_when_python_is_killed() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid, *places = parent.stdout.readline().split()
        assert is_running(int(pid))

        parent.kill()

    assert becomes_true(lambda: not is_running(int(pid)))
    assert becomes_true(lambda: not any(Path(place).exists() for place in places))


def test_a_guest_that_a_debugger_stopped_is_waited_for(guest: Machine) -> None:
    with socket.socket(socket.AF_UNIX) as stub:
        # QEMU stops the guest when a debugger connects; asked why, it has done so.
        stub.connect(str(guest.stub_address))
        stub.sendall(b"+$?#3f")
        assert stub.recv(100)
        with pytest.raises(TargetError, match="did not end in the guest in time"):
            guest.run("echo too late", 0.5)

        stub.sendall(b"+$c#63")
        assert text(guest, "echo again") == "again\n"


def test_a_failed_tests_report_has_backtraces(guest: Machine) -> None:
    running = guest.start("sleep 100", 180)
    is_asleep = f"grep -q '(sleep) S' /proc/{running.pid}/stat"
    assert becomes_true(lambda: guest.run(is_asleep, 180).status == 0)

    shown = backtraces(guest)

    running.kill()
    assert shown.startswith("vCPU 1: ")
    assert re.search(r"^task: __schedule\+.* hrtimer_nanosleep\+", shown, re.MULTILINE)
    assert text(guest, "echo again") == "again\n"


@pytest.mark.arches("amd64", "arm64")
def test_the_console_has_a_shell(guest: Machine) -> None:
    user, terminal = pty.openpty()
    shell = threading.Thread(
        target=console.attach,
        args=(guest.stub_address.parent / "console.sock",),
        kwargs={"source": terminal, "sink": terminal},
    )
    shell.start()

    answer = f"42 on /dev/{guest.options.machine_type.console}".encode()
    screen, deadline = b"", time.monotonic() + 60
    while answer not in screen:
        # A shell that has just begun may throw away what was typed before.
        os.write(user, b"echo $((6 * 7)) on $(tty)\r")
        while select.select([user], [], [], 5)[0] and answer not in screen:
            screen += os.read(user, 1000)
        assert time.monotonic() < deadline, screen
    os.write(user, console.LEAVE)
    shell.join(10)
    assert not shell.is_alive()
    os.close(user)
    os.close(terminal)


def test_the_console_log_has_the_kernels_warnings(guest: Machine) -> None:
    guest.run("echo '<1>a word from below' >/dev/kmsg", 180)

    assert becomes_true(lambda: "a word from below" in guest.console_log())


def test_a_saved_guest_goes_on_as_often_as_wanted(boot: Boot, arch: str, tmp_path: Path) -> None:
    place = tmp_path / 'it\'s a \\ "place"'
    machine = boot(arch=arch, cpus=3, append="kprobes.word=7", files={"/brought": b"yes"})
    text(machine, "echo before > /written")
    began = text(machine, "stat -c %Y /proc/1")

    machine.save(place)

    text(machine, "echo afterwards > /written")
    for _ in range(2):
        with Machine.boot(MachineOptions(saved=place)) as again:
            assert text(again, "cat /brought /written") == "yesbefore\n"
            assert "kprobes.word=7" in text(again, "cat /proc/cmdline")
            assert text(again, "nproc") == "3\n"
            assert text(again, "stat -c %Y /proc/1") == began
            text(again, "echo changed > /written")
            # A guest that has gone on is one like any other.
            again.save(tmp_path / "again")
            with Machine.boot(MachineOptions(saved=tmp_path / "again")) as third:
                assert text(third, "cat /written") == "changed\n"
            shutil.rmtree(tmp_path / "again")
    assert text(machine, "cat /written") == "afterwards\n"


def test_a_saved_guest_is_probed_as_any(boot: Boot, arch: str, tmp_path: Path) -> None:
    boot(arch=arch).save(tmp_path / "saved")

    hits: list[int] = []
    for _ in range(2):
        with kprobes.boot(MachineOptions(saved=tmp_path / "saved")) as kernel:
            kernel.probe("p:opened do_sys_openat2")
            with kernel.record() as trace:
                kernel.run("cat /proc/version")
            hits.append(len(trace["opened"]))

    assert hits[0] == hits[1] > 0


def test_saving_leaves_what_is_there_and_a_damaged_state_is_told(
    boot: Boot, arch: str, tmp_path: Path
) -> None:
    machine, place = boot(arch=arch), tmp_path / "saved"
    machine.save(place)

    with pytest.raises(UsageError, match="File exists"):
        machine.save(place)
    assert text(machine, "echo well") == "well\n"
    (place / "state").write_bytes(b"nonsense" * 1000)
    with pytest.raises(UnreachableError, match=r"does not go on:\n.*[Nn]ot a migration stream"):
        Machine.boot(MachineOptions(saved=place))
    (place / "ram").unlink()
    with pytest.raises(FormatError, match="No such file"):
        Machine.boot(MachineOptions(saved=place))
