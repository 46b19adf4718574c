"""Explanations of an event: how each field is fetched, in words, and its ``format`` file.

The file says how the kernel's own record of the event would lie:

    struct {    // packed; include/linux/trace_events.h, kernel/trace/trace_probe.h
        unsigned short common_type; unsigned char common_flags, common_preempt_count;
        int common_pid;
        unsigned long __probe_ip;                       // of an entry
        unsigned long __probe_func, __probe_ret_ip;     // of a return
        ...                                             // arguments
    };

Our own record is another one (``model.resolved``): this is what programs that know the kernel's
files expect. Written by f_show() in kernel/trace/trace_events.c.
"""

from collections.abc import Iterator

from kprobes.model.definition import Kind
from kprobes.model.plan import Returns
from kprobes.model.resolved import (
    SIGNED,
    CommValue,
    ComputedValue,
    Constant,
    EntryCounter,
    EntryValue,
    ExitAddress,
    Field,
    FieldFetch,
    Load,
    Operand,
    PerCpuAddress,
    ProcessId,
    RecordLayout,
    RegisterValue,
    ReturnedValue,
    StackTraceValue,
    StackValue,
    Storage,
    TaskAddress,
)


def explain(fetch: FieldFetch) -> str:
    """Return what a field holds and where that comes from, such as ``s32 = %di``.

    What is read from memory is *at* an address; everything else is a value. ``__user`` marks a
    pointer that is itself read from user space.
    """
    operand = fetch.operand
    if isinstance(operand, CommValue):
        return "string = the running task's name"
    if isinstance(operand, Load):
        space = "user space" if operand.is_user else "kernel memory"
        return f"{_type(fetch)}{_where(fetch, operand)}, read from {space}{_bits(fetch)}"
    if isinstance(operand, EntryCounter):
        return "ns since the entry"
    if isinstance(operand, StackTraceValue):
        whose = (
            "the program's stack, by frame pointers" if operand.is_user else "the kernel's stack"
        )
        return f"{whose}, by the kernel's own unwinder"
    text = f'"{fetch.field.text.decode(errors="backslashreplace")}"'
    value = text if fetch.field.storage is Storage.TEXT else _value(operand)
    return f"{_type(fetch)} = {value}{_bits(fetch)}"


def explain_kept(returns: Returns) -> list[str]:
    """Return what is kept from a call's entry for its return."""
    values = [_value(operand) for operand in returns.kept]
    return [*values, "the time"] if returns.is_timed else values


def _where(fetch: FieldFetch, load: Load) -> str:
    field, base = fetch.field, load.base
    if field.storage is Storage.STRING and field.count and isinstance(base, Load):
        # What is loaded is the first string; its pointer is the first of a row.
        return f", their pointers u64[{field.count}] at {_place(base)}"
    return f" at {_place(load)}"


def _type(fetch: FieldFetch) -> str:
    field = fetch.field
    return f"{field.type}[{field.count}]" if field.count is not None else field.type


def _bits(fetch: FieldFetch) -> str:
    if not fetch.bit_width:
        return ""
    first, last = fetch.bit_offset, fetch.bit_offset + fetch.bit_width - 1
    return f", bit {first} of it" if first == last else f", bits {first} to {last} of it"


def _value(operand: Operand) -> str:
    match operand:
        case RegisterValue(name=name):
            return f"%{name}"
        case StackValue(slot=slot):
            return f"*(u64 *)({_plus('%sp', 8 * slot)})"
        case Constant(value=value):
            return f"{value:#x}"
        case Load(is_user=is_user):
            return f"*(u64 {'__user ' if is_user else ''}*)({_place(operand)})"
        case _:
            return _computed(operand)


def _computed(operand: Operand) -> str:
    match operand:
        case TaskAddress():
            return "current"
        case ProcessId():
            return "current->tgid"
        case PerCpuAddress(base=base):
            return f"this_cpu_ptr({_value(base)})"
        case ComputedValue(operation=operation, left=left, right=right):
            return f"({_value(left)} {operation.sign} {_value(right)})"
        case ReturnedValue():
            return "the returned value"
        case EntryValue(base=base):
            return f"{_value(base)} at entry"
        case ExitAddress():
            return "the instruction by which it is left"
        case _:
            raise TypeError(f"{operand} is not a number")


def _place(load: Load) -> str:
    return _plus(_value(load.base), load.offset)


def _plus(base: str, offset: int) -> str:
    if offset == 0:
        return base
    return f"{base} {'-' if offset < 0 else '+'} {abs(offset):#x}"


_COMMON = """name: {name}
ID: {number}
format:
	field:unsigned short common_type;	offset:0;	size:2;	signed:0;
	field:unsigned char common_flags;	offset:2;	size:1;	signed:0;
	field:unsigned char common_preempt_count;	offset:3;	size:1;	signed:0;
	field:int common_pid;	offset:4;	size:4;	signed:1;

"""
_COMMON_SIZE = 8
_HEADS = {
    Kind.ENTRY: ("(%lx)", ("__probe_ip",)),
    Kind.RETURN: ("(%lx <- %lx)", ("__probe_func", "__probe_ret_ip")),
}
_LOCATION = 4


def format_text(layout: RecordLayout, *, number: int) -> str:
    """Return the text of an event's file, whose ``ID`` is ``number``."""
    fields = layout.fields
    head, words = _HEADS[Kind.ENTRY if layout.caller_offset is None else Kind.RETURN]
    lines = _COMMON.format(name=layout.event, number=number)
    for index, word in enumerate(words):
        lines += _line(f"unsigned long {word}", _COMMON_SIZE + 8 * index, 8, is_signed=False)
    offset = _COMMON_SIZE + 8 * len(words)
    for field in fields:
        size = kernel_size(field) * (field.count or 1)
        lines += _line(_declared(field), offset, size, is_signed=_is_signed(field))
        offset += size
    shown = "".join(f" {field.name}={_shown(field)}" for field in fields)
    values = [f"REC->{word}" for word in words]
    values += [value for field in fields for value in _values(field)]
    return f'{lines}\nprint fmt: "{head}{shown}", {", ".join(values)}\n'


def kernel_size(field: Field) -> int:
    """Return the bytes that the kernel's record has for one element of a field."""
    return _LOCATION if _is_text(field) else field.size


def _line(declared: str, offset: int, size: int, *, is_signed: bool) -> str:
    return f"\tfield:{declared};\toffset:{offset};\tsize:{size};\tsigned:{is_signed:d};\n"


def _is_text(field: Field) -> bool:
    is_number = field.storage in (Storage.NUMBER, Storage.DURATION)
    return not is_number or field.type == "symstr"


def _is_signed(field: Field) -> bool:
    return _is_text(field) or field.type in SIGNED


def _declared(field: Field) -> str:
    # The kernel looks for a bracket in the type and takes it for an array's, of which it does
    # not know the length; but not in __data_loc types.
    if _is_text(field):
        count = f"[{field.count}]" if field.count else ""
        return f"__data_loc char[]{count} {field.name}"
    type_ = field.type if field.type in SIGNED else f"u{8 * field.size}"
    return f"{type_} {field.name}{'[]' if field.count else ''}"


def _shown(field: Field) -> str:
    one = _one(field)
    return f"{{{','.join([one] * field.count)}}}" if field.count else one


def _one(field: Field) -> str:
    if _is_text(field):
        return r"\"%s\""
    match field.type:
        case "char":
            return "'%c'"
        case "symbol":
            return "%pS"
        case type_:
            long = "L" if field.size == 8 else ""
            letter = {"x": "x", "s": "d", "u": "u"}[type_[0]]
            return f"{'0x' if letter == 'x' else ''}%{long}{letter}"


def _values(field: Field) -> Iterator[str]:
    form = "__get_str({})" if _is_text(field) else "REC->{}"
    if field.count is None:
        yield form.format(field.name)
        return
    for index in range(field.count):
        yield form.format(f"{field.name}[{index}]")
