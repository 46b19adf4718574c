"""What needs capstone, imported when it is first used: arming a probe does not."""

from collections.abc import Mapping

from kprobes.arch.listed import Listed, Reach, Read, Syntax
from kprobes.units import Addr

_Pieces = tuple[tuple[Addr, bytes], ...]


def lines(code: bytes, addr: int, syntax: Syntax) -> tuple[Listed, ...]:
    """Return the lines of some code; see ``listing``."""
    from kprobes.arch.aarch64.listing import list_code

    return list_code(code, addr, syntax)


def follow(read: Read, entry: int, inside: range) -> _Pieces:
    """Return all code that an entry leads to; see ``follow``."""
    from kprobes.arch.aarch64.follow import follow

    return follow(read, entry, inside)


def reaches(entry: int, pieces: _Pieces, window: range) -> Mapping[Addr, Reach]:
    """Return which instructions touch a window of memory; see ``follow``."""
    from kprobes.arch.aarch64.follow import reaches

    return reaches(entry, pieces, window)
