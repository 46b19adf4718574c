"""A Resolved probe to the text that its kernel's release takes for it.

What every release since 5.5 knows stays as it was written: registers, the stack, memory, numbers,
texts. Everything else becomes that: names, ``->``, casts and ``$argN`` become registers, offsets
and types. So what is recorded is what the types that we read say, on every release alike; the
kernel's own reading of such words differs between releases, and in bit-fields.
"""

from collections.abc import Callable
from typing import assert_never

from msgspec.structs import replace

from kprobes.arch.arch import Arch
from kprobes.errors import DefinitionError
from kprobes.model.codes import Code, rejection
from kprobes.model.definition import (
    INSTEAD,
    STACKTRACE,
    TGID,
    USER_STACKTRACE,
    Comm,
    Definition,
    Deref,
    EventType,
    Fetch,
    FetchArg,
    Immediate,
    Kind,
    MemoryAt,
    MemoryOf,
    Register,
    StackPointer,
    StackSlot,
    Stacktrace,
    Text,
)
from kprobes.model.resolved import (
    CommValue,
    ComputedValue,
    Constant,
    EntryValue,
    FieldFetch,
    KprobeEvent,
    Load,
    Operand,
    PerCpuAddress,
    RegisterValue,
    Resolved,
    ReturnedValue,
    StackValue,
    Storage,
    TaskAddress,
    Word,
    within,
)
from kprobes.resolve.expression import number_of
from kprobes.resolve.system_call import NAMED
from kprobes.units import U64

Version = tuple[int, int]

_PLAIN = (
    Register,
    StackPointer,
    StackSlot,
    Comm,
    Immediate,
    MemoryAt,
    MemoryOf,
    Text,
)
_CHAR_SINCE: Version = (6, 3)
_ENTRY_VALUES_SINCE: Version = (6, 9)
_TASKS_SINCE: Version = (7, 3)
_TRACEPOINTS_SINCE: Version = (6, 5)
_DEFAULT = "x64"


def to_kprobe_event(probe: Resolved, version: Version, arch: Arch) -> KprobeEvent:
    """Return a probe as text for a kernel.

    Args:
        probe: of it.
        version: of its release.
        arch: its architecture.

    Raises:
        DefinitionError: what only a later release has, which the hint names, or only guests.
    """
    definition = probe.definition
    for fetch in probe.fetches[len(definition.args) :]:
        raise _only_in_guests(definition, fetch.field.name, 0)
    is_tracepoint = definition.type is EventType.TRACEPOINT
    if is_tracepoint and version < _TRACEPOINTS_SINCE:
        raise _unknown(definition, 0, ("tracepoints by t", _TRACEPOINTS_SINCE), version)
    number = definition.maxactive if definition.kind is Kind.RETURN else 0
    words = (
        _argument(definition, arg, fetch, version, arch)
        for arg, fetch in zip(definition.args, probe.fetches, strict=True)
    )
    return KprobeEvent(
        probe=probe,
        head="t" if is_tracepoint else f"{definition.kind.value}{number or ''}",
        words=(_place(definition, probe.layout.function), *words),
    )


def _place(definition: Definition, function: str) -> Word:
    place = definition.place
    if place.symbol.startswith(NAMED) and place.symbol != function:
        # The function of a system call.
        place = replace(place, symbol=function)
    if place.addr is not None:
        text = f"{place.addr:#x}"
    else:
        symbol = f"{place.module}:{place.symbol}" if place.module else place.symbol
        text = f"{symbol}+{place.offset}" if place.offset else symbol
    written = definition.command[place.span.start : place.span.stop]
    return Word(text=text, span=place.span, is_same=text == written)


def _argument(
    definition: Definition, arg: FetchArg, fetch: FieldFetch, version: Version, arch: Arch
) -> Word:
    written = f"{arg.name}={arg.text}"
    is_same = definition.command[arg.span.start : arg.span.stop] == written
    if isinstance(arg.fetch, Stacktrace):
        name = USER_STACKTRACE if arg.fetch.is_user else STACKTRACE
        raise _only_in_guests(definition, name, arg.body.start)
    if is_plain(arg) and _has_type(arg, version):
        return Word(text=written, span=arg.span, is_same=is_same)
    if any(isinstance(each, ComputedValue) for each in within(fetch.operand)):
        hint = (
            "what is computed, as by &, only guests have: the kernel's language has no word for it"
        )
        column = arg.body.start
        raise rejection(Code.NOT_YET, command=definition.command, column=column, hint=hint)
    late = _too_late(fetch.operand, version)
    if late is not None:
        raise _unknown(definition, arg.body.start, late, version)
    if _is_of_task(fetch.operand):
        suffix = "" if arg.type else _suffix(fetch, version)
        return Word(text=f"{written}{suffix}", span=arg.span, is_same=is_same)
    word_of = _argument_word if definition.type is EventType.TRACEPOINT else _register_word
    text = f"{arg.name}={_operand(_shown(fetch), arch, word_of)}{_suffix(fetch, version)}"
    return Word(text=text, span=arg.span, is_same=False)


def is_plain(arg: FetchArg) -> bool:
    """Whether every release reads a fetch as we do, whatever types it knows."""
    if "$COMM" in arg.text:
        # Since 6.0 it is what $comm is.
        return False
    fetch: Fetch = arg.fetch
    while isinstance(fetch, Deref):
        fetch = fetch.base
    return isinstance(fetch, _PLAIN)


def _has_type(arg: FetchArg, version: Version) -> bool:
    # A symstr is kept as the address that it is: as a symbol.
    base = arg.spec.base if arg.spec is not None else ""
    return base != "symstr" and (base != "char" or version >= _CHAR_SINCE)


def _too_late(operand: Operand, version: Version) -> tuple[str, Version] | None:
    if _is_of_task(operand) and version < _TASKS_SINCE:
        return "the running task and per-CPU memory", _TASKS_SINCE
    has_entry_value = any(isinstance(each, EntryValue) for each in within(operand))
    if has_entry_value and version < _ENTRY_VALUES_SINCE:
        return "arguments at a function's return", _ENTRY_VALUES_SINCE
    return None


def _is_of_task(operand: Operand) -> bool:
    return any(isinstance(each, TaskAddress | PerCpuAddress) for each in within(operand))


def _shown(fetch: FieldFetch) -> Operand:
    operand = fetch.operand
    is_string = fetch.field.storage is Storage.STRING
    if is_string and fetch.field.count is not None and isinstance(operand, Load):
        # The kernel follows the pointers in a row by itself.
        return operand.base
    return operand


WordOf = Callable[[Arch, str], str]
"""Returns the word for what is in a register."""


def _register_word(arch: Arch, name: str) -> str:
    del arch
    return f"%{name}"


def _argument_word(arch: Arch, name: str) -> str:
    # The first is what whoever listens to a tracepoint has given, and hidden.
    return f"$arg{arch.arguments.index(name)}"


def _operand(operand: Operand, arch: Arch, word_of: WordOf) -> str:
    match operand:
        case RegisterValue(name=name):
            return word_of(arch, name)
        case StackValue(slot=slot):
            return f"$stack{slot}"
        case ReturnedValue():
            return "$retval"
        case EntryValue(base=base):
            return f"$arg{number_of(arch, base)}"
        case Load():
            return _load(operand, arch, word_of)
        case _:
            return _leaf(operand)


def _leaf(operand: Operand) -> str:
    match operand:
        case Constant(value=value):
            return f"\\{value:#x}"
        case CommValue():
            return "$comm"
        case _:
            raise TypeError(f"{operand} is kept as it was written, or refused")


def _load(load: Load, arch: Arch, word_of: WordOf) -> str:
    if isinstance(load.base, Constant) and not load.is_user:
        return f"@{load.base.value + load.offset & U64:#x}"
    user = "u" if load.is_user else ""
    sign = "-" if load.offset < 0 else "+"
    return f"{sign}{user}{abs(load.offset)}({_operand(load.base, arch, word_of)})"


def _suffix(fetch: FieldFetch, version: Version) -> str:
    field = fetch.field
    count = "" if field.count is None else f"[{field.count}]"
    match field.storage:
        case Storage.NUMBER:
            type_ = _number_type(fetch, version)
            return f":{type_}{count}" if count or type_ != _DEFAULT else ""
        case Storage.STRING:
            # Where the text lies in user space, the last dereference says so itself.
            return f":string{count}" if count == "" else f":{field.type}{count}"
        case Storage.COMM | Storage.TEXT:
            return ":string"
        case Storage.DURATION | Storage.STACK:
            raise TypeError("only guests have these")
        case _:
            assert_never(field.storage)


def _number_type(fetch: FieldFetch, version: Version) -> str:
    field = fetch.field
    if fetch.bit_width:
        return f"b{fetch.bit_width}@{fetch.bit_offset}/{8 * field.size}"
    if field.type == "symstr":
        return "symbol"
    return "u8" if field.type == "char" and version < _CHAR_SINCE else field.type


def _unknown(
    definition: Definition, column: int, late: tuple[str, Version], version: Version
) -> DefinitionError:
    what, since = late
    hint = (
        f"{what}: Linux {since[0]}.{since[1]} has them, this kernel is {version[0]}.{version[1]}; "
        "a guest of any release can be asked"
    )
    return rejection(Code.NOT_IN_RELEASE, command=definition.command, column=column, hint=hint)


def _only_in_guests(definition: Definition, name: str, column: int) -> DefinitionError:
    where = "" if name in (STACKTRACE, USER_STACKTRACE, TGID) else " at their returns"
    hint = f"only functions of guests have the extra field {name!r}{where}: {INSTEAD[name]}"
    return rejection(Code.NOT_IN_RELEASE, command=definition.command, column=column, hint=hint)
