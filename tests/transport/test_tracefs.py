"""Place of tracefs, and its files as files are."""

import errno
import os
from pathlib import Path

import pytest

from kprobes.errors import TracefsError
from kprobes.transport.tracefs import Tracefs, mounted

_MOUNTS = """\
21 26 0:19 / /sys rw,nosuid shared:7 - sysfs sysfs rw
38 21 0:12 / /sys/kernel/tracing rw,nosuid shared:13 - tracefs tracefs rw
52 21 0:12 /instances /mnt/part rw - tracefs tracefs rw
53 21 0:12 / /mnt/a\\040blank rw - tracefs none rw
60 26 0:40 / /sys/kernel/debug rw - debugfs debugfs rw
"""


def test_whole_tracefs_mounts_are_found() -> None:
    assert list(mounted(_MOUNTS)) == [Path("/sys/kernel/tracing"), Path("/mnt/a blank")]


def test_writing_appends_and_never_truncates(tmp_path: Path) -> None:
    (tmp_path / "kprobe_events").write_text("theirs\n")

    Tracefs(tmp_path).write("kprobe_events", "ours\n")

    assert Tracefs(tmp_path).read("kprobe_events") == "theirs\nours\n"


def test_directories_are_made_listed_and_removed(tmp_path: Path) -> None:
    tracefs = Tracefs(tmp_path)

    tracefs.make("one")
    before = tracefs.names("")
    tracefs.remove("one")

    assert (before, tracefs.names(""), tracefs.has("one")) == (["one"], [], False)


@pytest.mark.parametrize("verb", ["read", "write", "list", "make", "remove"])
def test_what_the_kernel_refuses_carries_its_number(tmp_path: Path, verb: str) -> None:
    tracefs = Tracefs(tmp_path / "absent")
    acts = {
        "read": lambda: tracefs.read("x"),
        "write": lambda: tracefs.write("x", "1"),
        "list": lambda: tracefs.names("x"),
        "make": lambda: tracefs.make("x"),
        "remove": lambda: tracefs.remove("x"),
    }

    with pytest.raises(TracefsError) as caught:
        acts[verb]()

    assert caught.value.number == errno.ENOENT
    assert str(caught.value) == f"cannot {verb} x of tracefs: {os.strerror(errno.ENOENT)}"
