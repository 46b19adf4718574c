"""Resolved probe: every name has become an address, a register or an offset of the record.

The record's layout is made once, for code generator and decoder:

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
        ...                    // stacks, then strings, in field order; padded to 8
    };

A string field is a u32 ``length << 16 | offset``: offset from the record's start, length with
its NUL; length 0 is a fault. So is a stack, of u64 addresses, innermost first. Arrays are their
elements in a row, with one fault bit for a whole array of numbers. See
docs/reference/formats/ring.md.
"""

from collections.abc import Iterator
from enum import StrEnum

from msgspec import Struct

from kprobes.model.definition import Definition, Operation, Span
from kprobes.model.filter import Filter, Header, Source
from kprobes.model.hist import HistTable
from kprobes.model.trigger import CompiledTrigger
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
    STACK = "stack"


class Field(Struct, frozen=True, kw_only=True):
    """One fetch argument in the record.

    Attributes:
        name: of the argument.
        type: the kernel's name of its fetch type: u8..u64, s8..s64, x8..x64, char, symbol,
            symstr, string, ustring; or stacktrace; or bytes, of events that are not of probes. A
            bit-field has its container's.
        storage: DURATION at ``offset`` the u64 counter at the function's entry, of which the value
            is the ns until the record's; NUMBER at ``offset`` with ``size`` bytes, which is an
            address where the type is symbol or symstr; STRING and STACK a u32 there; COMM and TEXT
            take no room: the value is the header's comm, or ``text``.
        offset: from the record's start.
        size: of one number, 4 for a string or a stack, 0 for comm and text.
        index: the field's bit in the fault bits.
        count: elements of an array, one after the other; None when it is not an array.
        text: of an immediate string, without NUL.
        enumerators: value and name of each of its enum's, in their order, for a number that is
            an enum to the kernel's types.
        declared: its type in C, as an event's file has it; "" where no file tells.
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
    declared: str = ""

    @property
    def is_signed(self) -> bool:
        """Whether the number is negative when its top bit is set."""
        return self.type in SIGNED and self.storage is Storage.NUMBER

    @property
    def room(self) -> int:
        """Bytes that it takes in the record's fixed part."""
        return self.size * (self.count or 1)


class RecordLayout(Struct, frozen=True, kw_only=True):
    """One event's record.

    Attributes:
        event_id: 1 to 65535, unique in a session.
        group, event: the event's names.
        ip: the address that the kernel prints for this probe.
        where: that address as the trace prints it, without brackets: ``sym+0x0/0x170``.
        function: the probed function's name.
        fields: in definition order.
        size: of the fixed part, a multiple of 8; the whole record unless ``is_dynamic``.
        is_dynamic: whether strings or stacks follow the fixed part; ``size_offset`` holds the size.
        size_offset: of the u32 size; meaningless unless ``is_dynamic``.
        faults_offset: of the fault words, or None when no number can fault.
        caller_offset: of the u64 return address of a return probe's record, else None.
        definition: of the event, its words joined by single blanks.
        print_fmt: what is printed of an event that is not of a probe, as its file has it; else "".
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
    definition: str = ""
    print_fmt: str = ""


class RegisterValue(Struct, frozen=True, kw_only=True):
    """A register of the probed code, by its pt_regs name."""

    name: str


class StackValue(Struct, frozen=True, kw_only=True):
    """The long at stack pointer plus 8 times ``slot``; 0 when that is outside the stack.

    Another page than the stack pointer's is read by the guest's fault-safe readers.
    """

    slot: int


class Constant(Struct, frozen=True, kw_only=True):
    """A number that is known now; ``value`` is an unsigned 64-bit pattern."""

    value: int


class CommValue(Struct, frozen=True, kw_only=True):
    """The current task's name, as the record's header has it."""


class StackTraceValue(Struct, frozen=True, kw_only=True):
    """Where the hit is, and the return addresses of all calls that led there, innermost first.

    Attributes:
        has_link: whether a register still has the first of them, where the unwinder of the guest
            does not look for it.
        is_user: whether it is of the task's program, from where that has entered the kernel.
    """

    has_link: bool = False
    is_user: bool = False


class Load(Struct, frozen=True, kw_only=True):
    """Memory at ``base`` plus ``offset``, through the guest's fault-safe readers."""

    base: "Operand"
    offset: int
    is_user: bool


class TextValue(Struct, frozen=True, kw_only=True):
    """An immediate string: its field has the bytes."""


class TaskAddress(Struct, frozen=True, kw_only=True):
    """Where the running task's ``task_struct`` is."""


class ProcessId(Struct, frozen=True, kw_only=True):
    """The pid of the running task's process: its ``tgid``."""


class PerCpuAddress(Struct, frozen=True, kw_only=True):
    """Where a per-CPU object is on the CPU that was hit.

    Attributes:
        base: the object's address as its symbol, or a per-CPU pointer, has it.
        cpu_offset: the per-CPU address of the number to be added to it; None where it is the base
            of per-CPU memory, which a register has.
    """

    base: "Operand"
    cpu_offset: Addr | None


class ComputedValue(Struct, frozen=True, kw_only=True):
    """What an operation makes of two."""

    operation: Operation
    left: "Operand"
    right: "Operand"


class ReturnedValue(Struct, frozen=True, kw_only=True):
    """What the probed function returned."""


class EntryValue(Struct, frozen=True, kw_only=True):
    """What an argument was when the function was entered, of a probe at its return."""

    base: "Operand"


class EntryCounter(Struct, frozen=True, kw_only=True):
    """The raw counter, or the guest's clock, when the probed function was entered."""


class ExitAddress(Struct, frozen=True, kw_only=True):
    """The instruction by which the probed function was left, 0 where it is not known."""


Operand = (
    RegisterValue
    | StackValue
    | Constant
    | CommValue
    | StackTraceValue
    | Load
    | TextValue
    | TaskAddress
    | ProcessId
    | PerCpuAddress
    | ComputedValue
    | ReturnedValue
    | EntryValue
    | EntryCounter
    | ExitAddress
)


def parts_of(operand: Operand) -> tuple[Operand, ...]:
    """Return what another operand is made from."""
    match operand:
        case Load(base=base) | PerCpuAddress(base=base) | EntryValue(base=base):
            return (base,)
        case ComputedValue(left=left, right=right):
            return left, right
        case _:
            return ()


def within(operand: Operand) -> Iterator[Operand]:
    """Return an operand and all that it is made from."""
    yield operand
    for part in parts_of(operand):
        yield from within(part)


def can_fault(operand: Operand) -> bool:
    """Whether memory is read for it, at any depth."""
    return any(isinstance(each, Load) for each in within(operand))


def count_reads(operand: Operand) -> int:
    """Return how often memory is read for it."""
    if isinstance(operand, EntryValue):
        # What an entry keeps was computed there.
        return 0
    return isinstance(operand, Load) + sum(map(count_reads, parts_of(operand)))


def calls_guest(operand: Operand) -> bool:
    """Whether computing it runs the guest's own functions."""
    return any(
        # Another slot than the first may lie on a page that is not there.
        isinstance(each, Load | StackTraceValue) or (isinstance(each, StackValue) and each.slot > 0)
        for each in within(operand)
    )


class FieldFetch(Struct, frozen=True, kw_only=True):
    """One field of the record and where its value comes from.

    A STRING field's operand is a Load whose memory is the string itself. In an array of strings
    it is the first of them and its base is a Load too, of the first pointer in a row. In an
    array of numbers it is the first number.

    Attributes:
        bit_offset, bit_width: of a bit-field in the number that was fetched, from its lowest
            bit; the width is 0 when all of the number counts.
    """

    field: Field
    operand: Operand
    bit_offset: int = 0
    bit_width: int = 0

    @property
    def calls_guest(self) -> bool:
        """Whether fetching needs the guest's own functions."""
        return calls_guest(self.operand)

    @property
    def is_stack(self) -> bool:
        """Whether it is the stack."""
        return isinstance(self.operand, StackTraceValue)


class Resolved(Struct, frozen=True, kw_only=True):
    """One probe on one function.

    Attributes:
        definition: as written, but for ``$arg*`` and what else the kernel expands first.
        function: address of the probed symbol.
        addr: where in it the probe is, or of the tracepoint's struct; the layout has what is
            printed of that.
        layout: of its record.
        fetches: in field order.
        filter: what a hit must be like to be recorded, or None.
        hist: what hits are counted in, in place of being recorded; or None.
        triggers: what hits do, whether they are recorded or not.
        soft_enable: the number of the word that says whether they are, or 0.
    """

    definition: Definition
    function: Addr
    addr: Addr
    layout: RecordLayout
    fetches: tuple[FieldFetch, ...]
    filter: Filter | None = None
    hist: HistTable | None = None
    triggers: tuple[CompiledTrigger, ...] = ()
    soft_enable: int = 0

    @property
    def calls_guest(self) -> bool:
        """Whether a hit runs functions of the guest, so that it must be guarded."""
        return any(fetch.calls_guest for fetch in self.fetches) or self.filters_by(Header.CPU)

    @property
    def tables(self) -> list[HistTable]:
        """What hits are counted in."""
        hists = (self.hist, *(each.hist for each in self.triggers))
        return [each for each in hists if each is not None]

    @property
    def at_entry(self) -> tuple[EntryValue | EntryCounter, ...]:
        """What its record tells of the function's entry, of a probe at its return."""
        return tuple(
            operand
            for fetch in self.fetches
            for operand in within(fetch.operand)
            if isinstance(operand, EntryValue | EntryCounter)
        )

    def filters_by(self, source: Source) -> bool:
        """Whether the filter, or one of a trigger, tests this."""
        filters = (self.filter, *(each.filter for each in self.triggers))
        return any(each is not None and source in each.sources for each in filters)

    @property
    def shape(self) -> tuple[object, ...]:
        """What its machine code depends on: equal shapes differ in numbers only."""
        layout = self.layout
        extra = (layout.is_dynamic, layout.faults_offset, layout.caller_offset)
        counted = self.hist and self.hist.shape
        triggered = self.triggers, self.soft_enable
        return (layout.size, *extra, self.fetches, self.filter, counted, *triggered)


class Word(Struct, frozen=True, kw_only=True):
    """One word of the line, and what it stands for.

    Attributes:
        text: as it is written.
        span: columns of the definition's command that it was made of.
        is_same: whether it stands there just so.
    """

    text: str
    span: Span
    is_same: bool


class KprobeEvent(Struct, frozen=True, kw_only=True):
    """One probe as text.

    Attributes:
        probe: that it is.
        head: the statement's letter, and maxactive where it was given.
        words: the place, then the arguments.
    """

    probe: Resolved
    head: str
    words: tuple[Word, ...]

    def line(self, group: str, event: str) -> str:
        """Return the line that defines it under these names."""
        return " ".join([f"{self.head}:{group}/{event}", *(word.text for word in self.words)])

    def column(self, line: str, column: int) -> int:
        """Return the column of the definition's command that one of the line is about."""
        at = line.find(" ") + 1
        if column < at:
            return 0
        for word in self.words:
            if column <= at + len(word.text):
                return word.span.start + (column - at if word.is_same else 0)
            at += len(word.text) + 1
        return len(self.probe.definition.command) + 1
