"""The events that a guest's own kernel has: no kprobe event may take the name of one.

Its own kprobe events are left out: ours are not among them, and may be the same.

    LIST_HEAD(ftrace_events);           // through trace_event_call.list
    struct trace_event_call { struct list_head list; struct trace_event_class *class;
                              union { const char *name; struct tracepoint *tp; }; ...; int flags; };

As find_trace_event_call() in kernel/trace/trace_probe.c. The guest may run, and may be hostile:
what does not read is left out, and a ring that does not close ends somewhere.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from kprobes.errors import FormatError, MemoryFault, UnknownTypeError
from kprobes.model.kernel import Kernel
from kprobes.model.types import Types
from kprobes.ports import Memory

_MAX_EVENTS = 1 << 16
_MAX_NAME = 64
_TRACEPOINT, _KPROBE = "TRACE_EVENT_FL_TRACEPOINT", "TRACE_EVENT_FL_KPROBE"
_CALL, _CLASS, _POINT = "trace_event_call", "trace_event_class", "tracepoint"

Name = tuple[str, str]
"""Group and event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    list: int
    event_class: int
    name: int
    flags: int
    size: int
    system: int
    point_name: int
    is_tracepoint: int
    is_kprobe: int


def read_events(memory: Memory, kernel: Kernel) -> frozenset[Name]:
    """Return the names of a running kernel's events; none where its types do not tell."""
    head = kernel.symbols.find("ftrace_events")
    if head is None or kernel.types is None:
        return frozenset()
    try:
        layout = _layout(kernel.types)
    except (UnknownTypeError, FormatError):
        return frozenset()
    return frozenset(_walk(memory, layout, head.addr))


def _layout(types: Types) -> _Layout:
    flags = types.offset(_CALL, "flags")
    return _Layout(
        list=types.offset(_CALL, "list"),
        event_class=types.offset(_CALL, "class"),
        name=types.offset(_CALL, "name"),
        flags=flags,
        size=flags + 4,
        system=types.offset(_CLASS, "system"),
        point_name=types.offset(_POINT, "name"),
        is_tracepoint=types.enumerator(_TRACEPOINT),
        is_kprobe=types.enumerator(_KPROBE),
    )


def _walk(memory: Memory, layout: _Layout, head: int) -> Iterator[Name]:
    at, seen = _pointer(memory, head), {head}
    while at and at not in seen and len(seen) <= _MAX_EVENTS:
        seen.add(at)
        name = _name(memory, layout, at - layout.list)
        if name is not None:
            yield name
        at = _pointer(memory, at)


def _name(memory: Memory, layout: _Layout, call: int) -> Name | None:
    try:
        data = memory.read(call, layout.size)
        flags = _word(data, layout.flags, 4)
        if flags & layout.is_kprobe:
            return None
        system = _pointer(memory, _word(data, layout.event_class) + layout.system)
        name = _word(data, layout.name)
        if flags & layout.is_tracepoint:
            name = _pointer(memory, name + layout.point_name)
        return _text(memory, system), _text(memory, name)
    except MemoryFault:
        return None


def _word(data: bytes, at: int, size: int = 8) -> int:
    return int.from_bytes(data[at : at + size], "little")


def _pointer(memory: Memory, addr: int) -> int:
    try:
        return _word(memory.read(addr, 8), 0)
    except MemoryFault:
        return 0


def _text(memory: Memory, addr: int) -> str:
    # A name may end shortly before memory that is not there.
    try:
        data = memory.read(addr, _MAX_NAME)
    except MemoryFault:
        data = memory.read(addr, -addr % 4096 or 1)
    return data.split(b"\0")[0].decode(errors="backslashreplace")
