"""Fields that a hist trigger may name: of events that were recorded, and of probes of a guest."""

from msgspec.structs import replace

from kprobes.model.definition import STACKTRACE, TGID, USER_STACKTRACE
from kprobes.model.filter import Header
from kprobes.model.hist import (
    STACK,
    STACK_DEPTH,
    USER_STACK,
    Handler,
    HistField,
    HistKind,
    KnownFields,
    Modifier,
    Special,
)
from kprobes.model.resolved import Field, RecordLayout, Storage

_PID = HistField(name="common_pid", source=Header.PID, is_signed=True)
_CPU = HistField(name="common_cpu", source=Header.CPU)
_COMM = HistField(name="comm", source=Header.COMM, kind=HistKind.TEXT)
_GENERIC = {
    "comm": _COMM,
    "pid": _PID,
    "cpu": _CPU,
    "function": HistField(name="function", source=Special.FUNCTION, modifier=Modifier.SYM),
    "hitcount": HistField(name="hitcount", source=Special.HITCOUNT),
    "common_pid": _PID,
    "common_cpu": _CPU,
    "common_type": HistField(name="common_type", source=Header.TYPE),
    "COMM": _COMM,
    "common_comm": HistField(name="common_comm", source=Header.COMM, kind=HistKind.TEXT),
    "CPU": _CPU,
}
_TIMESTAMP = HistField(name="common_timestamp", source=Special.TIMESTAMP)
_TGID = HistField(name="tgid", source=Header.TGID, is_signed=True)
_ENTRY, _RETURN, _CALLER = "__probe_ip", "__probe_func", "__probe_ret_ip"
_STACKS = (STACKTRACE, "stacktrace", "STACKTRACE")
_NO_STACK = "the event was recorded without its stack, which -O {} adds"
_MISSING = {
    **dict.fromkeys((*_STACKS, STACK), _NO_STACK.format("stacktrace")),
    **dict.fromkeys((USER_STACKTRACE, USER_STACK), _NO_STACK.format("userstacktrace")),
    "common_flags": "a record has them in another form",
    "common_preempt_count": "a record has it in another form",
}
_OF_RECORD = {
    "tgid": "records have the pid of a task's process if it is asked for: -O record-tgid",
    ".syscall": "names of system calls are known where hits are counted in a guest",
}
_OF_GUEST = {
    "common_timestamp": "in a guest times are counters, which the host makes times",
    f"{Handler.ON_CHANGE}(": "each CPU of a guest counts for itself, and does not see what the "
    "others had before: record the events, and ask what was recorded",
}


def known_fields(layout: RecordLayout, *, of_guest: bool = False) -> KnownFields:
    """Return what a hist trigger may name of an event, its own fields first.

    Args:
        layout: of its records.
        of_guest: whether it is counted where it happens, in a guest; else when it was recorded.
    """
    own = {field.name: _known(field) for field in layout.fields}
    fixed = {f.name for f in layout.fields if of_guest and f.storage is Storage.TEXT}
    if layout.caller_offset is None:
        places = {_ENTRY: HistField(name=_ENTRY, source=Header.IP)}
    else:
        places = {
            _RETURN: HistField(name=_RETURN, source=Header.IP),
            _CALLER: HistField(name=_CALLER, source=Special.CALLER),
        }
    arrays = {name: "an array is not one value" for name, field in own.items() if field is None}
    arrays |= dict.fromkeys(fixed, "it is the same text at each hit")
    fields = {n: field for n, field in own.items() if field is not None and n not in fixed}
    if of_guest:
        places |= {"tgid": _TGID}
    else:
        places |= {"common_timestamp": _TIMESTAMP}
        places |= {"tgid": replace(fields[TGID], name="tgid")} if TGID in fields else {}
    if STACKTRACE in fields:
        places |= dict.fromkeys(_STACKS, fields[STACKTRACE])
        places[STACK] = replace(fields[STACKTRACE], name=STACK, width=0)
    if USER_STACKTRACE in fields:
        stack = fields[USER_STACKTRACE]
        places[USER_STACK] = replace(stack, name=USER_STACK, has_program=of_guest)
    others = {name: field for name, field in (_GENERIC | places).items() if name not in own}
    missing = _MISSING | (_OF_GUEST if of_guest else _OF_RECORD) | arrays
    return KnownFields(fields=fields | others, missing=missing)


def _known(field: Field) -> HistField | None:
    if field.count is not None:
        return None
    if field.storage is Storage.COMM:
        return HistField(name=field.name, source=Header.COMM, kind=HistKind.TEXT)
    if field.storage is Storage.DURATION:
        return HistField(name=field.name, source=field.index, kind=HistKind.DURATION)
    if field.storage is Storage.STACK:
        # No kernel has a key of the program's stack.
        kind, width = HistKind.STACK, 0 if field.type == "userstacktrace" else STACK_DEPTH
        return HistField(name=field.name, source=field.index, kind=kind, width=width, is_kept=True)
    is_number = field.storage is Storage.NUMBER and field.type != "symstr"
    return HistField(
        name=field.name,
        source=field.index,
        kind=HistKind.NUMBER if is_number else HistKind.TEXT,
        is_signed=field.is_signed,
        is_kept=field.storage is Storage.STRING,
    )
