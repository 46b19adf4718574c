"""``kprobe repl`` as its user has it: a shell on a terminal, scripts, code; the guest is well."""

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from kprobes.transport.qemu import Machine
from tests.build.command import WAIT_S, Command, read_line

pytestmark = pytest.mark.guest

_SCRIPT = """\
import sys
from drgn.helpers.linux import find_task
print(sys.argv[1:], find_task(prog, 1).comm, flush=True)
if sys.argv[1:] == ["fail"]:
    nosuch
sys.exit(7)
"""


@pytest.fixture
def kprobe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guest: Machine) -> Generator[Command]:
    monkeypatch.setenv("KPROBES_TARGET", f"qemu:{guest.stub_address}")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "script.py").write_text(_SCRIPT)
    monkeypatch.chdir(tmp_path)
    with Command(tmp_path / "state") as command:
        yield command
        assert command.is_idle(os.environ["KPROBES_TARGET"])


class Shell:
    """The shell on a terminal of its own."""

    def __init__(self, state: Path) -> None:
        self._terminal, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [Path(sys.executable).with_name("kprobe"), "repl", "-q"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "XDG_STATE_HOME": str(state), "TERM": "dumb"},
        )
        os.close(theirs)
        self._text = ""

    def wait_for(self, words: str) -> str:
        """Return what is shown up to some words; they must come."""
        deadline = time.monotonic() + WAIT_S
        while words not in self._text:
            ready, _, _ = select.select([self._terminal], [], [], deadline - time.monotonic())
            assert ready, self._text
            self._text += os.read(self._terminal, 4096).decode()
        before, _, self._text = self._text.partition(words)
        return before

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)


def test_the_shell_has_drgn_and_our_probes(kprobe: Command, tmp_path: Path) -> None:
    del kprobe
    shell = Shell(tmp_path / "state")
    try:
        assert "Linux 6.1.0" in shell.wait_for(">>> ")
        shell.wait_for("help(kernel)")
        shell.wait_for(">>> ")
        shell.type("find_task(prog, 1).comm\n")
        shell.wait_for('"init"')
        shell.type("while True: pass\n\n")
        shell.wait_for("... ")
        time.sleep(0.5)
        shell.process.send_signal(signal.SIGINT)
        shell.wait_for("KeyboardInterrupt")
        shell.type('probe("p schedule")\n')
        shell.wait_for("<TraceProbe p schedule: enabled>")
        shell.type("with record(timeout_s=60) as trace: len([*zip(trace, range(3))])\n\n")
        shell.type("len(trace) >= 3\n")
        shell.wait_for("True")
        shell.type("breakpoint('schedule').wait(60).regs.cpu in (0, 1)\n")
        shell.wait_for("True")
        # An end of input that comes before the shell reads again is lost: the
        # terminal takes it as it is then, not as the shell will have it.
        shell.wait_for(">>> ")
        shell.type("\x04")
        assert shell.process.wait(WAIT_S) == 0
    finally:
        shell.close()


def test_scripts_have_their_arguments_and_their_status(kprobe: Command) -> None:
    done = kprobe("repl", "script.py", "--", "one", "--two")

    assert (done.returncode, done.stderr) == (7, b"")
    assert done.stdout == b"['one', '--two'] (char [16])\"init\"\n"


def test_an_exception_is_shown_from_the_script_on(kprobe: Command) -> None:
    done = kprobe("repl", "script.py", "--", "fail")

    assert done.returncode == 1
    assert done.stderr.startswith(b"Traceback (most recent call last):\n")
    assert done.stderr.endswith(b"NameError: name 'nosuch' is not defined\n")
    assert done.stderr.count(b"File ") == 1


def test_code_has_the_helpers(kprobe: Command) -> None:
    done = kprobe("repl", "-e", "print(find_task(1).pid.value_(), kernel.kernel.arch)")

    assert (done.returncode, done.stdout, done.stderr) == (0, b"1 x86_64\n", b"")


def test_a_signal_ends_a_script_and_leaves_the_guest_well(kprobe: Command, guest: Machine) -> None:
    code = (
        "import time\n"
        "probe('p:seen vfs_write')\n"
        "with record():\n    print('records', flush=True)\n    time.sleep(1000)"
    )
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130)):
        process = kprobe.start("repl", "-e", code)
        assert read_line(process) == b"records\n"

        process.send_signal(number)

        assert process.wait(WAIT_S) == status
        assert guest.run("echo on", WAIT_S).output == b"on\n"
