"""Lines of a kernel's source, and variables at a place, as debug information has them."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from kprobes.errors import TargetError
from kprobes.model.definition import Operation, TypeWord
from kprobes.model.kernel import Kernel
from kprobes.units import U64


def is_same_file(path: str, wanted: str) -> bool:
    """Whether a path ends with the wanted one's parts: ``fs/read_write.c``, ``read_write.c``."""
    wanted = wanted.removeprefix("./")
    return path == wanted or path.endswith(f"/{wanted}")


class SourceLine(Struct, frozen=True, kw_only=True):
    """One line that has code.

    Attributes:
        file: as the compiler was given it: ``fs/read_write.c``.
        line: from 1.
        addrs: where it begins; several of one that is inlined or unrolled.
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
        copies: where it is inlined.
    """

    file: str
    line: int
    lines: tuple[SourceLine, ...] = ()
    copies: tuple[int, ...] = ()


class LocationKind(StrEnum):
    """Where a value is."""

    REGISTER = "register"
    MEMORY = "memory"
    STATIC = "static"
    PER_CPU = "per-cpu"
    CONSTANT = "constant"
    ADDRESS = "address"
    COMPUTED = "computed"


class Location(Struct, frozen=True, kw_only=True):
    """Where a value is while the CPU is at one place, or what it is made of.

    Attributes:
        register: of REGISTER, and the base of MEMORY, by its pt_regs name; "" where the base is
            the operand.
        number: MEMORY's offset from the base, CONSTANT's value; of STATIC and of PER_CPU, which
            each CPU has, the address of its memory, and ADDRESS's value.
        operation: of COMPUTED, on its two operands.
    """

    kind: LocationKind
    register: str = ""
    number: int = 0
    operation: Operation = Operation.ADD
    operands: "tuple[Location, ...]" = ()

    @classmethod
    def static(cls, addr: int, per_cpu: range) -> "Location":
        """Return what is in memory at an address; that each CPU has, where it is of those."""
        kind = LocationKind.PER_CPU if addr in per_cpu else LocationKind.STATIC
        return cls(kind=kind, number=addr)

    def moved(self, slide: int) -> "Location":
        """Return it with addresses as linked moved to where that is."""
        operands = tuple(each.moved(slide) for each in self.operands)
        # x86 before 6.15 links what each CPU has at 0, and moves it nowhere.
        is_moved = self.kind in _ADDRESSES and self.number >> 63
        number = self.number + slide & U64 if is_moved else self.number
        return replace(self, number=number, operands=operands)


_ADDRESSES = (LocationKind.STATIC, LocationKind.PER_CPU, LocationKind.ADDRESS)


class Piece(Struct, frozen=True, kw_only=True):
    """A part of a struct that is in several places: so many bytes from its beginning."""

    offset: int
    size: int
    location: Location


class Variable(Struct, frozen=True, kw_only=True):
    """A variable or parameter that is in scope at a place.

    Attributes:
        name: in the source.
        type: as C writes it.
        location: None where it cannot be read there as a whole.
        pieces: of a struct then, parts that can.
        why: it cannot; "" where it can.
        spec: how a number is fetched; None for what is none.
        struct: the name of the struct that it is, points to, or consists of, or "".
        enum: the name of the enum that it is of, or "".
        is_pointer: whether it is a pointer.
        is_array: whether it is an array.
        element: how one of its elements is fetched, of an array or a pointer to numbers.
        element_size: bytes of one; 0 where that is not known.
        counts: of an array, how many there are, and of one of arrays in each of those; 0 where
            that is not known.
        is_parameter: whether it is one of the function that is meant: the copy's, or the one that
            all others are inlined in.
        ranges: (start, end) of the addresses where it can be read.
    """

    name: str
    type: str
    location: Location | None
    why: str = ""
    pieces: tuple[Piece, ...] = ()
    spec: TypeWord | None = None
    struct: str = ""
    enum: str = ""
    is_pointer: bool = False
    is_array: bool = False
    element: TypeWord | None = None
    element_size: int = 0
    counts: tuple[int, ...] = ()
    is_parameter: bool = False
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def is_readable(self) -> bool:
        """Whether it, or a part of it, can be read there."""
        return self.location is not None or bool(self.pieces)

    def moved(self, slide: int) -> "Variable":
        """Return it with addresses as linked moved to where that is."""
        location = None if self.location is None else self.location.moved(slide)
        ranges = tuple((start + slide & U64, end + slide & U64) for start, end in self.ranges)
        pieces = tuple(replace(each, location=each.location.moved(slide)) for each in self.pieces)
        return replace(self, location=location, pieces=pieces, ranges=ranges)


class SourceInfo(Protocol):
    """The debug information of one kernel, or of one of its modules; addresses are of what runs."""

    @property
    def file(self) -> str:
        """The file that has it."""
        ...

    def function(self, addr: int) -> SourceFunction | None:
        """Return the function at an address, or None where nothing is known of it."""
        ...

    def inlined(self, name: str) -> Sequence[SourceFunction]:
        """Return the functions of a name that are inlined, each without its lines."""
        ...

    def inlined_lines(self, name: str, function: SourceFunction) -> Sequence[SourceLine]:
        """Return the lines of a function that ``inlined`` has returned."""
        ...

    def file_lines(self, file: str, first: int, last: int) -> Sequence[SourceLine]:
        """Return the lines of a file that have code.

        Args:
            file: the end of its path.
            first: of the lines that are meant.
            last: of them.
        """
        ...

    def text(self, file: str) -> Sequence[str]:
        """Return the text of a file of the source, line by line.

        Raises:
            UsageError: nobody has said where the source is, or the file is not there.
        """
        ...

    def externs(self, addr: int) -> Sequence[Variable]:
        """Return the variables of an address's unit, also those that another file has."""
        ...

    def variables(self, addr: int, line: int = 0, inlined: str = "") -> Sequence[Variable]:
        """Return what is in scope at an address; of a name the first, which is that of the line.

        Of no line in particular (0) the innermost come first.

        Args:
            addr: where.
            line: that is meant.
            inlined: the function whose copy is meant, if that begins there, or "".
        """
        ...


class OpenSource(Protocol):
    """Opens debug information."""

    def __call__(self, kernel: Kernel, module: str = "") -> SourceInfo:
        """Return that of a kernel, or of a module that it has loaded.

        Raises:
            TargetError: there is none; says how to get it.
            UsageError: libdw is not there.
        """
        ...


def no_source(kernel: Kernel, module: str = "") -> SourceInfo:
    """Raise TargetError: nobody knows where there is debug information."""
    del kernel, module
    raise TargetError("lines and variables need debug information, and there is none here")
