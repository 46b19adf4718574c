"""Places in the source: what debug information makes of a definition.

``vfs_read:10`` is the tenth line after that of the function's name, ``fs/read_write.c:463`` a line
of a file, ``reset@mm/slab.c:2`` one of the function there, as perf has them; ``fdget_pos`` is a
function that is inlined wherever it is called. There may be many places of each: one definition
becomes several of one event.
"""

from collections.abc import Iterable, Sequence
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from kprobes.errors import DefinitionError
from kprobes.model.codes import Code, rejection
from kprobes.model.definition import Definition, EventType, Kind
from kprobes.model.kernel import Kernel, Symbol
from kprobes.model.source import SourceFunction, SourceInfo, SourceLine, is_same_file
from kprobes.resolve.place import find_function
from kprobes.resolve.source_variables import with_all_named, with_variables
from kprobes.resolve.system_call import find_system_call
from kprobes.units import U64, Addr

_NEAR = 20
"""Lines around one without code in which some are looked for."""
_SHOWN = 4


class SourcePlaces(Struct, frozen=True, kw_only=True):
    """What a place in the source is.

    Attributes:
        line: its number in its file.
        addrs: where its code begins.
        inlined: the function whose copies begin there, or "".
    """

    line: int
    addrs: Sequence[int]
    inlined: str = ""


def is_inlined(definition: Definition, kernel: Kernel) -> bool:
    """Whether a definition names a function of which the kernel's symbols know nothing."""
    place = definition.place
    if place.addr is not None or place.module or place.is_glob or place.offset or not place.symbol:
        return False
    if definition.type is not EventType.KPROBE or kernel.symbols.find(place.symbol) is not None:
        return False
    return find_system_call(definition, kernel) is None


def at_lines(definition: Definition, kernel: Kernel, source: SourceInfo) -> list[Definition]:
    """Return a definition in the source, or one that names variables, at each place that it means.

    Args:
        definition: as parsed.
        kernel: that it is for.
        source: its debug information.

    Raises:
        DefinitionError: there is no such line, function, or variable, or it cannot be read there.
    """
    place = definition.place
    if place.line is None and not is_inlined(definition, kernel):
        function = find_function(definition, kernel)
        if function.module:
            # The kernel's own debug information has nothing of it.
            return [definition]
        found = SourcePlaces(line=0, addrs=[function.addr + place.offset])
        moved = [definition]
    else:
        found = places_in_source(definition, kernel, source)
        moved = [_at(definition, kernel, addr) for addr in found.addrs]
    reads = [
        partial(source.variables, addr - kernel.slide & U64, found.line, found.inlined)
        for addr in found.addrs
    ]
    args = with_all_named(definition, reads).args
    return [
        with_variables(
            replace(each, args=args),
            kernel,
            addr,
            read,
            partial(source.externs, addr - kernel.slide & U64),
        )
        for each, addr, read in zip(moved, found.addrs, reads, strict=True)
    ]


def places_in_source(definition: Definition, kernel: Kernel, source: SourceInfo) -> SourcePlaces:
    """Return the places of a line, or of a function that is inlined.

    Args:
        definition: that names one.
        kernel: that it is for.
        source: its debug information.

    Raises:
        DefinitionError: there is no such line, or function.
    """
    place = definition.place
    if is_inlined(definition, kernel):
        return _in_copies(definition, kernel, source)
    wanted = place.line or 0
    if not place.symbol:
        lines = source.file_lines(place.file, wanted - _NEAR, wanted + _NEAR)
        return _line(definition, kernel, place.file, 0, lines)
    symbol, function = _function(definition, kernel, source)
    if not wanted:
        # The function's own: its entry.
        return SourcePlaces(line=function.line, addrs=[symbol.addr])
    return _line(definition, kernel, symbol.name, function.line, function.lines)


def function_in_source(
    definition: Definition, kernel: Kernel, source: SourceInfo
) -> SourceFunction:
    """Return the source of the function that a definition names.

    Args:
        definition: that names one.
        kernel: that it is for.
        source: its debug information.

    Raises:
        DefinitionError: there is none, there are several, or nothing is known of it.
    """
    if is_inlined(definition, kernel):
        return _one_inlined(definition, kernel, source)
    return _function(definition, kernel, source)[1]


def _line(
    definition: Definition, kernel: Kernel, what: str, first: int, lines: Sequence[SourceLine]
) -> SourcePlaces:
    # That is counted from the first.
    wanted = first + (definition.place.line or 0)
    found = next((line for line in lines if line.line == wanted), None)
    if found is None:
        hint = _near(what, wanted, first, lines)
        raise _error(definition, Code.BAD_PROBE_ADDR, hint)
    return SourcePlaces(line=wanted, addrs=_as_loaded(kernel, found.addrs))


def _near(what: str, wanted: int, first: int, lines: Sequence[SourceLine]) -> str:
    by_distance = sorted(lines, key=lambda line: abs(line.line - wanted))[:_SHOWN]
    near = sorted(line.line - first for line in by_distance)
    if not near:
        return f"there is no code of {what} there"
    return f"that line has no code; of {what} there is some at {', '.join(map(str, near))}"


def _function(
    definition: Definition, kernel: Kernel, source: SourceInfo
) -> tuple[Symbol, SourceFunction]:
    place = definition.place
    named = kernel.symbols.all_named(place.symbol) if place.file else ()
    for symbol in named or (find_function(definition, kernel),):
        function = source.function(symbol.addr - kernel.slide)
        if function is not None and (not named or is_same_file(function.file, place.file)):
            return symbol, function
    where = f" in {place.file}" if place.file else ""
    hint = f"the debug information has no lines of {place.symbol}{where}"
    raise _error(definition, Code.BAD_PROBE_ADDR, hint)


def _in_copies(definition: Definition, kernel: Kernel, source: SourceInfo) -> SourcePlaces:
    name = definition.place.symbol
    if definition.place.line:
        function = _one_inlined(definition, kernel, source)
        return _line(definition, kernel, name, function.line, function.lines)
    functions = _inlined(definition, kernel, source)
    addrs = [addr for each in functions for addr in each.copies]
    return SourcePlaces(line=functions[0].line, addrs=_as_loaded(kernel, addrs), inlined=name)


def _one_inlined(definition: Definition, kernel: Kernel, source: SourceInfo) -> SourceFunction:
    # With its lines.
    name, functions = definition.place.symbol, _inlined(definition, kernel, source)
    if len(functions) > 1:
        where = ", ".join(f"{name}@{each.file}" for each in functions)
        raise _error(definition, Code.NON_UNIQ_SYMBOL, f"several functions have this name: {where}")
    (found,) = functions
    return replace(found, lines=tuple(source.inlined_lines(name, found)))


def _inlined(
    definition: Definition, kernel: Kernel, source: SourceInfo
) -> Sequence[SourceFunction]:
    name, file = definition.place.symbol, definition.place.file
    found = source.inlined(name)
    if not found:
        # Which says what there is.
        find_function(definition, kernel)
    if definition.kind is Kind.RETURN:
        hint = f"{name} is inlined: it has no return of its own"
        raise _error(definition, Code.BAD_RETPROBE, hint)
    of_file = [each for each in found if not file or is_same_file(each.file, file)]
    if not of_file:
        where = ", ".join(each.file for each in found)
        raise _error(definition, Code.BAD_PROBE_ADDR, f"{name} is a function of {where}")
    return of_file


def _as_loaded(kernel: Kernel, addrs: Iterable[int]) -> list[int]:
    return [addr + kernel.slide & U64 for addr in addrs]


def _at(definition: Definition, kernel: Kernel, addr: int) -> Definition:
    symbol, place = kernel.symbols.at(addr), definition.place
    if symbol is None or not kernel.symbols.is_unique(symbol.name):
        moved = replace(place, symbol="", addr=Addr(addr), line=None, file="")
    else:
        offset = addr - symbol.addr
        moved = replace(place, symbol=symbol.name, offset=offset, line=None, file="")
    return replace(definition, place=moved)


def _error(definition: Definition, code: Code, hint: str) -> DefinitionError:
    column = definition.place.span.start
    return rejection(code, command=definition.command, column=column, hint=hint)
