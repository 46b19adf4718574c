"""The real ``kprobe`` command on a guest that is there already."""

import re
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kprobes.transport.monitor import Monitor
from kprobes.transport.qemu import Machine
from tests.build.command import OPEN, WAIT_S, Command, events_of, wait_for_event, wait_for_words
from tests.build.json_lines import objects, parsed
from tests.build.victim import guardians_of
from tests.build.waiting import becomes_true

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64", matrix="arm64")]

ENTRY_TEXT = {"amd64": "entry_SYSCALL_64", "arm64": "vectors"}
_SOME_ROUNDS = ["--max-events", "40"]
_PATH = re.compile(rb': (\w+): .* path="([^"]*)"\n')


@pytest.fixture
def kprobe(tmp_path: Path) -> Iterator[Command]:
    """The command, with journals of this test's own."""
    with Command(tmp_path / "state") as command:
        yield command


@pytest.fixture
def target(guest: Machine) -> str:
    """The shared guest as a target."""
    return f"qemu:{guest.stub_address}"


@pytest.fixture
def busy(guest: Machine) -> Iterator[None]:
    """Keep the shared guest opening files."""
    with _repeated(guest, "cat /proc/version /none"):
        yield


@pytest.fixture
def busy_cpus(guest: Machine) -> Iterator[None]:
    """Keep each CPU of the shared guest opening files."""
    with _repeated(guest, "taskset 1 cat /proc/version /none; taskset 2 cat /proc/version /none"):
        yield


@pytest.fixture
def signalling(guest: Machine) -> Iterator[None]:
    """Keep the shared guest sending signals."""
    with _repeated(guest, "sleep 5 & kill $!"):
        yield


@contextmanager
def _repeated(guest: Machine, work: str) -> Generator[None]:
    job = guest.start(f"while :; do {work}; sleep 0.02; done")
    yield
    job.kill()
    job.wait(WAIT_S)


@pytest.mark.usefixtures("busy")
def test_json_goes_to_a_file_until_enough_events_have_come(
    kprobe: Command, target: str, tmp_path: Path
) -> None:
    file = tmp_path / "out.json"
    words = ["--format", "json", "-o", str(file), "--max-events", "25"]

    done = kprobe("trace", "--target", target, OPEN, "p vfs_open", *words)

    assert (done.returncode, done.stdout) == (0, b""), done.stderr.decode()
    events = parsed(file.read_bytes())
    assert len(events) == 25
    assert {event["event"] for event in events} == {"open", "p_vfs_open_0"}
    stamps = [event["ts_ns"] for event in events]
    assert stamps == sorted(stamps)
    assert b"25 of " in done.stderr or b"25 events" in done.stderr
    assert kprobe.is_idle(target)


@pytest.mark.usefixtures("busy")
def test_a_text_file_counts_its_events_in_its_header(
    kprobe: Command, target: str, tmp_path: Path
) -> None:
    file = tmp_path / "out.txt"
    file.write_text("old")

    done = kprobe("trace", "--target", target, OPEN, "--max-events", "20", "-o", str(file))

    assert done.returncode == 0, done.stderr.decode()
    count = len(events_of(file.read_bytes()))
    assert count > 0
    assert f"entries-written: {count}/{count} " in file.read_text(errors="replace")


@pytest.mark.usefixtures("busy")
def test_events_are_chosen_by_task(kprobe: Command, target: str) -> None:
    done = kprobe("trace", "--target", target, OPEN, "--comm", "ca*", "--max-events", "5")

    assert [line.split(b"-")[0].strip() for line in events_of(done.stdout)] == [b"cat"] * 5


@pytest.mark.usefixtures("busy")
def test_an_event_over_a_limit_is_disabled_told_and_counted(
    kprobe: Command, target: str, tmp_path: Path
) -> None:
    summary = tmp_path / "summary.json"
    limits = ("--max-rate", "1", "--max-overhead", "100", "--max-pause", "50")
    told = ("--strict", "--summary", f"json:{summary}", "-o", "/dev/null")
    process = kprobe.start("trace", "--target", target, *limits, OPEN, *told)

    wait_for_words(process, b"over the limit of 1: it is disabled")
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=WAIT_S)

    assert process.returncode == 6, words.decode()
    (counts,) = objects("summary", summary.read_bytes())
    assert counts["over_limit"] == 1


@pytest.mark.usefixtures("signalling")
@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ((), b" sig=15 type=1\n"),
        (("--enum",), b" sig=15 type=PIDTYPE_TGID\n"),
        (("--enum", "--format", "json"), b'"args":{"sig":15,"type":"PIDTYPE_TGID"}}\n'),
    ],
)
def test_enums_are_printed_by_name_on_demand(
    kprobe: Command, target: str, words: tuple[str, ...], shown: bytes
) -> None:
    line = "p:sent do_send_sig_info sig type"

    done = kprobe("trace", "--target", target, *words, line, "--max-events", "1")

    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.count(shown) == 1


@pytest.mark.usefixtures("busy")
def test_each_definition_has_a_filter_of_its_own(kprobe: Command, target: str) -> None:
    words = [OPEN, "--filter", 'path ~ "/proc/*"', "p:more do_sys_openat2 path=+0($arg2):ustring"]

    done = kprobe("trace", "-t", target, *words, "--filter", 'path == "/none"', *_SOME_ROUNDS)

    events = [(line[1], line[2]) for line in _PATH.finditer(done.stdout)]
    assert set(events) == {(b"open", b"/proc/version"), (b"more", b"/none")}


@pytest.mark.usefixtures("busy_cpus")
@pytest.mark.parametrize("cpu", ["0", "1"])
def test_only_hits_on_the_wanted_cpu_are_recorded(kprobe: Command, target: str, cpu: str) -> None:
    words = ["--cpu", cpu, OPEN, "--filter", 'path != "/none"', "p:other vfs_open"]

    done = kprobe("trace", "-t", target, *words, *_SOME_ROUNDS)

    found = {*re.findall(rb"\[00(\d)\] .*?: (\w+): \(", done.stdout)}
    assert found == {(cpu.encode(), b"open"), (cpu.encode(), b"other")}


def test_a_wrong_filter_is_refused_with_the_kernel_s_text(kprobe: Command, target: str) -> None:
    done = kprobe("trace", "--target", target, OPEN, "--filter", "mode == 1")

    assert done.returncode == 4
    assert done.stderr.decode().splitlines()[:3] == [
        "kprobe: error: Field not found",
        "  Command: mode == 1",
        "                ^",
    ]
    assert kprobe.is_idle(target)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cpu", "0-1,9"], "--cpu 9: the kernel has CPUs 0 to 1 only"),
        (["--returns", "tail"], "--returns is for return probes: define one (r FUNCTION)"),
        (["--call-duration"], "--call-duration is for return probes: define one (r FUNCTION)"),
    ],
)
def test_options_without_an_effect_are_refused(
    kprobe: Command, target: str, words: list[str], message: str
) -> None:
    done = kprobe("trace", "--target", target, OPEN, *words)

    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.decode().splitlines()[-1] == f"kprobe: {message}"
    assert kprobe.is_idle(target)


def test_a_pid_that_does_not_exist_has_no_events(kprobe: Command, target: str) -> None:
    words = ["--pid", "4000000", "--duration", "300ms", "--strict"]

    done = kprobe("trace", "--target", target, OPEN, *words)

    assert done.returncode == 0, done.stderr.decode()
    assert events_of(done.stdout) == []


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("more", [(), ("r:opened vfs_open",)], ids=["entry", "return"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_finishes_cleanly(
    kprobe: Command, target: str, number: signal.Signals, more: tuple[str, ...]
) -> None:
    process = kprobe.start("trace", "--target", target, OPEN, *more)
    wait_for_event(process)

    process.send_signal(number)
    out, words = process.communicate(timeout=WAIT_S)

    assert process.returncode == 0, words.decode()
    events_of(out)
    assert b"0 lost; guest paused for" in words
    assert b"Traceback" not in words
    assert kprobe.is_idle(target)


@pytest.mark.usefixtures("busy")
def test_a_second_signal_ends_at_once_and_the_guest_is_put_right(
    kprobe: Command, target: str
) -> None:
    process = kprobe.start("trace", "--target", target, OPEN, "p vfs_*")
    wait_for_event(process)

    # Together, so that the second comes before the first has been acted on.
    for each in (signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGCONT):
        process.send_signal(each)
    _, words = process.communicate(timeout=WAIT_S)

    assert process.returncode == 130
    assert b"ended at once" in words
    assert becomes_true(lambda: kprobe.is_idle(target), WAIT_S)
    assert kprobe("restore").stdout.startswith(b"nothing to restore")


@pytest.mark.usefixtures("busy")
def test_a_reader_that_leaves_ends_the_trace_quietly(kprobe: Command, target: str) -> None:
    process = kprobe.start("trace", "-q", "--target", target, OPEN)
    wait_for_event(process)

    assert process.stdout is not None
    process.stdout.close()

    assert process.wait(WAIT_S) == 0
    assert process.stderr is not None
    assert process.stderr.read() == b""
    assert kprobe.is_idle(target)


def test_functions_are_listed_with_their_typed_arguments(kprobe: Command, target: str) -> None:
    done = kprobe("list", "--target", target, "do_sys_open*", "-v")

    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().splitlines() == [
        "do_sys_open     (int dfd, const char *filename, int flags, umode_t mode) -> long int",
        "do_sys_openat2  (int dfd, const char *filename, struct open_how *how) -> long int",
    ]


def test_every_function_is_listed_without_a_compiler(target: str) -> None:
    code = (
        "import sys\n"
        "from kprobes.cli.main import main\n"
        "code = main(['list', '--target', sys.argv[1], '*'])\n"
        "sys.exit(code or int('llvmlite' in sys.modules))"
    )

    done = subprocess.run(
        [sys.executable, "-c", code, target], capture_output=True, timeout=WAIT_S, check=False
    )

    assert done.returncode == 0, done.stderr.decode()
    assert len(done.stdout.splitlines()) > 30_000


def test_a_list_of_nothing_says_so(kprobe: Command, target: str) -> None:
    done = kprobe("list", "--target", target, "no_such_*")

    assert (done.returncode, done.stdout) == (1, b"")
    assert b"no function that can be probed matches 'no_such_*'" in done.stderr


def test_the_guest_is_healthy(kprobe: Command, target: str) -> None:
    done = kprobe("doctor", "--target", target)

    assert done.returncode == 0, done.stdout.decode()
    assert re.search(rb"ok  sites +[\d,]+ functions with an ftrace site\n", done.stdout)


@pytest.mark.parametrize(
    ("definition", "words"),
    [
        ("p vfs_raed", ["Invalid probed address or symbol", "did you mean vfs_read"]),
        ("p {entry}", ["{entry}+0x0", "cannot be probed: it is entry text"]),
    ],
)
def test_what_the_kernel_has_not_is_refused_with_a_reason(
    kprobe: Command, target: str, arch: str, definition: str, words: list[str]
) -> None:
    entry = ENTRY_TEXT[arch]
    done = kprobe("trace", "--target", target, OPEN, definition.format(entry=entry))

    assert (done.returncode, done.stdout) == (4, b"")
    said = done.stderr.decode()
    assert [word for word in words if word.format(entry=entry) not in said] == []
    assert kprobe.is_idle(target)


def test_another_kernels_vmlinux_is_refused(kprobe: Command, target: str, tmp_path: Path) -> None:
    file = tmp_path / "vmlinux"
    file.write_bytes(b"no kernel at all")

    done = kprobe("trace", "--target", target, OPEN, "--vmlinux", str(file))

    assert done.returncode == 1
    assert done.stderr.count(b"\n") == 1


def test_the_guests_own_image_is_accepted(kprobe: Command, guest: Machine, target: str) -> None:
    words = ["--vmlinux", str(guest.kernel), "--duration", "100ms"]

    done = kprobe("trace", "--target", target, OPEN, *words)

    assert done.returncode == 0, done.stderr.decode()


@pytest.fixture
def monitor(guest: Machine) -> Iterator[Monitor]:
    """The shared guest's monitor; the guest runs afterwards."""
    with Monitor.open(str(guest.qmp_address)) as monitor:
        yield monitor
        monitor.command("cont")


@pytest.mark.parametrize("words", [("list", "vfs_read"), ("status",)])
def test_a_paused_guest_stays_so_when_it_is_only_read(
    kprobe: Command, target: str, monitor: Monitor, words: tuple[str, ...]
) -> None:
    monitor.command("stop")

    done = kprobe(*words, "--target", target)

    assert done.returncode == 0, done.stderr.decode()
    assert monitor.command("info status") == "VM status: paused\n"


@pytest.mark.usefixtures("busy")
def test_what_was_recorded_is_summed_up_where_a_paused_guest_keeps_the_probes_armed(
    kprobe: Command, target: str, monitor: Monitor, tmp_path: Path
) -> None:
    tracer = _start_with_a_handler(kprobe, target, tmp_path)

    monitor.command("stop")
    wait_for_words(tracer, b"somebody else has paused the guest")
    tracer.send_signal(signal.SIGINT)
    _, said = tracer.communicate(timeout=WAIT_S)

    assert monitor.command("info status") == "VM status: paused\n"
    monitor.command("cont")
    assert kprobe("restore", "--target", target).returncode == 0
    assert kprobe.is_idle(target)
    assert tracer.returncode == 1
    assert re.search(rb"\n[1-9]\d* events?, ", said), said.decode()
    assert b"the guest is paused" in said, said.decode()


@pytest.mark.usefixtures("busy")
def test_an_interrupt_ends_a_trace_with_handlers_as_any_other(
    kprobe: Command, target: str, tmp_path: Path
) -> None:
    tracer = _start_with_a_handler(kprobe, target, tmp_path)

    tracer.send_signal(signal.SIGINT)
    _, said = tracer.communicate(timeout=WAIT_S)

    assert tracer.returncode == 0, said.decode()
    assert re.search(rb"\n[1-9]\d* events?, ", said), said.decode()
    assert re.search(rb"\n  opened +[1-9]\d*  vfs_open", said), said.decode()


def _start_with_a_handler(kprobe: Command, target: str, folder: Path) -> subprocess.Popen[bytes]:
    # There is nearly always a task inside the probes' code.
    slow = folder / "slow.py"
    slow.write_text(
        "import time\n@kernel.entry('vfs_open')\ndef opened(path, *, regs):\n    time.sleep(0.05)\n"
    )
    tracer = kprobe.start("trace", "--target", target, "--python", str(slow), OPEN)
    for _ in range(10):
        wait_for_event(tracer)
    return tracer


@pytest.mark.usefixtures("busy")
def test_a_trace_waits_for_who_has_paused_its_guest(
    kprobe: Command, target: str, monitor: Monitor
) -> None:
    monitor.command("stop")
    tracer = kprobe.start("trace", "--target", target, OPEN)
    wait_for_words(tracer, b"probes are armed when it goes on")
    monitor.command("cont")
    wait_for_event(tracer)

    monitor.command("stop")
    wait_for_words(tracer, b"somebody else has paused the guest")
    assert monitor.command("info status") == "VM status: paused\n"
    monitor.command("cont")
    tracer.send_signal(signal.SIGINT)
    _, said = tracer.communicate(timeout=WAIT_S)

    assert tracer.returncode == 0, said.decode()
    assert kprobe.is_idle(target)


@pytest.mark.usefixtures("busy")
def test_a_trace_that_ends_leaves_a_guest_paused(
    kprobe: Command, target: str, monitor: Monitor
) -> None:
    tracer = kprobe.start("trace", "--target", target, OPEN)
    wait_for_event(tracer)

    monitor.command("stop")
    tracer.send_signal(signal.SIGINT)
    _, said = tracer.communicate(timeout=WAIT_S)

    assert (tracer.returncode, b"`kprobe restore`" in said) == (1, True), said.decode()
    assert re.search(rb"\d events?, 0 missed, 0 lost; ", said)
    assert b"which has ended: `kprobe restore` gives the memory back" in kprobe("status").stdout
    assert monitor.command("info status") == "VM status: paused\n"
    assert kprobe.is_idle(target)
    monitor.command("cont")
    assert kprobe("restore", "--target", target).returncode == 0


@pytest.mark.usefixtures("busy")
def test_a_tracer_that_is_killed_leaves_a_guest_paused_by_somebody_else(
    kprobe: Command, target: str, monitor: Monitor
) -> None:
    tracer = kprobe.start("trace", "--target", target, OPEN)
    wait_for_event(tracer)
    monitor.command("stop")
    wait_for_words(tracer, b"somebody else has paused the guest")
    address = target.removeprefix("qemu:")
    assert len(guardians_of(address)) == 1

    tracer.kill()
    tracer.wait(WAIT_S)

    # The guardian has put the text back, and let nothing run.
    assert becomes_true(lambda: not guardians_of(address), WAIT_S)
    assert kprobe.is_idle(target)
    assert monitor.command("info status") == "VM status: paused\n"
    monitor.command("cont")
    assert kprobe("restore", "--target", target).returncode == 0
