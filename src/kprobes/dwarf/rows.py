"""Rows of line tables that are of some lines of a file: where the code of those begins."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import closing
from ctypes import POINTER, Structure, c_char_p, c_int64, c_uint64, c_void_p

from kprobes.dwarf.libdw import Die, Dwarf, LineRow
from kprobes.native.library import function

_ROOM = 1 << 10
"""Rows of one unit that there is room for at first."""
_PART = 64
"""Units whose tables are in memory at once: libdw lets go of them only with all of a file."""
_FUNCTIONS = {
    "files": "dwarf_getsrcfiles",
    "file": "dwarf_filesrc",
    "lines": "dwarf_getsrclines",
    "line": "dwarf_onesrcline",
    "addr": "dwarf_lineaddr",
    "number": "dwarf_lineno",
    "source": "dwarf_linesrc",
    "begins": "dwarf_linebeginstatement",
    "ends": "dwarf_lineendsequence",
}


class _Row(Structure):
    _fields_ = (("addr", c_uint64), ("file", c_char_p), ("line", c_int64))


class _Rows(Structure):
    # As native/rows.c has it.
    _fields_ = (
        *((name, c_void_p) for name in _FUNCTIONS),
        ("wanted", c_char_p),
        ("length", c_uint64),
        ("first", c_int64),
        ("last", c_int64),
        ("found", POINTER(_Row)),
        ("room", c_uint64),
        ("count", c_uint64),
    )


def find_rows(dwarf: Dwarf, unit: Die, file: str, first: int, last: int) -> Iterator[LineRow]:
    """Return the rows of a unit at which the code of a line begins: what goes on with it is not.

    Args:
        dwarf: of the kernel.
        unit: of it.
        file: the end of its path.
        first: of the lines that are meant.
        last: of them.
    """
    find, room, name = function("rows", "rows_find", 2), _ROOM, file.removeprefix("./").encode()
    while True:
        found = (_Row * room)()
        rows = _Rows(
            **dwarf.addresses(_FUNCTIONS),
            wanted=name,
            length=len(name),
            first=first,
            last=last,
            found=found,
            room=room,
        )
        find(ctypes.addressof(rows), ctypes.addressof(unit))
        if rows.count <= room:
            break
        room = rows.count
    for row in found[: rows.count]:
        path = (row.file or b"").decode(errors="backslashreplace")
        yield LineRow(row.addr, path, row.line, is_statement=True, is_end=False)


def find_rows_of(
    dwarf: Dwarf, offsets: Sequence[int], file: str, first: int, last: int
) -> Iterator[LineRow]:
    """Return those of many units, as ``find_rows`` does of one.

    Args:
        dwarf: of the kernel.
        offsets: of the units' entries.
        file: the end of the lines' file's path.
        first: of the lines that are meant.
        last: of them.
    """
    for start in range(0, len(offsets), _PART):
        with closing(dwarf.reopened()) as part:
            for unit in map(part.die, offsets[start : start + _PART]):
                if unit is not None:
                    yield from find_rows(part, unit, file, first, last)
