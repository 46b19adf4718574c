"""A guest whose tracer died gets its bytes back and runs."""

from pathlib import Path

import pytest

from kprobes.errors import FormatError, KprobesError, TargetError, UnreachableError
from kprobes.guest import rescue as rescue_module
from kprobes.guest.guest import InitText
from kprobes.guest.rescue import Rescued, rescue
from kprobes.units import Addr, Phys
from tests.build.journals import NEW, OLD, patched, take_nothing_back, text_of
from tests.build.stub import FakeStub, listening, packet, send


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    # No kernel runs there that could take memory back.
    monkeypatch.setattr(rescue_module, "_free_after_crash", take_nothing_back)


def test_every_byte_is_put_back_and_the_guest_runs() -> None:
    stub = FakeStub()
    journal = patched(stub)

    with listening(stub) as path:
        assert rescue(path, journal.path) == Rescued(2, 0)

    assert text_of(stub) == [OLD, OLD]
    assert stub.is_running
    assert not journal.path.exists()


@pytest.mark.parametrize(("state", "count"), [(1, 2), (2, 1)])
def test_what_boot_has_freed_is_left_alone(state: int, count: int) -> None:
    stub = FakeStub()
    journal = patched(stub)
    init_text = InitText(
        start=Addr(0x180), stop=Addr(0x1A0), state=Phys(0x200), phys=Phys(0x190), head=b"\xee" * 8
    )
    journal.note_init_text(init_text)
    stub.physical[0x200:0x204] = state.to_bytes(4, "little")

    with listening(stub) as path:
        assert rescue(path, journal.path) == Rescued(count, 0)

    assert text_of(stub) == [OLD, OLD if count == 2 else NEW]
    assert not journal.path.exists()


def test_a_guest_that_somebody_else_has_paused_is_put_right_and_stays_paused() -> None:
    stub = FakeStub(is_running=False)
    stub.hooks[b"qRcmd," + b"info status".hex().encode()] = send(
        packet(b"O" + b"VM status: paused (prelaunch)\n".hex().encode()) + packet(b"OK")
    )
    journal = patched(stub)

    with listening(stub) as path, pytest.raises(KprobesError, match="paused"):
        rescue(path, journal.path, was_killed=False)

    assert text_of(stub) == [OLD, OLD]
    assert not stub.is_running
    assert journal.path.exists()


def test_of_a_guest_that_was_migrated_nothing_is_left_to_do_where_it_ran_before() -> None:
    stub = FakeStub(is_running=False)
    stub.hooks[b"qRcmd," + b"info status".hex().encode()] = send(
        packet(b"O" + b"VM status: paused (postmigrate)\n".hex().encode()) + packet(b"OK")
    )
    journal = patched(stub)

    with listening(stub) as path:
        assert rescue(path, journal.path, was_killed=False) == Rescued(2, 0)

    assert text_of(stub) == [OLD, OLD]
    assert not stub.is_running
    assert not journal.path.exists()


def test_a_guest_that_its_tracer_left_stopped_runs_again() -> None:
    stub = FakeStub(is_running=False)
    journal = patched(stub)

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
    journal = patched(stub, held=b"other")

    with listening(stub) as path, pytest.raises(TargetError, match="2 places"):
        rescue(path, journal.path)

    assert stub.is_running
    assert journal.path.exists()


def test_a_journal_that_cannot_be_read_does_not_keep_the_guest_stopped() -> None:
    stub = FakeStub(is_running=False)
    journal = patched(stub)
    journal.path.write_bytes(b"garbage\n")

    with listening(stub) as path, pytest.raises(FormatError):
        rescue(path, journal.path)

    assert stub.is_running
    assert journal.path.exists()


def test_a_guest_that_is_gone_is_told_after_a_while(tmp_path: Path) -> None:
    journal = patched(FakeStub())

    with pytest.raises(UnreachableError):
        rescue(str(tmp_path / "gone.sock"), journal.path, patience_s=0.05)

    assert journal.path.exists()
