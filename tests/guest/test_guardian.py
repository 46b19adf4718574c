"""The guardian: it waits for its tracer's end, and acts on it."""

import io
import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kprobes.errors import KprobesError, TargetError
from kprobes.guest import guardian, rescue
from kprobes.guest.guardian import Guardian
from kprobes.guest.journal import Journal
from tests.build.journals import NEW, OLD, patched, text_of
from tests.build.stub import FakeStub, listening


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


HOSTILE = "from pathlib import Path; Path('ran').touch(); raise SystemExit"


def test_nothing_is_run_from_the_directory_that_somebody_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.create("/somewhere")
    here = tmp_path / "here"
    here.mkdir()
    for name in ("json.py", "kprobes.py", "sitecustomize.py", "numpy.py"):
        (here / name).write_text(HOSTILE)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", ["", ".", *sys.path])
    stub = FakeStub(is_running=False)

    with listening(stub) as path:
        watcher = Guardian(path, journal)
        watcher.watch(lambda _: None)
        watcher.await_ready()
        assert Path(f"/proc/{watcher.pid}/cwd").readlink() == Path("/")
        watcher.dismiss()

    assert {path.name for path in here.iterdir()} == {
        "json.py",
        "kprobes.py",
        "sitecustomize.py",
        "numpy.py",
    }


def test_modules_come_from_where_the_tracer_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As PYTHONPATH and pip install --user have it: nothing that -I would look at.
    (tmp_path / "subprocess.py").write_text("raise ImportError('ours')")
    journal = Journal.create("/somewhere")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    with Guardian("/somewhere", journal) as watcher:
        watcher.watch(lambda _: None)
        with pytest.raises(TargetError, match="does not start: ImportError: ours"):
            watcher.await_ready()


def test_one_that_cannot_load_what_puts_right_is_told_before_anybody_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('ours')")
    journal = Journal.create("/somewhere")
    deaths = queue.Queue[KprobesError]()
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    with Guardian("/somewhere", journal) as watcher:
        watcher.watch(deaths.put)
        watcher.await_ready()
        assert "has ended: ImportError: ours; tracing has ended" in str(deaths.get(timeout=60))


def test_a_guardian_that_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal.create("/somewhere")
    deaths = queue.Queue[KprobesError]()
    monkeypatch.setattr(sys, "executable", "/bin/false")

    with Guardian("/somewhere", journal) as watcher:
        watcher.watch(deaths.put)
        with pytest.raises(TargetError, match="does not start: it says nothing"):
            watcher.await_ready()
    # Whoever waits for something else must hear of it, too.
    assert "does not start" in str(deaths.get(timeout=20))


def test_a_guardian_that_dies_is_told_once_and_one_that_is_dismissed_is_not() -> None:
    journal = Journal.create("/somewhere")
    deaths = queue.Queue[KprobesError]()

    with Guardian("/somewhere", journal) as watcher:
        watcher.watch(deaths.put)
        watcher.await_ready()
    assert deaths.empty()
    with Guardian("/somewhere", journal) as watcher:
        watcher.watch(deaths.put)
        watcher.await_ready()
        os.kill(watcher.pid, signal.SIGKILL)
        assert "was killed itself" in str(deaths.get(timeout=20))

    assert deaths.empty()


def test_what_ends_a_tracer_s_group_or_session_leaves_its_guardian() -> None:
    journal = Journal.create("/somewhere")

    with Guardian("/somewhere", journal) as watcher:
        watcher.watch(lambda _: None)
        watcher.await_ready()

        assert os.getpgid(watcher.pid) == os.getsid(watcher.pid) == watcher.pid


def test_a_guardian_that_is_dismissed_does_not_touch_the_guest() -> None:
    stub = FakeStub()
    journal = Journal.create("/somewhere")
    with listening(stub) as path, Guardian(path, journal) as watcher:
        watcher.watch(lambda _: None)
        watcher.await_ready()

    assert stub.asked == []
    assert journal.path.exists()


def test_what_a_tracer_that_ends_by_itself_has_left_is_put_back() -> None:
    # Its stub fell silent.
    stub = FakeStub(is_running=False)
    journal = patched(stub)
    with listening(stub) as path:
        watcher = Guardian(path, journal)
        watcher.watch(lambda _: None)
        watcher.await_ready()
        assert text_of(stub) == [NEW, NEW]
        watcher.dismiss()

    assert text_of(stub) == [OLD, OLD]


def test_one_that_is_dismissed_before_it_is_ready_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guardian, "_START", "import time; time.sleep(3600)")
    began = time.monotonic()

    with Guardian("/somewhere", Journal.create("/somewhere")):
        pass

    assert time.monotonic() - began < 600


def test_the_end_of_the_pipe_without_a_word_is_the_tracer_s_death() -> None:
    stub = FakeStub(is_running=False)
    journal = patched(stub)
    with listening(stub) as path:
        act = f"import sys, {guardian.__name__} as it; sys.exit(it.main(*sys.argv[1:]))"
        command = [sys.executable, "-c", act, path, str(journal.path)]

        # No kernel runs there that could take memory back, which it tries then.
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=180,
            check=False,
        )

    assert text_of(stub) == [OLD, OLD]
    assert stub.is_running


@pytest.mark.parametrize(("failures", "code"), [(0, 0), (2, 0), (99, 1)])
def test_memory_that_cannot_be_given_back_yet_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, failures: int, code: int
) -> None:
    tried: list[str] = []

    def fail_at_first(target: str, journal: Path, *, was_killed: bool) -> None:
        assert was_killed
        del journal
        tried.append(target)
        if len(tried) <= failures:
            raise TargetError("somebody is inside")

    monkeypatch.setattr(rescue, "rescue", fail_at_first)
    monkeypatch.setattr(guardian, "_BETWEEN_S", 0)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))

    assert guardian.main("target", "journal") == code
    assert len(tried) == (failures + 1 if code == 0 else 5)
