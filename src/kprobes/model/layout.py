"""How one event's record lies in the ring: written once, for code generator and decoder.

    struct record {            // little endian, 8-byte aligned, at ring position `position`
        u64 commit;            // position << 16 | event id; written last
        u64 counter;           // the CPU's raw cycle counter
        u32 pid;
        u32 context;           // see CONTEXT_* below
        char comm[16];
        u64 caller;            // the return address; only when caller_offset is set
        u32 size;              // of the whole record; only when is_dynamic
        u32 reserved;          //   with it
        u64 faults[];          // bit i of word i/64 is field i; only when faults_offset is set
        ...                    // fields, each aligned to its own size
        ...                    // bytes of strings, in field order; the record is padded to 8
    };

A string field is a u32 ``length << 16 | offset``: offset from the record's start, length with
its NUL; length 0 is a fault. Arrays are their elements in a row, with one fault bit for a whole
array of numbers. See docs/formats/ring.md.
"""

from dataclasses import dataclass
from enum import StrEnum

from kprobes.units import Addr

COMMIT, COUNTER, PID, CONTEXT, COMM, HEADER = 0, 8, 16, 20, 24, 40
EVENT_BITS = 16
COMM_SIZE = 16
ALIGN = 8

CONTEXT_PREEMPT = 0x000000FF
CONTEXT_SOFTIRQ = 0x0000FF00
CONTEXT_SERVING_SOFTIRQ = 0x00000100
"""Of the softirq part, which goes up by 1 while one is served and by 2 for every section with
bottom halves off (SOFTIRQ_DISABLE_OFFSET)."""
CONTEXT_HARDIRQ = 0x000F0000
CONTEXT_NMI = 0x00F00000
CONTEXT_IRQS_ON = 1 << 24
CONTEXT_NEED_RESCHED = 1 << 25
CONTEXT_NEED_RESCHED_LAZY = 1 << 26
CONTEXT_MIGRATE_SHIFT = 27
"""Bits 27 to 30: depth of migrate_disable, 15 for more."""
MIGRATE_SINCE = (5, 15)
"""54357f0c9149 (tracing: Add migrate-disabled counter to tracing output)."""
CONTEXT_NO_PREEMPT_RESCHED = 1 << 31
"""Inverted, as in the kernel's own preempt count: set when no preemption is wanted."""


SIGNED = frozenset({"s8", "s16", "s32", "s64"})
"""Types of which the top bit is a sign."""


class Storage(StrEnum):
    """How a field's value is kept in the record."""

    NUMBER = "number"
    STRING = "string"
    COMM = "comm"
    TEXT = "text"
    DURATION = "duration"


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One fetch argument in the record.

    Attributes:
        name: of the argument.
        type: the kernel's name of its fetch type: u8..u64, s8..s64, x8..x64, char, symbol,
            symstr, string, ustring. A bit-field has its container's.
        storage: DURATION at ``offset`` the u64 counter at the function's entry, of which the value
            is the ns until the record's; NUMBER at ``offset`` with ``size`` bytes, which is an
            address where the type is symbol or symstr; STRING a u32 there; COMM and TEXT take no
            room: the value is the header's comm, or ``text``.
        offset: from the record's start.
        size: of one number, 4 for a string, 0 for comm and text.
        index: the field's bit in the fault bits.
        count: elements of an array, one behind the other; None when it is no array.
        text: of an immediate string, without NUL.
        enumerators: value and name of each of its enum's, in their order, for a number that is
            an enum to the kernel's types.
    """

    name: str
    type: str
    storage: Storage
    offset: int
    size: int
    index: int
    count: int | None = None
    text: bytes = b""
    enumerators: tuple[tuple[int, str], ...] = ()

    @property
    def is_signed(self) -> bool:
        """Whether the number is negative when its top bit is set."""
        return self.type in SIGNED and self.storage is Storage.NUMBER

    @property
    def room(self) -> int:
        """Bytes that it takes in the record's fixed part."""
        return self.size * (self.count or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordLayout:
    """One event's record.

    Attributes:
        event_id: 1 to 65535, unique in a session.
        group, event: the event's names.
        ip: the address that the kernel prints for this probe.
        where: that address as the trace prints it, without brackets: ``sym+0x0/0x170``.
        function: the probed function's name.
        fields: in definition order.
        size: of the fixed part, a multiple of 8; the whole record unless ``is_dynamic``.
        is_dynamic: whether strings follow the fixed part and ``size_offset`` holds the size.
        size_offset: of the u32 size; meaningless unless ``is_dynamic``.
        faults_offset: of the fault words, or None when no number can fault.
        caller_offset: of the u64 return address of a return probe's record, else None.
    """

    event_id: int
    group: str
    event: str
    ip: Addr
    where: str
    function: str
    fields: tuple[Field, ...]
    size: int
    is_dynamic: bool
    size_offset: int
    faults_offset: int | None
    caller_offset: int | None = None
