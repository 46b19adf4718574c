"""Calls of a guest's functions by name: results by their types, deadlines, and what is refused."""

import time
from collections.abc import Generator
from pathlib import Path

import pytest

import kprobes
from kprobes.errors import RefusedError, TargetError, UnknownSymbolError, UsageError
from kprobes.guest import journal
from kprobes.open import GuestSession
from kprobes.transport.qemu import Machine
from tests.build.victim import is_complaint

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64")]

SLEEP_MS = 1500


@pytest.fixture(autouse=True)
def _own_journals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))


@pytest.fixture
def session(guest: Machine) -> Generator[GuestSession]:
    with kprobes.attach(str(guest.stub_address)) as session:
        yield session
    said = guest.run("dmesg", 180).output.decode().splitlines()
    assert [line for line in said if is_complaint(line)] == []
    assert guest.run("cat /proc/*/comm > /dev/null 2>&1; echo well", 180).output == b"well\n"


def test_results_have_the_function_s_types(session: GuestSession) -> None:
    types = session.kernel.types
    assert types is not None
    # The first task of all, which every kernel has.
    text = session.address("init_task") + types.offset("task_struct", "comm")
    assert session.string(text) == "swapper/0"

    assert session.call("int_sqrt", 144) == 12
    assert session.call("gcd", 12, 18) == 6
    # A bool, a pointer, an int with a sign, and nothing.
    assert session.call("sysfs_streq", text, text) is True
    assert session.call("sysfs_streq", text, text + 1) is False
    assert session.call("strnchr", text, 9, ord("/")) == text + 7
    assert session.call("strncasecmp", text + 1, text, 1) == ord("w") - ord("s")
    assert session.call("strncasecmp", text, text + 1, 1) == ord("s") - ord("w")
    assert session.call("msleep", 1) is None


def test_wrong_arguments_are_refused_before_anything_is_called(session: GuestSession) -> None:
    for arguments in [(), (1, 2), (-1,), (1 << 64,), ("144",), (1.5,)]:
        with pytest.raises(UsageError, match="int_sqrt"):
            session.call("int_sqrt", *arguments)  # pyright: ignore[reportArgumentType] - wrong on purpose
    with pytest.raises(UsageError, match="deadline"):
        session.call("int_sqrt", 4, timeout_s=0)


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("panic", (0,), "never returns"),
        ("do_exit", (0,), "never returns"),
        ("start_kernel", (), "init text"),
        ("_printk", (0,), "any number"),
        ("init_task", (), "data"),
    ],
)
def test_what_cannot_be_called_is_refused(
    session: GuestSession, name: str, arguments: tuple[int, ...], why: str
) -> None:
    with pytest.raises(RefusedError, match=why):
        session.call(name, *arguments)
    with pytest.raises(UnknownSymbolError):
        session.call("nothing_of_this_name")


def test_a_function_that_is_late_goes_on_alone(session: GuestSession) -> None:
    with pytest.raises(TargetError, match=r"msleep did not return within 0.2 s"):
        session.call("msleep", SLEEP_MS, timeout_s=0.2)

    # Others can be called meanwhile, and when it has come back.
    assert session.call("int_sqrt", 81) == 9
    session.probe("p:begun msleep")
    with session.record() as trace:
        time.sleep(SLEEP_MS / 1000)
        assert session.call("int_sqrt", 100) == 10
        session.call("msleep", 1)
    assert len(trace) == 1
    (entry,) = journal.entries()
    assert entry.allocations.call is None
