"""Layouts and rings as a guest would write them, with its mistakes where a test wants them."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kprobes.model.resolved import COMM_SIZE, HEADER, Field, RecordLayout, Storage
from kprobes.ring.chunk import POSITION_MASK, Chunk
from kprobes.units import Addr

One = int | bytes | None
Value = One | tuple[One, ...]


@dataclass(frozen=True, kw_only=True)
class Hit:
    """One event before it is written: what a decoder must give back.

    ``values`` has one entry per field: None is a fault; a comm field's or a text's is ignored;
    an array's is a tuple, or None when an array of numbers faulted; a duration's is the counter
    at the entry. ``caller`` is written only where the layout has room for it.
    """

    layout: RecordLayout
    counter: int = 0
    pid: int = 1
    context: int = 1 << 31
    comm: bytes = b"sh"
    values: tuple[Value, ...] = ()
    caller: int = 0


class IdentityClock:
    """A clock whose counts are nanoseconds."""

    def ns(self, counter: NDArray[np.uint64], cpu: int) -> NDArray[np.uint64]:
        """Return the counts."""
        del cpu
        return counter


def make_layout(
    event_id: int,
    types: Sequence[str] = (),
    *,
    event: str = "",
    where: str = "vfs_read+0x0/0x310",
    can_fault: bool = False,
    names: Sequence[str] = (),
    has_caller: bool = False,
) -> RecordLayout:
    """Lay out fields as resolve does.

    Types are ``u8[3]``, ``string``, ...; ``comm`` for $comm, ``text=WORDS`` for an immediate
    string, ``duration`` for the time since the entry.
    """
    is_dynamic = any(_storage(kind) in (Storage.STRING, Storage.STACK) for kind in types)
    header = HEADER + 8 * has_caller
    faults_offset = header + 8 * is_dynamic if can_fault else None
    offset = header + 8 * is_dynamic + 8 * can_fault * (1 + max(len(types) - 1, 0) // 64)
    fields: list[Field] = []
    for i, kind in enumerate(types):
        found = _field(names[i] if names else f"a{i}", kind, i, offset)
        fields.append(found)
        offset = found.offset + found.room
    return RecordLayout(
        event_id=event_id,
        group="kprobes",
        event=event or f"e{event_id}",
        ip=Addr(0xFFFFFFFF81000000 + event_id * 64),
        where=where,
        function=where.partition("+")[0],
        fields=tuple(fields),
        size=-(-offset // 8) * 8,
        is_dynamic=is_dynamic,
        size_offset=header if is_dynamic else 0,
        faults_offset=faults_offset,
        caller_offset=HEADER if has_caller else None,
    )


def record(hit: Hit, position: int, *, is_committed: bool = True) -> bytes:
    """Write one record as it stands in the ring at a position."""
    layout = hit.layout
    strings = _strings(hit)
    out = bytearray(layout.size) + strings
    out += bytes(-len(out) % 8)
    commit = (position & POSITION_MASK) << 16 | layout.event_id if is_committed else 0
    comm = hit.comm.ljust(COMM_SIZE, b"\0")
    struct.pack_into("<QQII16s", out, 0, commit, hit.counter, hit.pid, hit.context, comm)
    if layout.caller_offset is not None:
        struct.pack_into("<Q", out, layout.caller_offset, hit.caller)
    if layout.is_dynamic:
        struct.pack_into("<I", out, layout.size_offset, len(out))
    at = layout.size
    for item, value in zip(layout.fields, hit.values, strict=True):
        if item.storage in (Storage.STRING, Storage.STACK):
            at = _write_locations(out, item, value, at)
        elif item.storage in (Storage.NUMBER, Storage.DURATION):
            _write_number(out, layout, item, value)
    return bytes(out)


@dataclass(kw_only=True)
class GuestRing:
    """A CPU's ring with its writer, byte for byte; ``tail`` is what the host gives back."""

    size: int
    slack: int
    head: int = 0
    tail: int = 0
    lost: int = 0
    memory: NDArray[np.uint8] = field(init=False)

    def __post_init__(self) -> None:
        """Begin with zeroed memory."""
        self.memory = np.zeros(self.size + self.slack, np.uint8)

    def reserve(self, hit: Hit) -> int | None:
        """Move the head past a record and return its position, or count it as lost."""
        size = len(record(hit, 0))
        if self.head + size - self.tail > self.size:
            self.lost += 1
            return None
        position, self.head = self.head, self.head + size
        return position

    def fill(self, hit: Hit, position: int) -> None:
        """Write a record but for its commit word."""
        self._put(position + 8, record(hit, position)[8:], base=position)

    def commit(self, hit: Hit, position: int) -> None:
        """Write a record's commit word."""
        self._put(position, record(hit, position)[:8], base=position)

    def write(self, hit: Hit) -> bool:
        """Write one record whole, or count it as lost."""
        position = self.reserve(hit)
        if position is None:
            return False
        self.fill(hit, position)
        self.commit(hit, position)
        return True

    def copy(self, offset: int, size: int) -> NDArray[np.uint8]:
        """Return a private copy, as a reader's ``copy`` must."""
        if not 0 <= offset <= offset + size <= len(self.memory):
            raise IndexError(f"{size} bytes at {offset} of {len(self.memory)}")
        return self.memory[offset : offset + size].copy()

    def _put(self, position: int, data: bytes, *, base: int) -> None:
        # A record never wraps: only its start is taken modulo the size.
        at = base % self.size + position - base
        self.memory[at : at + len(data)] = np.frombuffer(data, np.uint8)


def chunk_of(data: bytes, *, position: int = 0, cpu: int = 0, limit: int | None = None) -> Chunk:
    """Make a chunk of bytes that nobody writes to."""
    copy = np.frombuffer(bytearray(data), np.uint8)
    end = len(data) if limit is None else limit
    return Chunk(cpu=cpu, position=position, limit=end, data=copy, commits=copy)


def stream(hits: Sequence[Hit], position: int = 0) -> bytes:
    """Write records one after the other."""
    out = bytearray()
    for hit in hits:
        out += record(hit, position + len(out))
    return bytes(out)


def _field(name: str, kind: str, index: int, offset: int) -> Field:
    kind, _, text = kind.partition("=")
    base, _, count = kind.rstrip("]").partition("[")
    size = _size(base)
    return Field(
        name=name,
        type={"comm": "string", "text": "string", "duration": "u64"}.get(base, base),
        storage=_storage(kind),
        offset=-(-offset // max(size, 1)) * max(size, 1),
        size=size,
        index=index,
        count=int(count) if count else None,
        text=text.encode(),
    )


def _storage(kind: str) -> Storage:
    base = kind.partition("[")[0].partition("=")[0]
    named = {
        "comm": Storage.COMM,
        "text": Storage.TEXT,
        "duration": Storage.DURATION,
        "stacktrace": Storage.STACK,
        "userstacktrace": Storage.STACK,
    }
    return named.get(base, Storage.STRING if base.endswith("string") else Storage.NUMBER)


def _size(base: str) -> int:
    match _storage(base):
        case Storage.COMM | Storage.TEXT:
            return 0
        case Storage.STRING | Storage.STACK:
            return 4
        case Storage.DURATION:
            return 8
        case Storage.NUMBER:
            named = {"char": 1, "symbol": 8, "symstr": 8}
            return named[base] if base in named else int(base[1:]) // 8


def _elements(value: Value) -> tuple[One, ...]:
    return value if isinstance(value, tuple) else (value,)


def _strings(hit: Hit) -> bytes:
    pairs = zip(hit.layout.fields, hit.values, strict=True)
    return b"".join(
        _stored(item, value)
        for item, values in pairs
        for value in _elements(values)
        if item.storage in (Storage.STRING, Storage.STACK) and isinstance(value, bytes)
    )


def _stored(item: Field, value: bytes) -> bytes:
    return value + b"\0" if item.storage is Storage.STRING else value


def _write_locations(out: bytearray, item: Field, values: Value, at: int) -> int:
    for number, value in enumerate(_elements(values)):
        if isinstance(value, bytes):
            size = len(_stored(item, value))
            struct.pack_into("<I", out, item.offset + 4 * number, size << 16 | at)
            at += size
    return at


def _write_number(out: bytearray, layout: RecordLayout, item: Field, value: Value) -> None:
    if value is not None:
        for number, one in enumerate(_elements(value)):
            assert isinstance(one, int)
            place = item.offset + item.size * number
            data = (one & (1 << 8 * item.size) - 1).to_bytes(item.size, "little")
            out[place : place + item.size] = data
    elif layout.faults_offset is not None:
        at = layout.faults_offset + item.index // 64 * 8
        (word,) = struct.unpack_from("<Q", out, at)
        struct.pack_into("<Q", out, at, word | 1 << item.index % 64)
