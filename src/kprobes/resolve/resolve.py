"""A Definition and a Kernel to a Resolved probe: names become addresses, registers, offsets.

There are fields that no definition fetches: a hit's stack, and of return probes a call's duration
and where it was left. Each field gets its place in the record, which ``model.resolved`` draws.
Probes of one event must agree in everything that is listed of them. A filter may name the fields
that the kernel's trace_find_event_field() would find.
"""

from collections.abc import Sequence

from msgspec import Struct

from kprobes.arch.arch import Arch
from kprobes.errors import DefinitionError
from kprobes.model.codes import Code, rejection
from kprobes.model.definition import (
    DURATION,
    EXIT,
    STACKTRACE,
    TGID,
    USER_STACKTRACE,
    Definition,
    EventType,
    Kind,
)
from kprobes.model.filter import FieldKind, FilterField, Header
from kprobes.model.kernel import Kernel, Symbol
from kprobes.model.resolved import (
    ALIGN,
    HEADER,
    EntryCounter,
    ExitAddress,
    Field,
    FieldFetch,
    ProcessId,
    RecordLayout,
    Resolved,
    Storage,
    can_fault,
)
from kprobes.resolve.argument import Fetched, fetch_argument, stack
from kprobes.resolve.expand import check_meta, expand
from kprobes.resolve.expression import ResolveContext, check_symbols, stack_trace
from kprobes.resolve.place import Locate, Target, find_target, find_tracepoint, ip_of
from kprobes.resolve.system_call import find_system_call
from kprobes.units import Addr

_DURATION = Fetched(
    name=DURATION, type="u64", storage=Storage.DURATION, size=8, operand=EntryCounter()
)
_EXIT = Fetched(name=EXIT, type="symbol", storage=Storage.NUMBER, size=8, operand=ExitAddress())
_PROCESS = Fetched(name=TGID, type="s32", storage=Storage.NUMBER, size=4, operand=ProcessId())


def extra_fields(context: ResolveContext) -> tuple[Fetched, ...]:
    """Return the extra fields of one probe, those of return probes only where it is one.

    Args:
        context: of its definition, expanded.

    Raises:
        DefinitionError: it has an argument of such a name, or the kernel cannot walk stacks.
    """
    synthetic_fields = context.definition.synthetic_fields
    is_return = context.definition.kind is Kind.RETURN
    wanted = ((synthetic_fields.duration, _DURATION), (synthetic_fields.exits, _EXIT))
    found = [field for is_wanted, field in wanted if is_wanted and is_return]
    if synthetic_fields.tgid:
        found.append(_PROCESS)
    if synthetic_fields.stacktrace:
        found.append(stack(STACKTRACE, stack_trace(context, 0)))
    if synthetic_fields.userstacktrace:
        found.append(stack(USER_STACKTRACE, stack_trace(context, 0, is_user=True)))
    names = {field.name for field in found}
    for arg in context.definition.args:
        if arg.name in names:
            hint = f"the extra field that is asked for is called {arg.name}, too"
            raise context.error(Code.USED_ARG_NAME, arg.span.start, hint)
    return tuple(found)


_COMMON = {
    "common_type": FilterField(kind=FieldKind.NUMBER, source=Header.TYPE, size=2),
    "common_flags": FilterField(kind=FieldKind.NUMBER, source=Header.FLAGS, size=1),
    "common_preempt_count": FilterField(kind=FieldKind.NUMBER, source=Header.PREEMPT_COUNT, size=1),
    "common_pid": FilterField(kind=FieldKind.NUMBER, source=Header.PID, size=4, is_signed=True),
}
_TGID = FilterField(kind=FieldKind.NUMBER, source=Header.TGID, size=4, is_signed=True)
_CPU = FilterField(kind=FieldKind.CPU, source=Header.CPU, is_signed=True)
_COMM = FilterField(kind=FieldKind.TEXT, source=Header.COMM)
_STACK = FilterField(kind=FieldKind.STACK, source=Header.IP)
_GENERIC = {
    **dict.fromkeys(("CPU", "cpu", "common_cpu"), _CPU),
    **dict.fromkeys(("COMM", "comm"), _COMM),
    **dict.fromkeys(("stacktrace", "STACKTRACE"), _STACK),
}
_ADDRESS = FilterField(kind=FieldKind.NUMBER, source=Header.IP, size=8)
_IP = {Kind.ENTRY: {"__probe_ip": _ADDRESS}, Kind.RETURN: {"__probe_func": _ADDRESS}}


def filter_fields(probe: Resolved, *, of_guest: bool = False) -> dict[str, FilterField]:
    """Return the fields of a probe's event by name, its own first; of a guest also ``tgid``."""
    fields = layout_fields(probe.layout, probe.definition.kind)
    return {**fields, "tgid": fields.get("tgid", _TGID)} if of_guest else fields


def layout_fields(layout: RecordLayout, kind: Kind) -> dict[str, FilterField]:
    """Return the fields of an event by name, its own first."""
    own = {field.name: _field(field) for field in layout.fields}
    others = _IP[kind] | _GENERIC | _COMMON
    if TGID in own:
        others |= {"tgid": own[TGID]}
    return {**own, **{k: v for k, v in others.items() if k not in own}}


def _field(field: Field) -> FilterField:
    if field.type == "symstr":
        return FilterField(kind=FieldKind.SYMBOL_NAME, source=field.index)
    match field.storage:
        case Storage.NUMBER:
            return FilterField(
                kind=FieldKind.NUMBER,
                source=field.index,
                size=field.room,
                is_signed=field.is_signed,
            )
        case Storage.TEXT:
            return FilterField(kind=FieldKind.TEXT, source=field.index, text=field.text)
        case Storage.STRING:
            return FilterField(kind=FieldKind.TEXT, source=field.index)
        case Storage.COMM:
            return _COMM
        case Storage.DURATION:
            return FilterField(kind=FieldKind.TIME, source=field.index)
        case Storage.STACK:
            return FilterField(kind=FieldKind.STACK, source=field.index)


_CALLER_SIZE = 8


class Shape(Struct, frozen=True, kw_only=True):
    """The fields of a record and its extra words, names of event and place left out."""

    fields: tuple[Field, ...]
    size: int
    is_dynamic: bool
    size_offset: int
    faults_offset: int | None
    caller_offset: int | None


def lay_out(args: Sequence[Fetched], *, has_caller: bool = False) -> Shape:
    """Place every argument's field, in order, each aligned to its own size.

    Args:
        args: as they are fetched.
        has_caller: whether the record has the return address: a return probe's has.
    """
    is_dynamic = any(arg.storage in (Storage.STRING, Storage.STACK) for arg in args)
    has_faults = any(arg.storage is Storage.NUMBER and can_fault(arg.operand) for arg in args)
    size_offset = HEADER + (_CALLER_SIZE if has_caller else 0)
    at = size_offset + (8 if is_dynamic else 0)
    faults_offset = at if has_faults else None
    at += 8 * ((len(args) + 63) // 64) if has_faults else 0
    fields: list[Field] = []
    for index, arg in enumerate(args):
        field = _record_field(arg, index, _aligned(at, arg.size))
        fields.append(field)
        at = field.offset + field.room
    return Shape(
        fields=tuple(fields),
        size=_aligned(at, ALIGN),
        is_dynamic=is_dynamic,
        size_offset=size_offset,
        faults_offset=faults_offset,
        caller_offset=HEADER if has_caller else None,
    )


def record_layout(
    definition: Definition, shape: Shape, *, event_id: int, ip: Addr, symbol: Symbol
) -> RecordLayout:
    """Give a shape its event's names and place.

    Args:
        definition: of the event.
        shape: of its record.
        event_id: its number in the ring.
        ip: what the kernel prints as the event's address.
        symbol: what it prints for ``ip``.
    """
    return RecordLayout(
        event_id=event_id,
        group=definition.group,
        event=definition.event,
        ip=ip,
        where=symbol.place(ip),
        function=symbol.name,
        fields=shape.fields,
        size=shape.size,
        is_dynamic=shape.is_dynamic,
        size_offset=shape.size_offset,
        faults_offset=shape.faults_offset,
        caller_offset=shape.caller_offset,
        definition=definition.command,
    )


def _record_field(arg: Fetched, index: int, offset: int) -> Field:
    return Field(
        name=arg.name,
        type=arg.type,
        storage=arg.storage,
        offset=offset,
        size=arg.size,
        index=index,
        count=arg.count,
        text=arg.text,
        enumerators=arg.enumerators,
    )


def _aligned(value: int, size: int) -> int:
    return -(-value // size) * size if size else value


_PLAIN = lay_out(())
"""Of a probe that fetches nothing."""
_RECORD_MAX = 3072
"""MAX_PROBE_EVENT_SIZE: bytes of all fields in the kernel's own record."""


def resolve(
    definition: Definition, kernel: Kernel, arch: Arch, *, event_id: int, locate: Locate
) -> Resolved:
    """Resolve one definition, whose place is one function.

    Args:
        definition: as parsed.
        kernel: of the target.
        arch: its architecture.
        event_id: the number of its records, 1 to 65535.
        locate: a function to the address that its probe will have; refuses with RefusedError.

    Raises:
        DefinitionError: a name is unknown or a type does not fit, with the caret.
        RefusedError: from ``locate``, or for a place where it has no probe.
    """
    target = find_target(definition, kernel, locate)
    expanded, fetched, shape = definition, (), _PLAIN
    # Tens of thousands that a pattern names have nothing to look up.
    extra = definition.synthetic_fields
    has_extra = extra.stacktrace or extra.userstacktrace or extra.tgid
    if definition.args or definition.kind is Kind.RETURN or has_extra:
        expanded, fetched = _expand_and_fetch(definition, kernel, arch, target)
        shape = lay_out(fetched, has_caller=definition.kind is Kind.RETURN)
    ip = ip_of(target, locate)
    symbol = kernel.symbols.at(ip) or target.function
    is_tracepoint = definition.type is EventType.TRACEPOINT
    return Resolved(
        definition=expanded,
        function=target.function.addr,
        addr=find_tracepoint(definition, kernel) if is_tracepoint else ip,
        layout=record_layout(expanded, shape, event_id=event_id, ip=ip, symbol=symbol),
        fetches=tuple(map(_field_fetch, shape.fields, fetched)),
    )


def _field_fetch(field: Field, arg: Fetched) -> FieldFetch:
    return FieldFetch(
        field=field, operand=arg.operand, bit_offset=arg.bit_offset, bit_width=arg.bit_width
    )


def _expand_and_fetch(
    definition: Definition, kernel: Kernel, arch: Arch, target: Target
) -> tuple[Definition, tuple[Fetched, ...]]:
    expanded, own = resolve_arguments(definition, kernel, arch, target)
    context = _context(expanded, kernel, arch, target)
    for arg in expanded.args:
        check_symbols(context, arg.fetch)
    return expanded, (*own, *extra_fields(context))


def resolve_arguments(
    definition: Definition, kernel: Kernel, arch: Arch, target: Target
) -> tuple[Definition, tuple[Fetched, ...]]:
    """Resolve what a definition fetches, wherever its probe may be placed; as the kernel reads it.

    Symbols whose memory is read need not exist: these it looks up at registration.

    Args:
        definition: as it was parsed.
        kernel: that it is for.
        arch: of that kernel.
        target: where the probe is.

    Returns:
        The definition with everything expanded, and its arguments.

    Raises:
        DefinitionError: a name is unknown or a type does not fit, with the caret.
    """
    context = _context(definition, kernel, arch, target)
    expanded = expand(context)
    fetched: list[Fetched] = []
    room = _RECORD_MAX
    for arg in expanded.args:
        found = fetch_argument(context, arg)
        room -= found.kernel_size
        if room < 0:
            hint = f"all fields together have at most {_RECORD_MAX} bytes"
            raise context.error(Code.EVENT_TOO_BIG, arg.body.start, hint)
        fetched.append(found)
    return expanded, tuple(fetched)


def check_parameters(definition: Definition, kernel: Kernel, arch: Arch, target: Target) -> None:
    """Check the words that stand for a function's parameters, which the kernel replaces first.

    Args:
        definition: as it was parsed.
        kernel: that it is for.
        arch: of that kernel.
        target: where the probe is.

    Raises:
        DefinitionError: the function has not so many, or they are not known.
    """
    check_meta(_context(definition, kernel, arch, target))


def check_variables(definition: Definition, kernel: Kernel, arch: Arch, target: Target) -> None:
    """Check that there are the variables that a definition names, whatever their types.

    Args:
        definition: as it was parsed.
        kernel: that it is for.
        arch: of that kernel.
        target: where the probe is.

    Raises:
        DefinitionError: one is not found.
    """
    try:
        resolve_arguments(definition, kernel, arch, target)
    except DefinitionError as error:
        if error.code == Code.NO_BTFARG.name:
            raise


def _context(definition: Definition, kernel: Kernel, arch: Arch, target: Target) -> ResolveContext:
    return ResolveContext(
        definition=definition,
        kernel=kernel,
        arch=arch,
        module=target.function.module,
        is_entry=target.is_entry,
        is_system_call=target.is_entry and find_system_call(definition, kernel) is not None,
    )


def check_alike(first: Resolved, other: Resolved) -> None:
    """Refuse a probe whose arguments differ from those of its event's first probe.

    What the text alone tells has been compared when it was parsed; here are types that only the
    kernel knows.

    Raises:
        DefinitionError: DIFF_ARG_TYPE, with the caret at the word that differs.
    """
    old, new = _columns(first), _columns(other)
    if old == new and first.definition.synthetic_fields == other.definition.synthetic_fields:
        return
    pairs = enumerate(zip(old, new, strict=False))
    at = next((n for n, (a, b) in pairs if a != b), None)
    # The kernel counts what the words have become, and stops after the last one there is.
    differing = min(len(old), len(new)) if len(old) != len(new) or at is None else at
    raise _error(other, differing)


def _columns(probe: Resolved) -> list[tuple[str, str, int | None]]:
    # Its own: extra fields come after them.
    own = probe.layout.fields[: len(probe.definition.args)]
    return [(field.name, field.type, field.count) for field in own]


def _error(probe: Resolved, argument: int) -> DefinitionError:
    command = probe.definition.command
    words = command.split(" ")
    # After the statement's letter and its place.
    before = words[: 2 + argument]
    column = sum(len(word) + 1 for word in before)
    return rejection(Code.DIFF_ARG_TYPE, command=command, column=column)
