"""Lines of source and where their code is: by function, by file."""

from collections.abc import Iterable, Sequence
from contextlib import closing
from itertools import pairwise
from typing import NamedTuple

from kprobes.dwarf.libdw import Die, Dwarf, LineRow
from kprobes.dwarf.rows import find_rows_of
from kprobes.model.source import SourceFunction, SourceLine, is_same_file

SUBPROGRAM = 0x2E
"""DW_TAG_subprogram."""
_PATCHABLE, _INSTRUCTION = 16, 4
"""Bytes that arm64's kernels have there at most, a BTI among them."""


class FunctionAt(NamedTuple):
    """A function, no inlined copy, that an address is in.

    Attributes:
        addr: the address, or where the function begins to gcc if that is later.
    """

    unit: Die
    die: Die
    addr: int


def function_at(dwarf: Dwarf, addr: int) -> FunctionAt | None:
    """Return the function that an address is in, or None.

    To gcc a function begins after the instructions that -fpatchable-function-entry puts there,
    which change no register.
    """
    for at in range(addr, addr + _PATCHABLE + 1, _INSTRUCTION):
        unit = dwarf.unit_at(at)
        functions = dwarf.children(unit) if unit is not None else ()
        for die in functions:
            is_there = dwarf.tag(die) == SUBPROGRAM and dwarf.has(die, at)
            if unit is not None and is_there and (at == addr or dwarf.entry(die) == at):
                return FunctionAt(unit, die, at)
    return None


def read_function(dwarf: Dwarf, addr: int) -> SourceFunction | None:
    """Return the source of the function at an address, or None where nothing is known of it."""
    found = function_at(dwarf, addr)
    declared = None if found is None else dwarf.declared(found.die)
    if found is None or declared is None:
        return None
    file, line = declared
    # What of the same file is inlined there is declared elsewhere: its lines are before or after.
    rows = [row for row in beginnings(dwarf.rows(found.unit)) if dwarf.has(found.die, row.addr)]
    own = (row for row in rows if row.file == file and row.line >= line)
    return SourceFunction(file=file, line=line, lines=tuple(gathered(own)))


def read_file(dwarf: Dwarf, file: str, first: int, last: int) -> list[SourceLine]:
    """Return the lines of a file that have code.

    A unit is made of its file of the same name; of headers, and of files that others include, all
    units are looked through, which takes a second or two.

    Args:
        dwarf: of the kernel.
        file: the end of its path.
        first: of the lines that are meant.
        last: of them.
    """
    # With a file of its own, so that not all that is looked at stays in memory.
    with closing(dwarf.reopened()) as whole:
        offsets = whole.unit_offsets()
        units = ((offset, whole.die(offset)) for offset in offsets)
        named = [at for at, unit in units if unit and is_same_file(whole.name(unit), file)]
    return gathered(find_rows_of(dwarf, named or offsets, file, first, last))


def beginnings(rows: Sequence[LineRow]) -> list[LineRow]:
    """Return the rows at which a line's code begins: those that go on with it are left out."""
    return [
        row
        for before, row in pairwise([LineRow(0, "", 0, False, True), *rows])
        if row.is_statement
        and row.line
        and not row.is_end
        and (before.is_end or (before.file, before.line) != (row.file, row.line))
    ]


def gathered(rows: Iterable[LineRow]) -> list[SourceLine]:
    """Return the lines that rows are of, each with all its places."""
    places = dict[tuple[int, str], list[int]]()
    for row in rows:
        places.setdefault((row.line, row.file), []).append(row.addr)
    return [
        SourceLine(file=file, line=line, addrs=tuple(sorted(set(addrs))))
        for (line, file), addrs in sorted(places.items())
    ]
