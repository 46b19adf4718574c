"""Lines and variables of Debian's kernel against those of perf probe, at random places.

What may differ: perf begins a line anew at each row of the line table, also where the row before is
of the same line, and where a function that the line calls begins and is inlined; of a line that
shares its address with others it refuses all but one; and of what the compiler computes, or has in
several places, it looks at the first operation only, and reads what that leads to.
"""

import random
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kprobes.dwarf.libdw import Die, Dwarf
from kprobes.dwarf.lines import function_at
from kprobes.dwarf.source import DwarfSource, open_source
from kprobes.model.source import SourceLine
from tests.build.debug_info import debug_vmlinux

pytestmark = [pytest.mark.guest, pytest.mark.matrix]

LINES, FUNCTIONS = 500, 200
_AT_CALL = 0x59
_BOTH = re.compile("computed|several places")
_PLACE = re.compile(r"^p:\S+ ([^+\s]+)(?:\+(\d+))?$", re.MULTILINE)
_AT = re.compile(r"^\t@<(\w+)\+(\d+)>\n((?:\t\t.*\n)*)", re.MULTILINE)


@pytest.fixture(scope="module")
def vmlinux() -> Path:
    return debug_vmlinux()


@pytest.fixture(scope="module")
def source(vmlinux: Path) -> DwarfSource:
    return open_source([vmlinux], "x86_64", "", b"")


@pytest.fixture(scope="module")
def functions(vmlinux: Path) -> Mapping[str, int]:
    """Addresses of those whose names nothing else has."""
    listed = subprocess.run(["nm", vmlinux], capture_output=True, text=True, check=True).stdout
    rows = [words for line in listed.splitlines() if len(words := line.split()) == 3]
    seen = Counter(name for _, _, name in rows)
    return {
        name: int(addr, 16)
        for addr, kind, name in rows
        if kind in "tT" and seen[name] == 1 and re.fullmatch(r"[a-z_]\w*", name)
    }


def perf(vmlinux: Path, *words: str) -> str:
    """Return what perf probe prints; nothing of what it refuses."""
    command = ["perf", "probe", "-k", str(vmlinux), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    return done.stdout if done.returncode == 0 else ""


def random_lines(
    source: DwarfSource, functions: Mapping[str, int], count: int
) -> list[tuple[str, int, SourceLine]]:
    """Return function, number from its own line, and line, of random ones that have code."""
    found = list[tuple[str, int, SourceLine]]()
    while len(found) < count:
        name = random.choice([*functions])
        function = source.function(functions[name])
        later = [each for each in function.lines if each.line > function.line] if function else []
        if function is not None and later:
            line = random.choice(later)
            found.append((name, line.line - function.line, line))
    return found


def test_lines_are_where_perf_has_them(
    vmlinux: Path, source: DwarfSource, functions: Mapping[str, int]
) -> None:
    seen, other, dwarf = Counter[str](), list[str](), Dwarf(vmlinux)
    for name, number, line in random_lines(source, functions, LINES):
        printed = _PLACE.findall(perf(vmlinux, "-D", f"{name}:{number}"))
        theirs = {functions[of] + int(offset or 0) for of, offset in printed if of in functions}
        if not printed or len(theirs) != len(printed):
            seen["refused"] += 1
            continue
        goes_on = theirs - set(line.addrs)
        seen["equal"] += not goes_on and theirs == set(line.addrs)
        # Each of perf's is of that line; each of ours is one of perf's.
        ours = {addr for addr in theirs if is_of(dwarf, addr, line)}
        if ours != theirs or not set(line.addrs) <= theirs:
            other.append(f"{name}:{number}")
    assert other == []
    assert seen["equal"] > LINES / 2


def is_of(dwarf: Dwarf, addr: int, line: SourceLine) -> bool:
    """Whether the line table has a row of a line at an address, or what it calls begins there."""
    at = function_at(dwarf, addr)
    if at is None:
        return False
    rows = {(row.addr, row.file, row.line) for row in dwarf.rows(at.unit)}
    called = (die for die in blocks(dwarf, at.die) if dwarf.number(die, _AT_CALL) == line.line)
    return (addr, line.file, line.line) in rows or addr in map(dwarf.entry, called)


def blocks(dwarf: Dwarf, die: Die) -> Iterator[Die]:
    """Return all that is nested in an entry."""
    for inner in dwarf.children(die):
        yield inner
        yield from blocks(dwarf, inner)


def test_variables_are_those_that_perf_has(
    vmlinux: Path, source: DwarfSource, functions: Mapping[str, int]
) -> None:
    places, missing = 0, list[str]()
    for name, number, line in random_lines(source, functions, FUNCTIONS):
        for of, offset, body in _AT.findall(perf(vmlinux, "-V", f"{name}:{number}")):
            if of not in functions:
                continue
            places += 1
            theirs = {row.rpartition("\t")[2] for row in body.splitlines()}
            found = source.variables(functions[of] + int(offset), line.line)
            ours = {each.name for each in found if each.is_readable or _BOTH.search(each.why)}
            missing += [f"{of}+{offset} {each}" for each in theirs - ours if "(" not in each]
    assert missing == []
    assert places > FUNCTIONS / 2
