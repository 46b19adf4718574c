"""Definitions of every form and type on functions that run, one per line of a golden file.

The lines are in amd64's words: see ``tests.build.words``. ``{STRUCT.MEMBER}`` is an offset in the
guest's types, ``{A.B-C.D}`` a difference of two, ``{STRUCT.MEMBER:byte}`` and ``:bit`` say where a
bit-field begins, ``{SYMBOL}`` is an address. Arguments that are only ``$argN`` are named
everywhere: the kernel's own names for them came with 6.5.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from kprobes.model.kernel import Kernel, Types
from tests.build.words import WORDS, debian_name

_GOLDEN = Path(__file__).parent.parent / "golden"
_HOLE = re.compile(r"\{([\w.:-]+)\}")


def definitions(name: str, kernel: Kernel) -> list[str]:
    """Return a file's definitions whose function a kernel has, with its numbers filled in."""
    words = WORDS[debian_name(kernel.arch)]
    lines = words.of((_GOLDEN / name).read_text()).splitlines()
    return [_filled(line, kernel) for line in lines if kernel.symbols.find(line.split()[1])]


def event_of(line: str) -> str:
    """Return the name of a definition's event."""
    return line.split(maxsplit=1)[0].partition(":")[2]


def split(lines: Sequence[str], size: int) -> list[list[str]]:
    """Return the lines in groups of at most so many."""
    return [list(lines[start : start + size]) for start in range(0, len(lines), size)]


def _filled(line: str, kernel: Kernel) -> str:
    types = kernel.types
    assert types is not None

    def number(hole: re.Match[str]) -> str:
        is_symbol = "." not in hole[1]
        return str(kernel.symbols.named(hole[1]).addr if is_symbol else _place(hole[1], types))

    return _HOLE.sub(number, line)


def _place(hole: str, types: Types) -> int:
    if "-" in hole:
        left, right = hole.split("-")
        return _place(left, types) - _place(right, types)
    place, _, part = hole.partition(":")
    struct, _, path = place.partition(".")
    if not part:
        return types.offset(struct, path)
    number = types.struct(struct)
    assert number is not None
    member = types.member(number, path)
    assert member is not None
    return member.bit_offset // 8 if part == "byte" else member.bit_offset % 8
