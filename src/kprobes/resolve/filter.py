"""The fields that an event's filter may name: trace_find_event_field() in the kernel."""

from kprobes.model.definition import Kind
from kprobes.model.filter import FieldKind, FilterField, Header
from kprobes.model.layout import Field, Storage
from kprobes.model.resolved import Resolved

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
    own = {field.name: _field(field) for field in probe.layout.fields}
    others = _IP[probe.definition.kind] | _GENERIC | _COMMON
    if of_guest:
        others |= {"tgid": _TGID}
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
