"""What needs iced-x86, imported when it is first used: arming a probe at an entry does not.

Importing it takes 20 ms of the 300 to a first armed probe.
"""

from collections.abc import Mapping, Sequence

from kprobes.arch.listed import Listed, Opinion, Reach, Read, Study, Syntax
from kprobes.model.text import TextPart, TextTables
from kprobes.units import Addr

_Pieces = tuple[tuple[Addr, bytes], ...]


def lines(code: bytes, addr: int, syntax: Syntax) -> tuple[Listed, ...]:
    """Return the lines of some code; see ``listing``."""
    from kprobes.arch.x86_64.listing import list_code

    return list_code(code, addr, syntax)


def study(name: str, parts: Sequence[TextPart], tables: TextTables) -> Study:
    """Decode a function and be ready to judge its instructions; see ``decode`` and ``judge``."""
    from kprobes.arch.x86_64.decode import decode_function
    from kprobes.arch.x86_64.judge import judge

    function = decode_function(name, parts, tables)

    def opinion(addr: int) -> Opinion:
        found = judge(function, addr, tables)
        return Opinion(verdict=found.verdict.value, why=found.why)

    sizes = {addr: len(found.code) for addr, found in function.instructions.items()}
    return Study(sizes=sizes, judge=opinion)


def follow(read: Read, entry: int, inside: range) -> _Pieces:
    """Return all code that an entry leads to; see ``follow``."""
    from kprobes.arch.x86_64.follow import follow

    return follow(read, entry, inside)


def reaches(entry: int, pieces: _Pieces, window: range) -> Mapping[Addr, Reach]:
    """Return which instructions touch a window of memory; see ``follow``."""
    from kprobes.arch.x86_64.follow import reaches

    return reaches(entry, pieces, window)
