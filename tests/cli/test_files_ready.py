"""Telling scripts that everything is armed."""

import os
from pathlib import Path

import pytest

from kprobes.cli.files import check_ready, report_ready
from kprobes.errors import KprobesError, UsageError


def test_a_file_appears_when_everything_is_armed(tmp_path: Path) -> None:
    path = tmp_path / "ready"
    path.write_text("of an earlier trace")

    check_ready(str(path))
    assert not path.exists()
    report_ready(str(path))

    assert path.read_bytes() == b"ready\n"


def test_a_descriptor_gets_the_line_and_its_end() -> None:
    reader, writer = os.pipe()

    check_ready(str(writer))
    report_ready(str(writer))

    assert os.read(reader, 100) == b"ready\n"
    assert os.read(reader, 100) == b""
    os.close(reader)


def test_a_fifo_may_be_read_later(tmp_path: Path) -> None:
    path = tmp_path / "fifo"
    os.mkfifo(path)

    check_ready(str(path))
    report_ready(str(path))

    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    assert os.read(reader, 100) == b"ready\n"
    os.close(reader)


@pytest.mark.parametrize("where", ["987", "/nonexistent/ready"])
def test_what_cannot_be_told_is_refused_early(where: str) -> None:
    with pytest.raises(UsageError, match=f"--ready {where}: "):
        check_ready(where)


def test_nobody_who_takes_it_is_an_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)

    with pytest.raises(KprobesError, match=f"--ready {writer}: Broken pipe"):
        report_ready(str(writer))
    os.close(writer)
