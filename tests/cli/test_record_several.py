"""``kprobe record`` of several targets, whose processes are small programs here.

Each of them behaves as a recorder does: it says that it is ready, takes signals, and ends.
"""

import json
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from kprobes.cli.main import main, make_parsers
from kprobes.cli.record_several import Part, parts_of, split
from tests.build.command import WAIT_S, wait_for_words
from tests.build.waiting import becomes_true

_BOTH = ["-t", "qemu:/no/a.sock", "p vfs_read", "-t", "libvirt:b", "p vfs_write"]
_RECORDER = """
import os, signal, sys, time
from contextlib import suppress
from pathlib import Path
from kprobes.cli.record_several import follow_parent
name, taken = {name!r}, []
def say(text):
    with suppress(BrokenPipeError):
        os.write(2, text.encode() + b"\\n")
def take(number, frame):
    taken.append(number)
    say(f"took {{signal.Signals(number).name}}")
def ready():
    file = int(sys.argv[-1].removeprefix("--ready="))
    os.write(file, b"ready\\n")
    os.close(file)
def wait(count=1):
    while len(taken) < count:
        time.sleep(0.01)
def see(path):
    while not path.exists():
        time.sleep(0.01)
gate = Path({gate!r})
follow_parent()
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2):
    if signal.getsignal(number) is not signal.SIG_IGN:
        signal.signal(number, take)
say("is up")
{does}
"""
_PARENT = """
import argparse, json, sys
from pathlib import Path
from kprobes.cli.main import guarded
from kprobes.cli.record_several import Part, record_several
parts = [
    Part(name=each["name"], words=[each["script"]], args=argparse.Namespace(**each["args"]))
    for each in json.loads(sys.argv[1])
]
for part in parts:
    part.args.recording = Path(part.args.recording)
sys.exit(guarded(lambda: record_several(parts, command=[sys.executable, "-c"])))
"""
_WHOLE = "ready(); wait(); say('ends')"
"""Is armed, and ends when it is told to."""
_FAILS = "see(gate); say('kprobe: no such guest'); sys.exit(3)"
"""Cannot be armed."""


def recorders(directory: Path, *does: str, **args: Any) -> list[str]:
    """Return the command of a parent whose recorders, a, b, ..., do something."""
    parts = [
        {
            "name": name,
            "script": _RECORDER.format(name=name, gate=str(directory / "gate"), does=each),
            "args": {
                "quiet": False,
                "ready": None,
                "rotate": None,
                "snapshot": 1 if "SIGUSR2" in each else None,
                "recording": str(directory / f"x.{name}.rec"),
            }
            | args,
        }
        for name, each in zip("abc", does, strict=False)
    ]
    return [sys.executable, "-c", _PARENT, json.dumps(parts)]


@pytest.fixture
def running() -> Iterator[ExitStack]:
    with ExitStack() as undo:
        yield undo


def started(running: ExitStack, command: Sequence[str]) -> "subprocess.Popen[bytes]":
    process = running.enter_context(subprocess.Popen(command, stderr=subprocess.PIPE, bufsize=0))
    running.callback(process.kill)
    return process


def finished(process: "subprocess.Popen[bytes]") -> tuple[int, list[str]]:
    """Return what it ended with, and the lines that it printed."""
    _, err = process.communicate(timeout=WAIT_S)
    return process.returncode, err.decode().splitlines()


def parts_in(words: Sequence[str]) -> list[Part]:
    """Return the parts of a command line."""
    lines = split(["record", *words])
    parser = make_parsers("record")[0]
    return parts_of([(line, parser.parse_args(line)) for line in lines])


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ([], []),
        (["p f", "-t", "A"], []),
        (["p f", "--target=A", "--", "run", "-t", "B"], []),
        (["p f", "-t", "A", "-t", "B"], [["p f", "-t", "A"], ["p f", "-t", "B"]]),
        (["-tA", "p f", "-qtB", "-q"], [["-tA", "p f"], ["-qtB", "-q"]]),
        (
            ["p f", "--filter", "a", "--target=A", "p g", "--target", "B", "p h", "--filter", "b"],
            [
                ["p f", "--filter", "a", "--target=A", "p g"],
                ["p f", "--filter", "a", "--target", "B", "p h", "--filter", "b"],
            ],
        ),
        (
            ["-t", "A", "--summary=json:s", "p f", "-t", "B", "p g", "-qo", "x", "--ready", "4"],
            [
                ["--summary=json:s", "-o", "x", "--ready", "4", "-t", "A", "p f"],
                ["--summary=json:s", "-o", "x", "--ready", "4", "-t", "B", "p g", "-q"],
            ],
        ),
        (["p f", "-o", "-t", "A", "-t", "B"], [["p f", "-o", "-t", "A"], ["p f", "-o", "-t", "B"]]),
    ],
)
def test_each_target_has_the_words_after_it_and_those_before_any(
    words: list[str], lines: list[list[str]]
) -> None:
    assert split(["record", *words]) == [["record", *line] for line in lines]


def test_other_commands_have_one_target() -> None:
    assert split(["trace", "-t", "A", "-t", "B"]) == []
    assert split(["--version", "record", "-tA", "-tB"])[0] == ["--version", "record", "-tA"]
    assert split(["-t", "-t"]) == []


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("qemu:localhost:1234", "qemu-localhost-1234"),
        ("qemu:10.0.0.1:1", "qemu-10.0.0.1-1"),
        ("qemu:/run/my guest/g.sock", "qemu-run-my-guest-g.sock"),
        ("libvirt:../../etc", "libvirt-..-..-etc"),
        ("guest", "guest"),
        ("::", "target"),
        ("name:" + "n" * 300, "n" * 100),
    ],
)
def test_a_targets_name_is_safe_in_a_files(target: str, name: str) -> None:
    first, second = parts_in(["p f", "-t", target, "-t", "other", "-o", "in/x.y.rec"])

    assert (first.name, second.name) == (name, "other")
    assert first.args.recording == Path(f"in/x.y.{name}.rec")


def test_each_process_is_an_ordinary_record_with_files_of_its_own() -> None:
    words = ["p f", "--ready", "5", *_BOTH, "-qo", "x", "--duration", "3s", "--summary=json:s.json"]

    parts = parts_in(words)

    first, second = (" ".join(part.words) for part in parts)
    files = "record --output=x.{0} --summary=json:s.{0}.json p f -t {1}"
    assert first == files.format("qemu-no-a.sock", "qemu:/no/a.sock p vfs_read")
    assert second == files.format("libvirt-b", "libvirt:b p vfs_write -q --duration 3s")
    assert [part.args.ready for part in parts] == ["5", "5"]
    assert [part.args.duration for part in parts] == [None, 3.0]


@pytest.mark.parametrize(
    "wrong",
    [
        ([*_BOTH, "--", "ls"], 2, "COMMAND runs in one guest: record that one alone"),
        ([*_BOTH, "-o", "-"], 2, "-o - is for one target"),
        ([*_BOTH, "-t", "libvirt:b"], 2, "-t libvirt:b: given twice"),
        ([*_BOTH, "-t", "libvirt/b"], 2, "libvirt:b and libvirt/b would have files of one name"),
        ([*_BOTH, "-"], 2, "standard input is for one target"),
        ([*_BOTH, "--summary", "json"], 2, "--summary json of several targets needs a file"),
        ([*_BOTH, "--summary", "json:x", "-o", "x"], 2, "x would be written twice"),
        (["--control", "fifo:c", *_BOTH], 2, "--control: give each target named pipes"),
        ([*_BOTH, "--control", "fd:3"], 2, "--control: give each target named pipes"),
        ([*_BOTH, "-o", "."], 2, ". is not a file"),
        ([*_BOTH, "-o", "no/such/x.rec"], 2, "cannot write no/such/x.qemu-no-a.sock.rec"),
        ([*_BOTH, "--follow"], 2, "--follow is for a command"),
        ([*_BOTH, "--ready", "no/such/r"], 2, "--ready no/such/r: its directory cannot be"),
        (["-t", "qemu:/no/a", "p f", "-t", "libvirt:b"], 2, "nothing to trace: give a definition"),
        (["-t", "qemu:/no/a", "p f", "-t", "b", "p g"], 2, "host, guest, guest:SUITE:ARCH, auto"),
        ([*_BOTH, "p f a=$foo"], 4, "Invalid $-variable specified"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_started(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    wrong: tuple[list[str], int, str],
) -> None:
    words, status, told = wrong
    monkeypatch.chdir(tmp_path)

    assert main(["record", *words]) == status

    err = capsys.readouterr().err
    assert told in err
    assert ": kprobe: " not in err
    assert [*tmp_path.iterdir()] == []


def test_what_is_wrong_in_one_targets_words_is_said_with_its_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["record", *_BOTH, "p f a=$foo"]) == 4

    assert capsys.readouterr().err.endswith("\n  in libvirt-b\n")


@pytest.mark.parametrize(
    "twice", [["-o", "a", "-o", "b"], ["--ready=1", "--ready=2"], ["-q", "-m"]]
)
def test_options_of_the_whole_are_given_once(
    capsys: pytest.CaptureFixture[str], twice: list[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["record", twice[0], *_BOTH, *twice[1:]])

    assert "kprobe record: error: argument" in capsys.readouterr().err


def test_all_are_ready_before_it_is_said_and_one_interrupt_ends_each(
    tmp_path: Path, running: ExitStack
) -> None:
    late = f"say('waits'); see(gate); {_WHOLE}"
    paths = [tmp_path / "x.a.rec", tmp_path / "x.b.rec"]
    for path in paths:
        path.touch()
    ready = tmp_path / "ready"
    parent = started(running, recorders(tmp_path, _WHOLE, late, ready=str(ready)))
    wait_for_words(parent, b"b: waits")
    was_ready = ready.exists()
    (tmp_path / "gate").touch()
    wait_for_words(parent, b"recording on 2 targets; Ctrl-C ends")
    assert becomes_true(lambda: ready.exists() and ready.read_text() == "ready\n")

    parent.send_signal(signal.SIGINT)
    code, lines = finished(parent)

    assert not was_ready
    assert code == 0
    assert sorted(lines[:-1]) == ["a: ends", "a: took SIGINT", "b: ends", "b: took SIGINT"]
    assert lines[-1] == f"to print what was recorded: kprobe report {paths[0]} {paths[1]}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_passed_on_and_so_is_a_second_one(
    tmp_path: Path, running: ExitStack, number: signal.Signals
) -> None:
    parent = started(running, recorders(tmp_path, *["ready(); wait(2); sys.exit(130)"] * 2))
    wait_for_words(parent, b"recording on 2 targets")
    for _ in range(2):
        parent.send_signal(number)
        for _ in range(2):
            wait_for_words(parent, f"took {number.name}".encode())

    assert finished(parent) == (130, [])


def test_the_terminals_interrupt_comes_once_to_each(tmp_path: Path) -> None:
    leads = "say(f'leads a session: {os.getsid(0) == os.getpid()}')"
    pid, terminal = pty.fork()
    if pid == 0:
        command = recorders(tmp_path, *[f"{leads}; ready(); wait(); time.sleep(0.5)"] * 2)
        os.execv(command[0], command)

    said = b""
    try:
        # The other end is closed with an error.
        with suppress(OSError):
            while data := os.read(terminal, 4096):
                was_said, said = b"Ctrl-C ends" in said, said + data
                if b"Ctrl-C ends" in said and not was_said:
                    os.write(terminal, b"\x03")
    finally:
        os.close(terminal)
        _, status = os.waitpid(pid, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    assert said.count(b"took SIGINT") == 2
    # Two that come at nearly the same time may be one.
    assert said.count(b"leads a session: True") == 2


def test_one_that_is_not_armed_ends_the_others_once(tmp_path: Path, running: ExitStack) -> None:
    (tmp_path / "x.a.rec").touch()
    ends = "ready(); gate.touch(); wait(); say('puts right'); time.sleep(0.3)"
    parent = started(running, recorders(tmp_path, ends, _FAILS, "wait(); sys.exit(130)"))
    wait_for_words(parent, b"puts right")

    # The user's own, meanwhile, is not their second one.
    parent.send_signal(signal.SIGINT)
    code, lines = finished(parent)

    assert code == 3
    assert not any("took SIGINT" in line and line.startswith("a") for line in lines)
    assert not any("recording on" in line or "kprobe report" in line for line in lines)


def test_the_message_of_one_that_is_not_armed_is_shown(tmp_path: Path, running: ExitStack) -> None:
    parent = started(running, recorders(tmp_path, "gate.touch(); wait(); sys.exit(130)", _FAILS))

    code, lines = finished(parent)

    assert code == 3
    assert lines.index("b: kprobe: no such guest") < lines.index(
        "kprobe: b is not armed: the others are ended"
    )
    assert "a: took SIGINT" in lines


def test_one_that_ends_lets_the_others_go_on_and_the_highest_status_stays(
    tmp_path: Path, running: ExitStack
) -> None:
    gone = "ready(); time.sleep(0.3); say('kprobe: the guest is gone'); sys.exit(1)"
    parent = started(running, recorders(tmp_path, gone, _WHOLE))
    wait_for_words(parent, b"a: kprobe: the guest is gone")
    with pytest.raises(subprocess.TimeoutExpired):
        parent.wait(0.5)

    parent.send_signal(signal.SIGINT)
    code, lines = finished(parent)

    assert code == 1
    assert "a: took SIGINT" not in lines
    assert "b: ends" in lines


def test_one_that_is_killed_is_told_by_its_status(tmp_path: Path, running: ExitStack) -> None:
    dies = "ready(); time.sleep(0.3); os.kill(os.getpid(), signal.SIGKILL)"
    parent = started(running, recorders(tmp_path, dies, "ready(); sys.exit(6)"))

    assert finished(parent)[0] == 128 + signal.SIGKILL


def test_snapshots_are_asked_of_those_that_keep_them(tmp_path: Path, running: ExitStack) -> None:
    keeps = "ready()  # SIGUSR2\nwait(2); sys.exit(5 if taken[0] == signal.SIGUSR2 else 4)"
    parent = started(running, recorders(tmp_path, keeps, _WHOLE))
    wait_for_words(parent, b"recording on 2 targets")
    parent.send_signal(signal.SIGUSR2)
    wait_for_words(parent, b"a: took SIGUSR2")

    parent.send_signal(signal.SIGINT)
    code, lines = finished(parent)

    assert code == 5
    assert "b: took SIGUSR2" not in lines


def test_a_parent_that_is_killed_leaves_no_recorder(tmp_path: Path, running: ExitStack) -> None:
    ends = f"ready(); wait(); Path({str(tmp_path)!r}, name + '.over').touch()"
    parent = started(running, recorders(tmp_path, ends, ends))
    wait_for_words(parent, b"recording on 2 targets")

    parent.kill()

    assert becomes_true(lambda: len([*tmp_path.glob("*.over")]) == 2)


def test_nohup_is_passed_on(tmp_path: Path, running: ExitStack) -> None:
    nohup = shutil.which("nohup")
    assert nohup is not None
    parent = started(running, [nohup, *recorders(tmp_path, _WHOLE, _WHOLE)])
    wait_for_words(parent, b"recording on 2 targets")
    parent.send_signal(signal.SIGHUP)
    parent.send_signal(signal.SIGTERM)

    code, lines = finished(parent)

    assert code == 0
    assert sorted(lines) == ["a: ends", "a: took SIGTERM", "b: ends", "b: took SIGTERM"]


def test_an_early_interrupt_is_no_traceback(tmp_path: Path, running: ExitStack) -> None:
    parent = started(running, recorders(tmp_path, *["wait(); sys.exit(130)"] * 2))
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
    assert becomes_true(lambda: len(children.read_text().split()) == 2)

    parent.send_signal(signal.SIGINT)
    code, lines = finished(parent)

    assert code == 130
    assert "Traceback" not in "\n".join(lines)


def test_quiet_recorders_have_a_quiet_parent(tmp_path: Path, running: ExitStack) -> None:
    (tmp_path / "x.a.rec").touch()
    parent = started(running, recorders(tmp_path, "ready()", "ready()", quiet=True))

    code, lines = finished(parent)

    assert (code, sorted(lines)) == (0, ["a: is up", "b: is up"])


def test_files_that_were_rotated_are_not_to_be_printed_by_one_command(
    tmp_path: Path, running: ExitStack
) -> None:
    (tmp_path / "x.a.rec").touch()
    parent = started(running, recorders(tmp_path, "ready()", "ready()", rotate=[1, None]))

    code, lines = finished(parent)

    assert code == 0
    assert "recording on 2 targets; Ctrl-C ends" in lines
    assert not any("kprobe report" in line for line in lines)


def test_nobody_who_takes_ready_ends_all(tmp_path: Path, running: ExitStack) -> None:
    parent = started(running, recorders(tmp_path, _WHOLE, _WHOLE, ready=str(tmp_path)))

    code, lines = finished(parent)

    assert code == 1
    assert lines[-1] == f"kprobe: --ready {tmp_path}: Is a directory"
    assert {"a: ends", "b: ends"} <= {*lines}


def test_a_long_line_and_bytes_that_are_no_text_are_passed_on(
    tmp_path: Path, running: ExitStack
) -> None:
    says = "ready(); os.write(2, b'\\xff' + b'y' * 200_000 + b'\\n\\nno end')"
    parent = started(running, recorders(tmp_path, says, "ready()"))

    code, lines = finished(parent)

    assert code == 0
    own = [line.removeprefix("a: ") for line in lines if line.startswith("a:")]
    assert "".join(own[1:]) == "\\xff" + "y" * 200_000 + "a:" + "no end"


def test_real_ones_that_cannot_be_reached_leave_files_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "x.qemu-no-a.rec"
    file.write_bytes(b"older")
    kprobe = Path(sys.executable).with_name("kprobe")
    silent = tmp_path / "silent.sock"
    targets = ["-t", "qemu:/no/a", "-t", f"qemu:{silent}"]
    words = ["p vfs_read", *targets, "-o", str(tmp_path / "x.rec")]

    # The other one still waits for an answer: did both end at once, none would be left to end.
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(silent))
        listening.listen()
        done = subprocess.run(
            [kprobe, "record", *words],
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
            env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
        )

    assert (done.returncode, done.stdout) == (3, "")
    assert "kprobe: /no/" in done.stderr
    assert ": no such socket: is QEMU running?\n" in done.stderr
    assert " is not armed" in done.stderr
    assert file.read_bytes() == b"older"
    assert sorted(path.name for path in tmp_path.glob("x*")) == ["x.qemu-no-a.rec"]


def test_real_ones_are_interrupted_while_they_wait(tmp_path: Path, running: ExitStack) -> None:
    kprobe = str(Path(sys.executable).with_name("kprobe"))
    words = ["p vfs_read", "--wait", "-t", "qemu:/no/a", "-t", "qemu:/no/b", "--output"]
    parent = started(running, [kprobe, "record", *words, str(tmp_path / "x.rec")])
    for _ in range(2):
        wait_for_words(parent, b"kprobe: waiting for qemu:/no/")

    parent.send_signal(signal.SIGINT)
    code, lines = finished(parent)

    assert code == 130
    assert sorted(lines) == ["qemu-no-a: kprobe: interrupted", "qemu-no-b: kprobe: interrupted"]
