"""The host's side against scripted answers, then both sides on a pseudo terminal of this host."""

import gzip
import os
import pty
import select
import shutil
import subprocess
import threading
import tty
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest

from kprobes.errors import GuestGoneError, TargetError, UsageError
from kprobes.transport.agent import Agent, Finished
from tests.build.waiting import becomes_true

LIMIT = 1 << 20


class Script:
    """A wire whose guest answers the n-th request with the n-th script, in pieces of one read."""

    def __init__(self, *answers: list[bytes]) -> None:
        self._answers = deque(answers)
        self.coming: deque[bytes] = deque()
        self.sent: list[bytes] = []

    def read(self, timeout_s: float) -> bytes:
        if self.coming:
            return self.coming.popleft()
        # A short sleep stands for any time-out.
        threading.Event().wait(min(timeout_s, 0.01))
        return b""

    def write(self, data: bytes, timeout_s: float | None) -> None:
        del timeout_s
        self.sent.append(data)
        if self._answers:
            self.coming.extend(self._answers.popleft())


def agent(*answers: list[bytes]) -> tuple[Agent, Script]:
    script = Script(*answers)
    return Agent(script, longest_output=LIMIT), script


def test_a_command_is_one_line_of_plain_ascii_whatever_is_in_it() -> None:
    ours, script = agent([b"done 1 7 0 0 0 0\n"])

    ours.run("echo 'a\\b'\n\u00e9\udcff")

    assert script.sent == [b"start 1 quiet $'echo \\047a\\134b\\047\\012\\303\\251\\377'\n"]


def test_words_reach_the_command_as_they_are() -> None:
    ours, script = agent([b"done 1 7 0 0 0 0\n"])

    ours.run(["echo", "two words", "$HOME"])

    assert b"echo \\047two words\\047 \\047$HOME\\047" in script.sent[0]


def test_the_answer_may_come_in_any_pieces() -> None:
    whole = b"done 1 42 3 0 5 5\n\0\nab\n"
    for cut in range(len(whole)):
        ours, _ = agent([whole[:cut], whole[cut:]])

        assert ours.run("x", 5) == Finished(status=3, output=b"\0\nab\n", pid=42)


def test_a_packed_answer_is_unpacked() -> None:
    data = gzip.compress(b"line\n" * 9999)
    ours, _ = agent([b"done 1 2 0 1 %d %d\n" % (5 * 9999, len(data)), data])

    assert ours.run("x", 5).output == b"line\n" * 9999


@pytest.mark.parametrize("claimed", [49_994, 49_996, 3])
def test_a_packed_answer_of_another_size_than_claimed_is_refused(claimed: int) -> None:
    data = gzip.compress(b"line\n" * 9999)
    ours, _ = agent([b"done 1 2 0 1 %d %d\n" % (claimed, len(data)), data])

    # One that unpacks to more than was claimed is cut there: it must not fill our memory.
    if claimed < 5 * 9999:
        assert len(ours.run("x", 5).output) == claimed
    else:
        with pytest.raises(TargetError, match="nonsense"):
            ours.run("x", 5)


@pytest.mark.parametrize(
    "nonsense",
    [
        b"hello\n",
        b"done 1 2 3\n",
        b"done 1 2 0 0 -5 -5\n",
        b"done 1 2 0 0 x 5\n",
        b"done 1 2 0 0 1048577 1048577\n",
        b"done 1 2 0 1 1048577 10\n",
        b"done 1 2 0 1 10 3\nabc",
        b"started 1\n",
        b"x" * 300,
    ],
)
def test_a_guest_that_speaks_nonsense_is_not_believed(nonsense: bytes) -> None:
    ours, _ = agent([nonsense])

    with pytest.raises(TargetError, match="nonsense"):
        ours.run("x", 5)


def test_a_command_that_takes_too_long_is_stopped_and_its_late_answer_dropped() -> None:
    ours, script = agent([], [b"done 1 7 137 0 1 1\nx"], [b"done 2 8 0 0 2 2\nok"])

    with pytest.raises(TargetError, match="'sleep 100' did not end in the guest in time"):
        ours.run("sleep 100", 0.02)

    assert script.sent[1] == b"stop 1\n"
    assert ours.run("echo ok", 5).output == b"ok"


def test_a_started_command_tells_its_pid_before_its_end() -> None:
    ours, script = agent([b"started 1 42\n"], [b"done 1 42 137 0 0 0\n"])

    running = ours.start("sleep 100", 5)

    assert (running.pid, repr(running)) == (42, "<Running 'sleep 100', pid 42>")
    running.kill()
    assert running.wait(60).status == 137
    assert running.wait(60).status == 137
    assert [line.split()[0] for line in script.sent] == [b"start", b"stop"]


def test_a_held_command_is_told_when_to_go() -> None:
    ours, script = agent([b"started 1 42\n"], [b"done 1 42 0 0 0 0\n"])

    running = ours.start("ls", 5, is_held=True)
    running.go()

    assert running.wait(5).status == 0
    assert script.sent == [b"start 1 held $'ls'\n", b"go 1\n"]


def test_waiting_in_vain_leaves_the_command_running() -> None:
    ours, script = agent([b"started 1 42\n"])
    running = ours.start("sleep 100", 5)

    for _ in range(2):
        with pytest.raises(TargetError, match="did not end"):
            running.wait(0.02)

    assert len(script.sent) == 1


def test_commands_may_end_in_another_order() -> None:
    ours, _ = agent([b"started 1 10\n"], [b"done 2 11 0 0 1 1\nbdone 1 10 0 0 1 1\na"])
    first = ours.start("a", 5)

    assert ours.run("b", 5).output == b"b"
    assert first.wait(60).output == b"a"


def test_a_guest_that_dies_is_not_waited_for() -> None:
    class Dead(Script):
        def read(self, timeout_s: float) -> bytes:
            raise GuestGoneError(f"gone before {timeout_s}")

    with pytest.raises(GuestGoneError, match="gone"):
        Agent(Dead(), longest_output=LIMIT).run("x")


def test_the_guest_is_ready_when_it_says_so() -> None:
    ours, script = agent()

    assert not ours.wait_ready(0.02)

    script.coming.append(b"ready\n")
    assert ours.wait_ready(5)


@pytest.mark.parametrize("command", ["a\0b", "x" * 40_000])
def test_a_command_that_cannot_be_sent_is_refused(command: str) -> None:
    ours, script = agent()

    with pytest.raises(UsageError, match="a command"):
        ours.run(command)

    assert script.sent == []


class Terminal:
    """The master of a pseudo terminal as a wire."""

    def __init__(self, master: int) -> None:
        self._master = master

    def read(self, timeout_s: float) -> bytes:
        ready, _, _ = select.select([self._master], [], [], timeout_s)
        return os.read(self._master, 65536) if ready else b""

    def write(self, data: bytes, timeout_s: float | None) -> None:
        del timeout_s
        assert os.write(self._master, data) == len(data)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Agent]:
    """The guest's agent, run by this host's busybox."""
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("no busybox is installed: make test installs busybox-static")
    programs = tmp_path / "bin"
    programs.mkdir()
    subprocess.run([busybox, "--install", "-s", str(programs)], check=True)
    script = Path(__file__).parents[2] / "src/kprobes/transport/guest/agent.sh"
    master, slave = pty.openpty()
    tty.setraw(slave)
    process = subprocess.Popen(
        [busybox, "sh", str(script), os.ttyname(slave), str(tmp_path / "run")],
        env={"PATH": str(programs)},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        ours = Agent(Terminal(master), longest_output=LIMIT * 8)
        assert ours.wait_ready(10)
        yield ours
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(slave)


def test_output_and_status_are_exact(here: Agent) -> None:
    script = r"printf 'a\0\377\r\n\n'; printf '\001\003\004\021\023\032'; exit 7"

    assert here.run(script, 10).output == b"a\0\xff\r\n\n\1\3\4\x11\x13\x1a"
    assert here.run(script, 10).status == 7


def test_standard_error_is_part_of_the_output(here: Agent) -> None:
    assert here.run("echo a; echo b >&2; echo c", 10).output == b"a\nb\nc\n"


def test_quotes_and_bytes_pass_unchanged(here: Agent) -> None:
    nasty = "'\"\\ $HOME `id` \t\n* \u00e9 ;&|"

    assert here.run(["printf", "%s", nasty], 10).output == nasty.encode()


def test_large_output_is_whole(here: Agent) -> None:
    text = here.run("i=0; while [ $i -lt 20000 ]; do echo line $i; i=$((i+1)); done", 20)

    assert text.output == b"".join(b"line %d\n" % i for i in range(20000))


def test_the_pid_is_the_commands_own(here: Agent) -> None:
    finished = here.run("echo $$", 10)

    assert finished.output == b"%d\n" % finished.pid


def test_a_held_command_begins_when_it_may_with_an_exec_of_its_own(here: Agent) -> None:
    running = here.start("echo $$ $0; exit 3", 10, is_held=True)
    # It waits where all of the agent's own execs are over.
    assert b"read -r go" in Path(f"/proc/{running.pid}/cmdline").read_bytes().split(b"\0")[2]
    with pytest.raises(TargetError, match="did not end"):
        running.wait(0.1)
    running.go()

    finished = running.wait(10)
    assert finished.output == b"%d sh\n" % running.pid
    assert finished.status == 3


def test_a_held_command_can_be_killed_and_told_too_late(here: Agent) -> None:
    running = here.start("echo never", 10, is_held=True)
    running.kill()

    assert running.wait(10).status == 137
    running.go()
    assert here.run("echo next", 10).output == b"next\n"


def test_a_background_child_does_not_hold_up_the_end(here: Agent) -> None:
    finished = here.run("(sleep 0.3; echo late) & echo early", 10)

    assert finished.output == b"early\n"


def test_many_short_commands_in_a_row_lose_no_request(here: Agent) -> None:
    # The end of a command once interrupted the agent's reading of the next request.
    for i in range(60):
        assert here.run(f"echo {i}", 10).output == b"%d\n" % i


def test_several_at_once_do_not_mix(here: Agent) -> None:
    running = [here.start(f"sleep 0.1; head -c 9999 /dev/zero | tr '\\0' {c}", 10) for c in "abcd"]

    outputs = [command.wait(60).output for command in running]

    assert outputs == [c * 9999 for c in (b"a", b"b", b"c", b"d")]


def test_threads_may_run_commands_at_once(here: Agent) -> None:
    found: dict[int, bytes] = {}

    def work(number: int) -> None:
        found[number] = here.run(f"sleep 0.0{number}; echo {number}", 10).output

    threads = [threading.Thread(target=work, args=(i,)) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == {i: b"%d\n" % i for i in range(5)}


def test_a_killed_command_takes_its_children_along(here: Agent) -> None:
    running = here.start("sleep 100 & echo $!; wait", 10)

    running.kill()

    finished = running.wait(60)
    assert finished.status == 137
    child = finished.output.strip().decode()
    # The child may not have been told yet when the kill came, nor be gone at once after it.
    assert not child or becomes_true(lambda: not Path(f"/proc/{child}/exe").exists())
