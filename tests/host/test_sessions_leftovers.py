"""Remains of killed tracers: found by journal and by name, and nothing of others touched."""

import errno
from pathlib import Path

import pytest

from kprobes.host.events import HostFiles
from kprobes.host.owner import Owner, new_owner, note, noted
from kprobes.host.sessions import remove_leftovers
from tests.build.tracefs import FakeTracefs

DEAD = Owner(pid=1 << 22, started="7", session=1)
OTHERS = ["p:kprobes/theirs vfs_read", "r10:mine/x vfs_write a=%di"]


@pytest.fixture
def tracefs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTracefs:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    found = FakeTracefs()
    found.lines += [OTHERS[0], f"p:{DEAD.group}/a vfs_read", f"r8:{DEAD.group}/b many", OTHERS[1]]
    found.make(DEAD.instance)
    found.make("instances/kprobes")
    return found


def test_instance_and_events_of_a_dead_process_go(tracefs: FakeTracefs) -> None:
    note(DEAD)

    (removed,) = remove_leftovers(tracefs)

    assert (removed.owner, removed.count, removed.error) == (DEAD, 2, None)
    assert tracefs.lines == OTHERS
    assert set(tracefs.instances) == {"kprobes"}
    assert list(noted()) == []


def test_events_at_tracepoints_go_too(tracefs: FakeTracefs) -> None:
    theirs = "t:tracepoints/theirs sched_switch"
    tracefs.lines += [theirs, f"t:{DEAD.group}/c sched_switch"]

    assert [removed.count for removed in remove_leftovers(tracefs)] == [3]
    assert tracefs.lines == [*OTHERS, theirs]


def test_names_alone_are_enough(tracefs: FakeTracefs) -> None:
    del tracefs.instances[DEAD.label]

    assert [removed.count for removed in remove_leftovers(tracefs)] == [2]
    assert tracefs.lines == OTHERS


def test_a_journal_of_what_is_gone_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    note(DEAD)

    (removed,) = remove_leftovers(FakeTracefs())

    assert removed.count == 0
    assert list(noted()) == []


def test_what_a_process_still_uses_is_left_alone(tracefs: FakeTracefs) -> None:
    owner = new_owner()
    tracefs.make(owner.instance)

    found = {removed.owner: removed for removed in remove_leftovers(tracefs)}

    assert found[owner].is_tracing
    assert owner.label in tracefs.instances


def test_what_somebody_has_open_is_told_and_stays(tracefs: FakeTracefs) -> None:
    tracefs.instances[DEAD.label].is_open = True

    (removed,) = remove_leftovers(tracefs)

    assert removed.error is not None
    assert removed.error.number == errno.EBUSY
    assert len(HostFiles(tracefs, DEAD).lines()) == 2
