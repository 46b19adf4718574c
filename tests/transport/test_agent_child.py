"""Commands on this machine."""

import os
from pathlib import Path

import pytest

from kprobes.errors import TargetError, UsageError
from kprobes.transport.agent import start


def test_a_command_ends_with_its_status_and_output() -> None:
    child = start("echo out; echo err >&2; exit 3")
    assert repr(child) == f"<Child 'echo out; echo err >&2; exit 3', pid {child.pid}>"

    finished = child.wait(60)

    assert (finished.status, finished.output) == (3, b"out\nerr\n")


def test_words_reach_the_command_as_they_are() -> None:
    assert start(["printf", "%s", "a b $HOME"]).wait(60).output == b"a b $HOME"


def test_a_killed_command_takes_its_children_along() -> None:
    child = start("sleep 60 & echo $!; wait")
    while not os.path.exists(f"/proc/{child.pid}"):  # noqa: PTH110 - a process, no file
        pass

    with pytest.raises(TargetError, match="did not end in time"):
        child.wait(0.3)
    child.kill()
    finished = child.wait(60)

    assert finished.status == 128 + 9
    child.kill()
    assert child.wait() is finished


def test_a_held_command_has_done_nothing_but_its_exec() -> None:
    child = start(["sh", "-c", "echo $$; exit 3"], is_held=True)
    name = Path(f"/proc/{child.pid}/comm").read_text()
    state = Path(f"/proc/{child.pid}/stat").read_text().rpartition(") ")[2][0]
    with pytest.raises(TargetError, match="did not end"):
        child.wait(0.1)

    child.go()
    finished = child.wait(10)

    assert (name, state) == ("sh\n", "t")
    assert (finished.status, finished.output) == (3, b"%d\n" % child.pid)


def test_a_held_command_can_be_killed() -> None:
    child = start("sleep 60", is_held=True)

    child.kill()
    child.go()

    assert child.wait(10).status == 128 + 9


@pytest.mark.parametrize("is_held", [False, True])
def test_no_such_program_is_the_users_mistake(is_held: bool) -> None:
    with pytest.raises(UsageError, match="cannot run /no/such"):
        start(["/no/such"], is_held=is_held)
