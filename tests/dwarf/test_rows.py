"""Rows of line tables that C finds: those that Python does."""

from pathlib import Path

import pytest

from kprobes.dwarf import rows
from kprobes.dwarf.libdw import Dwarf, LineRow
from kprobes.dwarf.lines import beginnings
from kprobes.dwarf.rows import find_rows, find_rows_of
from kprobes.model.source import is_same_file
from tests.build.objects import FOLDER
from tests.dwarf.test_lines import ALL


@pytest.fixture(params=ALL)
def path(request: pytest.FixtureRequest) -> Path:
    return FOLDER / request.param


def expected(path: Path, file: str, first: int, last: int) -> list[LineRow]:
    dwarf = Dwarf(path)
    return [
        row
        for unit in dwarf.units()
        for row in beginnings(dwarf.rows(unit))
        if first <= row.line <= last and is_same_file(row.file, file)
    ]


@pytest.mark.parametrize(
    "file", ["source.c", "./source.c", "objects/source.c", "ource.c", "c", "", "x/source.c"]
)
@pytest.mark.parametrize(("first", "last"), [(1, 99), (16, 22), (24, 24), (99, 1)])
def test_they_are_those_that_python_finds(path: Path, file: str, first: int, last: int) -> None:
    dwarf = Dwarf(path)

    found = [row for unit in dwarf.units() for row in find_rows(dwarf, unit, file, first, last)]

    assert found == expected(path, file, first, last)
    assert bool(found) == (is_same_file("objects/source.c", file) and first <= last)
    assert list(find_rows_of(dwarf, dwarf.unit_offsets(), file, first, last)) == found


def test_more_than_there_was_room_for_are_found(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "_ROOM", 2)
    dwarf = Dwarf(path)

    found = list(find_rows_of(dwarf, dwarf.unit_offsets(), "source.c", 1, 99))

    assert len(found) > 10
    assert found == expected(path, "source.c", 1, 99)
