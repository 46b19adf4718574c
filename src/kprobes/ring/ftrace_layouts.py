"""Layouts of events that others have recorded, by the events' ``format`` files.

What an event of a probe shows its file tells by the conversions of its ``print fmt``: those of
``format_text`` in resolve/explain.py, and kernel/trace/trace_probe.c. Every other event has the
fields of its file, typed as C has them, and is printed by the ``print fmt`` itself.
"""

import re

from kprobes.model.events import SYSCALLS, TRACERS, EventField, EventFormat, HostEvent, Locator
from kprobes.model.resolved import Field, RecordLayout, Storage
from kprobes.ring.ftrace_shapes import CALLER, ENTRY, RETURN
from kprobes.units import Addr

_BY_WIDTH = {
    1: ("char", "bool", "u8", "s8", "__u8", "__s8", "uint8_t", "int8_t", "signed char"),
    2: ("short", "u16", "s16", "__u16", "__s16", "uint16_t", "int16_t", "__be16", "__le16"),
    4: ("int", "u32", "s32", "__u32", "__s32", "uint32_t", "int32_t", "unsigned", "gfp_t", "pid_t"),
    8: ("long", "u64", "s64", "__u64", "__s64", "uint64_t", "int64_t", "size_t", "long long"),
}
_WIDTHS = {name: width for width, names in _BY_WIDTH.items() for name in names}
_ARRAY = re.compile(r"(?P<of>.*?)\s*(?:\[(?P<count>[^\]]*)\])+")
_SHOWN = re.compile(
    r" (?P<name>\w+)=\{?(?:(?P<text>\\\"%s\\\")|(?P<symbol>%pS)|(?P<char>'%c')|"
    r"(?P<hex>0x)?%(?:ll|l|L|h)*(?P<letter>[duxi]))"
)
_LETTERS = {"d": "s", "i": "s", "u": "u", "x": "x"}
_FUNCTION = '"%ps <-%ps", (void *)REC->ip, (void *)REC->parent_ip'
_BINARY = '"%ps: %s", (void *)REC->ip, bstr_printf(REC->fmt, REC->buf)'
_ENTER, _EXIT = "sys_enter_", "sys_exit_"
_NUMBERS = ("__syscall_nr", "nr")
_HEX_SINCE = (6, 18)
"""Values of more than 9 have their 0x."""
_USER_DATA = re.compile(r"__\w+_val")
_USER_BYTES = '"%s", print_syscall_enter()'
_PROBES = frozenset({ENTRY, RETURN, CALLER})


def event_of(group: str, form: EventFormat, version: tuple[int, int]) -> HostEvent:
    """Return an event as it is shown.

    Args:
        group: that it is of.
        form: its ``format`` file.
        version: major and minor of the kernel's release.
    """
    names = {field.name for field in form.fields}
    is_probe = ENTRY in names or RETURN in names
    own = [field for field in form.fields if not (is_probe and field.name in _PROBES)]
    types = _types_of_probe(form.print_fmt) if is_probe else {}
    fields = [_field(each, at, types.get(each.name, "")) for at, each in enumerate(own)]
    layout = RecordLayout(
        event_id=form.number,
        group=group,
        event=form.name,
        ip=Addr(0),
        where="",
        function="",
        fields=tuple(fields),
        size=form.size,
        is_dynamic=any(field.locator is not Locator.HERE for field in own),
        size_offset=0,
        faults_offset=None,
        print_fmt="" if is_probe else _print_fmt(group, form, version),
    )
    return HostEvent(format=form, layouts=(layout,))


def _print_fmt(group: str, form: EventFormat, version: tuple[int, int]) -> str:
    if (group, form.name) == (TRACERS, "function"):
        # The file does not say what trace_fn_trace() of kernel/trace/trace_output.c prints.
        return _FUNCTION
    if (group, form.name) == (TRACERS, "bprint"):
        # Its file has nothing of what trace_bprint_print() does with the values.
        return _BINARY
    if group == SYSCALLS:
        return _syscall(form, version) or form.print_fmt or '""'
    return form.print_fmt or '""'


def _syscall(form: EventFormat, version: tuple[int, int]) -> str:
    # As print_syscall_enter() and print_syscall_exit() of kernel/trace/trace_syscalls.c.
    if form.name.startswith(_EXIT):
        return f'"sys_{form.name.removeprefix(_EXIT)} -> 0x%lx", REC->ret'
    if not form.name.startswith(_ENTER):
        return ""
    names = [field.name for field in form.fields if field.name not in _NUMBERS]
    own = [name for name in names if not _USER_DATA.fullmatch(name)]
    texts = [name for name in own if f"__get_str(__{name}_val)" in form.print_fmt]
    if len(own) + len(texts) < len(names) or (texts and form.name == "sys_enter_openat"):
        # Bytes of the user's are shown in two ways at once there, and flags by name.
        return _USER_BYTES
    shown: list[str] = []
    values: list[str] = []
    for name in own:
        is_plain = version < _HEX_SINCE
        shown.append(f"{name}: {'%lx' if is_plain else '%s%lx'}")
        values += [] if is_plain else [f'(unsigned long)REC->{name} > 9 ? "0x" : ""']
        values.append(f"REC->{name}")
        if name in texts:
            shown[-1] += r" \"%s\""
            values.append(f"__get_str(__{name}_val)")
    arguments = "".join(f", {value}" for value in values)
    return f'"sys_{form.name.removeprefix(_ENTER)}({", ".join(shown)})"{arguments}'


def _types_of_probe(print_fmt: str) -> dict[str, str]:
    # By field: the letter of its numbers, or the whole of its type.
    found: dict[str, str] = {}
    for shown in _SHOWN.finditer(print_fmt.partition('", REC->')[0]):
        if shown["text"]:
            found[shown["name"]] = "string"
        elif shown["symbol"]:
            found[shown["name"]] = "symbol"
        elif shown["char"]:
            found[shown["name"]] = "char"
        else:
            found[shown["name"]] = "x" if shown["hex"] else _LETTERS[shown["letter"]]
    return found


def _field(field: EventField, index: int, shown: str) -> Field:
    declared = field.type.removeprefix(field.locator).strip()
    if field.locator is not Locator.HERE:
        is_text = _is_text(declared)
        count = field.size // 4 if field.size > 4 else None
        return _made(field, index, "string" if is_text else "bytes", (4, count))
    array = _ARRAY.fullmatch(declared)
    if array is None:
        if field.size not in _BY_WIDTH:
            return _made(field, index, "bytes", (field.size, None))
        is_named = shown in ("symbol", "char")
        type_ = shown if is_named else f"{shown or _letter(field)}{8 * field.size}"
        return _made(field, index, type_, (field.size, None))
    if _is_text(declared) and not shown:
        return _made(field, index, "string", (field.size, None))
    width = _width(array["of"], array["count"], field.size)
    if not width:
        return _made(field, index, "bytes", (field.size, None))
    type_ = shown if shown in ("symbol", "char") else f"{shown or _letter(field)}{8 * width}"
    return _made(field, index, type_, (width, field.size // width))


def _is_text(declared: str) -> bool:
    # filter_assign_type() of kernel/trace/trace_events_filter.c takes unsigned ones for text, too;
    # but those are addresses of hardware, keys, and the like.
    return "char" in declared and "unsigned" not in declared


def _letter(field: EventField) -> str:
    if field.type.endswith("*"):
        return "x"
    return "s" if field.is_signed else "u"


def _width(of: str, count: str, size: int) -> int:
    # Of one element; 0 where that is not known.
    name = of.removeprefix("const ").removeprefix("unsigned ")
    width = _WIDTHS.get(of, _WIDTHS.get(name, 8 if of.endswith("*") else 0))
    if count.isdecimal() and int(count) and size % int(count) == 0:
        width = size // int(count)
    return width if width in _BY_WIDTH and size and size % width == 0 else 0


def _made(field: EventField, index: int, type_: str, room: tuple[int, int | None]) -> Field:
    size, count = room
    return Field(
        name=field.name,
        type=type_,
        storage=Storage.STRING if type_ in ("string", "bytes") else Storage.NUMBER,
        offset=field.offset,
        size=size,
        index=index,
        count=count,
        declared=field.type,
    )
