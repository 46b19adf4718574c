"""The command whose end ends a trace."""

import threading

import pytest

from kprobes.cli.workload import Workload
from kprobes.errors import GuestGoneError, KprobesError, TargetError
from kprobes.transport.agent import Command, Finished
from tests.build.waiting import becomes_true


class FakeJob:
    """Ends when it is told to, or killed."""

    pid = 7

    def __init__(self, *, status: int = 0, error: KprobesError | None = None) -> None:
        self.may_end = threading.Event()
        self.was_killed = False
        self._status, self._error = status, error

    def wait(self, timeout_s: float | None = None) -> Finished:
        del timeout_s
        assert self.may_end.wait(60)
        if self._error is not None:
            raise self._error
        return Finished(status=137 if self.was_killed else self._status, output=b"out", pid=7)

    def go(self) -> None:
        raise AssertionError("it was not held")

    def kill(self) -> None:
        self.was_killed = True
        self.may_end.set()


def wait_until_over(workload: Workload) -> None:
    # finish() would kill what has not ended yet.
    assert becomes_true(lambda: workload.is_over)


@pytest.mark.parametrize(
    ("words", "command"),
    [(["ls", "/a b"], ["ls", "/a b"]), (["ls / | wc -l"], "ls / | wc -l"), (["ls"], "ls")],
)
def test_one_word_is_a_line_for_the_shell_and_several_are_words(
    words: list[str], command: Command
) -> None:
    started: list[Command] = []

    def start(command: Command) -> FakeJob:
        started.append(command)
        return FakeJob()

    workload = Workload(start, words)
    workload.start()
    workload.finish()

    assert started == [command]


@pytest.mark.parametrize(
    ("status", "text"),
    [(0, "ls /: exit status 0"), (3, "ls /: exit status 3"), (139, "ls /: ended by signal 11")],
)
def test_a_command_that_ended_tells_how(status: int, text: str) -> None:
    job = FakeJob(status=status)
    workload = Workload(lambda _: job, ["ls", "/"])

    workload.start()
    assert not workload.is_over
    job.may_end.set()
    wait_until_over(workload)
    finished = workload.finish()

    assert finished is not None
    assert finished.output == b"out"
    assert workload.status == status
    assert workload.ending(finished) == text
    assert not job.was_killed


def test_a_command_that_runs_on_is_killed_with_the_trace() -> None:
    job = FakeJob()
    workload = Workload(lambda _: job, ["sleep", "1000"])

    workload.start()
    finished = workload.finish()

    assert job.was_killed
    assert workload.status == 0
    assert workload.ending(finished) == "sleep 1000: killed, because the trace was over"


def test_a_command_that_was_never_started_has_no_end() -> None:
    workload = Workload(lambda _: FakeJob(), ["ls"])

    assert workload.finish() is None
    assert workload.status == 0


@pytest.mark.parametrize("error", [TargetError("nonsense"), GuestGoneError("gone")])
def test_what_went_wrong_in_the_guest_is_raised_at_the_end(error: KprobesError) -> None:
    job = FakeJob(error=error)
    workload = Workload(lambda _: job, ["ls"])

    workload.start()
    job.may_end.set()
    wait_until_over(workload)

    with pytest.raises(type(error)):
        workload.finish()
