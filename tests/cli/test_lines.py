"""``kprobe lines``: how they are shown; on guests in ``tests/system/test_source.py``."""

from pathlib import Path

import pytest

from kprobes.cli.lines import as_json, as_text
from kprobes.errors import UsageError
from kprobes.inspect.source import Lines, ShownLine, read_lines
from tests.build.json_lines import objects

_FUNCTION = Lines(
    function="vfs_read",
    file="fs/read_write.c",
    first=3,
    last=5,
    lines=(
        ShownLine(relative=1, line=4, places=("vfs_read+0x0/0x40",)),
        ShownLine(relative=2, line=5, places=("vfs_read+0x8/0x40", "vfs_write+0x4/0x40")),
    ),
)
_FILE = Lines(
    function="",
    file="fs/read_write.c",
    first=1,
    last=4,
    lines=(ShownLine(relative=None, line=4, places=("vfs_read+0x0/0x40",)),),
)


def test_lines_have_their_numbers_and_places() -> None:
    assert as_text(_FUNCTION).splitlines() == [
        "vfs_read at fs/read_write.c:3",
        "     1  vfs_read+0x0/0x40",
        "     2  vfs_read+0x8/0x40, vfs_write+0x4/0x40",
    ]
    assert as_text(_FILE).splitlines() == ["fs/read_write.c", "     4  vfs_read+0x0/0x40"]


def test_with_its_text_lines_without_code_have_no_number(tmp_path: Path) -> None:
    (tmp_path / "fs").mkdir()
    (tmp_path / "fs" / "read_write.c").write_text("one\ntwo\nint f()\n{ a\tb }\n\x1b[31m\n")

    text = read_lines(tmp_path, _FUNCTION)

    assert as_text(_FUNCTION, text).splitlines() == [
        "vfs_read at fs/read_write.c:3",
        "        int f()",
        "     1  { a\tb }",
        "     2  \x1b[31m",
    ]


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"fs/read_write.c: No such file"):
        read_lines(tmp_path, _FUNCTION)


def test_json_has_an_object_for_each() -> None:
    first, second = objects("lines", as_json(_FUNCTION))

    assert first == {
        "file": "fs/read_write.c",
        "line": 4,
        "function": "vfs_read",
        "relative": 1,
        "places": ["vfs_read+0x0/0x40"],
    }
    assert second["places"] == ["vfs_read+0x8/0x40", "vfs_write+0x4/0x40"]
