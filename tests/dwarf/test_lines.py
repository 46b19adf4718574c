"""Lines of a small library that gcc and clang made with debug information, of DWARF 4 and 5."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kprobes.dwarf.libdw import Dwarf, LineRow
from kprobes.dwarf.lines import beginnings, read_file, read_function
from kprobes.errors import FormatError
from kprobes.formats.elf_functions import ElfFunctions
from kprobes.model.source import is_same_file
from tests.build.objects import FOLDER, LINES

GCC = ["lines-4.so", "lines-5.so", "lines-split-4.so", "lines-split-5.so"]
ALL = [*GCC, "lines-clang.so"]
_TEXT = LINES.read_text().splitlines()
_LOOKS = _TEXT.index("int looks(struct thing *thing, const char *text, unsigned short count)") + 1


@pytest.fixture(params=ALL)
def path(request: pytest.FixtureRequest) -> Path:
    return FOLDER / request.param


@pytest.fixture
def dwarf(path: Path) -> Iterator[Dwarf]:
    found = Dwarf(path)
    yield found
    found.close()


def address(path: Path, name: str) -> int:
    """Return where a function is."""
    functions = ElfFunctions(path.read_bytes()).functions()
    return next(each.place[1] for each in functions if each.name == name)


def line_of(words: str) -> int:
    """Return the number of the line that has some words."""
    (found,) = [number for number, text in enumerate(_TEXT, start=1) if words in text]
    return found


def test_a_function_has_its_lines(dwarf: Dwarf, path: Path) -> None:
    found = read_function(dwarf, address(path, "looks") + 4)

    assert found is not None
    assert found.line == _LOOKS
    assert is_same_file(found.file, "source.c")
    lines = {each.line: each.addrs for each in found.lines}
    assert lines[line_of("{ .mode = count }")]
    # Once for each round of the loop, and where it begins.
    assert len(lines[line_of("for (int at = 0")]) >= 2
    assert all(addr >= address(path, "looks") for addrs in lines.values() for addr in addrs)
    # What is inlined is declared before it.
    assert line_of("value * 2") not in lines


def test_a_line_that_is_inlined_is_at_each_copy(dwarf: Dwarf) -> None:
    inlined = line_of("return outside(&counter")

    (line,) = read_file(dwarf, "objects/source.c", inlined, inlined)

    assert line.line == inlined
    assert len(line.addrs) >= 2


def test_lines_without_code_are_not_there(dwarf: Dwarf) -> None:
    empty = line_of("int counter = 5;")

    assert read_file(dwarf, "source.c", empty, empty) == []
    assert read_file(dwarf, "other.c", 1, 99) == []
    assert [each.line for each in read_file(dwarf, "source.c", 1, 99)] == sorted(
        {each.line for each in read_file(dwarf, "source.c", 1, 99)}
    )


def test_an_address_of_nothing_has_no_function(dwarf: Dwarf) -> None:
    assert read_function(dwarf, 0xFFFF_0000) is None


def test_a_file_is_named_by_its_last_parts() -> None:
    assert is_same_file("fs/read_write.c", "read_write.c")
    assert is_same_file("./include/linux/fs.h", "linux/fs.h")
    assert is_same_file("fs/read_write.c", "./fs/read_write.c")
    assert not is_same_file("fs/read_write.c", "write.c")
    assert not is_same_file("read_write.c", "fs/read_write.c")


def test_a_line_begins_where_another_was_before() -> None:
    rows = [
        LineRow(0x10, "a.c", 5, True, False),
        LineRow(0x14, "a.c", 5, True, False),
        LineRow(0x18, "a.c", 6, False, False),
        LineRow(0x1C, "b.h", 5, True, False),
        LineRow(0x20, "a.c", 5, True, False),
        LineRow(0x24, "a.c", 0, True, False),
        LineRow(0x28, "a.c", 5, True, True),
        LineRow(0x30, "a.c", 5, True, False),
    ]

    assert [each.addr for each in beginnings(rows)] == [0x10, 0x1C, 0x20, 0x30]


def test_a_file_without_debug_information_is_refused() -> None:
    for name in ("gcc-linked.so", "entries.c"):
        with pytest.raises(FormatError, match="no debug information"):
            list(Dwarf(FOLDER / name).units())


def test_of_what_was_split_off_and_is_gone_nothing_is_known(tmp_path: Path) -> None:
    for name in ("lines-split-4.so", "lines-split-5.so"):
        path = tmp_path / name
        path.write_bytes((FOLDER / name).read_bytes().replace(b"-source.dwo", b"-nosuch.dwo"))
        dwarf = Dwarf(path)

        assert read_function(dwarf, address(FOLDER / name, "looks")) is None
        assert list(dwarf.units())
        dwarf.close()
