"""A check-up in words."""

from kprobes.cli.doctor import findings_as_json, findings_as_text
from kprobes.model.finding import Finding, Severity
from tests.build.json_lines import objects

FINE = Finding(subject="QEMU", verdict=Severity.OK, found="7.2")
SLOW = Finding(subject="KVM", verdict=Severity.NOTE, found="none", advice="it is slow")
ABSENT = Finding(subject="LLVM", verdict=Severity.MISSING, found="absent", advice="install it")


def test_advice_stands_below_what_was_found() -> None:
    assert findings_as_text([FINE, SLOW, ABSENT]) == (
        "ok  QEMU  7.2\n"
        "--  KVM   none\n"
        "          -> it is slow\n"
        "NO  LLVM  absent\n"
        "          -> install it\n"
        "1 problem\n"
    )


def test_a_note_is_no_problem() -> None:
    assert findings_as_text([FINE, SLOW]).endswith("\nall that is needed is here\n")


def test_json_has_an_object_per_line() -> None:
    (found,) = objects("doctor", findings_as_json([FINE]))

    assert found == {"subject": "QEMU", "verdict": "ok", "found": "7.2", "advice": ""}
