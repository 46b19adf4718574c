"""Journals of killed tracers, and guests that are put right from them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kprobes.errors import TargetError, UnreachableError, UsageError
from kprobes.guest import rescue
from kprobes.guest.journal import entries
from kprobes.guest.recovery import Outcome, Restored, of_target, restore
from tests.build.journals import MARK_AT, make_patch, mark_guest, take_nothing_back, write_journal
from tests.build.stub import FakeStub, listening


@pytest.fixture(autouse=True)
def _own_journals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    # No kernel runs there that could take memory back.
    monkeypatch.setattr(rescue, "_free_after_crash", take_nothing_back)


@pytest.fixture
def stub() -> FakeStub:
    made = FakeStub()
    mark_guest(made)
    return made


@pytest.fixture
def target(stub: FakeStub) -> Iterator[str]:
    with listening(stub) as address:
        yield address


def restore_all() -> list[Restored]:
    return list(restore(entries(), patience_s=0))


def test_a_killed_tracers_bytes_are_put_back_and_the_guest_runs(
    stub: FakeStub, target: str
) -> None:
    stub.physical[16:20] = stub.physical[32:36] = b"new!"
    entry = write_journal(target, make_patch(16), make_patch(32))

    (restored,) = restore_all()

    assert (restored.outcome, restored.count) == (Outcome.RESTORED, 2)
    assert stub.physical[16:20] == stub.physical[32:36] == b"old!"
    assert stub.is_running
    assert not entry.path.exists()


def test_bytes_that_are_as_before_already_are_left_alone(stub: FakeStub, target: str) -> None:
    stub.physical[16:20] = b"old!"
    write_journal(target, make_patch(16))

    (restored,) = restore_all()

    assert (restored.outcome, restored.count) == (Outcome.RESTORED, 0)
    assert not any(request.startswith(b"M") for request in stub.asked)


def test_strange_bytes_are_left_alone_and_the_journal_is_kept(stub: FakeStub, target: str) -> None:
    stub.physical[16:20], stub.physical[32:36] = b"else", b"new!"
    entry = write_journal(target, make_patch(16), make_patch(32))

    (restored,) = restore_all()

    assert restored.outcome is Outcome.FAILED
    assert isinstance(restored.error, TargetError)
    assert restored.error.exit_code == 1
    assert (stub.physical[16:20], stub.physical[32:36]) == (b"else", b"old!")
    assert stub.is_running
    assert entry.path.exists()


@pytest.mark.parametrize(
    ("held", "words"),
    [
        (bytes(24), "the guest was restored to an earlier state"),
        (bytes(range(16)) + b"\x07" + bytes(7), "in which it has probes of ours"),
    ],
)
def test_a_guest_in_another_state_is_not_touched_and_its_journal_is_closed(
    stub: FakeStub, target: str, held: bytes, words: str
) -> None:
    stub.physical[16:20] = b"new!"
    stub.physical[MARK_AT : MARK_AT + 24] = held
    entry = write_journal(target, make_patch(16))

    (restored,) = restore_all()

    assert restored.outcome is Outcome.REPLACED
    assert words in str(restored.error)
    assert not any(request.startswith((b"M", b"G", b"P", b"Z")) for request in stub.asked)
    assert stub.is_running
    assert not entry.path.exists()


def test_a_rebooted_guest_is_not_touched(stub: FakeStub, target: str) -> None:
    stub.physical[16:20] = b"new!"
    entry = write_journal(target, make_patch(16))
    boot = {"addr": 0x9000, "phys": 0x40, "value": "0102030405060708"}
    with entry.path.open("a") as file:
        file.write(f"{json.dumps({'boot': boot})}\n")

    (restored,) = restore_all()

    assert restored.outcome is Outcome.REPLACED
    assert str(restored.error) == "the guest was rebooted"
    assert stub.physical[16:20] == b"new!"


@pytest.mark.parametrize("what", ["marked", "boot"])
def test_a_journal_without_a_proof_leads_to_no_write(
    stub: FakeStub, target: str, what: str
) -> None:
    stub.physical[16:20] = b"new!"
    entry = write_journal(target, make_patch(16))
    lines = entry.path.read_text().splitlines(keepends=True)
    entry.path.write_text("".join(line for line in lines if f'"{what}"' not in line))

    (restored,) = restore_all()

    assert restored.outcome is Outcome.FAILED
    assert "does not say what proves that the guest is the same" in str(restored.error)
    assert stub.physical[16:20] == b"new!"


def test_what_a_later_tracer_patched_over_is_taken_back_first(stub: FakeStub, target: str) -> None:
    stub.physical[16:20] = b"2nd!"
    first = write_journal(target, make_patch(16, new=b"1st!"), name="first")
    second = write_journal(target, make_patch(16, old=b"1st!", new=b"2nd!"), name="second")

    outcomes = [each.outcome for each in restore([first, second])]

    assert outcomes == [Outcome.RESTORED] * 2
    assert stub.physical[16:20] == b"old!"


def test_a_tracer_at_work_is_left_alone(stub: FakeStub, target: str) -> None:
    entry = write_journal(target, make_patch(16), is_live=True)

    (restored,) = restore_all()

    assert restored.outcome is Outcome.STILL_TRACING
    assert stub.asked == []
    assert entry.path.exists()


def test_the_journal_of_a_guest_of_ours_that_ended_is_removed(tmp_path: Path) -> None:
    entry = write_journal(str(tmp_path / "kprobes-gone" / "gdb.sock"), make_patch(16))

    (restored,) = restore_all()

    assert restored.outcome is Outcome.GUEST_ENDED
    assert not entry.path.exists()


def test_a_guest_that_cannot_be_reached_keeps_its_journal(tmp_path: Path) -> None:
    entry = write_journal(str(tmp_path / "gdb.sock"), make_patch(16))

    (restored,) = restore_all()

    assert restored.outcome is Outcome.FAILED
    assert isinstance(restored.error, UnreachableError)
    assert entry.path.exists()


def test_a_journal_of_no_patches_needs_no_guest(tmp_path: Path) -> None:
    entry = write_journal(str(tmp_path / "gdb.sock"))

    (restored,) = restore_all()

    assert restored.outcome is Outcome.FORGOTTEN
    assert not entry.path.exists()


def test_a_guest_that_a_tracer_left_stopped_runs_again(stub: FakeStub, target: str) -> None:
    stub.is_running = False
    write_journal(target)

    (restored,) = restore_all()

    assert restored.outcome is Outcome.RESTORED
    assert stub.is_running


@pytest.mark.parametrize("target", ["localhost:1234", "qemu:localhost:1234"])
def test_a_target_is_the_same_however_it_is_spelt(target: str) -> None:
    write_journal("localhost:1234", name="a")
    write_journal("qemu:localhost:1234", name="b")
    write_journal("localhost:1235", name="c")
    write_journal("no target at all", name="d")

    found = of_target(entries(), target)

    assert sorted(entry.path.stem for entry in found) == ["a", "b"]


def test_without_a_target_every_journal_counts() -> None:
    write_journal("localhost:1234", name="a")
    write_journal("localhost:1235", name="b")

    assert len(of_target(entries(), None)) == 2


def test_a_wrong_target_is_a_usage_error() -> None:
    with pytest.raises(UsageError):
        of_target([], "nonsense")
