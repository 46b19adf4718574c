"""Reading records by hand, one after the other: what generated code wrote, in plain Python."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from kprobes.model.abi import CPU_SHIFT
from kprobes.model.resolved import Field, RecordLayout, Resolved, Storage
from tests.build.cpu import Cpu

One = int | bytes | None
Value = One | tuple[One, ...]


class Loaded(Protocol):
    """A site and its probes."""

    @property
    def probes(self) -> Sequence[Resolved]: ...


class Machine(Protocol):
    """An emulated guest."""

    cpu: Cpu

    @property
    def loaded(self) -> Sequence[Loaded]: ...

    def word(self, number: int) -> int: ...

    def place(self, number: int, position: int) -> int: ...


class Record(Struct, frozen=True):
    """One record of a ring, its commit word checked.

    Attributes:
        values: by field: numbers unsigned, strings with their NUL, comm as it is; None is a fault;
            arrays as tuples, or None when an array of numbers faulted.
        caller: of a return probe's record, else 0.
    """

    event_id: int
    position: int
    size: int
    counter: int
    pid: int
    context: int
    comm: bytes
    values: tuple[Value, ...]
    caller: int = 0


def records(machine: Machine, number: int, *, start: int = 0) -> list[Record]:
    """Return the records of a CPU's ring from a position up to its head."""
    head = machine.word(number) & (1 << CPU_SHIFT) - 1
    found: list[Record] = []
    while start < head:
        found.append(record(machine, number, start))
        start += found[-1].size
    assert start == head
    return found


def record(machine: Machine, number: int, position: int) -> Record:
    """Return the record at a position of a CPU's ring."""
    layouts = _layouts(machine)
    data = machine.cpu.read(machine.place(number, position), 32768)
    commit = int.from_bytes(data[:8], "little")
    assert commit >> 16 == position, f"{position:#x} is not committed: {commit:#x}"
    layout = layouts[commit & 0xFFFF]
    size = layout.size
    if layout.is_dynamic:
        size = int.from_bytes(data[layout.size_offset : layout.size_offset + 4], "little")
    return Record(
        event_id=layout.event_id,
        position=position,
        size=size,
        counter=int.from_bytes(data[8:16], "little"),
        pid=int.from_bytes(data[16:20], "little"),
        context=int.from_bytes(data[20:24], "little"),
        comm=data[24:40],
        values=tuple(_value(data[:size], layout, field) for field in layout.fields),
        caller=_caller(data, layout),
    )


def _caller(data: bytes, layout: RecordLayout) -> int:
    at = layout.caller_offset
    return 0 if at is None else int.from_bytes(data[at : at + 8], "little")


def _layouts(machine: Machine) -> Mapping[int, RecordLayout]:
    return {probe.layout.event_id: probe.layout for site in machine.loaded for probe in site.probes}


def _value(data: bytes, layout: RecordLayout, field: Field) -> Value:
    if field.storage is Storage.NUMBER and _is_faulted(data, layout, field):
        return None
    places = [field.offset + field.size * n for n in range(field.count or 1)]
    found = tuple(_one(data, layout, field, place) for place in places)
    return found if field.count is not None else found[0]


def _one(data: bytes, layout: RecordLayout, field: Field, place: int) -> One:
    number = int.from_bytes(data[place : place + field.size], "little")
    match field.storage:
        case Storage.COMM:
            return data[24:40]
        case Storage.TEXT:
            return field.text
        case Storage.STRING:
            length, offset = number >> 16, number & 0xFFFF
            assert layout.size <= offset <= offset + length <= len(data)
            return data[offset : offset + length] if length else None
        case Storage.STACK:
            length, offset = number >> 16, number & 0xFFFF
            assert layout.size <= offset <= offset + length <= len(data)
            return data[offset : offset + length]
        case Storage.NUMBER | Storage.DURATION:
            return number


def _is_faulted(data: bytes, layout: RecordLayout, field: Field) -> bool:
    if layout.faults_offset is None:
        return False
    byte = data[layout.faults_offset + field.index // 8]
    return bool(byte >> field.index % 8 & 1)
