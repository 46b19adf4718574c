"""Events as columns, from rows; and from the lines of a real trace file."""

import re
from collections.abc import Sequence
from typing import cast

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.model.events import Batch, Column, Events
from kprobes.model.resolved import Field, RecordLayout, Storage
from kprobes.model.strings import Strings, strings_of
from tests.build.ring import Value, make_layout

_LINE = re.compile(
    rb" *(?P<comm>\S.*?)-(?P<pid>\d+) +\[(?P<cpu>\d+)\] (?P<flags>\S+) +"
    rb"(?P<s>\d+)\.(?P<us>\d{6}): (?P<event>\w+): \((?P<where>[^)]*)\)(?P<args>.*)"
)
_ARGUMENT = re.compile(rb' (\w+)=(".*?"(?= \w+=|$)|\(fault\)|\S+)', re.DOTALL)


class Row(Struct, frozen=True, kw_only=True):
    """One event."""

    ts: int = 0
    cpu: int = 0
    pid: int = 1
    context: int = 1 << 31 | 1 << 24
    comm: bytes = b"sh"
    values: tuple[Value, ...] = ()
    caller: int = 0


def make_batch(layout: RecordLayout, rows: Sequence[Row]) -> Batch:
    """Turn rows into columns; a number that is None is a fault and holds stale bytes."""
    comm = np.array([row.comm for row in rows], "S16")
    return Batch(
        layout=layout,
        ts=np.array([row.ts for row in rows], np.uint64),
        cpu=np.array([row.cpu for row in rows], np.uint16),
        pid=np.array([row.pid for row in rows], np.int32),
        context=np.array([row.context for row in rows], np.uint32),
        comm=comm,
        columns=tuple(
            comm if field.storage is Storage.COMM else _column(field, [r.values[i] for r in rows])
            for i, field in enumerate(layout.fields)
        ),
        faulted=tuple(
            None
            if field.storage in (Storage.COMM, Storage.TEXT, Storage.STACK)
            else np.array([_fault(field, row.values[i]) for row in rows], np.bool_)
            for i, field in enumerate(layout.fields)
        ),
        caller=None if layout.caller_offset is None else _callers(rows),
    )


def make_events(batches: Sequence[Batch], order: Sequence[tuple[int, int]] | None = None) -> Events:
    """Put batches together; the order is (batch, row) pairs, one batch after the other if None."""
    pairs = order or [(i, row) for i, batch in enumerate(batches) for row in range(len(batch))]
    return Events(
        batches=tuple(batches),
        batch=np.array([batch for batch, _ in pairs], np.uint16),
        row=np.array([row for _, row in pairs], np.uint32),
    )


def events_of_trace(lines: Sequence[bytes]) -> Events:
    """Read lines that a kernel printed back into events."""
    layouts: dict[bytes, RecordLayout] = {}
    rows: dict[bytes, list[Row]] = {}
    order: list[tuple[int, int]] = []
    for line in lines:
        found = _LINE.fullmatch(line)
        assert found is not None, line
        arguments = _ARGUMENT.findall(found["args"])
        shape = found["event"] + found["where"] + b",".join(name for name, _ in arguments)
        if shape not in layouts:
            layouts[shape] = _layout(len(layouts) + 1, found, arguments)
        order.append((list(layouts).index(shape), len(rows.setdefault(shape, []))))
        rows[shape].append(_row(found, arguments))
    return make_events([make_batch(layouts[shape], rows[shape]) for shape in layouts], order)


def context_of(letters: str) -> int:
    """Return bits that a kernel prints as these letters."""
    irqs, resched, interrupt, *depths = letters
    context = 0 if irqs in "dD" else 1 << 24
    context |= 0x200 if irqs in "bD" else 0
    context |= 1 << 25 if resched in "NnBb" else 0
    context |= 1 << 31 if resched not in "NpBL" else 0
    context |= 1 << 26 if resched in "BLbl" else 0
    context |= 0x100 if interrupt in "sH" else 0
    context |= 0x10000 if interrupt in "hHZ" else 0
    context |= 0x100000 if interrupt in "zZ" else 0
    preempt, migrate = (int(depth.replace(".", "0"), 16) for depth in (*depths, ".")[:2])
    return context | preempt | migrate << 27


def _layout(
    event_id: int, found: re.Match[bytes], arguments: Sequence[tuple[bytes, bytes]]
) -> RecordLayout:
    return make_layout(
        event_id,
        [_type(value) for _, value in arguments],
        event=found["event"].decode(),
        where=found["where"].decode(),
        can_fault=True,
        names=[name.decode() for name, _ in arguments],
    )


def _type(value: bytes) -> str:
    if value[:1] in b'"(':
        return "string"
    if value.startswith(b"0x"):
        return "x64"
    return "s64" if value.startswith(b"-") else "u64"


def _row(found: re.Match[bytes], arguments: Sequence[tuple[bytes, bytes]]) -> Row:
    idle = found["comm"] == b"<idle>"
    return Row(
        ts=(int(found["s"]) * 1_000_000 + int(found["us"])) * 1000,
        cpu=int(found["cpu"]),
        pid=int(found["pid"]),
        context=context_of(found["flags"].decode()),
        comm=b"swapper/" + found["cpu"][-1:] if idle else found["comm"],
        values=tuple(_value(value) for _, value in arguments),
    )


def _value(value: bytes) -> Value:
    if value == b"(fault)":
        return None
    return value[1:-1] if value.startswith(b'"') else int(value, 0)


def _callers(rows: Sequence[Row]) -> NDArray[np.uint64]:
    return np.array([row.caller for row in rows], np.uint64)


def _column(field: Field, values: Sequence[Value]) -> Column | Strings:
    if field.storage is Storage.TEXT:
        return np.full(len(values), field.text, object)
    if field.storage in (Storage.STRING, Storage.STACK):
        rows = [each if isinstance(each, tuple) else (each,) for each in values]
        shape = (len(values), field.count) if field.count else (len(values),)
        return strings_of(cast("list[bytes | None]", [one for row in rows for one in row]), shape)
    stale = 0xEE if field.count is None else (0xEE,) * field.count
    numbers = [stale if value is None else value for value in values]
    return np.array(numbers, f"{'i' if field.is_signed else 'u'}{field.size}")


def _fault(field: Field, value: Value) -> bool | list[bool]:
    if isinstance(value, tuple) and field.storage is Storage.STRING:
        return [element is None for element in value]
    return value is None
