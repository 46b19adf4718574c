"""The pager on a real terminal."""

import os
import pty
import sys
from pathlib import Path

import pytest

from kprobes.cli.files import WholeFile
from kprobes.cli.pager import paged
from tests.build.recorded import recorded

REPORT = (
    "import os, sys; os.environ['PAGER'] = sys.argv[1];"
    "from kprobes.cli.main import main; sys.argv = ['kprobe', *sys.argv[2:]]; sys.exit(main())"
)


def on_terminal(tmp_path: Path, pager: str, *words: str) -> tuple[int, bytes]:
    """Return the status and what a terminal shows."""
    file = tmp_path / "x.rec"
    file.write_bytes(recorded(2000))
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", REPORT, pager, "report", str(file), *words])
    shown = b""
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:
            break
        shown += part
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown


def test_a_pager_is_given_all_on_a_terminal(tmp_path: Path) -> None:
    status, shown = on_terminal(tmp_path, "wc -l")

    assert status == 0
    # Of 2,000 events and a header; what guests' strings have as line feeds are escapes.
    assert shown.split() == [b"2012"]


def test_a_pager_that_ends_early_is_no_error(tmp_path: Path) -> None:
    status, shown = on_terminal(tmp_path, "head -3")

    assert (status, shown.count(b"\n")) == (0, 3)


@pytest.mark.parametrize("pager", ["cat", "", "/none/such"])
def test_without_a_pager_all_is_printed(tmp_path: Path, pager: str) -> None:
    status, shown = on_terminal(tmp_path, pager)

    assert (status, shown.count(b"\n")) == (0, 2012)


def test_none_is_started_where_none_is_wanted(tmp_path: Path) -> None:
    assert on_terminal(tmp_path, "wc -l", "--no-pager")[1].count(b"\n") == 2012
    with WholeFile(tmp_path / "out") as file, paged(file) as shown:
        assert shown is file
