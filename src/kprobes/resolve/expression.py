"""Fetch expressions to operands: names become registers, addresses and offsets.

``$argN`` is where the argument is when the function is entered: one word for each. Member chains,
``a->b.c->d``, become reads of memory by the kernel's types, as in its parse_btf_field(): every
arrow reads the pointer before it, dots add offsets.
"""

from typing import assert_never

from msgspec import Struct
from msgspec.structs import replace

from kprobes.arch.arch import Arch, Base
from kprobes.errors import DefinitionError
from kprobes.model.abi import WALK_STACK, WALK_USER_STACK
from kprobes.model.codes import Code, rejection
from kprobes.model.definition import (
    AddressOf,
    Argument,
    Cast,
    Comm,
    Computed,
    CurrentTask,
    Definition,
    Deref,
    EventType,
    Fetch,
    Immediate,
    Kind,
    Member,
    MemoryAt,
    MemoryOf,
    Operation,
    Parameter,
    PerCpu,
    Register,
    ReturnValue,
    Span,
    StackPointer,
    StackSlot,
    Stacktrace,
    Step,
    Text,
    leaf_of,
)
from kprobes.model.kernel import CType, Kernel, MemberPlace, Prototype, TypeKind, Types
from kprobes.model.resolved import (
    CommValue,
    ComputedValue,
    Constant,
    EntryValue,
    Load,
    Operand,
    PerCpuAddress,
    RegisterValue,
    ReturnedValue,
    StackTraceValue,
    StackValue,
    TaskAddress,
    TextValue,
)
from kprobes.units import U64

_WORD = 8


def at_entry(arch: Arch, number: int) -> RegisterValue | StackValue:
    """Return what has the argument of a number, counted from 1."""
    registers = arch.arguments
    if number <= len(registers):
        return RegisterValue(name=registers[number - 1])
    return StackValue(slot=_first_slot(arch) + number - len(registers) - 1)


def number_of(arch: Arch, operand: Operand) -> int:
    """Return the number of the argument that something has."""
    match operand:
        case RegisterValue(name=name):
            return arch.arguments.index(name) + 1
        case StackValue(slot=slot):
            return len(arch.arguments) + 1 + slot - _first_slot(arch)
        case _:
            raise TypeError(f"{operand} is not an argument")


def _first_slot(arch: Arch) -> int:
    # Below it there may be the return address.
    last = arch.passed([_WORD] * (len(arch.arguments) + 1))[-1]
    if last.stack is None:
        raise ValueError(f"{arch.name}: an argument is in {last.registers} and in no ``arguments``")
    return last.stack // _WORD


class ResolveContext(Struct, frozen=True, kw_only=True):
    """One definition on one function.

    Attributes:
        definition: whose words errors point into.
        kernel: of the target.
        arch: its architecture.
        module: that the function is in, or "" for the kernel itself.
        is_entry: whether the probe is where a function begins, and named by a symbol: an
            address is nowhere in particular to the kernel.
        is_system_call: whether that is the function of a system call, which is named.
    """

    definition: Definition
    kernel: Kernel
    arch: Arch
    module: str
    is_entry: bool
    is_system_call: bool = False

    @property
    def is_return(self) -> bool:
        """Whether the probe is at a function's return."""
        return self.definition.kind is Kind.RETURN and self.is_entry

    @property
    def types(self) -> Types | None:
        """The kernel's types, its module's included, or None when it carries none."""
        return self.kernel.types_for(self.module)

    @property
    def prototype(self) -> Prototype | None:
        """The function's, where the kernel's types have it."""
        name = self.definition.function
        found = self.types.function(name) if self.types and name else None
        if found is None or not self.hidden:
            return found
        return replace(found, parameters=found.parameters[self.hidden :])

    @property
    def hidden(self) -> int:
        """How many parameters the function has before those that the definition knows."""
        return 1 if self.definition.type is EventType.TRACEPOINT else 0

    def error(self, code: Code, column: int, hint: str = "") -> DefinitionError:
        """Return the error whose caret stands at a column of the command.

        Args:
            code: what is wrong.
            column: of the caret, from 0.
            hint: what would be right, or "".
        """
        return rejection(code, command=self.definition.command, column=column, hint=hint)


class Value(Struct, frozen=True, kw_only=True):
    """An expression and what is known of it.

    Attributes:
        operand: how it is fetched.
        ctype: its type, or None where the language loses it, as after an explicit dereference.
        bit_offset: where the value begins in the first byte fetched.
        bit_size: of a bit-field, else 0.
    """

    operand: Operand
    ctype: CType | None = None
    bit_offset: int = 0
    bit_size: int = 0


class Start(Struct, frozen=True, kw_only=True):
    """What a chain begins at.

    Attributes:
        operand: a pointer.
        ctype: its type; of a cast, None.
        aggregate: number of the struct that it is cast to; of other pointers, None.
        shift: bytes to be taken from the first member's offset: the pointer is to a member.
    """

    operand: Operand
    ctype: CType | None = None
    aggregate: int | None = None
    shift: int = 0


def walk(context: ResolveContext, types: Types, start: Start, steps: tuple[Step, ...]) -> Value:
    """Return the member at the end of a chain.

    Args:
        context: the definition, and its kernel.
        types: of that kernel.
        start: what the first step begins at.
        steps: the names, each with what leads to it.

    Raises:
        DefinitionError: a step goes through no pointer, or to no member.
    """
    first = start.aggregate
    first = _pointee(context, steps[0], start.ctype) if first is None else first
    place = _Place(base=start.operand, offset=-8 * start.shift, ctype=types.describe(first))
    for number, step in enumerate(steps):
        if number and step.is_arrow:
            place = place.followed(types, _pointee(context, step, place.ctype))
        if not step.is_element:
            found = find_member(context, types, place.ctype.number, step)
            place = replace(
                place,
                offset=place.offset + found.bit_offset,
                ctype=types.describe(found.number),
                bit_size=found.bit_size,
            )
        for index_number, index in enumerate(step.indexes):
            # The first of BASE[N] is of what a pointer leads to.
            if index_number or not step.is_element:
                place = _elements(context, types, place, step)
            place = _element(context, place, step, index)
    return Value(
        operand=place.load(),
        ctype=place.ctype,
        bit_offset=place.offset % 8,
        bit_size=place.bit_size,
    )


class _Place(Struct, frozen=True, kw_only=True):
    # Memory: so many bits from where a pointer leads, and what is there; of an array or a pointer
    # whose elements are meant count is how many there are, or 0.
    base: Operand
    offset: int
    ctype: CType
    bit_size: int = 0
    count: int = 0

    def load(self) -> Load:
        return Load(base=self.base, offset=self.offset // 8, is_user=False)

    def followed(self, types: Types, target: int) -> "_Place":
        return _Place(base=self.load(), offset=0, ctype=types.describe(target))


def _elements(context: ResolveContext, types: Types, place: _Place, step: Step) -> _Place:
    if place.ctype.kind is TypeKind.POINTER:
        return place.followed(types, place.ctype.target)
    if place.ctype.kind is TypeKind.ARRAY:
        return replace(place, ctype=types.describe(place.ctype.target), count=place.ctype.count)
    hint = f"{step.name} is neither an array nor a pointer"
    raise context.error(Code.NO_BTF_FIELD, step.span.start, hint)


def _element(context: ResolveContext, place: _Place, step: Step, index: int) -> _Place:
    if place.count and index >= place.count:
        hint = f"{step.text}: there are {place.count}, from 0"
        raise context.error(Code.NO_BTF_FIELD, step.span.start, hint)
    if not place.ctype.size:
        hint = f"how long an element of {step.name or 'it'} is, is not known"
        raise context.error(Code.NO_BTF_FIELD, step.span.start, hint)
    return replace(place, offset=place.offset + 8 * place.ctype.size * index, count=0)


def find_member(context: ResolveContext, types: Types, aggregate: int, step: Step) -> MemberPlace:
    """Return one member of a struct or union.

    Args:
        context: the definition, for the error.
        types: of its kernel.
        aggregate: the type's number.
        step: the member's name.

    Raises:
        DefinitionError: the type is neither, or has no such member.
    """
    outer = types.describe(aggregate)
    if outer.kind is not TypeKind.AGGREGATE:
        hint = f"{step.name} is wanted of what is neither a struct nor a union"
        raise context.error(Code.BAD_BTF_TID, step.span.start, hint)
    place = types.member(aggregate, step.name)
    if place is None:
        hint = f"{outer.name or 'the type'} has no member {step.name or 'without a name'}"
        raise context.error(Code.NO_BTF_FIELD, step.span.start, hint)
    return place


def _pointee(context: ResolveContext, step: Step, ctype: CType | None) -> int:
    if ctype is None or ctype.kind is not TypeKind.POINTER:
        raise context.error(Code.NO_PTR_STRCT, step.span.start)
    return ctype.target


_TASK = "task_struct"


def evaluate(context: ResolveContext, fetch: Fetch) -> Value:
    """Return how an expression is fetched, and its type where it has one.

    Raises:
        DefinitionError: a name in it means nothing here.
    """
    match fetch:
        case Deref(base=base, offset=offset, is_user=is_user):
            inner = evaluate(context, base).operand
            return Value(operand=Load(base=inner, offset=offset, is_user=is_user))
        case ReturnValue(span=span):
            return _returned(context, span)
        case Parameter():
            return _parameter(context, fetch)
        case Member(base=base, steps=steps):
            _check_first(context, base, steps[0])
            types = types_of(context, fetch.span)
            return walk(context, types, start_of(context, types, base), steps)
        case Cast(base=base):
            # Alone, it is the pointer itself.
            return Value(operand=evaluate(context, base).operand)
        case PerCpu() | AddressOf():
            is_of_cpu = isinstance(fetch, PerCpu)
            found = _per_cpu(context, fetch) if is_of_cpu else _address_of(context, fetch)
            return Value(operand=found)
        case Computed(operation=operation, left=left, right=right):
            first, second = (evaluate(context, each).operand for each in (left, right))
            return Value(operand=ComputedValue(operation=operation, left=first, right=second))
        case _:
            return Value(operand=_leaf(context, fetch))


def _address_of(context: ResolveContext, fetch: AddressOf) -> Operand:
    value = evaluate(context, fetch.base)
    if not isinstance(value.operand, Load) or value.bit_size:
        what = "a bit-field" if value.bit_size else "what is in no memory"
        raise context.error(Code.BAD_FETCH_ARG, fetch.span.start, f"{what} has no address")
    start, offset = value.operand.base, value.operand.offset
    if isinstance(start, Constant):
        return Constant(value=start.value + offset & U64)
    added = Constant(value=offset & U64)
    return ComputedValue(operation=Operation.ADD, left=start, right=added) if offset else start


def _leaf(context: ResolveContext, fetch: Fetch) -> Operand:
    match fetch:
        case Register(name=name):
            return RegisterValue(name=name)
        case Argument():
            return _argument(context, fetch)
        case StackPointer():
            return RegisterValue(name="sp")
        case StackSlot(number=number):
            return StackValue(slot=number)
        case Stacktrace(is_user=is_user):
            return stack_trace(context, fetch.span.start, is_user=is_user)
        case Immediate(value=value):
            return Constant(value=value & U64)
        case MemoryAt() | MemoryOf():
            return Load(base=_address(context, fetch), offset=0, is_user=False)
        case _:
            return _task_leaf(fetch)


def _task_leaf(fetch: Fetch) -> Operand:
    match fetch:
        case Comm():
            return CommValue()
        case Text():
            return TextValue()
        case CurrentTask():
            return TaskAddress()
        case _:
            raise TypeError(f"{fetch} is not expanded")


def stack_trace(context: ResolveContext, column: int, *, is_user: bool = False) -> StackTraceValue:
    """Return how the stack is fetched.

    Args:
        context: the definition, and its kernel.
        column: of the caret.
        is_user: whether it is the program's.

    Raises:
        DefinitionError: the kernel cannot walk its stacks, or those of programs.
    """
    walker = WALK_USER_STACK if is_user else WALK_STACK
    if context.kernel.symbols.find(walker) is None:
        since = (
            "CONFIG_USER_STACKTRACE_SUPPORT, of arm64 since 6.8"
            if is_user
            else "CONFIG_STACKTRACE, since 5.2"
        )
        raise context.error(Code.NOT_IN_RELEASE, column, f"it has no {walker}: {since}")
    if is_user:
        return StackTraceValue(is_user=True)
    has_link = context.arch.code.call.link is not None
    return StackTraceValue(has_link=has_link and context.is_entry and not context.is_return)


def _address(context: ResolveContext, fetch: MemoryAt | MemoryOf) -> Constant:
    match fetch:
        case MemoryAt(addr=addr):
            return Constant(value=addr)
        case MemoryOf(symbol=name, offset=offset):
            symbol = context.kernel.symbols.find(name)
            # One that is not there is found out at registration only.
            return Constant(value=symbol.addr + offset & U64 if symbol is not None else 0)
        case _:
            assert_never(fetch)


def check_symbols(context: ResolveContext, fetch: Fetch) -> None:
    """Check that the kernel has the symbols whose memory an expression reads.

    Raises:
        DefinitionError: it has not; the kernel points at the place.
    """
    fetch = leaf_of(fetch)
    if isinstance(fetch, MemoryOf) and context.kernel.symbols.find(fetch.symbol) is None:
        hint = f"no symbol {fetch.symbol!r} in this kernel"
        raise context.error(Code.BAD_PROBE_ADDR, context.definition.place.span.start, hint)


def _argument(context: ResolveContext, fetch: Argument) -> Operand:
    if not context.is_entry:
        raise context.error(Code.NOFENTRY_ARGS, fetch.span.start)
    most = context.arch.thread_size // 8
    if context.is_system_call:
        most = len(context.arch.system_call)
    if fetch.number > most:
        hint = f"arguments count from 1 to {most}"
        raise context.error(Code.BAD_ARG_NUM, fetch.span.start, hint)
    return _at_entry(context, fetch.number)


def _at_entry(context: ResolveContext, number: int) -> Operand:
    if context.is_system_call:
        registers = _passed(context, 1)
        offset = context.arch.system_call[number - 1]
        return Load(base=registers, offset=offset, is_user=False)
    return _passed(context, number + context.hidden)


def _passed(context: ResolveContext, number: int) -> Operand:
    value = at_entry(context.arch, number)
    return EntryValue(base=value) if context.is_return else value


def _returned(context: ResolveContext, span: Span) -> Value:
    if not context.is_return:
        hint = "only a probe at the return of a function that is named has it"
        raise context.error(Code.RETVAL_ON_PROBE, span.start, hint)
    if context.prototype is None or context.types is None:
        return Value(operand=ReturnedValue())
    if context.prototype.returned == 0:
        raise context.error(Code.NO_RETVAL, span.start)
    ctype = context.types.describe(context.prototype.returned)
    return Value(operand=ReturnedValue(), ctype=ctype)


def _parameter(context: ResolveContext, fetch: Parameter) -> Value:
    if not context.is_entry:
        hint = "parameters are known by name where a function is named and begins"
        raise context.error(Code.NOSUP_BTFARG, fetch.span.start, hint)
    types = types_of(context, fetch.span)
    prototype = context.prototype
    if prototype is None or not prototype.parameters:
        hint = f"{context.definition.function} has no parameters in this kernel's types"
        raise context.error(Code.NO_BTF_ENTRY, fetch.span.start, hint)
    for number, parameter in enumerate(prototype.parameters, start=1):
        if parameter.name == fetch.name:
            ctype = types.describe(parameter.number)
            return Value(operand=_at_entry(context, number), ctype=ctype)
    hint = _declaration(prototype)
    if fetch.name == "comm":
        hint += "; the running task's name is $comm"
    raise context.error(Code.NO_BTFARG, fetch.span.start, hint)


def _declaration(prototype: Prototype) -> str:
    return f"its parameters: {' '.join(parameter.name for parameter in prototype.parameters)}"


def types_of(context: ResolveContext, span: Span) -> Types:
    """Return the kernel's types.

    Args:
        context: the definition, and its kernel.
        span: of what needs them.

    Raises:
        DefinitionError: the kernel carries none.
    """
    if context.types is None:
        hint = "this kernel carries no type information"
        raise context.error(Code.NOSUP_BTFARG, span.start, hint)
    return context.types


def _check_first(context: ResolveContext, base: Fetch, step: Step) -> None:
    if not step.is_arrow and not isinstance(base, Cast):
        hint = "that is not a structure; follow a pointer with ->"
        raise context.error(Code.NOSUP_DAT_ARG, step.span.start, hint)


def start_of(context: ResolveContext, types: Types, base: Fetch) -> Start:
    """Return what a chain of members begins at.

    Args:
        context: the definition, and its kernel.
        types: of that kernel.
        base: what stands before the first arrow.

    Raises:
        DefinitionError: a name in it means nothing here.
    """
    match base:
        case Cast():
            return _cast(context, types, base)
        case CurrentTask():
            number = types.struct(_TASK)
            if number is None:
                raise context.error(Code.NO_BTF_ENTRY, base.span.start)
            return Start(operand=TaskAddress(), aggregate=number)
        case ReturnValue() if context.is_return and context.prototype is None:
            raise context.error(Code.NO_BTF_ENTRY, base.span.stop + len("->"))
        case _:
            value = evaluate(context, base)
            return Start(operand=value.operand, ctype=value.ctype)


def _cast(context: ResolveContext, types: Types, cast: Cast) -> Start:
    operand = evaluate(context, cast.base).operand
    number = types.struct(cast.struct)
    # After the opening brace.
    column = cast.span.start + 1
    if number is None:
        hint = f"no struct {cast.struct} in this kernel's types"
        raise context.error(Code.NO_PTR_STRCT, column, hint)
    shift = _container(context, types, cast, number) if cast.container else 0
    return Start(operand=operand, aggregate=number, shift=shift)


def _container(context: ResolveContext, types: Types, cast: Cast, aggregate: int) -> int:
    column = cast.span.start + 1 + len(cast.struct) + len(",")
    bits = 0
    for name in cast.container.split("."):
        step = Step(name=name, is_arrow=False, span=Span(column, column + len(name)))
        place = find_member(context, types, aggregate, step)
        bits, aggregate = bits + place.bit_offset, place.number
        column += len(name) + len(".")
    if bits % 8:
        raise context.error(Code.TYPECAST_NOT_ALIGNED, cast.span.start + 1 + len(cast.struct) + 1)
    return bits // 8


def _per_cpu(context: ResolveContext, fetch: PerCpu) -> Operand:
    cpu_offset = context.kernel.symbols.find("this_cpu_off")
    if cpu_offset is None and not isinstance(context.arch.code.per_cpu, Base):
        hint = "per-CPU addresses of a kernel without this_cpu_off"
        raise context.error(Code.NOT_YET, fetch.span.start, hint)
    # The object itself, not what is read there.
    if isinstance(fetch.base, MemoryAt | MemoryOf):
        base: Operand = _address(context, fetch.base)
    else:
        base = evaluate(context, fetch.base).operand
    address = PerCpuAddress(base=base, cpu_offset=cpu_offset and cpu_offset.addr)
    return Load(base=address, offset=0, is_user=False) if fetch.is_read else address
