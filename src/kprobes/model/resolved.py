"""A definition whose every name has become an address, a register or an offset."""

from dataclasses import dataclass

from kprobes.model.definition import Definition
from kprobes.model.filter import Filter, Header, Source
from kprobes.model.layout import Field, RecordLayout
from kprobes.units import Addr


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisterValue:
    """A register of the probed code, by its pt_regs name."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StackValue:
    """The long at stack pointer plus 8 times ``slot``; 0 when that is outside the stack.

    Another page than the stack pointer's is read by the guest's fault-safe readers.
    """

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A number that is known now; ``value`` is an unsigned 64-bit pattern."""

    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommValue:
    """The current task's name, as the record's header has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Memory at ``base`` plus ``offset``, through the guest's fault-safe readers."""

    base: "Operand"
    offset: int
    is_user: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TextValue:
    """An immediate string: its field has the bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskAddress:
    """Where the running task's ``task_struct`` is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerCpuAddress:
    """Where a per-CPU object is on the CPU that was hit.

    Attributes:
        base: the object's address as its symbol, or a per-CPU pointer, has it.
        cpu_offset: the per-CPU address of the number to be added to it; None where it is the base
            of per-CPU memory, which a register has.
    """

    base: "Operand"
    cpu_offset: Addr | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnedValue:
    """What the probed function returned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryValue:
    """What an argument was when the function was entered, of a probe at its return."""

    base: "Operand"


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryCounter:
    """The raw counter, or the guest's clock, when the probed function was entered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitAddress:
    """The instruction by which the probed function was left, 0 where it is not known."""


Operand = (
    RegisterValue
    | StackValue
    | Constant
    | CommValue
    | Load
    | TextValue
    | TaskAddress
    | PerCpuAddress
    | ReturnedValue
    | EntryValue
    | EntryCounter
    | ExitAddress
)


def base_of(operand: Operand) -> Operand | None:
    """Return the operand that another is computed from, or None for one that is a leaf."""
    match operand:
        case Load(base=base) | PerCpuAddress(base=base) | EntryValue(base=base):
            return base
        case _:
            return None


def can_fault(operand: Operand) -> bool:
    """Whether memory is read for it, at any depth."""
    inner: Operand | None = operand
    while inner is not None and not isinstance(inner, Load):
        inner = base_of(inner)
    return inner is not None


def calls_guest(operand: Operand) -> bool:
    """Whether computing it runs the guest's own functions."""
    leaf = leaf_of(operand)
    # Another slot than the first may lie on a page that is not there.
    return can_fault(operand) or (isinstance(leaf, StackValue) and leaf.slot > 0)


def leaf_of(operand: Operand) -> Operand:
    """Return what the innermost expression fetches."""
    while (base := base_of(operand)) is not None:
        operand = base
    return operand


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldFetch:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """One probe on one function.

    Attributes:
        definition: as written, but for ``$arg*`` and what else the kernel expands first.
        function: address of the probed symbol.
        layout: of its record.
        fetches: in field order.
        filter: what a hit must be like to be recorded, or None.
    """

    definition: Definition
    function: Addr
    layout: RecordLayout
    fetches: tuple[FieldFetch, ...]
    filter: Filter | None = None

    @property
    def calls_guest(self) -> bool:
        """Whether a hit runs functions of the guest, so that it must be guarded."""
        return any(fetch.calls_guest for fetch in self.fetches) or self.filters_by(Header.CPU)

    def filters_by(self, source: Source) -> bool:
        """Whether the filter tests this."""
        return self.filter is not None and source in self.filter.sources

    @property
    def shape(self) -> tuple[object, ...]:
        """What its machine code depends on: equal shapes differ in numbers only."""
        layout = self.layout
        extra = (layout.is_dynamic, layout.faults_offset, layout.caller_offset)
        return (layout.size, *extra, self.fetches, self.filter)
