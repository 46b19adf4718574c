"""Fate of a journal, in words."""

import errno
from pathlib import Path

import pytest

from kprobes.cli.main import main
from kprobes.cli.words import words_for, words_for_host
from kprobes.errors import TargetError, TracefsError
from kprobes.guest.recovery import Outcome, Restored
from kprobes.host.owner import Owner
from kprobes.host.sessions import Removed
from tests.build.journals import make_entry

ENTRY = make_entry("localhost:1234")

OWNER = Owner(pid=42, started="7", session=1)


@pytest.mark.parametrize(
    ("restored", "text"),
    [
        (Restored(entry=ENTRY, outcome=Outcome.RESTORED, count=2), "2 places put back as before"),
        (Restored(entry=ENTRY, outcome=Outcome.RESTORED), "as before already"),
        (Restored(entry=ENTRY, outcome=Outcome.GUEST_ENDED), "the guest has ended"),
        (Restored(entry=ENTRY, outcome=Outcome.FORGOTTEN), "nothing was patched in it"),
        (Restored(entry=ENTRY, outcome=Outcome.STILL_TRACING), f"process {ENTRY.pid} is still"),
    ],
    ids=["restored", "as before", "ended", "forgotten", "still tracing"],
)
def test_each_outcome_is_a_line_that_names_the_guest(restored: Restored, text: str) -> None:
    line = words_for(restored)

    assert line.startswith("localhost:1234: ")
    assert text in line
    assert "\n" not in line


def test_a_failure_says_why_and_where_the_journal_is() -> None:
    error = TargetError("strange bytes")

    lines = words_for(Restored(entry=ENTRY, outcome=Outcome.FAILED, error=error)).splitlines()

    assert lines[0] == "localhost:1234: strange bytes"
    assert str(ENTRY.path) in lines[1]


@pytest.mark.parametrize(
    ("removed", "words"),
    [
        (Removed(owner=OWNER, count=3), "3 events of process 42 taken away"),
        (Removed(owner=OWNER, is_tracing=True), "left alone: process 42 is still tracing it"),
        (
            Removed(owner=OWNER, error=TracefsError("instances/x", errno.EBUSY, verb="remove")),
            "something of process 42 is left: cannot remove instances/x of tracefs: Device or",
        ),
    ],
)
def test_what_was_left_in_this_machines_kernel(removed: Removed, words: str) -> None:
    assert words_for_host(removed).startswith(f"this machine's kernel: {words}")


@pytest.mark.parametrize("command", ["restore", "status"])
def test_a_broken_journal_is_named_and_told_by_the_exit_status(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    broken = tmp_path / "kprobes" / "journal" / "broken.jsonl"
    broken.mkdir(parents=True)

    code = main([command, "--target", "guest"])

    out, words = capfd.readouterr()
    assert (code, out) == (1, "")
    assert words.startswith(f"kprobe: {broken} is not a file\n")
