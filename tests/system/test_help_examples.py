"""The examples of ``kprobe COMMAND --help``, run on a guest.

Those with a command in a guest of their own are run by test_documented_traces.py.
"""

import os
import re
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kprobes.cli import guest as guest_command
from kprobes.cli import main
from kprobes.transport.qemu import Machine
from tests.build.command import OPEN, WAIT_S, Command, read_line
from tests.build.debug_info import debug_vmlinux
from tests.build.objects import FOLDER
from tests.build.recorded import recorded
from tests.system import test_documented_traces

pytestmark = pytest.mark.guest

_TARGET, _IMAGE = "qemu:localhost:1234", "/boot/vmlinuz"
_DEBUG = "/usr/lib/debug/boot/vmlinux"


def _examples(module: ModuleType) -> list[str]:
    text = module.EPILOG.removeprefix("examples:\n").partition("\n\n")[0]
    return [line.strip() for line in text.splitlines()]


def _words(example: str) -> list[str]:
    return shlex.split(example, comments=True)[1:]


_ALL = [example for module in (main, *main.COMMANDS) for example in _examples(module)]
_COUNTING = ("count", "hist")
_NOT_SO = ("guest", "open", "debuginfo")
"""Commands that end when they are told to, or when a page has what they show, or that download."""
_RUN = [each for each in _ALL if "--" not in _words(each) and _words(each)[0] not in _NOT_SO]


@pytest.fixture
def kprobe(guest: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """The command, where the examples' files are, with the guest as what is meant."""
    (tmp_path / "probes.txt").write_text(f"{OPEN}\n")
    (tmp_path / "a.out").touch()
    (tmp_path / "linux-6.1" / "fs").mkdir(parents=True)
    (tmp_path / "linux-6.1" / "fs" / "open.c").write_text("{\n" * 2000)
    (tmp_path / "tasks.py").write_text("print(prog['init_task'].comm)\n")
    (tmp_path / "prog.o").write_bytes((FOLDER / "gcc-fentry.o").read_bytes())
    for name in ("kprobe.rec", "reads.rec"):
        (tmp_path / name).write_bytes(recorded(200, since=12_600_000_000))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KPROBES_TARGET", f"qemu:{guest.stub_address}")
    with Command(tmp_path / "state") as command:
        yield command


_DURATIONS = ("500ms", "5s", "50s")
_SHOWS = {
    "check": rb"accepted",
    "convert": rb"^$",
    "count": rb"HITS +SHARE +(COMM|FUNCTION|DURATION.AVG)|comm,",
    "diff": rb"EVENT +A/S|\"rates\": ",
    "doctor": rb"host: ",
    "fail": rb"calls +skipped +rule",
    "flame": rb"vfs_read",
    "gdbserver": rb"\bvfs_read\b|^$",
    "hist": rb" hits\n[^$]*\|#+",
    "info": rb"6\.1\.0",
    "lines": rb"vfs_read\+0x|^do_sys_openat2 at fs/open\.c:1304\n",
    "list": rb"\b(vfs_read|do_sys_openat2|sched_switch)\b",
    "record": rb"^kprobes\n|^$",
    "repl": rb"\(char \[16\]\)\"(init|swapper/0|\w+)\"",
    "report": rb"(# tracer: nop[^$]*|\"event\":\")read|TIME +CPU +TASK +PID +EVENT[^\n]*\n",
    "sites": rb"call __fentry__|vfs_read",
    "stats": rb"EVENT +HITS|\"hits\": ",
    "restore": rb"nothing to restore",
    "syscalls": rb"\b(openat|newfstatat)\b",
    "status": rb"^$|no journal|all of them idle",
    "targets": rb"gdb\.sock",
    "trace": rb" open: \(",
    "vars": rb"count +size_t|\"name\": \"count\"",
    "xray": rb"\b(vfs_read|do_sys_openat2)\b",
}
"""What the output of each command has."""


@pytest.mark.parametrize("example", _RUN)
def test_an_example_does_what_its_command_is_for(
    kprobe: Command, guest: Machine, example: str
) -> None:
    # Beside other tests the shared guest is not the only one.
    text = re.sub(rf"{_TARGET}|\brunning\b", os.environ["KPROBES_TARGET"], example)
    text = re.sub(r"^(kprobe trace .*)--duration 10s", r"\1--duration 180s --max-events 5", text)
    assert guest.kernel is not None
    text = text.replace(_IMAGE, str(guest.kernel))
    if _DEBUG in text:
        text = text.replace(_DEBUG, str(debug_vmlinux()))
    # Busybox's cat does not call vfs_read.
    job = guest.start("while :; do cat /proc/version; head -c 20 /proc/version; sleep 0.02; done")
    shown, is_shown = b"", False

    try:
        # Where this machine is busy a guest may have done nothing in a short time.
        for duration in _DURATIONS if re.search(r"\b10s\b", text) else _DURATIONS[:1]:
            words = _words(re.sub(r"\b10s\b", duration, text))
            done = kprobe(*words)
            file = words[words.index("-o") + 1] if "-o" in words else None
            told = done.stderr if words[0] == "fail" else done.stdout
            shown = told if file is None else Path(file).read_bytes()
            assert done.returncode in ({0, 5} if words[0] == "doctor" else {0}), done.stderr
            is_shown = re.search(_SHOWS[words[0]], shown) is not None
            if is_shown:
                break
    finally:
        job.kill()
        job.wait(WAIT_S)

    assert is_shown, shown.decode()


@pytest.mark.parametrize(
    "example", [each for each in _ALL if _words(each)[0] == "fail" and "--" in _words(each)]
)
def test_calls_of_a_command_fail_and_are_counted(kprobe: Command, example: str) -> None:
    done = kprobe(*_words(example)[:1], "-t", "guest", *_words(example)[1:])

    assert re.search(rb"No space left on device|Cannot allocate memory", done.stdout)
    assert re.search(rb"(?m)^[1-9]\d* +[1-9]\d* +__x64_sys_", done.stderr), done.stderr.decode()


@pytest.mark.parametrize(
    "example", [each for each in _ALL if _words(each)[0] == "record" and "--" in _words(each)]
)
def test_a_command_is_recorded_and_printed(kprobe: Command, example: str) -> None:
    done = kprobe(*_words(example)[:1], "-t", "guest", *_words(example)[1:])
    printed = kprobe("report")

    assert (done.returncode, done.stdout) == (0, b""), done.stderr.decode()
    assert re.search(rb" ls-\d+ .* open: \(.*path=", printed.stdout)


@pytest.mark.parametrize(
    "example", [each for each in _ALL if _words(each)[0] in _COUNTING and "--" in _words(each)]
)
def test_what_a_command_hits_is_counted(kprobe: Command, example: str) -> None:
    done = kprobe(*_words(example)[:1], "-t", "guest", *_words(example)[1:])

    assert done.returncode == 0, done.stderr.decode()
    assert re.search(_SHOWS[_words(example)[0]], done.stdout), done.stdout.decode()


@pytest.mark.parametrize(
    "example", [each for each in _ALL if _words(each)[0] == "flame" and "--" in _words(each)]
)
def test_stacks_of_a_command_are_drawn(kprobe: Command, tmp_path: Path, example: str) -> None:
    words = _words(example)
    done = kprobe(*words[:1], "-t", "guest", *words[1:])

    assert done.returncode == 0, done.stderr.decode()
    assert b"vfs_statx" in (tmp_path / words[words.index("-o") + 1]).read_bytes()


@pytest.mark.parametrize("example", _examples(guest_command))
def test_a_guest_is_booted_and_ends_when_it_is_told(kprobe: Command, example: str) -> None:
    process = kprobe.start(*_words(example))

    assert read_line(process).startswith(b"qemu:/")

    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_S) == 0


def test_each_command_has_three_examples_which_are_all_run() -> None:
    assert {len(_examples(module)) for module in (main, *main.COMMANDS)} == {3}
    others = [each for each in _ALL if each not in _RUN and _words(each)[0] != "guest"]
    # Others are in test_vng.py, test_debug_files.py and cli/test_open.py.
    own = {"debuginfo", "fail", "flame", "open", "record", "vng", *_COUNTING}
    assert {_words(each)[0] for each in others} == {"trace", *own}
    others = [each for each in others if _words(each)[0] == "trace"]
    known = [each.command for name, each in test_documented_traces.examples() if "--help" in name]
    commands = [_words(each)[_words(each).index("--") + 1 :] for each in others]
    assert all(command in known for command in commands)
