"""Lines of a kernel's source that can be probed, and the variables that can be read at a place."""

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from msgspec import Struct

from kprobes.errors import UsageError
from kprobes.guest.guest import Guest
from kprobes.guest.places import places_of
from kprobes.lang.parser import SOURCE_FILE, parse
from kprobes.model.kernel import Kernel, Symbol, place_of
from kprobes.model.source import OpenSource, SourceLine, Variable
from kprobes.resolve.place import find_target, ip_of
from kprobes.resolve.source_place import (
    SourcePlaces,
    function_in_source,
    is_inlined,
    module_of,
    places_in_source,
)
from kprobes.units import Addr

_FILE = re.compile(
    rf"(?:(?P<module>\w+):)?(?P<file>{SOURCE_FILE})"
    r"(?::(?P<first>\d{1,9})(?:-(?P<last>\d{1,9}))?)?"
)
_LAST = 10**9


class ShownLine(Struct, frozen=True, kw_only=True):
    """One line that has code.

    Attributes:
        relative: from its function's own, or None of a file's.
        line: in the file.
        places: where its code begins, as the kernel prints addresses.
    """

    relative: int | None
    line: int
    places: tuple[str, ...]


class Lines(Struct, frozen=True, kw_only=True):
    """Lines of one file.

    Attributes:
        function: that they are of, or "".
        file: as the compiler was given it, or as it was asked for.
        first: the first line that was asked for; a function's own.
        last: likewise; a function's last that has code.
        lines: those that have code.
    """

    function: str
    file: str
    first: int
    last: int
    lines: tuple[ShownLine, ...]


class PlaceVariables(Struct, frozen=True, kw_only=True):
    """What is in scope at one place, as the kernel prints its address, the innermost first."""

    place: str
    variables: tuple[Variable, ...]


class SourceKernel(Struct, frozen=True, kw_only=True):
    """A kernel that runs, as far as its source is asked about.

    Attributes:
        kernel: that runs.
        registers: names of its registers.
        open_source: as ``model.source.OpenSource``.
        locate: returns where a probe at a function's entry is.
    """

    kernel: Kernel
    registers: Collection[str]
    open_source: OpenSource
    locate: Callable[[Symbol], Addr]


def source_of_guest(guest: Guest) -> SourceKernel:
    """Return what is asked about the source of a guest's kernel."""
    return SourceKernel(
        kernel=guest.kernel,
        registers=guest.arch.registers,
        open_source=guest.open_source,
        locate=lambda function: places_of(guest).locate(function),
    )


def lines_of(asked: SourceKernel, text: str) -> Lines:
    """Return the lines of ``FUNCTION[@FILE]``, or of ``FILE``, ``FILE:LINE``, ``FILE:FIRST-LAST``.

    A module's are those of ``MODULE:FILE`` and so on.

    Raises:
        DefinitionError: there is no such function, or nothing is known of it.
        UsageError: nothing is known of such a file.
        TargetError: there is no debug information.
    """
    kernel = asked.kernel
    file = _FILE.fullmatch(text)
    if file is None:
        definition = parse(f"p {text}", registers=asked.registers)
        source = asked.open_source(kernel, module_of(definition, kernel))
        function = function_in_source(definition, kernel, source)
        shown = _shown(kernel, function.lines, function.line)
        last = shown[-1].line if shown else function.line
        return Lines(function=text, file=function.file, first=function.line, last=last, lines=shown)
    first = int(file["first"] or 1)
    last = int(file["last"] or file["first"] or _LAST)
    source = asked.open_source(kernel, file["module"] or "")
    found = source.file_lines(file["file"], first, last)
    if not found:
        raise UsageError(f"the debug information has no code of {text}")
    shown = _shown(kernel, found, None)
    return Lines(
        function="", file=found[0].file, first=first, last=min(last, shown[-1].line), lines=shown
    )


def read_lines(tree: Path, lines: Lines) -> list[str]:
    """Return the text of the lines that were asked for.

    Args:
        tree: the top of the source.
        lines: of one of its files.

    Raises:
        UsageError: the file is not there.
    """
    from kprobes.dwarf.source import read_text

    return read_text(tree, lines.file)[lines.first - 1 : lines.last]


def variables_at(
    asked: SourceKernel, text: str, *, has_externs: bool = False
) -> list[PlaceVariables]:
    """Return what is in scope at each place that a text means, as in a definition.

    Args:
        asked: whose source.
        text: the place.
        has_externs: whether what its whole file has is wanted, too.

    Raises:
        DefinitionError: there is no such place.
        TargetError: there is no debug information.
    """
    kernel = asked.kernel
    definition = parse(f"p {text}", registers=asked.registers)
    source = asked.open_source(kernel, module_of(definition, kernel))
    if definition.place.line is not None or is_inlined(definition, kernel):
        found = places_in_source(definition, kernel, source)
    else:
        target = find_target(definition, kernel, asked.locate)
        found = SourcePlaces(line=0, addrs=[ip_of(target, asked.locate)])
    return [
        PlaceVariables(
            place=place_of(kernel.symbols, addr),
            variables=(
                *source.variables(addr, found.line, found.inlined),
                *(source.externs(addr) if has_externs else ()),
            ),
        )
        for addr in found.addrs
    ]


def _shown(kernel: Kernel, lines: Sequence[SourceLine], own: int | None) -> tuple[ShownLine, ...]:
    return tuple(
        ShownLine(
            relative=None if own is None else line.line - own,
            line=line.line,
            places=tuple(place_of(kernel.symbols, addr) for addr in line.addrs),
        )
        for line in lines
    )
