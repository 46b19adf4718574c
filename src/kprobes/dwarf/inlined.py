"""Functions by the places where they are inlined: where each copy begins, and its lines.

Our C looks through all entries of a kernel's debug information for it, six million, in a second.
"""

import ctypes
from collections.abc import Iterator
from ctypes import POINTER, Structure, c_char_p, c_uint64, c_void_p
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kprobes.dwarf.libdw import Die, Dwarf, LineRow
from kprobes.dwarf.lines import gathered
from kprobes.dwarf.rows import find_rows
from kprobes.model.source import SourceFunction, SourceLine
from kprobes.native.library import function

_ROOM = 1 << 10
"""Copies of one unit that there is room for at first."""
_LAST = 1 << 31
_FUNCTIONS = {
    "child": "dwarf_child",
    "sibling": "dwarf_siblingof",
    "tag": "dwarf_tag",
    "name": "dwarf_diename",
}


class _Search(Structure):
    # As native/inlined.c has it.
    _fields_ = (
        *((name, c_void_p) for name in _FUNCTIONS),
        ("wanted", c_char_p),
        ("found", POINTER(Die)),
        ("names", c_void_p),
        ("room", c_uint64),
        ("count", c_uint64),
    )


class _Copy(NamedTuple):
    unit: Die
    die: Die
    addr: int
    declared: tuple[str, int]


def read_copies(dwarf: Dwarf, name: str) -> list[SourceFunction]:
    """Return the functions of a name that are inlined, without their lines.

    Args:
        dwarf: of the kernel.
        name: of the functions; those that are declared elsewhere are others.
    """
    places = dict[tuple[str, int], set[int]]()
    for each in _copies(dwarf, name):
        places.setdefault(each.declared, set()).add(each.addr)
    return [
        SourceFunction(file=file, line=line, copies=tuple(sorted(addrs)))
        for (file, line), addrs in sorted(places.items())
    ]


def read_copy_lines(dwarf: Dwarf, name: str, declared: tuple[str, int]) -> tuple[SourceLine, ...]:
    """Return the lines of a function that is inlined, wherever it is.

    Args:
        dwarf: of the kernel.
        name: of the function.
        declared: the file and the line that it is at.
    """
    found = list[LineRow]()
    copies = (each for each in _copies(dwarf, name) if each.declared == declared)
    for _, of_unit in groupby(copies, lambda each: each.unit.addr):
        own = list(of_unit)
        rows = find_rows(dwarf, own[0].unit, *declared, last=_LAST)
        found += [row for row in rows if any(dwarf.has(each.die, row.addr) for each in own)]
    return tuple(gathered(found))


def _copies(dwarf: Dwarf, name: str) -> Iterator[_Copy]:
    # A copy without code is in a function that is only there to be inlined itself.
    for unit in dwarf.units():
        for die in _in_unit(dwarf, unit, name):
            addr, declared = dwarf.entry(die), dwarf.declared(die)
            if addr is not None and declared is not None:
                yield _Copy(unit, die, addr, declared)


def read_inlined_names(dwarf: Dwarf) -> frozenset[str]:
    """Return the names of all functions that are inlined somewhere."""
    found = set[str]()
    for unit in dwarf.units():
        room = _ROOM
        while (count := _search(dwarf, unit, names=(names := np.empty(room, np.uint64)))) > room:
            room = count
        found |= {
            ctypes.string_at(place).decode(errors="backslashreplace")
            for place in np.unique(names[:count]).tolist()
        }
    return frozenset(found)


def _in_unit(dwarf: Dwarf, unit: Die, name: str) -> Iterator[Die]:
    room = _ROOM
    while (count := _search(dwarf, unit, name, found=(found := (Die * room)()))) > room:
        room = count
    for number in range(count):
        yield Die.from_buffer_copy(found[number])


def _search(
    dwarf: Dwarf,
    unit: Die,
    name: str | None = None,
    *,
    found: "ctypes.Array[Die] | None" = None,
    names: NDArray[np.uint64] | None = None,
) -> int:
    # How many there are, which may be more than there is room for.
    find, array = function("inlined", "inlined_find", 2), found if names is None else names
    search = _Search(
        **dwarf.addresses(_FUNCTIONS),
        wanted=None if name is None else name.encode(),
        found=found,
        names=None if names is None else names.ctypes.data,
        room=0 if array is None else len(array),
    )
    find(ctypes.addressof(search), ctypes.addressof(unit))
    return int(search.count)
