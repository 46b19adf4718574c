"""Code of our probes, explained: what each instruction does, and for which fetch argument.

The record's address comes into the code as a constant, and what is stored behind it is a field of
the record (``model.layout``). Definitions are in the journal, and resolving them again gives the
layout.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kprobes.arch.facts import Arch
from kprobes.arch.listed import Listed, Reach
from kprobes.drivers.anatomy import Mark
from kprobes.drivers.guest.arena import COUNTERS_SIZE
from kprobes.drivers.guest.layout import readers, task_abi
from kprobes.drivers.instructions import Text
from kprobes.drivers.journal import Described, Entry
from kprobes.drivers.loans import Kind, Loan
from kprobes.drivers.places import Places
from kprobes.drivers.specimen import Specimen
from kprobes.errors import DefinitionError, TargetError
from kprobes.lang.parser import parse_statement
from kprobes.model import layout as record
from kprobes.model.abi import (
    PERCPU_GUARD,
    PERCPU_LIMIT,
    PERCPU_LOST,
    PERCPU_SIZE,
    PERCPU_WORD,
    SLACK,
)
from kprobes.model.definition import Definition
from kprobes.model.kernel import Kernel
from kprobes.model.layout import Field, RecordLayout, Storage
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
    record.COMMIT: "commit: the record is whole now",
    record.COUNTER: "header: the cycle counter",
    record.PID: "header: pid and context",
    record.COMM: "header: comm",
    record.COMM + 8: "header: comm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Touched:
    reach: Reach
    layout: RecordLayout | None


class OurNotes:
    """Explains the instructions of one site's code."""

    def __init__(
        self,
        specimen: Specimen,
        entry: Entry,
        mark: Mark,
        loans: Mapping[Kind, Loan],
        pieces: tuple[tuple[Addr, bytes], ...],
    ) -> None:
        self._specimen = specimen
        self._per_cpu = loans.get(Kind.PER_CPU)
        described = [probe for probe in entry.probes if probe.site == mark.start]
        # What sites share has been linked before what is of this one alone.
        start = mark.leads_to or Addr(0)
        code = start, pieces
        self._touched = _touched(specimen, loans.get(Kind.DATA), code, described)
        found = _reader_addrs(specimen.kernel)
        self._readers = found | _veneers(specimen.arch, pieces, found)
        self._current, self._preempt = _task(specimen.kernel)
        self._bodies = {addr for addr, _ in pieces} - {start}
        self._inside = [range(addr, addr + len(code)) for addr, code in pieces]

    def of(self, line: Listed) -> str:
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

    def _per_cpu_note(self, line: Listed) -> str:
        if line.per_cpu is None:
            return ""
        if self._per_cpu is not None and 0 <= line.per_cpu - self._per_cpu.addr < PERCPU_SIZE:
            return _WORDS.get(line.per_cpu - self._per_cpu.addr, "our per-CPU words")
        if line.per_cpu == self._current:
            return "the running task"
        return "the preempt count" if line.per_cpu == self._preempt else ""


def _touched(
    specimen: Specimen,
    data: Loan | None,
    code: tuple[Addr, tuple[tuple[Addr, bytes], ...]],
    described: Sequence[Described],
) -> Mapping[Addr, _Touched]:
    if data is None:
        return {}
    window = range(data.addr, data.addr + data.size)
    found = specimen.arch.listing.reaches(*code, window)
    # Each probe of a site computes its record's address once, one probe behind the other.
    records = {r.origin for r in found.values() if r.is_write and r.offset >= COUNTERS_SIZE}
    layouts = list(_layouts(specimen, described))
    if len(records) != len(layouts):
        layouts = []
    by_origin = dict(zip(sorted(records), layouts, strict=False))
    return {a: _Touched(reach=r, layout=by_origin.get(r.origin)) for a, r in found.items()}


def _layouts(specimen: Specimen, described: Sequence[Described]) -> Iterator[RecordLayout]:
    text = Text(
        kernel=specimen.kernel,
        open_memory=specimen.compiled,
        read_tables=lambda: specimen.tables,
    )
    places = Places(text, specimen.arch, specimen.sites or _NO_SITES)
    for probe in described:
        try:
            statement = parse_statement(probe.definition, registers=specimen.arch.registers)
            assert isinstance(statement, Definition)
            yield places.resolve(statement, event_id=probe.event_id).layout
        except (DefinitionError, TargetError):
            # A journal may be of an older kprobes.
            return


def _record_note(touched: _Touched) -> str:
    reach, layout = touched.reach, touched.layout
    event = f"{layout.event}: " if layout is not None else ""
    if reach.offset < COUNTERS_SIZE:
        return "one more missed hit" if reach.is_write else ""
    at = reach.offset - COUNTERS_SIZE
    if at >= SLACK:
        return "room for strings that a filter reads"
    if not reach.size:
        return _address_note(layout, at, event)
    if not reach.is_write:
        return f"{event}reads what it recorded at {at:#x}"
    return f"{event}{_stored(layout, at, reach.size)}"


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


def _address_note(layout: RecordLayout | None, at: int, event: str) -> str:
    if at == 0:
        return f"{event}the record's address"
    field = _field_at(layout, at)
    if field is not None:
        return f"{event}where {field.name} goes"
    if layout is not None and layout.is_dynamic and at == layout.size:
        texts = [field.name for field in layout.fields if field.storage is Storage.STRING]
        return f"{event}where the text of {', '.join(texts[:1])} goes"
    return f"{event}record at {at:#x}"


def _field_at(layout: RecordLayout | None, at: int) -> Field | None:
    return next(iter(_fields_in(layout, at, 1)), None)


def _fields_in(layout: RecordLayout | None, at: int, size: int) -> Sequence[Field]:
    fields = layout.fields if layout is not None else ()
    return [f for f in fields if f.room and f.offset < at + size and at < f.offset + f.room]


def _field_words(field: Field) -> str:
    if field.storage is Storage.STRING:
        return f"{field.name}: length and offset of its text,"
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
