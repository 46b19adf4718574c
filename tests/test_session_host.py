"""Text given to a session with this machine's kernel, on a kernel that is not there."""

import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from kprobes.errors import DefinitionError, NotSupportedError, UsageError
from kprobes.handlers.probe import Kprobe
from kprobes.host.driver import HostDriver, HostOptions
from kprobes.model.options import Options, Tasks
from kprobes.model.plan import ReturnMethod, Strategy
from kprobes.open import HostSession
from kprobes.session import Session
from tests.build.host_machine import make_machine, open_fake, read_fake
from tests.build.tracefs import FakeTracefs
from tests.build.waiting import becomes_true


@pytest.fixture
def tracefs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTracefs:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return FakeTracefs()


def session_of(tracefs: FakeTracefs, options: HostOptions | None = None) -> HostSession:
    driver = HostDriver(make_machine(tracefs), options or HostOptions(), open_fake, read_fake)
    with ExitStack() as undo:
        undo.callback(driver.close)
        return Session(driver, undo.pop_all(), driver.machine)


def test_a_recording_arms_counts_and_leaves_nothing(tracefs: FakeTracefs) -> None:
    with session_of(tracefs) as kernel:
        kernel.probe("p:a vfs_read count")
        with kernel.record() as trace:
            armed = list(tracefs.lines)

    assert [line.split(" ", 1)[1] for line in armed] == ["vfs_read count=%dx:u64"]
    assert (tracefs.lines, tracefs.instances) == ([], {})
    assert (trace.counts.recorded, trace.counts.lost) == ({1: 5}, 2)
    assert [hits.event for hits in trace.hits] == ["a"]


def test_an_error_in_a_recording_leaves_nothing(tracefs: FakeTracefs) -> None:
    kernel = session_of(tracefs)
    kernel.probe("p:a vfs_read")

    with pytest.raises(ZeroDivisionError), kernel.record():
        raise ZeroDivisionError

    assert (tracefs.lines, tracefs.instances) == ([], {})


def test_a_command_that_is_followed_runs_when_it_is_named(tracefs: FakeTracefs) -> None:
    kernel = session_of(tracefs)
    kernel.probe("p:a vfs_read")
    kernel.choose_tasks(follow=True)
    with kernel.record():
        finished = kernel.run("echo $$")

    pids = [text for name, text in tracefs.written if name.endswith("set_event_pid")]
    assert pids == [f"{finished.pid}\n"]
    assert finished.output.decode() == pids[0]
    with pytest.raises(UsageError, match="give pids"):
        kernel.choose_tasks(tgids=[1])


def test_a_command_that_is_followed_does_nothing_until_the_kernel_was_told_its_pid(
    tracefs: FakeTracefs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, seen = tmp_path / "done", list[bool]()
    kernel = session_of(tracefs)
    kernel.probe("p:a vfs_read")
    kernel.choose_tasks(follow=True)
    follow = kernel.driver.follow

    def follow_late(pid: int) -> None:
        # Ample for a command that nothing holds; one that is held never comes.
        seen.append(becomes_true(done.exists, timeout_s=2))
        follow(pid)

    monkeypatch.setattr(kernel.driver, "follow", follow_late)
    with kernel.record():
        kernel.run(f"touch {done}")

    assert seen == [False]
    assert done.exists()


def test_nothing_is_written_before_recording(tracefs: FakeTracefs) -> None:
    kernel = session_of(tracefs)

    kernel.probe("p:a vfs_read\nr:b many")
    kernel.probe("-:a")

    assert [definition.event for definition in kernel.definitions] == ["b"]
    assert tracefs.written == []


def test_a_wrong_definition_changes_nothing(tracefs: FakeTracefs) -> None:
    kernel = session_of(tracefs)
    kernel.probe("p:a vfs_read")

    for text in ("p:b nothing", "p:b vfs_read now=$current->pid", "p:b vfs_read a=%zz"):
        with pytest.raises(DefinitionError):
            kernel.probe(text)

    assert [definition.event for definition in kernel.definitions] == ["a"]


def test_extra_fields_of_returns_are_for_guests(tracefs: FakeTracefs) -> None:
    with pytest.raises(DefinitionError) as caught:
        session_of(tracefs).probe("r vfs_read", duration=True)

    assert "only functions of guests" in caught.value.hint
    assert "`p FUNCTION` and `r FUNCTION`" in caught.value.hint


def test_events_come_one_by_one_until_the_time_is_over(tracefs: FakeTracefs) -> None:
    kernel = session_of(tracefs)
    kernel.probe("p:a vfs_read")

    assert list(kernel.events(timeout_s=0.1)) == []
    assert tracefs.lines == []


def test_handlers_are_refused_with_what_works(tracefs: FakeTracefs) -> None:
    kernel = session_of(tracefs)

    for take in (kernel.kprobe, kernel.entry, kernel.returns):
        with pytest.raises(NotSupportedError, match=r"for event in kernel\.events"):
            take("vfs_read")
    with pytest.raises(NotSupportedError, match=r"for event in kernel\.events"):
        kernel.register_kprobe(Kprobe(symbol_name="vfs_read", pre_handler=print))
    with pytest.raises(NotSupportedError, match=r"kprobes\.boot"):
        kernel.read_u64(0)


def test_recording_needs_a_definition(tracefs: FakeTracefs) -> None:
    with pytest.raises(UsageError), session_of(tracefs).record():
        pass


def test_commands_run_on_this_machine(tracefs: FakeTracefs) -> None:
    assert session_of(tracefs).run("echo here").output == b"here\n"


@pytest.mark.parametrize(("clock", "has_ns"), [("local", True), ("x86-tsc", False)])
def test_sinks_know_whether_times_are_nanoseconds(
    tracefs: FakeTracefs, clock: str, *, has_ns: bool
) -> None:
    assert session_of(tracefs, HostOptions(clock=clock)).source.has_ns is has_ns


def test_a_closed_session_takes_no_probes_and_says_that_it_is_closed(tracefs: FakeTracefs) -> None:
    kernel = session_of(tracefs)
    kernel.close()

    assert repr(kernel).startswith("<Session with Linux")
    assert "closed" in repr(kernel)
    with pytest.raises(UsageError, match="this session is closed"):
        kernel.probe("p:a vfs_read")


def test_how_probes_are_placed_is_refused_and_the_options_stay(tracefs: FakeTracefs) -> None:
    kernel = session_of(tracefs)
    before = kernel.options

    for wrong in (
        Options(strategy=Strategy.JUMP),
        Options(return_method=ReturnMethod.RETHOOK),
        Options(tasks=Tasks(tgids=(1,))),
    ):
        with pytest.raises(NotSupportedError, match="this machine's own kernel"):
            kernel.options = wrong
        assert kernel.options is before


def test_limits_are_watched_as_long_as_something_is_recorded(tracefs: FakeTracefs) -> None:
    def watching() -> bool:
        return any(thread.name == "kprobes-limits" for thread in threading.enumerate())

    with session_of(tracefs) as kernel:
        kernel.probe("p:a vfs_read")
        with kernel.record():
            assert not watching()
        kernel.limit(max_rate=5)
        with kernel.record():
            assert watching()
        assert not watching()
