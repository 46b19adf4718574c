"""Annotated code that changed text leads to, followed to its end.

Of our probes' code it is said what each instruction does, and for which fetch argument. The
record's address comes into the code as a constant, and what is stored after it is a field of the
record (``model.resolved``). Definitions are in the journal, and resolving them again gives the
layout.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
from msgspec import Struct

from kprobes.arch.arch import Arch
from kprobes.arch.insn import Disassembled, MemoryAccess, Syntax
from kprobes.errors import DefinitionError, TargetError
from kprobes.guest.allocations import Allocation, Kind
from kprobes.guest.arena import COUNTERS_SIZE, LOADS_SIZE, OVERRIDES_SIZE
from kprobes.guest.armed import ArmedProbe
from kprobes.guest.journal import Entry
from kprobes.guest.kernel_abi import readers, task_abi
from kprobes.guest.places import Places
from kprobes.guest.text import Text
from kprobes.inspect.model import ChangeSource, Detour, Row, Side, TextChange
from kprobes.inspect.subject import TextSnapshot
from kprobes.lang.parser import parse_statement
from kprobes.model import resolved
from kprobes.model.abi import (
    PERCPU_GUARD,
    PERCPU_LIMIT,
    PERCPU_LOST,
    PERCPU_SIZE,
    PERCPU_WORD,
    SLACK,
)
from kprobes.model.definition import Definition
from kprobes.model.kernel import Kernel, name_of
from kprobes.model.resolved import Field, RecordLayout, Storage
from kprobes.plan.ftrace import Sites
from kprobes.units import Addr

_NO_SITES = Sites(addrs=np.zeros(0, np.uint64), records=np.zeros(0, np.uint64))
_WORDS = {
    PERCPU_WORD: "this CPU's reservation word",
    PERCPU_LIMIT: "how far this CPU's ring may be filled",
    PERCPU_LOST: "records lost because the ring was full",
    PERCPU_GUARD: "guard against our own path being probed",
}
_HEADER = {
    resolved.COMMIT: "commit: the record is whole now",
    resolved.COUNTER: "header: the cycle counter",
    resolved.PID: "header: pid and context",
    resolved.COMM: "header: comm",
    resolved.COMM + 8: "header: comm",
}


class _Touched(Struct, frozen=True, kw_only=True):
    reach: MemoryAccess
    layout: RecordLayout | None


class OurNotes:
    """Explains the instructions of one site's code."""

    def __init__(
        self,
        snapshot: TextSnapshot,
        entry: Entry,
        change: TextChange,
        live: Mapping[Kind, Allocation],
        pieces: tuple[tuple[Addr, bytes], ...],
    ) -> None:
        self._snapshot = snapshot
        self._per_cpu = live.get(Kind.PER_CPU)
        described = [probe for probe in entry.probes if probe.site == change.start]
        # What sites share has been linked before what is of this one alone.
        start = change.leads_to or Addr(0)
        code = start, pieces
        self._touched = _touched(snapshot, live.get(Kind.DATA), code, described)
        found = _reader_addrs(snapshot.kernel)
        self._readers = found | _veneers(snapshot.arch, pieces, found)
        self._current, self._preempt = _task(snapshot.kernel)
        self._bodies = {addr for addr, _ in pieces} - {start}
        self._inside = [range(addr, addr + len(code)) for addr, code in pieces]

    def of(self, line: Disassembled) -> str:
        """Return what is to be said of a line, or ""."""
        touched = self._touched.get(line.addr)
        if touched is not None:
            return _record_note(touched)
        if line.target in self._readers:
            return "fault-safe reader of the guest"
        if line.target in self._bodies:
            return "the compiled probes, with all registers saved"
        if line.target is not None and not any(line.target in each for each in self._inside):
            return "on from here"
        return self._per_cpu_note(line)

    def _per_cpu_note(self, line: Disassembled) -> str:
        if line.per_cpu is None:
            return ""
        if self._per_cpu is not None and 0 <= line.per_cpu - self._per_cpu.addr < PERCPU_SIZE:
            return _WORDS.get(line.per_cpu - self._per_cpu.addr, "our per-CPU words")
        if line.per_cpu == self._current:
            return "the running task"
        return "the preempt count" if line.per_cpu == self._preempt else ""


def _touched(
    snapshot: TextSnapshot,
    data: Allocation | None,
    code: tuple[Addr, tuple[tuple[Addr, bytes], ...]],
    described: Sequence[ArmedProbe],
) -> Mapping[Addr, _Touched]:
    if data is None:
        return {}
    window = range(data.addr, data.addr + data.size)
    found = snapshot.arch.listing.reaches(*code, window)
    # Each probe of a site computes its record's address once, one probe after the other.
    records = {r.origin for r in found.values() if r.is_write and r.offset >= COUNTERS_SIZE}
    layouts = list(_layouts(snapshot, described))
    if len(records) != len(layouts):
        layouts = []
    by_origin = dict(zip(sorted(records), layouts, strict=False))
    return {a: _Touched(reach=r, layout=by_origin.get(r.origin)) for a, r in found.items()}


def _layouts(snapshot: TextSnapshot, described: Sequence[ArmedProbe]) -> Iterator[RecordLayout]:
    text = Text(
        kernel=snapshot.kernel,
        open_memory=snapshot.compiled,
        read_tables=lambda: snapshot.tables,
    )
    places = Places(text, snapshot.arch, snapshot.sites or _NO_SITES)
    for probe in described:
        try:
            statement = parse_statement(probe.definition, registers=snapshot.arch.registers)
            assert isinstance(statement, Definition)
            yield places.resolve(statement, event_id=probe.event_id).layout
        except (DefinitionError, TargetError):
            # A journal may be of an older kprobes.
            return


def _record_note(touched: _Touched) -> str:
    reach, layout = touched.reach, touched.layout
    event = f"{layout.event}: " if layout is not None else ""
    if reach.offset < COUNTERS_SIZE:
        return _count_note(reach.offset) if reach.is_write else ""
    at = reach.offset - COUNTERS_SIZE
    if at >= SLACK:
        return "room for strings that a filter reads"
    if not reach.size:
        return _address_note(layout, at, event)
    if not reach.is_write:
        return f"{event}reads what it recorded at {at:#x}"
    return f"{event}{_stored(layout, at, reach.size)}"


def _count_note(offset: int) -> str:
    if offset >= COUNTERS_SIZE - LOADS_SIZE:
        return "counts what hits take"
    if offset >= COUNTERS_SIZE - LOADS_SIZE - OVERRIDES_SIZE:
        return "counts a call that may be skipped"
    return "one more missed hit"


def _stored(layout: RecordLayout | None, at: int, size: int) -> str:
    if at in _HEADER:
        return _HEADER[at]
    # A pair of registers, or neighbouring constants, are stored at once.
    fields = _fields_in(layout, at, size)
    if fields:
        return "; ".join(f"{_field_words(f)} at {max(f.offset, at):#x}" for f in fields)
    if layout is not None and layout.is_dynamic and at == layout.size_offset:
        return "size of the record"
    faults = layout.faults_offset if layout is not None else None
    if layout is not None and faults is not None:
        words = -(-len(layout.fields) // 64)
        if faults <= at < faults + 8 * words:
            return "which fields faulted"
    return f"record at {at:#x}"


_NAMES = {Storage.STRING: "text", Storage.STACK: "addresses"}
"""What follows the fixed part of a record."""


def _address_note(layout: RecordLayout | None, at: int, event: str) -> str:
    if at == 0:
        return f"{event}the record's address"
    field = _field_at(layout, at)
    if field is not None:
        return f"{event}where {field.name} goes"
    if layout is not None and layout.is_dynamic and at == layout.size:
        first = next(field for field in layout.fields if field.storage in _NAMES)
        return f"{event}where the {_NAMES[first.storage]} of {first.name} goes"
    return f"{event}record at {at:#x}"


def _field_at(layout: RecordLayout | None, at: int) -> Field | None:
    return next(iter(_fields_in(layout, at, 1)), None)


def _fields_in(layout: RecordLayout | None, at: int, size: int) -> Sequence[Field]:
    fields = layout.fields if layout is not None else ()
    return [f for f in fields if f.room and f.offset < at + size and at < f.offset + f.room]


def _field_words(field: Field) -> str:
    if field.storage in _NAMES:
        return f"{field.name}: length and offset of its {_NAMES[field.storage]},"
    return f"{field.name}, {field.type},"


def _veneers(
    arch: Arch, pieces: Iterable[tuple[Addr, bytes]], readers: Iterable[Addr]
) -> frozenset[Addr]:
    make = arch.code.veneer
    codes = set[bytes]() if make is None else set(map(make, readers))
    return frozenset(addr for addr, code in pieces if code in codes)


def _reader_addrs(kernel: Kernel) -> frozenset[Addr]:
    try:
        found = readers(kernel)
    except TargetError:
        return frozenset()
    return frozenset({found.copy_kernel, found.copy_user, found.string_kernel, found.string_user})


def _task(kernel: Kernel) -> tuple[int | None, int | None]:
    try:
        abi = task_abi(kernel)
    except TargetError:
        return None, None
    return abi.current, abi.preempt_count


_SLOT = 64
_NEAR = 1 << 12
"""Bytes that code of unknown size may have."""
_DATA = frozenset("aAbBdD")
_CALLBACK = "optimized_callback"
Note = Callable[[Disassembled], str]
"""A line to what is to be said of it, or ""."""


def _ignore(line: Disassembled) -> str:
    del line
    return ""


def read_detours(
    snapshot: TextSnapshot, changes: Sequence[TextChange], syntax: Syntax = Syntax.ATT
) -> tuple[Detour, ...]:
    """Return the code that changes lead to, each once.

    Args:
        snapshot: of the kernel's text.
        changes: from ``read_changes``.
        syntax: how operands are written.
    """
    found: dict[Addr, Detour] = {}
    for change in changes:
        if change.leads_to is not None and change.leads_to not in found:
            found[change.leads_to] = _detour(snapshot, change, change.leads_to, syntax)
    return tuple(found.values())


def row_of(kernel: Kernel, line: Disassembled, *, side: Side = Side.BOTH, note: str = "") -> Row:
    """Return a line with the name of what it leads to or names.

    Args:
        kernel: whose symbols name it.
        line: of a listing.
        side: what has it, memory or the file or both.
        note: what is printed after it.
    """
    return Row(line=line, side=side, name=_named(kernel, line), note=note)


def _named(kernel: Kernel, line: Disassembled) -> str:
    addr = next((addr for addr in (line.target, line.place, line.value) if addr), None)
    if addr is not None:
        return name_of(kernel.symbols, addr) if kernel.symbols.at(addr) is not None else ""
    symbol = kernel.symbols.at(line.per_cpu) if line.per_cpu else None
    # What was allocated since boot has no name, and lies after whatever has.
    is_static = symbol is not None and symbol.type in _DATA
    return name_of(kernel.symbols, line.per_cpu) if line.per_cpu and is_static else ""


def _detour(snapshot: TextSnapshot, change: TextChange, addr: Addr, syntax: Syntax) -> Detour:
    match change.source:
        case ChangeSource.OURS:
            return _our_detour(snapshot, change, addr, syntax)
        case ChangeSource.FTRACE:
            return _trampoline(snapshot, addr, syntax)
        case ChangeSource.KPROBE:
            return _kprobe_detour(snapshot, change, addr, syntax)
        case _:
            inside = range(addr, addr + _NEAR)
            return _followed(snapshot, f"code at {addr:#x}", inside, syntax)


def _followed(
    snapshot: TextSnapshot,
    title: str,
    inside: range,
    syntax: Syntax,
    note: Note = _ignore,
) -> Detour:
    lines = _code(snapshot, _pieces(snapshot, inside.start, inside), syntax)
    rows = tuple(row_of(snapshot.kernel, line, note=note(line)) for line in lines)
    return Detour(title=title, addr=Addr(inside.start), rows=rows)


def _pieces(snapshot: TextSnapshot, entry: int, inside: range) -> tuple[tuple[Addr, bytes], ...]:
    if snapshot.memory is None:
        return ()
    return snapshot.arch.listing.follow(snapshot.memory.read, entry, inside)


def _code(
    snapshot: TextSnapshot, pieces: tuple[tuple[Addr, bytes], ...], syntax: Syntax
) -> Iterator[Disassembled]:
    for addr, code in pieces:
        yield from snapshot.arch.listing.lines(code, addr, syntax)


def _trampoline(snapshot: TextSnapshot, addr: Addr, syntax: Syntax) -> Detour:
    tracer = snapshot.tracers.with_trampoline(addr) if snapshot.tracers else None
    handlers = {t.handler: t.handler_name for t in snapshot.tracers.all} if snapshot.tracers else {}

    def note(line: Disassembled) -> str:
        return "the handler" if line.target in handlers else ""

    if tracer is not None:
        title = f"trampoline of {tracer.name}, for {tracer.handler_name}"
        return _followed(snapshot, title, range(addr, tracer.trampoline.stop), syntax, note)
    symbol = snapshot.kernel.symbols.at(addr)
    if symbol is None or not symbol.is_text:
        return _followed(snapshot, f"code at {addr:#x}", range(addr, addr + _NEAR), syntax, note)
    inside = range(addr, max(symbol.addr + symbol.size, addr + 1))
    return _followed(snapshot, symbol.name, inside, syntax, note)


def _kprobe_detour(
    snapshot: TextSnapshot, change: TextChange, addr: Addr, syntax: Syntax
) -> Detour:
    probe = next(p for p in snapshot.probes if p.addr == change.start)
    if probe.detour == addr:
        callback = snapshot.kernel.symbols.find(_CALLBACK)

        def note(line: Disassembled) -> str:
            return "the handler" if callback and line.target == callback.addr else ""

        title = "detour of the guest's optimised kprobe"
        return _followed(snapshot, title, range(addr, addr + _NEAR), syntax, note)
    title = "slot of the guest's kprobe"
    return _followed(snapshot, title, range(addr, addr + _SLOT), syntax)


def _code_around(addr: Addr, live: Sequence[Allocation]) -> range:
    code = (range(each.addr, each.addr + each.size) for each in live if each.kind is Kind.CODE)
    return next((each for each in code if addr in each), range(addr, addr + _NEAR))


def _our_detour(snapshot: TextSnapshot, change: TextChange, addr: Addr, syntax: Syntax) -> Detour:
    entry = next(
        (e for e in snapshot.entries if any(u.addr == change.start for u in e.patches)), None
    )
    live = {allocation.kind: allocation for allocation in entry.allocations.live} if entry else {}
    inside = _code_around(addr, entry.allocations.live if entry else ())
    pieces = _pieces(snapshot, addr, inside)
    notes = OurNotes(snapshot, entry, change, live, pieces) if entry else None
    rows = tuple(
        row_of(snapshot.kernel, line, note=notes.of(line) if notes else "")
        for line in _code(snapshot, pieces, syntax)
    )
    return Detour(title=f"code of our probe {change.probe}", addr=addr, rows=rows)
