"""Places in the source: what debug information makes of a definition.

``vfs_read:10`` is the tenth line after that of the function's name, ``fs/read_write.c:463`` a line
of a file, ``reset@mm/slab.c:2`` one of the function there, ``vfs_read;ret=*`` its lines whose text
is like that, blanks left out: all as perf has them. ``fdget_pos`` is a function that is inlined
wherever it is called. ``dummy:dummy.c:60`` is a module's. There may be many places of each: one
definition becomes several of one event.
"""

import re
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from functools import cache, partial

from msgspec import Struct
from msgspec.structs import replace

from kprobes.errors import DefinitionError, TargetError, UsageError
from kprobes.model.codes import Code, rejection
from kprobes.model.definition import Definition, EventType, Kind
from kprobes.model.kernel import Kernel, Symbol
from kprobes.model.source import (
    OpenSource,
    SourceFunction,
    SourceInfo,
    SourceLine,
    is_same_file,
)
from kprobes.resolve.place import find_function, module_is_loaded
from kprobes.resolve.source_variables import names_variables, with_all_named, with_variables
from kprobes.resolve.system_call import find_system_call
from kprobes.units import Addr

_NEAR = 20
"""Lines around one without code in which some are looked for."""
_SHOWN = 4
_BLANKS = re.compile(r"\s+")


class SourcePlaces(Struct, frozen=True, kw_only=True):
    """What a place in the source is.

    Attributes:
        line: its number in its file; 0 of several.
        addrs: where its code begins.
        inlined: the function whose copies begin there, or "".
    """

    line: int
    addrs: Sequence[int]
    inlined: str = ""


def is_inlined(definition: Definition, kernel: Kernel) -> bool:
    """Whether a definition names a function that no symbol of the kernel, or its module, has."""
    place = definition.place
    if place.addr is not None or place.is_glob or place.offset or not place.symbol:
        return False
    if definition.type is not EventType.KPROBE:
        return False
    if place.module:
        named = kernel.symbols.all_named(place.symbol)
        is_loaded = module_is_loaded(place.module, kernel)
        return is_loaded and all(each.module != place.module for each in named)
    if kernel.symbols.find(place.symbol) is not None:
        return False
    return find_system_call(definition, kernel) is None


def module_of(definition: Definition, kernel: Kernel) -> str:
    """Return the module whose debug information a definition needs; "" for the kernel's own."""
    place = definition.place
    if place.module or not place.symbol:
        return place.module
    symbol = kernel.symbols.find(place.symbol)
    return "" if symbol is None else symbol.module


def at_lines(definition: Definition, kernel: Kernel, source: SourceInfo) -> list[Definition]:
    """Return a definition in the source, or one that names variables, at each place that it means.

    Args:
        definition: as parsed.
        kernel: that it is for.
        source: the debug information of it, or of the definition's module.

    Raises:
        DefinitionError: there is no such line, function, or variable, or it cannot be read there.
    """
    place = definition.place
    if place.line is None and not is_inlined(definition, kernel):
        function = find_function(definition, kernel)
        addr = function.addr + place.offset
        found = SourcePlaces(line=0, addrs=[addr])
        moved = [_at(definition, kernel, addr) if function.module else definition]
    else:
        found = places_in_source(definition, kernel, source)
        moved = [_at(definition, kernel, addr) for addr in found.addrs]
    reads = [partial(source.variables, addr, found.line, found.inlined) for addr in found.addrs]
    args = with_all_named(definition, reads).args
    return [
        with_variables(
            replace(each, args=args),
            kernel,
            addr,
            read,
            partial(source.externs, addr),
        )
        for each, addr, read in zip(moved, found.addrs, reads, strict=True)
    ]


class SourcePlacer:
    """Finds what definitions mean in the source, where they need it.

    Args:
        kernel: that they are for.
        open_source: as ``model.source.OpenSource``.
    """

    def __init__(self, kernel: Kernel, open_source: OpenSource) -> None:
        self._kernel = kernel
        self._open = open_source
        # Looked for once, whatever comes of that: there may be thousands of names.
        self._if_any = cache(self._find)

    def at_lines(self, definition: Definition) -> list[Definition] | None:
        """Return a definition at each place that it means; None of what needs no source.

        Raises:
            DefinitionError: there is no such line, function, or variable, or it cannot be read.
            RefusedError: its module is not loaded.
            TargetError: it names a line, and there is no debug information.
            UsageError: likewise, or libdw is not there.
        """
        kernel = self._kernel
        if definition.place.line is not None:
            source: SourceInfo | None = self._open(kernel, module_of(definition, kernel))
        else:
            source = self._of_names(definition)
        return None if source is None else at_lines(definition, kernel, source)

    def _of_names(self, definition: Definition) -> SourceInfo | None:
        # What knows of names that nothing else does, if there is anything.
        module = module_of(definition, self._kernel)
        if names_variables(definition):
            return self._if_any(module)
        if is_inlined(definition, self._kernel):
            # Most such names are mistyped, which needs no library to be told.
            with suppress(UsageError):
                return self._if_any(module)
        return None

    def _find(self, module: str) -> SourceInfo | None:
        # Without debug information the kernel's word counts: there is no such variable.
        try:
            return self._open(self._kernel, module)
        except TargetError:
            return None


def places_in_source(definition: Definition, kernel: Kernel, source: SourceInfo) -> SourcePlaces:
    """Return the places of a line, or of a function that is inlined.

    Args:
        definition: that names one.
        kernel: that it is for.
        source: the debug information of it, or of the definition's module.

    Raises:
        DefinitionError: there is no such line, or function.
    """
    place = definition.place
    if is_inlined(definition, kernel) and not place.pattern:
        return _in_copies(definition, kernel, source)
    if place.pattern:
        function = function_in_source(definition, kernel, source)
        return _like(definition, function, source.text(function.file))
    wanted = place.line or 0
    if not place.symbol:
        lines = source.file_lines(place.file, wanted - _NEAR, wanted + _NEAR)
        return _line(definition, place.file, 0, lines)
    symbol, function = _function(definition, kernel, source)
    if not wanted:
        # The function's own: its entry.
        return SourcePlaces(line=function.line, addrs=[symbol.addr])
    return _line(definition, symbol.name, function.line, function.lines)


def function_in_source(
    definition: Definition, kernel: Kernel, source: SourceInfo
) -> SourceFunction:
    """Return the source of the function that a definition names.

    Args:
        definition: that names one.
        kernel: that it is for.
        source: the debug information of it, or of the definition's module.

    Raises:
        DefinitionError: there is none, there are several, or nothing is known of it.
    """
    if is_inlined(definition, kernel):
        return _one_inlined(definition, kernel, source)
    return _function(definition, kernel, source)[1]


def _line(
    definition: Definition, what: str, first: int, lines: Sequence[SourceLine]
) -> SourcePlaces:
    # That is counted from the first.
    wanted = first + (definition.place.line or 0)
    found = next((line for line in lines if line.line == wanted), None)
    if found is None:
        hint = _near(what, wanted, first, lines)
        raise _error(definition, Code.BAD_PROBE_ADDR, hint)
    return SourcePlaces(line=wanted, addrs=found.addrs)


def _like(definition: Definition, function: SourceFunction, text: Sequence[str]) -> SourcePlaces:
    pattern = _BLANKS.sub("", definition.place.pattern)
    coded = [each for each in function.lines if each.line <= len(text)]
    found = [e for e in coded if fnmatchcase(_BLANKS.sub("", text[e.line - 1]), pattern)]
    if not found:
        name = definition.place.symbol
        shown = "; ".join(text[each.line - 1].strip() for each in coded[:_SHOWN])
        hint = f"no line of {name} that has code is like this; some are: {shown}"
        raise _error(definition, Code.BAD_PROBE_ADDR, hint)
    addrs = dict.fromkeys(addr for each in found for addr in each.addrs)
    return SourcePlaces(line=found[0].line if len(found) == 1 else 0, addrs=list(addrs))


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
        function = source.function(symbol.addr)
        if function is not None and (not named or is_same_file(function.file, place.file)):
            return symbol, function
    where = f" in {place.file}" if place.file else ""
    hint = f"the debug information has no lines of {place.symbol}{where}"
    raise _error(definition, Code.BAD_PROBE_ADDR, hint)


def _in_copies(definition: Definition, kernel: Kernel, source: SourceInfo) -> SourcePlaces:
    name = definition.place.symbol
    if definition.place.line:
        function = _one_inlined(definition, kernel, source)
        return _line(definition, name, function.line, function.lines)
    functions = _inlined(definition, kernel, source)
    addrs = [addr for each in functions for addr in each.copies]
    return SourcePlaces(line=functions[0].line, addrs=addrs, inlined=name)


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


def _at(definition: Definition, kernel: Kernel, addr: int) -> Definition:
    # Without its module, which may be of another build when it is loaded again.
    symbol = kernel.symbols.at(addr)
    bare = replace(definition.place, symbol="", module="", offset=0, line=None, file="", pattern="")
    if symbol is None or not kernel.symbols.is_unique(symbol.name):
        moved = replace(bare, addr=Addr(addr))
    else:
        moved = replace(bare, symbol=symbol.name, offset=addr - symbol.addr)
    return replace(definition, place=moved)


def _error(definition: Definition, code: Code, hint: str) -> DefinitionError:
    column = definition.place.span.start
    return rejection(code, command=definition.command, column=column, hint=hint)
