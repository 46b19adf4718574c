"""The guardian: a guest whose tracer died gets its bytes back and runs."""

import io
import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from kprobes.errors import FormatError, KprobesError, TargetError, UnreachableError
from kprobes.guest import guardian
from kprobes.guest.armed import ArmedPatch
from kprobes.guest.guardian import Guardian, Rescued, rescue
from kprobes.guest.guest import InitText
from kprobes.guest.journal import Journal
from kprobes.guest.patches import check_unchanged
from kprobes.units import Addr, Phys
from tests.build.journals import lend
from tests.build.stub import FakeStub, listening, packet, send

OLD, NEW = b"\x0f\x1f\x44\x00\x00", b"\xe8abcd"


def _take_nothing_back(
    _stub: object, _entry: object, left: Sequence[ArmedPatch]
) -> tuple[int, int]:
    check_unchanged(left)
    return 0, 0


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    # No kernel runs there that could take memory back.
    monkeypatch.setattr(guardian, "_free_after_crash", _take_nothing_back)


def _patched(stub: FakeStub, *, held: bytes = NEW) -> Journal:
    places = [0x100, 0x180]
    journal = Journal.create("/somewhere")
    patches = [
        ArmedPatch(phys=Phys(p), addr=Addr(p), old=OLD, new=NEW, what="vfs_read") for p in places
    ]
    journal.record(patches)
    lend(stub, journal)
    for place in places:
        stub.physical[place : place + len(held)] = held
    return journal


def _places(stub: FakeStub) -> list[bytes]:
    return [bytes(stub.physical[at : at + len(OLD)]) for at in (0x100, 0x180)]


def test_every_byte_is_put_back_and_the_guest_runs() -> None:
    stub = FakeStub()
    journal = _patched(stub)

    with listening(stub) as path:
        assert rescue(path, journal.path) == Rescued(2, 0)

    assert _places(stub) == [OLD, OLD]
    assert stub.is_running
    assert not journal.path.exists()


@pytest.mark.parametrize(("state", "count"), [(1, 2), (2, 1)])
def test_what_boot_has_freed_is_left_alone(state: int, count: int) -> None:
    stub = FakeStub()
    journal = _patched(stub)
    init_text = InitText(
        start=Addr(0x180), stop=Addr(0x1A0), state=Phys(0x200), phys=Phys(0x190), head=b"\xee" * 8
    )
    journal.note_init_text(init_text)
    stub.physical[0x200:0x204] = state.to_bytes(4, "little")

    with listening(stub) as path:
        assert rescue(path, journal.path) == Rescued(count, 0)

    assert _places(stub) == [OLD, OLD if count == 2 else NEW]
    assert not journal.path.exists()


def test_a_guest_that_somebody_else_has_paused_is_put_right_and_stays_paused() -> None:
    stub = FakeStub(is_running=False)
    stub.hooks[b"qRcmd," + b"info status".hex().encode()] = send(
        packet(b"O" + b"VM status: paused (prelaunch)\n".hex().encode()) + packet(b"OK")
    )
    journal = _patched(stub)

    with listening(stub) as path, pytest.raises(KprobesError, match="paused"):
        rescue(path, journal.path, was_killed=False)

    assert _places(stub) == [OLD, OLD]
    assert not stub.is_running
    assert journal.path.exists()


def test_of_a_guest_that_was_migrated_nothing_is_left_to_do_where_it_ran_before() -> None:
    stub = FakeStub(is_running=False)
    stub.hooks[b"qRcmd," + b"info status".hex().encode()] = send(
        packet(b"O" + b"VM status: paused (postmigrate)\n".hex().encode()) + packet(b"OK")
    )
    journal = _patched(stub)

    with listening(stub) as path:
        assert rescue(path, journal.path, was_killed=False) == Rescued(2, 0)

    assert _places(stub) == [OLD, OLD]
    assert not stub.is_running
    assert not journal.path.exists()


def test_a_guest_that_its_tracer_left_stopped_runs_again() -> None:
    stub = FakeStub(is_running=False)
    journal = _patched(stub)

    with listening(stub) as path:
        rescue(path, journal.path)

    assert stub.is_running


def test_a_tracer_that_died_before_it_wrote_a_journal_leaves_a_running_guest() -> None:
    stub = FakeStub(is_running=False)

    with listening(stub) as path:
        assert rescue(path, Path("/nowhere/journal")) == Rescued(0, 0)

    assert stub.is_running


def test_strange_bytes_are_told_and_the_guest_runs_all_the_same() -> None:
    stub = FakeStub()
    journal = _patched(stub, held=b"other")

    with listening(stub) as path, pytest.raises(TargetError, match="2 places"):
        rescue(path, journal.path)

    assert stub.is_running
    assert journal.path.exists()


def test_a_journal_that_cannot_be_read_does_not_keep_the_guest_stopped() -> None:
    stub = FakeStub(is_running=False)
    journal = _patched(stub)
    journal.path.write_bytes(b"garbage\n")

    with listening(stub) as path, pytest.raises(FormatError):
        rescue(path, journal.path)

    assert stub.is_running
    assert journal.path.exists()


def test_a_guest_that_is_gone_is_told_after_a_while(tmp_path: Path) -> None:
    journal = _patched(FakeStub())

    with pytest.raises(UnreachableError):
        rescue(str(tmp_path / "gone.sock"), journal.path, patience_s=0.05)

    assert journal.path.exists()


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
        watcher = Guardian(path, journal.path)
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
    (tmp_path / "numpy.py").write_text("raise ImportError('ours')")
    journal = Journal.create("/somewhere")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    with Guardian("/somewhere", journal.path) as watcher:
        watcher.watch(lambda _: None)
        with pytest.raises(TargetError, match="does not start: ImportError: ours"):
            watcher.await_ready()


def test_a_guardian_that_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal.create("/somewhere")
    deaths = queue.Queue[KprobesError]()
    monkeypatch.setattr(sys, "executable", "/bin/false")

    with Guardian("/somewhere", journal.path) as watcher:
        watcher.watch(deaths.put)
        with pytest.raises(TargetError, match="does not start: it says nothing"):
            watcher.await_ready()
    # Whoever waits for something else must hear of it, too.
    assert "does not start" in str(deaths.get(timeout=20))


def test_a_guardian_that_dies_is_told_once_and_one_that_is_dismissed_is_not() -> None:
    journal = Journal.create("/somewhere")
    deaths = queue.Queue[KprobesError]()

    with Guardian("/somewhere", journal.path) as watcher:
        watcher.watch(deaths.put)
        watcher.await_ready()
    assert deaths.empty()
    with Guardian("/somewhere", journal.path) as watcher:
        watcher.watch(deaths.put)
        watcher.await_ready()
        os.kill(watcher.pid, signal.SIGKILL)
        assert "was killed itself" in str(deaths.get(timeout=20))

    assert deaths.empty()


def test_what_ends_a_tracer_s_group_or_session_leaves_its_guardian() -> None:
    journal = Journal.create("/somewhere")

    with Guardian("/somewhere", journal.path) as watcher:
        watcher.watch(lambda _: None)
        watcher.await_ready()

        assert os.getpgid(watcher.pid) == os.getsid(watcher.pid) == watcher.pid


def test_a_guardian_that_is_dismissed_does_not_touch_the_guest() -> None:
    stub = FakeStub()
    journal = Journal.create("/somewhere")
    with listening(stub) as path, Guardian(path, journal.path) as watcher:
        watcher.watch(lambda _: None)
        watcher.await_ready()

    assert stub.asked == []
    assert journal.path.exists()


def test_one_that_is_dismissed_before_it_is_ready_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guardian, "_START", "import time; time.sleep(3600)")
    began = time.monotonic()

    with Guardian("/somewhere", Journal.create("/somewhere").path):
        pass

    assert time.monotonic() - began < 600


def test_the_end_of_the_pipe_without_a_word_is_the_tracer_s_death() -> None:
    stub = FakeStub(is_running=False)
    journal = _patched(stub)
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

    assert _places(stub) == [OLD, OLD]
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

    monkeypatch.setattr(guardian, "rescue", fail_at_first)
    monkeypatch.setattr(guardian, "_BETWEEN_S", 0)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))

    assert guardian.main("target", "journal") == code
    assert len(tried) == (failures + 1 if code == 0 else 5)
