"""Variables of the source in a definition: what debug information makes of their names.

A variable is fetched as the register or the memory that it lives in, so that it costs what that
costs, or computed from those as the compiler has it.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest

from msgspec.structs import replace

from kprobes.errors import DefinitionError
from kprobes.model.codes import Code, rejection
from kprobes.model.definition import (
    AddressOf,
    AllMembers,
    AllVariables,
    Cast,
    Computed,
    Definition,
    Deref,
    EventType,
    Fetch,
    FetchArg,
    Immediate,
    Kind,
    Member,
    MemoryAt,
    Operation,
    Parameter,
    PerCpu,
    Register,
    Span,
    Step,
    TypeWord,
    leaf_of,
)
from kprobes.model.kernel import Kernel, TypeKind
from kprobes.model.source import Location, LocationKind, Variable
from kprobes.resolve.argument import inferred_type
from kprobes.units import U64, Addr

Read = Callable[[], Sequence[Variable]]
"""Returns what is in scope at a place; of a name the first is meant."""
_NUMBERS = (TypeKind.INT, TypeKind.ENUM, TypeKind.POINTER)
_SHOWN = 4
"""Ranges of addresses in a message."""


def names_variables(definition: Definition) -> bool:
    """Whether a definition fetches something by a name where the kernel's types do not help.

    They have the parameters of functions, at their entries. At a return nothing is where it was.
    """
    if definition.kind is Kind.RETURN or definition.type is not EventType.KPROBE:
        return False
    has_all = any(isinstance(arg.fetch, AllVariables) for arg in definition.args)
    return has_all or (bool(definition.place.offset) and _has_names(definition))


def _has_names(definition: Definition) -> bool:
    return any(isinstance(leaf_of(arg.fetch), Parameter) for arg in definition.args)


def with_all_named(definition: Definition, reads: Sequence[Read]) -> Definition:
    """Return a definition with a name for each of all parameters, or variables, that it asks for.

    Those are numbers and pointers that can be read at each of its places, and are alike there.

    Args:
        definition: that may ask for them.
        reads: returns what is in scope, for each of its places.

    Raises:
        DefinitionError: there are none.
    """
    args: list[FetchArg] = []
    for arg in definition.args:
        if not isinstance(arg.fetch, AllVariables):
            args.append(arg)
            continue
        names = _common(reads, has_locals=arg.fetch.has_locals)
        if not names:
            hint = "there is none that can be read: `kprobe vars` says why"
            raise _error(definition, hint, arg.span)
        args += [
            replace(arg, name=name, text=name, fetch=Parameter(name=name, span=arg.span))
            for name in names
        ]
    return replace(definition, args=tuple(args))


def _common(reads: Sequence[Read], *, has_locals: bool) -> list[str]:
    first, *others = (
        {
            name: each.spec
            for name, each in _by_name(read()).items()
            if each.location is not None and each.spec is not None
            if has_locals or each.is_parameter
        }
        for read in reads
    )
    return [name for name, spec in first.items() if all(spec == one.get(name) for one in others)]


def _by_name(variables: Sequence[Variable]) -> dict[str, Variable]:
    found: dict[str, Variable] = {}
    for each in variables:
        found.setdefault(each.name, each)
    return found


def with_variables(
    definition: Definition, kernel: Kernel, addr: int, read: Read, read_externs: Read
) -> Definition:
    """Return a definition that names no variables.

    Args:
        definition: that may, at one place.
        kernel: that it is for.
        addr: of the place.
        read: returns what is in scope there.
        read_externs: returns what its whole file has.

    Raises:
        DefinitionError: there is no such variable, or it cannot be read there.
    """
    if not _has_names(definition):
        return definition
    own = _by_name(read())
    leaves = (leaf_of(arg.fetch) for arg in definition.args)
    names = [each for each in leaves if isinstance(each, Parameter)]
    is_all_own = all(each.name in own for each in names)
    variables = own if is_all_own else _by_name(read_externs()) | own
    for unknown in (each for each in names if each.name not in variables):
        hint = f"in scope there: {' '.join(sorted(own)) or 'nothing'}"
        raise _error(definition, hint, unknown.span)
    args = tuple(_fetched(definition, arg, variables, kernel, addr) for arg in definition.args)
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
    variable = variables[leaf.name]
    location, spec = variable.location, arg.spec
    if location is None and variable.pieces:
        return _of_piece(definition, arg, variable, kernel)
    if location is None:
        raise _error(definition, _where(variable, kernel, addr), leaf.span)
    value, address = _value(location, leaf.span), _address(location, leaf.span)
    if arg.fetch is not leaf:
        _check_use(definition, arg.fetch, variable, has_address=address is not None)
        fetch = _replaced(arg.fetch, variable, value, address)
        spec = variable.element if spec is None and _is_element(arg.fetch, variable) else spec
    elif spec is not None and spec.is_string and variable.is_pointer:
        fetch = Deref(base=value, offset=0, is_user=spec.base == "ustring", span=leaf.span)
    elif spec is None and variable.spec is None:
        hint = f"{leaf.name} is a {variable.type}: name a member, or a type such as x64"
        raise _error(definition, hint, leaf.span)
    else:
        fetch, spec = value, spec or variable.spec
        arg = replace(arg, enum=variable.enum)
    text = _text(fetch)
    if text is not None and spec is not None:
        text += f":{arg.type or spec.base}"
    return replace(arg, fetch=fetch, spec=spec, text=arg.text if text is None else text)


def _of_piece(
    definition: Definition, arg: FetchArg, variable: Variable, kernel: Kernel
) -> FetchArg:
    # A member of a struct that is in several places, by the kernel's types.
    match arg.fetch:
        case Member(base=Parameter(span=span), steps=(step, *others)) if not step.is_arrow:
            pass
        case _:
            hint = f"{variable.name} is in several places at once: name a member"
            raise _error(definition, hint, arg.body)
    types, struct = kernel.types, variable.struct
    number = None if types is None else types.struct(struct)
    place = None if types is None or number is None else types.member(number, step.name)
    if types is None or place is None:
        raise _error(definition, f"{struct} has no member {step.name}", step.span)
    found = (each for each in variable.pieces if 8 * each.offset == place.bit_offset)
    piece = next(found, None)
    ctype = types.describe(place.number)
    size = ctype.size if arg.spec is None or others else max(ctype.size, arg.spec.size)
    is_whole = piece is not None and size <= piece.size and ctype.kind in _NUMBERS
    if piece is None or not is_whole or place.bit_size or step.indexes:
        hint = f"{variable.name}.{step.text} cannot be read there as a whole"
        raise _error(definition, hint, step.span)
    value = _value(piece.location, span)
    if not others:
        word = inferred_type(ctype)
        spec = arg.spec or TypeWord(base=word, size=int(word[1:]) // 8)
        return replace(arg, fetch=value, spec=spec)
    target = types.describe(ctype.target).name if ctype.kind is TypeKind.POINTER else ""
    if not target or not others[0].is_arrow:
        hint = f"{variable.name}.{step.name} points to no struct"
        raise _error(definition, hint, others[0].span)
    cast = Cast(struct=target, container="", base=value, span=span)
    return replace(arg, fetch=Member(base=cast, steps=tuple(others), span=arg.fetch.span))


def _check_use(
    definition: Definition, fetch: Fetch, variable: Variable, *, has_address: bool
) -> None:
    match fetch:
        case AddressOf(base=Parameter(span=span)) if not has_address:
            hint = f"{variable.name} is in no memory there: it has no address"
            raise _error(definition, hint, span)
        case Member(base=Parameter(), steps=(step, *others)) if step.is_element:
            why = _no_element(variable, step, has_members=bool(others))
            if why:
                raise _error(definition, why, step.span)
        case Deref() | Member() | Cast() | PerCpu() | AddressOf() | AllMembers():
            _check_use(definition, fetch.base, variable, has_address=has_address)
        case _:
            pass


def _no_element(variable: Variable, step: Step, *, has_members: bool) -> str:
    # Why there is none; "" where there is.
    name, counts = variable.name, variable.counts
    if not variable.is_array and not variable.is_pointer:
        return f"{name} is a {variable.type}: neither an array nor a pointer"
    for index, count in zip(step.indexes, counts, strict=False):
        if count and index >= count:
            return f"{name} has {' times '.join(map(str, counts))} elements, from 0"
    is_whole = len(step.indexes) == max(len(counts), 1) and all(counts[1:])
    is_number = variable.element is not None and not has_members
    if not variable.element_size or not is_whole or not (is_number or variable.struct):
        return f"{name} is a {variable.type}: what is there is no number"
    return ""


def _element(variable: Variable, indexes: Sequence[int]) -> int:
    # Of an array of arrays the last index counts single elements.
    number = 0
    for index, count in zip_longest(indexes, variable.counts, fillvalue=1):
        number = number * count + index
    return number


def _is_element(fetch: Fetch, variable: Variable) -> bool:
    # Of numbers; those of structs are known by the kernel's types.
    match fetch:
        case Member(base=Parameter(), steps=(step,)):
            return step.is_element and not variable.struct
        case _:
            return False


def _where(variable: Variable, kernel: Kernel, addr: int) -> str:
    symbol = kernel.symbols.at(addr)
    start = addr if symbol is None else symbol.addr
    ranges = [
        f"+{low - start & U64:#x} to +{high - start - 1 & U64:#x}" for low, high in variable.ranges
    ]
    name = "" if symbol is None else symbol.name
    there = f"at {name}+{addr - start:#x} {variable.name} cannot be read: {variable.why}"
    return f"{there}; it can from {', '.join(ranges[:_SHOWN])}" if ranges else there


def _value(location: Location, span: Span) -> Fetch:
    match location.kind:
        case LocationKind.REGISTER:
            return Register(name=location.register, span=span)
        case LocationKind.MEMORY:
            base = _base(location, span)
            return Deref(base=base, offset=location.number, is_user=False, span=span)
        case LocationKind.STATIC:
            return MemoryAt(addr=Addr(location.number), span=span)
        case LocationKind.PER_CPU:
            return _of_this_cpu(location, span, is_read=True)
        case LocationKind.CONSTANT:
            return Immediate(value=location.number & U64, span=span)
        case LocationKind.ADDRESS:
            return Immediate(value=location.number, span=span)
        case LocationKind.COMPUTED:
            left, right = (_value(each, span) for each in location.operands)
            return Computed(operation=location.operation, left=left, right=right, span=span)


def _of_this_cpu(location: Location, span: Span, *, is_read: bool) -> PerCpu:
    memory = MemoryAt(addr=Addr(location.number), span=span)
    return PerCpu(base=memory, is_read=is_read, span=span)


def _base(location: Location, span: Span) -> Fetch:
    for operand in location.operands:
        return _value(operand, span)
    return Register(name=location.register, span=span)


def _address(location: Location, span: Span) -> Fetch | None:
    # None of what is not in memory.
    match location.kind:
        case LocationKind.STATIC:
            return Immediate(value=location.number, span=span)
        case LocationKind.PER_CPU:
            return _of_this_cpu(location, span, is_read=False)
        case LocationKind.MEMORY:
            offset = Immediate(value=location.number & U64, span=span)
            base = _base(location, span)
            return Computed(operation=Operation.ADD, left=base, right=offset, span=span)
        case _:
            return None


def _replaced(fetch: Fetch, variable: Variable, value: Fetch, address: Fetch | None) -> Fetch:
    match fetch:
        case Parameter():
            return value
        case AddressOf(base=Parameter()) if address is not None:
            return address
        case AllMembers(base=Parameter(span=span)) if variable.struct:
            return replace(fetch, base=_cast(variable, value, address, span))
        case Member(steps=(first,)) if _is_element(fetch, variable):
            start = address if variable.is_array and address is not None else value
            offset = _element(variable, first.indexes) * variable.element_size
            return Deref(base=start, offset=offset, is_user=False, span=fetch.span)
        case Member(base=Parameter(span=span), steps=(first, *others)) if variable.struct:
            # What is a struct itself, and no pointer to one, is walked from where it is.
            is_struct = not (variable.is_pointer or variable.is_array)
            is_walked = variable.is_pointer if first.is_arrow else is_struct
            if is_walked or first.is_element:
                steps = (_from_pointer(variable, first), *others)
                return replace(fetch, base=_cast(variable, value, address, span), steps=steps)
            return replace(fetch, base=value)
        case Deref() | Member() | Cast() | PerCpu() | AddressOf() | AllMembers():
            return replace(fetch, base=_replaced(fetch.base, variable, value, address))
        case _:
            return fetch


def _from_pointer(variable: Variable, step: Step) -> Step:
    indexes = (_element(variable, step.indexes),) if step.is_element else step.indexes
    return replace(step, is_arrow=True, indexes=indexes)


def _cast(variable: Variable, value: Fetch, address: Fetch | None, span: Span) -> Fetch:
    # What points to a struct: the variable, or else where that is.
    base = value if variable.is_pointer else address
    if base is None:
        return value
    return Cast(struct=variable.struct, container="", base=base, span=span)


def _text(fetch: Fetch) -> str | None:
    # As the kernel's language has it, if it has a word for that.
    match fetch:
        case Register(name=name):
            return f"%{name}"
        case MemoryAt(addr=addr):
            return f"@{addr:#x}"
        case Immediate(value=value):
            return f"\\{value}"
        case Deref() | Cast() | Member() | PerCpu():
            base = _text(fetch.base)
            return None if base is None else _of_base(fetch, base)
        case _:
            return None


def _of_base(fetch: Deref | Cast | Member | PerCpu, base: str) -> str:
    match fetch:
        case Deref(offset=offset, is_user=is_user):
            return f"{'-' if offset < 0 else '+'}{'u' if is_user else ''}{abs(offset)}({base})"
        case Cast(struct=struct):
            return f"({struct}){base}"
        case PerCpu(is_read=is_read):
            return f"this_cpu_{'read' if is_read else 'ptr'}({base})"
        case Member(steps=steps):
            return base + "".join(map(_of_step, steps))


def _of_step(step: Step) -> str:
    if step.is_element:
        return step.text
    return f"{'->' if step.is_arrow else '.'}{step.text}"


def _error(definition: Definition, hint: str, span: Span) -> DefinitionError:
    return rejection(Code.NO_BTFARG, command=definition.command, column=span.start, hint=hint)
