"""The real ``kprobe`` command on guests that it boots, or with no guest at all."""

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.build.command import (
    OPEN,
    WAIT_S,
    Command,
    events_of,
    read_line,
    wait_for_event,
    wait_for_words,
)
from tests.build.json_lines import parsed
from tests.system.conftest import Boot

pytestmark = pytest.mark.guest
BOTH = pytest.mark.arches("amd64", "arm64", matrix="arm64")

PACKAGES = {"amd64": b"qemu-system-x86", "arm64": b"qemu-system-arm"}


@pytest.fixture
def kprobe(tmp_path: Path) -> Iterator[Command]:
    """The command, with journals of this test's own."""
    with Command(tmp_path / "state") as command:
        yield command


# A guest of its own.


@BOTH
def test_a_command_is_traced_in_a_guest_that_is_booted_for_it(
    kprobe: Command, tmp_path: Path, arch: str
) -> None:
    done = kprobe(
        "trace", "--arch", arch, OPEN, "p vfs_r*", "--comm", "ls", "--", "ls", "/proc/self"
    )

    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.startswith(b"# tracer: nop\n#\n# entries-in-buffer/entries-written: 0/0")
    events = events_of(done.stdout)
    assert any(b'path="/proc/self"' in line for line in events)
    assert all(line.lstrip().startswith(b"ls-") for line in events)
    words = done.stderr.decode()
    assert re.search(r"^tracing \d+ functions; Ctrl-C ends\n", words, re.MULTILINE)
    assert "\ncmdline\n" in words
    assert re.search(r"\n\d+ events?, 0 missed, 0 lost; guest paused for [\d.]+ ms in", words)
    assert re.search(r"\n  open +\d+  do_sys_openat2\n", words)
    assert words.endswith("  ls /proc/self: exit status 0\n")
    assert list((tmp_path / "state" / "kprobes" / "journal").iterdir()) == []


@BOTH
def test_a_failing_command_is_reported_and_its_trace_is_done(kprobe: Command, arch: str) -> None:
    done = kprobe("trace", "--arch", arch, OPEN, "--format", "json", "--", "cat /absent; exit 3")

    assert done.returncode == 3
    assert b"can't open '/absent': No such file" in done.stderr
    assert b"cat /absent; exit 3: exit status 3\n" in done.stderr
    paths = [event["args"]["path"] for event in parsed(done.stdout)]
    assert "/absent" in paths or None in paths


@pytest.mark.parametrize(("words", "status"), [((), 7), (("--exit-status", "ignore"), 0)])
def test_calls_fail_and_how_the_command_ended_is_said(
    kprobe: Command, words: tuple[str, ...], status: int
) -> None:
    done = kprobe(
        "fail", "__x64_sys_mkdir returns -ENOSPC", "-t", "guest", *words, "--", "mkdir /a; exit 7"
    )

    assert done.returncode == status, done.stderr.decode()
    assert done.stdout == b"mkdir: can't create directory '/a': No space left on device\n"
    assert re.search(
        rb"^calls +skipped +rule\n1 +1 +__x64_sys_mkdir returns -ENOSPC\n"
        rb"mkdir /a; exit 7: exit status 7\n\Z",
        done.stderr,
        re.MULTILINE,
    )


@BOTH
def test_a_guest_that_dies_leaves_its_events_and_one_clear_line(
    boot: Boot, kprobe: Command
) -> None:
    machine = boot()
    machine.start("while :; do cat /proc/version; sleep 0.02; done")
    process = kprobe.start("trace", OPEN, "--target", str(machine.stub_address))
    wait_for_event(process)

    os.kill(machine.pid, signal.SIGKILL)
    out, words = process.communicate(timeout=WAIT_S)

    assert process.returncode == 1
    events_of(out)
    # What was counted before is summed up; one line says what has become of the guest.
    assert words.startswith(b"tracing 1 function; Ctrl-C ends\n")
    assert words.endswith(b"kprobe: the gdb stub hung up: the guest has ended\n"), words.decode()
    assert words.count(b"kprobe: ") == 1, words.decode()


@BOTH
def test_what_a_killed_tracer_left_is_shown_and_put_right(kprobe: Command, arch: str) -> None:
    guest = kprobe.start("guest", "--no-shell", "--arch", arch)
    target = read_line(guest).decode().strip()
    names = kprobe("list", "--target", target, "vfs_*").stdout.decode().split()[:20]
    assert len(names) == 20
    tracer = kprobe.start("trace", "--target", target, OPEN, *(f"p {name}" for name in names))
    # Not by asking for its status: whoever has the stub then keeps the tracer out.
    wait_for_words(tracer, b"tracing 21 functions")
    assert b": 21 sites armed by process" in kprobe("status", "--target", target).stdout

    tracer.send_signal(signal.SIGSTOP)
    os.kill(guardian_of(tracer.pid), signal.SIGKILL)
    tracer.kill()
    tracer.wait()

    shown = kprobe("status", "--target", target)
    assert shown.returncode == 0
    assert b"which was killed: `kprobe restore` puts it right" in shown.stdout
    assert b"ftrace sites, 21 armed\n  21 armed by kprobe on this machine\n" in shown.stdout
    restored = kprobe("restore")
    assert restored.returncode == 0
    # A site and its record each.
    assert re.search(
        rb": 42 places put back as before, [0-9,]+ KiB given back; the", restored.stdout
    )
    assert kprobe.is_idle(target)
    assert kprobe("restore", "--target", target).stdout.startswith(b"nothing to restore")
    again = kprobe("trace", "--target", target, OPEN, "--duration", "200ms")
    assert again.returncode == 0, again.stderr.decode()
    guest.terminate()
    assert guest.wait(WAIT_S) == 0


def guardian_of(tracer: int) -> int:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == tracer and b"kprobes.guest.guardian" in words:
            return int(path.name)
    raise AssertionError(f"{tracer} has no guardian")


# No guest at all.


def test_a_wrong_definition_is_found_before_anything_is_booted(
    kprobe: Command, tmp_path: Path
) -> None:
    # Without QEMU in the path, booting could not even be tried.
    done = kprobe("trace", "p vfs_read a=$foo", path=str(tmp_path))

    assert done.returncode == 4
    lines = done.stderr.decode().splitlines()
    assert lines[:2] == [
        "kprobe: error: Invalid $-variable specified",
        "  Command: p vfs_read a=$foo",
    ]
    assert lines[2].index("^") == lines[1].index("$foo")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--target", "qemu:localhost:1"], b"connection refused"),
        (["--target", "qemu:/nonexistent/gdb.sock"], b"no such socket"),
        (["--kernel", "/nonexistent/vmlinuz"], b"cannot read the kernel"),
    ],
)
def test_what_cannot_be_reached_is_one_line_and_exit_code_3(
    kprobe: Command, words: list[str], text: bytes
) -> None:
    done = kprobe("trace", OPEN, *words)

    assert done.returncode == 3
    assert text in done.stderr
    assert done.stderr.count(b"\n") == 1


@BOTH
def test_without_qemu_it_says_what_to_install(kprobe: Command, tmp_path: Path, arch: str) -> None:
    done = kprobe("trace", "--arch", arch, OPEN, path=str(tmp_path))

    assert done.returncode == 3
    assert b"install Debian's " + PACKAGES[arch] in done.stderr


def test_nothing_to_restore_is_said_and_fine(kprobe: Command) -> None:
    done = kprobe("restore")

    assert (done.returncode, done.stdout) == (
        0,
        b"nothing to restore: no journal was left behind\n",
    )
