"""Operations that change a running trace: what each does, and what is answered."""

import os
import select
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path

import pytest

from kprobes.cli.control import Control
from kprobes.errors import UsageError
from kprobes.event_table import TraceProbe
from kprobes.host.driver import HostDriver, HostOptions
from kprobes.open import HostSession
from kprobes.session import Session
from tests.build.host_machine import make_machine, open_fake, read_fake
from tests.build.tracefs import FakeTracefs
from tests.test_column_hist import counted


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostSession:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    driver = HostDriver(make_machine(FakeTracefs()), HostOptions(), open_fake, read_fake)
    return Session(driver, ExitStack(), driver.machine)


@pytest.fixture
def pipes(tmp_path: Path) -> tuple[Path, Path]:
    found = tmp_path / "ctl", tmp_path / "ack"
    for each in found:
        os.mkfifo(each)
    return found


@pytest.fixture
def control(session: HostSession, pipes: tuple[Path, Path]) -> Iterator[Control]:
    opened = Control("fifo:{},{}".format(*pipes), session)
    yield opened
    opened.close()


def test_each_operation_is_made_and_answered(session: HostSession, control: Control) -> None:
    assert control.answer("define p:a vfs_read count") == ["ack"]
    assert control.answer("define p:b void_fn") == ["ack"]
    assert control.answer("filter a count > 3") == ["ack"]
    assert control.answer("disable a") == ["ack"]
    assert control.answer("evlist") == [
        "kprobes/a disabled filter=count > 3: p:a vfs_read count",
        "kprobes/b enabled: p:b void_fn",
        "ack",
    ]
    assert control.answer("enable kprobes/*") == ["ack"]
    assert control.answer("filter a") == ["ack"]
    assert control.answer("delete b") == ["ack"]
    assert control.answer("ping") == ["ack"]
    assert control.answer("evlist") == [
        "kprobes/a enabled: p:a vfs_read count",
        "ack",
    ]
    assert [each.command for each in session.definitions] == ["p:a vfs_read count"]


def test_what_hist_triggers_have_counted_is_shown_line_by_line(
    session: HostSession, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = (counted("keys=comm"), counted("keys=got"))
    session.probe("p:a vfs_read count")
    monkeypatch.setattr(TraceProbe, "histograms", tables)

    assert control.answer("hist a") == [*(str(tables[0]) + str(tables[1])).splitlines(), "ack"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("", "no such operation: ''"),
        ("begin", "no such operation: 'begin' (enable, "),
        ("delete", "which event? give its name"),
        ("enable nothing", "no such event: 'nothing'"),
        ("define p:x nothing", "Invalid probed address or symbol"),
        ("filter a nothing > 3", "Field not found"),
    ],
)
def test_what_is_wrong_is_answered_in_a_line_and_changes_nothing(
    session: HostSession, control: Control, line: str, why: str
) -> None:
    session.probe("p:a vfs_read count", filter="count > 1")

    (answer,) = control.answer(line)

    assert answer.startswith(f"error: {why}")
    assert [each.filter for each in session.definitions] == ["count > 1"]


def test_lines_are_read_from_one_pipe_and_answered_in_the_other(
    control: Control, pipes: tuple[Path, Path]
) -> None:
    control.start()

    with pipes[0].open("w") as ctl, pipes[1].open() as ack:
        ctl.write("ping\nbegin\nst")
        ctl.flush()
        answers = [ack.readline() for _ in range(2)]
        ctl.write("op\n")
        ctl.flush()
        answers.append(ack.readline())

    assert [answer.split(":")[0].strip() for answer in answers] == ["ack", "error", "ack"]
    assert control.is_stopped


def test_who_reads_no_answers_keeps_nobody_waiting(
    session: HostSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pipes of a shell's, which block.
    (words, told), (heard, answers) = os.pipe(), os.pipe()
    control = Control(f"fd:{words},{answers}", session)

    def much(line: str) -> list[str]:
        return [line * 500_000, "ack"]

    monkeypatch.setattr(control, "answer", much)
    control.start()
    os.write(told, b"op\n")
    assert select.select([heard], [], [], 5)[0]
    time.sleep(0.2)

    with ThreadPoolExecutor() as threads:
        closing = threads.submit(control.close)
        _, waiting = wait([closing], timeout=5)
        # Whoever waits for room gets it: this test ends.
        while not closing.done():
            os.read(heard, 1 << 20)

    assert not waiting
    for each in (words, told, heard, answers):
        os.close(each)


@pytest.mark.parametrize("spec", ["pipe", "fifo:", "fifo:/nowhere", "fd:x", "fd:1,2,3", "fd:999"])
def test_a_control_that_cannot_be_is_refused(session: HostSession, spec: str) -> None:
    with pytest.raises(UsageError, match="control"):
        Control(spec, session)
