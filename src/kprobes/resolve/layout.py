"""Where each field of an event lies in its record; the record is drawn in ``model.layout``."""

from collections.abc import Sequence
from dataclasses import dataclass

from kprobes.model.definition import Definition
from kprobes.model.layout import ALIGN, HEADER, Field, RecordLayout, Storage
from kprobes.model.resolved import can_fault
from kprobes.model.symbol import Symbol
from kprobes.resolve.argument import Fetched
from kprobes.units import Addr

_CALLER_SIZE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The fields of a record and its extra words, names of event and place left out."""

    fields: tuple[Field, ...]
    size: int
    is_dynamic: bool
    size_offset: int
    faults_offset: int | None
    caller_offset: int | None


def lay_out(args: Sequence[Fetched], *, has_caller: bool = False) -> Shape:
    """Place every argument's field, in order, each aligned to its own size.

    Args:
        args: as they are fetched.
        has_caller: whether the record has the return address: a return probe's has.
    """
    is_dynamic = any(arg.storage is Storage.STRING for arg in args)
    has_faults = any(arg.storage is Storage.NUMBER and can_fault(arg.operand) for arg in args)
    size_offset = HEADER + (_CALLER_SIZE if has_caller else 0)
    at = size_offset + (8 if is_dynamic else 0)
    faults_offset = at if has_faults else None
    at += 8 * ((len(args) + 63) // 64) if has_faults else 0
    fields: list[Field] = []
    for index, arg in enumerate(args):
        field = _field(arg, index, _aligned(at, arg.size))
        fields.append(field)
        at = field.offset + field.room
    return Shape(
        fields=tuple(fields),
        size=_aligned(at, ALIGN),
        is_dynamic=is_dynamic,
        size_offset=size_offset,
        faults_offset=faults_offset,
        caller_offset=HEADER if has_caller else None,
    )


def record_layout(
    definition: Definition, shape: Shape, *, event_id: int, ip: Addr, symbol: Symbol
) -> RecordLayout:
    """Give a shape its event's names and place; ``symbol`` is what the kernel prints for ``ip``."""
    return RecordLayout(
        event_id=event_id,
        group=definition.group,
        event=definition.event,
        ip=ip,
        where=symbol.place(ip),
        function=symbol.name,
        fields=shape.fields,
        size=shape.size,
        is_dynamic=shape.is_dynamic,
        size_offset=shape.size_offset,
        faults_offset=shape.faults_offset,
        caller_offset=shape.caller_offset,
    )


def _field(arg: Fetched, index: int, offset: int) -> Field:
    return Field(
        name=arg.name,
        type=arg.type,
        storage=arg.storage,
        offset=offset,
        size=arg.size,
        index=index,
        count=arg.count,
        text=arg.text,
        enumerators=arg.enumerators,
    )


def _aligned(value: int, size: int) -> int:
    return -(-value // size) * size if size else value
