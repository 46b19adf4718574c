"""Places in the source, and variables there: what debug information makes of a definition.

``vfs_read:10`` is the tenth line after that of the function's name, ``fs/read_write.c:463`` a line
of a file, ``reset@mm/slab.c:2`` one of the function there, as perf has them. A line may be at many
places, and a variable somewhere else at each: one definition becomes several of one event. A
variable is fetched as the register or the memory that it lives in, so that it costs what that
costs.
"""

from collections.abc import Sequence

from msgspec.structs import replace

from kprobes.errors import DefinitionError
from kprobes.model.codes import Code, rejection
from kprobes.model.definition import (
    Cast,
    Definition,
    Deref,
    Fetch,
    FetchArg,
    Immediate,
    Member,
    MemoryAt,
    Parameter,
    PerCpu,
    Register,
    Span,
    leaf_of,
)
from kprobes.model.kernel import Kernel, Symbol
from kprobes.model.source import (
    Location,
    LocationKind,
    SourceFunction,
    SourceInfo,
    SourceLine,
    Variable,
    is_same_file,
)
from kprobes.resolve.place import find_function
from kprobes.units import U64, Addr

_NEAR = 20
"""Lines around one without code in which some are looked for."""
_SHOWN = 4


def names_variables(definition: Definition) -> bool:
    """Whether a definition fetches something by a name where the kernel's types do not help.

    They have the parameters of functions, at their entries.
    """
    return bool(definition.place.offset) and _has_names(definition)


def _has_names(definition: Definition) -> bool:
    return any(isinstance(leaf_of(arg.fetch), Parameter) for arg in definition.args)


def at_lines(definition: Definition, kernel: Kernel, source: SourceInfo) -> list[Definition]:
    """Return a definition at a line, or one that names variables, at each place that it means.

    Args:
        definition: as parsed.
        kernel: that it is for.
        source: its debug information.

    Raises:
        DefinitionError: there is no such line, function, or variable, or it cannot be read there.
    """
    if definition.place.line is None:
        function = find_function(definition, kernel)
        if function.module:
            # The kernel's own debug information has nothing of it.
            return [definition]
        addr = function.addr + definition.place.offset
        return [_with_variables(definition, kernel, source, addr)]
    line, addrs = addresses_of_line(definition, kernel, source)
    return [
        _with_variables(_at(definition, kernel, addr), kernel, source, addr, line) for addr in addrs
    ]


def addresses_of_line(
    definition: Definition, kernel: Kernel, source: SourceInfo
) -> tuple[int, Sequence[int]]:
    """Return the number in its file of the line that a definition names, and where its code begins.

    Args:
        definition: whose place has a line.
        kernel: that it is for.
        source: its debug information.

    Raises:
        DefinitionError: there is no such line, or function.
    """
    place, slide = definition.place, kernel.slide
    assert place.line is not None
    if not place.symbol:
        wanted = place.line
        lines = source.file_lines(place.file, wanted - _NEAR, wanted + _NEAR)
        what = place.file
    else:
        symbol, function = _function(definition, kernel, source)
        if place.line == 0:
            # The function's own: its entry.
            return function.line, [symbol.addr]
        wanted, lines, what = function.line + place.line, function.lines, symbol.name
    found = next((line for line in lines if line.line == wanted), None)
    if found is None:
        raise _error(definition, Code.BAD_PROBE_ADDR, _near(what, wanted, place.line, lines))
    return wanted, [addr + slide & U64 for addr in found.addrs]


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


def _near(what: str, wanted: int, given: int, lines: Sequence[SourceLine]) -> str:
    by_distance = sorted(lines, key=lambda line: abs(line.line - wanted))[:_SHOWN]
    near = sorted(line.line - wanted + given for line in by_distance)
    if not near:
        return f"there is no code of {what} there"
    return f"that line has no code; of {what} there is some at {', '.join(map(str, near))}"


def _at(definition: Definition, kernel: Kernel, addr: int) -> Definition:
    symbol, place = kernel.symbols.at(addr), definition.place
    if symbol is None or not kernel.symbols.is_unique(symbol.name):
        found = replace(place, symbol="", addr=Addr(addr), line=None, file="")
    else:
        offset = addr - symbol.addr
        found = replace(place, symbol=symbol.name, offset=offset, line=None, file="")
    return replace(definition, place=found)


def _with_variables(
    definition: Definition, kernel: Kernel, source: SourceInfo, addr: int, line: int = 0
) -> Definition:
    if not _has_names(definition):
        return definition
    variables = source.variables(addr - kernel.slide & U64, line)
    by_name = {each.name: each for each in variables}
    args = tuple(_fetched(definition, arg, by_name, kernel, addr) for arg in definition.args)
    return replace(definition, args=args)


def _fetched(
    definition: Definition,
    arg: FetchArg,
    variables: dict[str, Variable],
    kernel: Kernel,
    addr: int,
) -> FetchArg:
    leaf = leaf_of(arg.fetch)
    if not isinstance(leaf, Parameter):
        return arg
    variable = variables.get(leaf.name)
    if variable is None:
        hint = f"in scope there: {' '.join(sorted(variables)) or 'nothing'}"
        raise _error(definition, Code.NO_BTFARG, hint, leaf.span)
    if variable.location is None:
        raise _error(definition, Code.NO_BTFARG, _where(variable, kernel, addr), leaf.span)
    value = _value(variable.location, leaf.span, kernel)
    fetch, spec = _replaced(arg.fetch, value, variable), arg.spec
    if arg.fetch is leaf and spec is None:
        if variable.spec is None:
            hint = f"{leaf.name} is a {variable.type}: name a member, or a type such as x64"
            raise _error(definition, Code.NO_BTFARG, hint, leaf.span)
        spec = variable.spec
    if arg.fetch is leaf and spec is not None and spec.is_string and variable.is_pointer:
        fetch = Deref(base=value, offset=0, is_user=spec.base == "ustring", span=leaf.span)
    text = f"{_text(fetch)}:{arg.type or spec.base}" if spec is not None else _text(fetch)
    return replace(arg, fetch=fetch, spec=spec, text=text)


def _where(variable: Variable, kernel: Kernel, addr: int) -> str:
    symbol = kernel.symbols.at(addr)
    start = addr if symbol is None else symbol.addr
    ranges = [
        f"+{low + kernel.slide - start & U64:#x} to +{high + kernel.slide - start - 1 & U64:#x}"
        for low, high in variable.ranges
    ]
    there = f"at +{addr - start:#x} {variable.name} cannot be read: {variable.why}"
    return f"{there}; it can from {', '.join(ranges[:_SHOWN])}" if ranges else there


def _value(location: Location, span: Span, kernel: Kernel) -> Fetch:
    match location.kind:
        case LocationKind.REGISTER:
            return Register(name=location.register, span=span)
        case LocationKind.MEMORY:
            base = Register(name=location.register, span=span)
            return Deref(base=base, offset=location.number, is_user=False, span=span)
        case LocationKind.STATIC:
            return MemoryAt(addr=Addr(location.number + kernel.slide & U64), span=span)
        case LocationKind.CONSTANT:
            return Immediate(value=location.number & U64, span=span)


def _replaced(fetch: Fetch, value: Fetch, variable: Variable) -> Fetch:
    match fetch:
        case Parameter():
            return value
        case Member(base=Parameter(), steps=steps) if variable.struct and steps[0].is_arrow:
            cast = Cast(struct=variable.struct, container="", base=value, span=fetch.base.span)
            return replace(fetch, base=cast)
        case Deref() | Member() | Cast() | PerCpu():
            return replace(fetch, base=_replaced(fetch.base, value, variable))
        case _:
            return fetch


def _text(fetch: Fetch) -> str:
    # As the kernel's language has it.
    match fetch:
        case Register(name=name):
            return f"%{name}"
        case Deref(base=base, offset=offset, is_user=is_user):
            return (
                f"{'-' if offset < 0 else '+'}{'u' if is_user else ''}{abs(offset)}({_text(base)})"
            )
        case MemoryAt(addr=addr):
            return f"@{addr:#x}"
        case Immediate(value=value):
            return f"\\{value}"
        case Cast(struct=struct, base=base):
            return f"({struct}){_text(base)}"
        case Member(base=base, steps=steps):
            walked = "".join(f"{'->' if step.is_arrow else '.'}{step.name}" for step in steps)
            return _text(base) + walked
        case _:
            return "?"


def _error(
    definition: Definition, code: Code, hint: str, span: Span | None = None
) -> DefinitionError:
    column = (span or definition.place.span).start
    return rejection(code, command=definition.command, column=column, hint=hint)
