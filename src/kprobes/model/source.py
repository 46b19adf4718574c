"""Lines of a kernel's source, and variables at a place, as debug information has them."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from kprobes.model.definition import TypeWord


def is_same_file(path: str, wanted: str) -> bool:
    """Whether a path ends with the wanted one's parts: ``fs/read_write.c``, ``read_write.c``."""
    wanted = wanted.removeprefix("./")
    return path == wanted or path.endswith(f"/{wanted}")


class SourceLine(Struct, frozen=True, kw_only=True):
    """One line that has code.

    Attributes:
        file: as the compiler was given it: ``fs/read_write.c``.
        line: from 1.
        addrs: where it begins, as linked; several of one that is inlined or unrolled.
    """

    file: str
    line: int
    addrs: tuple[int, ...]


class SourceFunction(Struct, frozen=True, kw_only=True):
    """One function's source.

    Attributes:
        file: that it is in.
        line: where it is declared.
        lines: that have code of it, ascending; of inlined functions those of their own are left
            out.
    """

    file: str
    line: int
    lines: tuple[SourceLine, ...]


class LocationKind(StrEnum):
    """Where a value is."""

    REGISTER = "register"
    MEMORY = "memory"
    STATIC = "static"
    CONSTANT = "constant"


class Location(Struct, frozen=True, kw_only=True):
    """Where a variable is while the CPU is at one place.

    Attributes:
        register: of REGISTER, and the base of MEMORY, by its pt_regs name.
        number: MEMORY's offset from the base, STATIC's address as linked, CONSTANT's value.
    """

    kind: LocationKind
    register: str = ""
    number: int = 0


class Variable(Struct, frozen=True, kw_only=True):
    """A variable or parameter that is in scope at a place.

    Attributes:
        name: in the source.
        type: as C writes it.
        location: None where it cannot be read there.
        why: it cannot; "" where it can.
        spec: how a number is fetched; None for what is none.
        struct: the name of the struct that it points to, or "".
        is_pointer: whether it is a pointer.
        ranges: (start, end) of the addresses where it can be read, as linked.
    """

    name: str
    type: str
    location: Location | None
    why: str = ""
    spec: TypeWord | None = None
    struct: str = ""
    is_pointer: bool = False
    ranges: tuple[tuple[int, int], ...] = ()


class SourceInfo(Protocol):
    """The debug information of one kernel; addresses are as linked."""

    def function(self, addr: int) -> SourceFunction | None:
        """Return the function at an address, or None where nothing is known of it."""
        ...

    def file_lines(self, file: str, first: int, last: int) -> Sequence[SourceLine]:
        """Return the lines of a file that have code.

        Args:
            file: the end of its path.
            first: of the lines that are meant.
            last: of them.
        """
        ...

    def variables(self, addr: int, line: int = 0) -> Sequence[Variable]:
        """Return what is in scope at an address; of a name the first, which is that of the line.

        Of no line in particular (0) the innermost come first.
        """
        ...
