"""The command line as a whole: help, dispatch, errors and exit codes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from kprobes.cli.main import COMMANDS, guarded, main
from kprobes.errors import (
    DefinitionError,
    KprobesError,
    RefusedError,
    TargetError,
    UnreachableError,
    UsageError,
)
from kprobes.guest.journal import process_start
from tests.build.journals import dead_pid, write_journal
from tests.build.json_lines import schema

NAMES = [module.NAME for module in COMMANDS]


@pytest.fixture(autouse=True)
def _own_journals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


def raising(error: BaseException) -> Callable[[], int]:
    def act() -> int:
        raise error

    return act


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


def help_of(*words: str) -> str:
    done = run_python(f"import sys; from kprobes.cli.main import main; main({[*words, '--help']})")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_names_every_command() -> None:
    text = help_of()

    assert [name for name in NAMES if f"\n    {name} " not in text] == []


@pytest.mark.parametrize("name", NAMES)
def test_each_command_helps_with_examples_and_its_exit_status(name: str) -> None:
    text = help_of(name)

    assert f"examples:\n  kprobe {name}" in text
    assert "Exit status: " in text


def test_help_needs_neither_the_engine_nor_numpy() -> None:
    code = (
        "import sys\n"
        "from kprobes.cli.main import main\n"
        "try: main(['trace', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'llvmlite', 'rich', 'kprobes.session', 'dataclasses'}\n"
        "sys.exit(sorted(heavy & sys.modules.keys()) or 0)"
    )

    assert run_python(code).returncode == 0


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])

    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("kprobe 0.")


def test_the_schema_of_what_is_printed_as_json_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--json-schema"])

    assert caught.value.code == 0
    assert json.loads(capsys.readouterr().out) == schema()


def test_a_version_that_is_not_known_is_no_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)

    with pytest.raises(SystemExit) as caught:
        main(["--version"])

    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("kprobe of an unknown version: not installed")


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nonsense"],
        ["trace", "p vfs_read", "--duration", "soon"],
        ["trace", "p vfs_read", "--max-events", "0"],
        ["trace", "p vfs_read", "--"],
        ["trace", "p vfs_read", "--format", "xml"],
        ["trace", "p vfs_read", "--durat", "1s"],
        ["list", "vfs_*", "--", "ls"],
    ],
)
def test_wrong_usage_exits_with_2(words: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)

    assert caught.value.code == 2


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--nosuch"], "usage: kprobe trace [options]"),
        (["--exits", "--nosuch", "p g"], "kprobe trace: error: unrecognized arguments: --nosuch"),
        (["--"], "kprobe trace: error: no command given after '--'"),
        (["--duration", "0"], "argument --duration: invalid duration: '0' (use 10s, 500ms or 2m)"),
        (["--duration", "-5s"], "argument --duration: expected one argument"),
        (["--max-events", "0"], "invalid number: '0' (must be a positive integer)"),
        (["--buffer-size", "1K"], "invalid size: '1K' (must be 64K to 1G)"),
        (["--duration", "5 minutes"], "argument --duration: invalid duration: '5 minutes' (use"),
        (["--duration", "5s", "--duration", "5s"], "argument --duration: given twice"),
        (["--target", ""], "argument --target: must not be empty"),
        (["--target="], "argument --target: must not be empty"),
        (["--filter", ""], "argument --filter: must not be empty"),
        (["--comm", ""], "argument --comm: must not be empty"),
        ([""], "error: an argument must not be empty"),
        (["--target", "guest", "--target", "host"], "argument -t/--target: given twice"),
        (["-o", "a", "-o", "b"], "argument -o/--output: given twice"),
        (["--max-events", "1", "--max-events=1"], "argument --max-events: given twice"),
    ],
)
def test_values_that_make_no_sense_are_refused(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["trace", "p vfs_read", *words])

    assert caught.value.code == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "restore", "doctor"])
@pytest.mark.parametrize("target", ["qemu:localhost:1234", "host"])
def test_a_target_without_its_option_leads_to_it(
    command: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([command, target])

    assert capsys.readouterr().err.splitlines()[-1] == (
        f"kprobe {command}: error: unrecognized arguments: {target}; "
        f"a target is named by -t {target}"
    )


def test_results_can_go_to_a_file_which_an_error_leaves_as_it_was(
    tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]
) -> None:
    file = tmp_path / "found.json"
    words = ["--format", "json", "-t", "host", "-o", str(file)]
    shown = main(["doctor", *words[:-2]]), capsysbinary.readouterr().out

    assert (main(["doctor", *words]), file.read_bytes()) == shown
    assert capsysbinary.readouterr().out == b""

    assert main(["check", "p f", "--image", "/nonexistent", "-o", str(file)]) == 1
    assert file.read_bytes() == shown[1]

    assert main(["doctor", "-o", "/nonexistent/found.json"]) == 2


def test_a_check_of_nothing_is_refused_before_a_kernel_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["check", "--image", "/nonexistent"]) == 2
    assert capsys.readouterr().err == "kprobe: nothing to check: no definition was given\n"


def test_a_deletion_is_a_definition_in_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "p:a f", "-:a"]) == 2
    assert capsys.readouterr().err == "kprobe: nothing to probe: no definition was given\n"

    assert main(["trace", "-:a", "p:a f", "-o", "/nonexistent/out"]) == 4
    assert "-:a\n" in capsys.readouterr().err


def test_an_option_of_another_command_is_given_once_too() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["status", "--format", "json", "--format", "text"])

    assert caught.value.code == 2


@pytest.mark.parametrize(
    "words",
    [
        ["--target", "qemu:localhost:1234", "--", "ls"],
        ["--target", "qemu:localhost:1234", "--memory", "1G"],
        ["--target", "nowhere"],
        ["--kernel", "/boot/vmlinuz", "--suite", "sid"],
        ["--memory", "1M"],
        ["-o", "/nonexistent/directory/out.txt"],
        ["--follow"],
        ["--follow", "p f", "--all-tasks", "--", "ls"],
        ["--cpu", "1", "--python", "handlers.py"],
        ["--target", "host", "--tgid", "7"],
        ["--target", "host", "-O", "record-tgid"],
    ],
)
def test_options_that_make_no_sense_exit_with_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "p vfs_read", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KprobesError("it broke"), 1),
        (TargetError("it broke"), 1),
        (UsageError("it broke"), 2),
        (UnreachableError("it broke"), 3),
        (RefusedError("it broke"), 4),
    ],
)
def test_every_error_is_one_line_and_its_exit_code(
    error: KprobesError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert guarded(raising(error)) == code
    assert capsys.readouterr() == ("", "kprobe: it broke\n")


def test_a_wrong_definition_is_shown_with_its_caret(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["trace", "p  vfs_read a=$foo"])

    assert code == 4
    assert capsys.readouterr().err.splitlines()[:3] == [
        "kprobe: error: Invalid $-variable specified",
        "  Command: p vfs_read a=$foo",
        "           " + " " * len("p vfs_read a=") + "^",
    ]


def test_notes_say_where_a_definition_stands(capsys: pytest.CaptureFixture[str]) -> None:
    error = DefinitionError("X", "Wrong", command="p f", column=2)
    error.add_note("line 3")
    error.add_note("probes.txt")

    guarded(raising(error))

    assert capsys.readouterr().err.endswith("^\n  in probes.txt, line 3\n")


def test_an_interrupt_is_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "kprobe: interrupted\n"


def test_a_reader_that_left_is_no_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert guarded(raising(BrokenPipeError())) == 0
    assert capsys.readouterr().err == ""


def test_a_bug_is_one_line_that_says_how_to_see_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KPROBES_TRACEBACK", raising=False)

    code = guarded(raising(RuntimeError("deep\ntrouble")))

    assert code == 1
    assert capsys.readouterr().err.splitlines() == [
        "kprobe: internal error: RuntimeError: deep",
        "  KPROBES_TRACEBACK=1 in the environment shows where",
    ]


@pytest.mark.parametrize("error", [RuntimeError("deep"), UnreachableError("far")])
def test_the_traceback_can_be_had(
    error: Exception, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KPROBES_TRACEBACK", "1")

    guarded(raising(error))

    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_bug_in_a_thread_is_no_traceback_either() -> None:
    code = (
        "import threading\n"
        "from kprobes.cli import main\n"
        "def act(args, out):\n"
        "    thread = threading.Thread(target=lambda: 1 / 0)\n"
        "    thread.start(); thread.join()\n"
        "    return 0\n"
        "main.COMMANDS[0].run = act\n"
        "main.main(['trace', 'p f'])"
    )

    done = run_python(code, KPROBES_TRACEBACK="")

    assert "ZeroDivisionError" in done.stderr
    assert "Traceback" not in done.stderr


def test_output_that_nobody_reads_is_not_complained_about() -> None:
    code = (
        "import sys\n"
        "from kprobes.cli.main import guarded\n"
        "def act():\n"
        "    sys.stdout.buffer.write(b'x')\n"
        "    return 0\n"
        "sys.exit(guarded(act))"
    )
    reader, writer = os.pipe()
    os.close(reader)

    done = subprocess.run(
        [sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, check=False
    )

    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    ("guardian", "is_told"), [((0, ""), True), ((os.getpid(), process_start(os.getpid())), False)]
)
def test_the_next_command_says_that_tracer_and_guardian_were_killed(
    capfd: pytest.CaptureFixture[str],
    guardian: tuple[int, str],
    *,
    is_told: bool,
) -> None:
    entry = write_journal("localhost:1", name=f"{dead_pid()}-1")
    with entry.path.open("a") as file:
        file.write(f"{json.dumps({'guardian': guardian})}\n")

    main(["check", "p f", "--image", "/nonexistent"])

    words = f"kprobe: process {entry.pid}, which used localhost:1, was killed, as was its guardian"
    assert (words in capfd.readouterr().err) == is_told


def test_the_next_command_says_that_memory_is_still_allocated(
    capfd: pytest.CaptureFixture[str],
) -> None:
    entry = write_journal("localhost:1", name=f"{dead_pid()}-1")
    with entry.path.open("a") as file:
        file.write('{"closed": true}\n')

    main(["check", "p f", "--image", "/nonexistent"])

    words = f"kprobe: process {entry.pid}, which used localhost:1, has ended; that guest's memory"
    assert words in capfd.readouterr().err
