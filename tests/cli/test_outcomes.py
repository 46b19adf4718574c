"""What became of a journal, in words."""

import pytest

from kprobes.cli.outcomes import words_for
from kprobes.drivers.restore import Outcome, Restored
from kprobes.errors import TargetError
from tests.build.journals import make_entry

ENTRY = make_entry("localhost:1234")


@pytest.mark.parametrize(
    ("restored", "text"),
    [
        (Restored(entry=ENTRY, outcome=Outcome.RESTORED, count=2), "2 places put back as before"),
        (Restored(entry=ENTRY, outcome=Outcome.RESTORED), "as before already"),
        (Restored(entry=ENTRY, outcome=Outcome.GUEST_ENDED), "the guest has ended"),
        (Restored(entry=ENTRY, outcome=Outcome.FORGOTTEN), "nothing was patched in it"),
        (Restored(entry=ENTRY, outcome=Outcome.STILL_TRACING), f"process {ENTRY.pid} is still"),
    ],
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
