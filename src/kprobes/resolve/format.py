"""The ``format`` file of an event: how the kernel's own record of it would lie.

    struct {    // packed; include/linux/trace_events.h, kernel/trace/trace_probe.h
        unsigned short common_type; unsigned char common_flags, common_preempt_count;
        int common_pid;
        unsigned long __probe_ip;                       // of an entry
        unsigned long __probe_func, __probe_ret_ip;     // of a return
        ...                                             // arguments
    };

Our own record is another one (``model.layout``): this is what programs that know the kernel's
files expect. Written by f_show() in kernel/trace/trace_events.c.
"""

from collections.abc import Iterator

from kprobes.model.definition import Kind
from kprobes.model.layout import SIGNED, Field, Storage
from kprobes.model.resolved import Resolved

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


def format_text(probe: Resolved, *, number: int) -> str:
    """Return the file's text.

    Args:
        probe: the event's.
        number: its ``ID``.
    """
    fields = probe.layout.fields
    head, words = _HEADS[probe.definition.kind]
    lines = _COMMON.format(name=probe.layout.event, number=number)
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
