"""Sessions of this machine's kernel: found by journal and by name."""

from pathlib import Path

import pytest

from kprobes.host.owner import Owner, new_owner, note
from kprobes.host.sessions import sessions_in
from tests.build.tracefs import FakeTracefs

DEAD = Owner(pid=1 << 22, started="7", session=1)


def test_sessions_are_found_by_journal_and_by_name_with_their_events(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    live = new_owner()
    note(live)
    tracefs = FakeTracefs()
    tracefs.make(DEAD.instance)
    tracefs.lines += ["p:theirs/x vfs_read", f"p:{DEAD.group}/a vfs_read"]

    found = {session.owner: session.lines for session in sessions_in(tracefs)}

    assert found == {live: (), DEAD: (f"p:{DEAD.group}/a vfs_read",)}
