"""Outputs that end early, are full, or are files."""

import io
import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import BinaryIO

import pytest

from kprobes.cli.files import WholeFile
from kprobes.cli.output import Output, check_writable, open_output
from kprobes.cli.terminal import Stop
from kprobes.errors import KprobesError, UsageError
from kprobes.model.events import Events
from tests.build.events import Row, make_batch, make_events
from tests.build.ring import make_layout

MANY = make_events([make_batch(make_layout(1), [Row()] * 50_000)])
EVENTS = make_events([make_batch(make_layout(1), [Row()])])


class Lines:
    """Writes a line per write."""

    def __init__(self, out: BinaryIO) -> None:
        self.out = out

    def write(self, events: Events) -> None:
        self.out.writelines(b"event %d\n" % row for row in events.row.tolist())
        self.out.flush()

    def close(self) -> None:
        self.out.write(b"end\n")
        self.out.flush()


def test_what_is_written_reaches_the_stream() -> None:
    stream = io.BytesIO()
    output = Output(stream, Lines)

    output.write(EVENTS)
    output.close()
    output.check()

    assert stream.getvalue() == b"event 0\nend\n"
    assert not output.is_gone
    assert not stream.closed


def test_a_reader_that_leaves_is_noticed_without_a_write() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "wb") as stream:
        output = Output(stream, Lines)
        assert not output.is_gone
        os.close(reader)

        assert output.is_gone


def test_writing_to_a_reader_that_left_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with WholeFile(writer) as stream:
        output = Output(stream, Lines)

        output.write(EVENTS)
        output.write(EVENTS)
        output.close()
        output.check()

        assert output.is_gone
        assert not output.is_late
    os.close(writer)


def test_a_full_disk_is_an_error_at_the_end_only() -> None:
    output = Output(open_output(Path("/dev/full")), Lines, is_ours=True)

    output.write(EVENTS)
    assert output.is_gone
    output.write(EVENTS)
    output.close()

    with pytest.raises(KprobesError, match="No space left on device; 2 events not written"):
        output.check()


def test_a_stream_of_ours_is_closed_at_the_end(tmp_path: Path) -> None:
    stream = open_output(tmp_path / "out.txt")
    output = Output(stream, Lines, is_ours=True)

    output.close()

    assert stream.closed
    assert (tmp_path / "out.txt").read_bytes() == b"end\n"


def test_looking_whether_a_file_can_be_written_leaves_it_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "out.txt"
    file.write_text("precious")

    check_writable(file)

    assert file.read_text() == "precious"


def test_looking_leaves_no_file_that_was_not_there(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("target.txt")

    check_writable(tmp_path / "out.txt")
    check_writable(link)

    assert list(tmp_path.iterdir()) == [link]


def test_a_file_is_emptied_and_can_be_read_and_sought(tmp_path: Path) -> None:
    file = tmp_path / "out.txt"
    file.write_text("old")

    with open_output(file) as stream:
        assert stream.readable()
        assert stream.seekable()

    assert file.read_bytes() == b""


@pytest.mark.parametrize("name", ["", "absent/out.txt"])
def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(KprobesError, match=r"cannot write .*(directory|No such)"):
        open_output(tmp_path / name)


def test_it_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file or directory"):
        check_writable(tmp_path / "absent" / "out.txt")


def test_a_device_is_not_touched_by_looking() -> None:
    check_writable(Path("/dev/full"))


def test_after_the_wish_to_end_a_write_comes_back_and_the_rest_is_written_at_the_end(
    tmp_path: Path,
) -> None:
    with Stop() as stop:
        stop.defer()
        output = Output(open_output(tmp_path / "out"), Lines, is_ours=True, stop=stop)
        output.write(EVENTS)
        os.kill(os.getpid(), signal.SIGINT)

        output.write(MANY)
        assert (tmp_path / "out").read_bytes().count(b"\n") == 1
        output.close()

    output.check()
    assert (tmp_path / "out").read_bytes().count(b"\n") == 1 + len(MANY) + 1
    assert output.unwritten == 0


def test_a_reader_that_reads_no_more_is_not_waited_for_after_the_wish_to_end() -> None:
    reader, writer = os.pipe()
    with Stop() as stop, WholeFile(writer) as stream:
        stop.defer()

        def interrupt(number: int, frame: FrameType | None) -> None:
            del number, frame
            os.kill(os.getpid(), signal.SIGINT)

        before = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        output = Output(stream, Lines, stop=stop)

        output.write(MANY)
        output.write(MANY)
        output.close()
        took_s = time.monotonic() - stop.asked_s
        signal.signal(signal.SIGALRM, before)

    output.check()
    assert output.is_late
    assert os.get_blocking(writer)
    os.close(writer)
    with os.fdopen(reader, "rb") as taken:
        assert taken.read().count(b"\n") == 2 * len(MANY) - output.unwritten
    # 1.5, with room for a busy machine; the reader would be waited for for ever.
    assert took_s < 30


def test_what_is_formatted_too_slowly_is_not_written_and_counted(tmp_path: Path) -> None:
    class Slow(Lines):
        def write(self, events: Events) -> None:
            super().write(events)
            stop.asked_s = 0  # long ago

    stop = Stop()
    output = Output(open_output(tmp_path / "out"), Slow, is_ours=True, stop=stop)
    stop.is_asked, stop.asked_s = True, time.monotonic()

    output.write(MANY)
    output.close()

    written = (tmp_path / "out").read_bytes().count(b"\n") - 1
    assert 0 < written < len(MANY)
    assert (output.unwritten, output.is_late) == (len(MANY) - written, True)
    output.check()
