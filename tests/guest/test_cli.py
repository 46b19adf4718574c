"""The real ``kprobe`` command on real kernels."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from kprobes.transport.qemu import Machine
from tests.guest.conftest import Boot

pytestmark = pytest.mark.guest

KPROBE = Path(sys.executable).with_name("kprobe")
OPEN = "p:open do_sys_openat2 dfd=$arg1:s32 path=+0($arg2):ustring"
LINE = re.compile(rb" *\S.{0,15}-\d+ +\[\d{3}\] [^ ]{5} +\d+\.\d{6}: (\w+): \(.*\).*\n")
WAIT_S = 60.0
_FOR_A_WHILE = ["--duration", "500ms"]
_PATH = re.compile(rb': (\w+): .* path="([^"]*)"\n')

Run = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture
def environment(tmp_path: Path) -> Mapping[str, str]:
    """Journals of this test's own."""
    return {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}


@pytest.fixture
def kprobe(environment: Mapping[str, str]) -> Run:
    """Run ``kprobe`` to its end."""

    def run(*words: str, path: str | None = None) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [KPROBE, *words],
            capture_output=True,
            env={**environment, **({"PATH": path} if path else {})},
            timeout=WAIT_S,
            check=False,
        )

    return run


Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def start(environment: Mapping[str, str]) -> Iterator[Start]:
    """Start ``kprobe`` and leave it running; the test's end kills what is left."""
    with ExitStack() as undo:

        def started(*words: str) -> subprocess.Popen[bytes]:
            process = undo.enter_context(
                subprocess.Popen(
                    [KPROBE, *words],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=environment,
                    # select would not see what a buffer holds.
                    bufsize=0,
                )
            )
            undo.callback(process.kill)
            return process

        yield started


@pytest.fixture
def target(guest: Machine) -> str:
    """The shared guest as a target."""
    return f"qemu:{guest.stub_address}"


@pytest.fixture
def busy(guest: Machine) -> Iterator[None]:
    """Keep the shared guest opening files."""
    job = guest.start("while :; do cat /proc/version /none; sleep 0.02; done")
    yield
    job.kill()
    job.wait(WAIT_S)


def read_line(process: subprocess.Popen[bytes], timeout_s: float = WAIT_S) -> bytes:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], timeout_s)
    assert ready, "nothing was printed in time"
    return process.stdout.readline()


def wait_for_event(process: subprocess.Popen[bytes]) -> None:
    while (line := read_line(process)).startswith(b"#"):
        pass
    assert LINE.fullmatch(line), line or process.communicate()[1]


def is_idle(kprobe: Run, target: str) -> bool:
    return b"all of them idle" in kprobe("status", "--target", target).stdout


def events_of(text: bytes) -> list[bytes]:
    lines = [line for line in text.splitlines(keepends=True) if not line.startswith(b"#")]
    assert [line for line in lines if not LINE.fullmatch(line)] == []
    return lines


# A guest of its own.


def test_a_command_is_traced_in_a_guest_that_is_booted_for_it(kprobe: Run, tmp_path: Path) -> None:
    done = kprobe("trace", OPEN, "p vfs_r*", "--comm", "ls", "--", "ls", "/proc/self")

    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.startswith(b"# tracer: nop\n#\n# entries-in-buffer/entries-written: 0/0")
    events = events_of(done.stdout)
    assert any(b'path="/proc/self"' in line for line in events)
    assert all(line.lstrip().startswith(b"ls-") for line in events)
    words = done.stderr.decode()
    assert "\ncmdline\n" in words
    assert re.search(r"\n\d+ events?, 0 missed, 0 lost; guest paused for [\d.]+ ms in", words)
    assert re.search(r"\n  open +\d+  do_sys_openat2\n", words)
    assert words.endswith("  ls /proc/self: exit status 0\n")
    assert list((tmp_path / "state" / "kprobes" / "journal").iterdir()) == []


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ((), b" sig=15 type=1\n"),
        (("--enum",), b" sig=15 type=PIDTYPE_TGID\n"),
        (("--enum", "--format", "json"), b'"args":{"sig":15,"type":"PIDTYPE_TGID"}}\n'),
    ],
)
def test_enums_are_printed_by_name_on_demand(
    kprobe: Run, words: tuple[str, ...], shown: bytes
) -> None:
    line = "p:sent do_send_sig_info sig type"

    done = kprobe("trace", *words, line, "--", "sleep 5 & kill $!; wait")

    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.count(shown) == 1


def test_a_failing_command_is_reported_and_its_trace_is_done(kprobe: Run) -> None:
    done = kprobe("trace", OPEN, "--format", "json", "--", "ls /absent; exit 3")

    assert done.returncode == 0
    assert b"/absent: No such file" in done.stderr
    assert b"ls /absent; exit 3: exit status 3\n" in done.stderr
    paths = [json.loads(line)["args"]["path"] for line in done.stdout.splitlines()]
    assert "/absent" in paths or None in paths


def test_a_guest_that_dies_leaves_its_events_and_one_clear_line(boot: Boot, start: Start) -> None:
    machine = boot()
    machine.start("while :; do cat /proc/version; sleep 0.02; done")
    process = start("trace", OPEN, "--target", str(machine.stub_address))
    wait_for_event(process)

    os.kill(machine.pid, signal.SIGKILL)
    out, words = process.communicate(timeout=WAIT_S)

    assert process.returncode == 1
    events_of(out)
    assert words.count(b"\n") == 1, words.decode()


def test_what_a_killed_tracer_left_is_shown_and_put_right(kprobe: Run, start: Start) -> None:
    guest = start("guest", "--no-shell")
    target = read_line(guest).decode().strip()
    names = kprobe("list", "--target", target, "vfs_*").stdout.decode().split()[:20]
    assert len(names) == 20
    tracer = start("trace", "--target", target, OPEN, *(f"p {name}" for name in names))
    wait_until_armed(kprobe, target, 21)

    guardian = guardian_of(tracer.pid)
    os.kill(guardian, signal.SIGKILL)
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
    assert is_idle(kprobe, target)
    assert kprobe("restore", "--target", target).stdout.startswith(b"nothing to restore")
    again = kprobe("trace", "--target", target, OPEN, "--duration", "200ms")
    assert again.returncode == 0, again.stderr.decode()
    guest.terminate()
    assert guest.wait(WAIT_S) == 0


def wait_until_armed(kprobe: Run, target: str, count: int) -> None:
    deadline = time.monotonic() + WAIT_S
    text = f": {count} sites armed by process"
    while text.encode() not in kprobe("status", "--target", target).stdout:
        assert time.monotonic() < deadline, "nothing is armed"
        time.sleep(0.1)


def guardian_of(tracer: int) -> int:
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == tracer and b"kprobes.drivers.guest.guardian" in words:
            return int(path.name)
    raise AssertionError(f"{tracer} has no guardian")


# The shared guest, attached to.


@pytest.mark.usefixtures("busy")
def test_json_goes_to_a_file_until_enough_events_have_come(
    kprobe: Run, target: str, tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    words = ["--format", "json", "-o", str(file), "--max-events", "25"]

    done = kprobe("trace", "--target", target, OPEN, "p vfs_open", *words)

    assert (done.returncode, done.stdout) == (0, b""), done.stderr.decode()
    events = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(events) == 25
    assert {event["event"] for event in events} == {"open", "p_vfs_open_0"}
    stamps = [event["ts_ns"] for event in events]
    assert stamps == sorted(stamps)
    assert b"25 of " in done.stderr or b"25 events" in done.stderr
    assert is_idle(kprobe, target)


@pytest.mark.usefixtures("busy")
def test_a_text_file_counts_its_events_in_its_header(
    kprobe: Run, target: str, tmp_path: Path
) -> None:
    file = tmp_path / "out.txt"
    file.write_text("old")

    done = kprobe("trace", "--target", target, OPEN, "--max-events", "20", "-o", str(file))

    assert done.returncode == 0, done.stderr.decode()
    count = len(events_of(file.read_bytes()))
    assert count > 0
    assert f"entries-written: {count}/{count} " in file.read_text(errors="replace")


@pytest.mark.usefixtures("busy")
def test_events_are_chosen_by_task(kprobe: Run, target: str) -> None:
    done = kprobe("trace", "--target", target, OPEN, "--comm", "ca*", "--max-events", "5")

    assert [line.split(b"-")[0].strip() for line in events_of(done.stdout)] == [b"cat"] * 5


@pytest.mark.usefixtures("busy")
def test_each_definition_has_a_filter_of_its_own(kprobe: Run, target: str) -> None:
    words = [OPEN, "--filter", 'path ~ "/proc/*"', "p:more do_sys_openat2 path=+0($arg2):ustring"]

    done = kprobe("trace", "--target", target, *words, "--filter", 'path == "/none"', *_FOR_A_WHILE)

    events = [(line[1], line[2]) for line in _PATH.finditer(done.stdout)]
    assert set(events) == {(b"open", b"/proc/version"), (b"more", b"/none")}


def test_a_wrong_filter_is_refused_with_the_kernel_s_text(kprobe: Run, target: str) -> None:
    done = kprobe("trace", "--target", target, OPEN, "--filter", "mode == 1")

    assert done.returncode == 4
    assert done.stderr.decode().splitlines()[:3] == [
        "kprobe: error: Field not found",
        "  Command: mode == 1",
        "                ^",
    ]
    assert is_idle(kprobe, target)


def test_a_pid_that_does_not_exist_has_no_events(kprobe: Run, target: str) -> None:
    words = ["--pid", "4000000", "--duration", "300ms", "--strict"]

    done = kprobe("trace", "--target", target, OPEN, *words)

    assert done.returncode == 0, done.stderr.decode()
    assert events_of(done.stdout) == []


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_finishes_cleanly(
    kprobe: Run, start: Start, target: str, number: signal.Signals
) -> None:
    process = start("trace", "--target", target, OPEN)
    wait_for_event(process)

    process.send_signal(number)
    out, words = process.communicate(timeout=WAIT_S)

    assert process.returncode == 0, words.decode()
    events_of(out)
    assert b"0 lost; guest paused for" in words
    assert b"Traceback" not in words
    assert is_idle(kprobe, target)


@pytest.mark.usefixtures("busy")
def test_a_second_signal_ends_at_once_and_the_guest_is_put_right(
    kprobe: Run, start: Start, target: str
) -> None:
    process = start("trace", "--target", target, OPEN, "p vfs_*")
    wait_for_event(process)

    # Together, so that the second comes before the first has been acted on.
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    _, words = process.communicate(timeout=WAIT_S)

    assert process.returncode == 1
    assert b"ended at once" in words
    deadline = time.monotonic() + WAIT_S
    while not is_idle(kprobe, target):
        assert time.monotonic() < deadline, "the guardian did not put it right"
    assert kprobe("restore").stdout.startswith(b"nothing to restore")


@pytest.mark.usefixtures("busy")
def test_a_reader_that_leaves_ends_the_trace_quietly(
    kprobe: Run, start: Start, target: str
) -> None:
    process = start("trace", "-q", "--target", target, OPEN)
    wait_for_event(process)

    assert process.stdout is not None
    process.stdout.close()

    assert process.wait(WAIT_S) == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert is_idle(kprobe, target)


def test_functions_are_listed_with_their_typed_arguments(kprobe: Run, target: str) -> None:
    done = kprobe("list", "--target", target, "do_sys_open*", "-v")

    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().splitlines() == [
        "do_sys_open     (int dfd, const char *filename, int flags, umode_t mode) -> long int",
        "do_sys_openat2  (int dfd, const char *filename, struct open_how *how) -> long int",
    ]


def test_a_list_of_nothing_says_so(kprobe: Run, target: str) -> None:
    done = kprobe("list", "--target", target, "no_such_*")

    assert (done.returncode, done.stdout) == (1, b"")
    assert b"no function that can be probed matches 'no_such_*'" in done.stderr


def test_the_guest_is_healthy(kprobe: Run, target: str) -> None:
    done = kprobe("doctor", "--target", target)

    assert done.returncode == 0, done.stdout.decode()
    assert re.search(rb"ok  sites +[\d,]+ functions with an ftrace site\n", done.stdout)


@pytest.mark.parametrize(
    ("definition", "words"),
    [
        ("p vfs_raed", [b"Invalid probed address or symbol", b"did you mean vfs_read"]),
        ("p entry_SYSCALL_64", [b"entry_SYSCALL_64+0x0", b"cannot be probed: it is entry text"]),
    ],
)
def test_what_the_kernel_has_not_is_refused_with_a_reason(
    kprobe: Run, target: str, definition: str, words: list[bytes]
) -> None:
    done = kprobe("trace", "--target", target, OPEN, definition)

    assert (done.returncode, done.stdout) == (4, b"")
    assert [word for word in words if word not in done.stderr] == []
    assert is_idle(kprobe, target)


def test_another_kernels_vmlinux_is_refused(kprobe: Run, target: str, tmp_path: Path) -> None:
    file = tmp_path / "vmlinux"
    file.write_bytes(b"no kernel at all")

    done = kprobe("trace", "--target", target, OPEN, "--vmlinux", str(file))

    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1


def test_the_guests_own_image_is_accepted(kprobe: Run, guest: Machine, target: str) -> None:
    words = ["--vmlinux", str(guest.kernel), "--duration", "100ms"]

    done = kprobe("trace", "--target", target, OPEN, *words)

    assert done.returncode == 0, done.stderr.decode()


# No guest at all.


def test_a_wrong_definition_is_found_before_anything_is_booted(kprobe: Run, tmp_path: Path) -> None:
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
    kprobe: Run, words: list[str], text: bytes
) -> None:
    done = kprobe("trace", OPEN, *words)

    assert done.returncode == 3
    assert text in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_without_qemu_it_says_what_to_install(kprobe: Run, tmp_path: Path) -> None:
    done = kprobe("trace", OPEN, path=str(tmp_path))

    assert done.returncode == 3
    assert b"install Debian's qemu-system-x86" in done.stderr


def test_nothing_to_restore_is_said_and_fine(kprobe: Run) -> None:
    done = kprobe("restore")

    assert (done.returncode, done.stdout) == (
        0,
        b"nothing to restore: no journal was left behind\n",
    )
