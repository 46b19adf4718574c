"""Probe definition as written: what ``lang`` makes of text, before any kernel is known.

It has the types of its fields (``u8``, ``b4@2/32``, ``string``, ``x16[4]``), and names the fields
that records have beside what their definitions fetch.
"""

from enum import StrEnum
from typing import TypedDict

from msgspec import Struct

from kprobes.model.trigger import Trigger
from kprobes.units import Addr

DURATION = "duration"
EXIT = "exit"
STACKTRACE = "common_stacktrace"
"""The kernel's name of it in its hist triggers."""
USER_STACKTRACE = "common_userstacktrace"
TGID = "common_tgid"
"""The kernel's name of it in events of long ago."""


class SyntheticFields(Struct, frozen=True, kw_only=True):
    """Which fields records have beside those that their definitions fetch.

    Attributes:
        duration: of every return probe, the ns from the entry of the call to its return.
        exits: of these, the instruction by which the function was left.
        tgid: of every probe, the pid of the task's process.
        stacktrace: of every probe, the kernel's stack at the hit.
        userstacktrace: of every probe, the stack of the task's program.
        is_stack_triggered: whether that is empty but where a trigger ``stacktrace`` asks for it.
    """

    duration: bool = False
    exits: bool = False
    tgid: bool = False
    stacktrace: bool = False
    userstacktrace: bool = False
    is_stack_triggered: bool = False


NO_SYNTHETIC_FIELDS = SyntheticFields()


class SyntheticFieldWords(TypedDict, total=False):
    """Those of ``SyntheticFields`` that users ask for, as keywords."""

    duration: bool
    exits: bool
    tgid: bool
    stacktrace: bool
    userstacktrace: bool


INSTEAD = {
    DURATION: "here `p FUNCTION` and `r FUNCTION` give the times of both, by task",
    EXIT: "here `p FUNCTION+OFFSET` probes each of its returns, which `kprobe xray` shows",
    TGID: "here the kernel's trace option `record-tgid` puts it into its own `trace` file",
    STACKTRACE: "here the kernel's trace option `stacktrace` puts it into its own `trace` file",
    USER_STACKTRACE: "here the kernel's trace option `userstacktrace` puts it into `trace`",
}
"""What to do for each on this machine's own kernel, which has no such fields."""


STRINGS = ("string", "ustring", "symstr", "pd", "pD")
"""Kept in the record as a u32 ``data_loc``, their bytes after the fixed part."""


class TypeWord(Struct, frozen=True, kw_only=True):
    """How an argument's value is fetched last, kept and printed.

    Attributes:
        base: u8..u64, s8..s64, x8..x64, char, symbol, string, ustring, symstr, pd, pD, or
            ``bits`` for ``bWIDTH@OFFSET/SIZE``.
        size: bytes of one element in the record; 4 for those in ``STRINGS``.
        count: N of ``TYPE[N]``, or None when it is not an array.
        bit_width: WIDTH of ``bits``, else 0.
        bit_offset: OFFSET of ``bits``, from the container's lowest bit.
    """

    base: str
    size: int
    count: int | None = None
    bit_width: int = 0
    bit_offset: int = 0

    @property
    def is_string(self) -> bool:
        """Whether the record has a ``data_loc`` for it."""
        return self.base in STRINGS


class Span(Struct, frozen=True):
    """Columns [start, stop) of the command: its words joined by single blanks."""

    start: int
    stop: int


class Kind(StrEnum):
    """Where a definition probes; the value is the letter of a kprobe event's statement."""

    ENTRY = "p"
    RETURN = "r"


class EventType(StrEnum):
    """Which of the kernel's probe events a definition is."""

    KPROBE = "kprobe"
    """``p`` and ``r``: at any instruction, and at a function's return."""
    FPROBE = "fprobe"
    """``f``: at a function's entry, or its return."""
    TRACEPOINT = "tracepoint"
    """``t``: at a tracepoint, with what that is given."""


_LETTERS = {EventType.FPROBE: "f", EventType.TRACEPOINT: "t"}
ITERATOR = "__traceiter_"
"""Of a tracepoint: a function of its own, which calls everybody who listens."""


class Register(Struct, frozen=True, kw_only=True):
    """``%NAME``: a register by its pt_regs name, without the percent sign."""

    name: str
    span: Span


class Argument(Struct, frozen=True, kw_only=True):
    """``$argN``, N from 1."""

    number: int
    span: Span


class StackPointer(Struct, frozen=True, kw_only=True):
    """``$stack``."""

    span: Span


class StackSlot(Struct, frozen=True, kw_only=True):
    """``$stackN``: the N-th long of the stack, N from 0."""

    number: int
    span: Span


class Comm(Struct, frozen=True, kw_only=True):
    """``$comm``: the current task's name."""

    span: Span


class Stacktrace(Struct, frozen=True, kw_only=True):
    """``$stacktrace``, ``$ustack``: the kernel's stack, or the program's; no kernel has them."""

    span: Span
    is_user: bool = False


class Immediate(Struct, frozen=True, kw_only=True):
    r"""``\NUM``; ``value`` is the 64-bit pattern, unsigned."""

    value: int
    span: Span


class MemoryAt(Struct, frozen=True, kw_only=True):
    """``@ADDR``: memory at an address."""

    addr: Addr
    span: Span


class MemoryOf(Struct, frozen=True, kw_only=True):
    """``@SYM[+|-OFF]``: memory at a symbol."""

    symbol: str
    offset: int
    span: Span


class Deref(Struct, frozen=True, kw_only=True):
    """``+|-[u]OFF(BASE)``: memory at BASE plus a signed offset, kernel's or user's."""

    base: "Fetch"
    offset: int
    is_user: bool
    span: Span


class ReturnValue(Struct, frozen=True, kw_only=True):
    """``$retval``."""

    span: Span


class Text(Struct, frozen=True, kw_only=True):
    r"""``\"TEXT"``: an immediate string, without its quotes."""

    value: str
    span: Span


class Parameter(Struct, frozen=True, kw_only=True):
    """``NAME``: a parameter of the probed function by the name that its types give it."""

    name: str
    span: Span


class AllParameters(Struct, frozen=True, kw_only=True):
    """``$arg*``: every parameter of the probed function; alone in its word."""

    span: Span


class AllVariables(Struct, frozen=True, kw_only=True):
    """``$params``, or ``$vars`` with ``has_locals``: what debug information has there, as perf."""

    has_locals: bool
    span: Span


class Step(Struct, frozen=True, kw_only=True):
    """One ``->NAME`` (``is_arrow``) or ``.NAME``; the span is the name's.

    Attributes:
        name: "" of a first step that only has an index: ``BASE[2]``.
        indexes: the N of each ``[N]`` after it (ours, not the kernel's).
    """

    name: str
    is_arrow: bool
    span: Span
    indexes: tuple[int, ...] = ()

    @property
    def is_element(self) -> bool:
        """Whether it is an element of what is before it, and no member."""
        return not self.name and bool(self.indexes)

    @property
    def text(self) -> str:
        """How it is written after its arrow or dot."""
        return self.name + "".join(f"[{index}]" for index in self.indexes)


class Member(Struct, frozen=True, kw_only=True):
    """``BASE->a.b->c``: a walk along members, by the kernel's types; at least one step."""

    base: "Fetch"
    steps: tuple[Step, ...]
    span: Span


class Cast(Struct, frozen=True, kw_only=True):
    """``(STRUCT)BASE``, or ``(STRUCT,FIELD)BASE``: BASE points to that field of a STRUCT.

    Attributes:
        container: FIELD, a path such as ``a.b``; ``""`` when there is none.
    """

    struct: str
    container: str
    base: "Fetch"
    span: Span


class AddressOf(Struct, frozen=True, kw_only=True):
    """``&BASE``: where a member or a variable is (ours, not the kernel's)."""

    base: "Fetch"
    span: Span


class AllMembers(Struct, frozen=True, kw_only=True):
    """``*BASE``: every member of the struct that BASE is or points to; alone in its word (ours).

    Attributes:
        depth: how many stars there are: with two also what is in structs that are members.
    """

    base: "Fetch"
    depth: int
    span: Span


class CurrentTask(Struct, frozen=True, kw_only=True):
    """``$current``: the running task's ``struct task_struct *``."""

    span: Span


class PerCpu(Struct, frozen=True, kw_only=True):
    """``this_cpu_ptr(BASE)``, or ``this_cpu_read(BASE)`` when ``is_read``."""

    base: "Fetch"
    is_read: bool
    span: Span


class Operation(StrEnum):
    """What is made of two 64-bit numbers; the value is what LLVM calls it."""

    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    AND = "and"
    OR = "or"
    XOR = "xor"
    SHL = "shl"
    LSHR = "lshr"
    ASHR = "ashr"
    EQ = "eq"
    NE = "ne"
    SLT = "slt"
    SLE = "sle"
    SGT = "sgt"
    SGE = "sge"

    @property
    def is_comparison(self) -> bool:
        """Whether it is 1 or 0."""
        return self.sign in _COMPARISONS

    @property
    def sign(self) -> str:
        """How C writes it."""
        return _SIGNS[self]


_COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
_ARITHMETIC = ("+", "-", "*", "&", "|", "^", "<<", ">>", ">>")
_SIGNS = dict(zip(Operation, _ARITHMETIC + _COMPARISONS, strict=True))


class Computed(Struct, frozen=True, kw_only=True):
    """What an operation makes of two; debug information has it, the language no word for it."""

    operation: Operation
    left: "Fetch"
    right: "Fetch"
    span: Span


Fetch = (
    Register
    | Argument
    | StackPointer
    | StackSlot
    | Comm
    | Stacktrace
    | Immediate
    | MemoryAt
    | MemoryOf
    | Deref
    | ReturnValue
    | Text
    | Parameter
    | AllParameters
    | AllVariables
    | Member
    | Cast
    | AddressOf
    | AllMembers
    | CurrentTask
    | PerCpu
    | Computed
)


class FetchArg(Struct, frozen=True, kw_only=True):
    """One argument word ``[NAME=]FETCH[:TYPE]``.

    Attributes:
        name: as given, or the kernel's default: the word itself when that is a name, else
            ``arg1`` ...; ``""`` for ``$arg*``, and after it the numbers count it as one.
        fetch: the expression.
        type: as given, or ``""`` when the word names none (the default is x64).
        text: the expression with its type, verbatim, as a listing prints it.
        span: the whole word.
        body: FETCH without NAME and TYPE, where most errors point.
        type_span: the type's columns; empty at the word's end when there is none.
        spec: the type, read; None when the word names none.
        enum: of a variable of the source, the name of its enum; else "".
    """

    name: str
    fetch: Fetch
    type: str
    text: str
    span: Span
    body: Span
    type_span: Span
    spec: TypeWord | None = None
    enum: str = ""

    @property
    def is_named(self) -> bool:
        """Whether the word gives a name."""
        return self.body.start > self.span.start


def leaf_of(fetch: Fetch) -> Fetch:
    """Return what an expression begins with: what is left of all that is read or cast of it."""
    while isinstance(fetch, Deref | Member | Cast | PerCpu | AddressOf | AllMembers):
        fetch = fetch.base
    return fetch


class Place(Struct, frozen=True, kw_only=True):
    """Where the probe goes: a symbol (or a glob of symbols) and an offset, or an address.

    Attributes:
        symbol: without module and offset; ``""`` when the place is an address.
        module: the one that has the symbol, which need not be loaded; ``""`` for the kernel.
        addr: of a place that is a bare number.
        line: of the source (ours, not the kernel's): from the function's own, or of ``file``.
        file: the end of its path, ``fs/read_write.c``; that has the function, if there is one.
        pattern: of the text of the function's lines that are meant, with the line 0; or "".
    """

    symbol: str
    offset: int
    span: Span
    module: str = ""
    addr: Addr | None = None
    line: int | None = None
    file: str = ""
    pattern: str = ""

    @property
    def is_glob(self) -> bool:
        """Whether the symbol is a pattern for several functions (ours, not the kernel's)."""
        return any(char in self.symbol for char in "*?[")


class Definition(Struct, frozen=True, kw_only=True):
    """One whole statement.

    Attributes:
        command: the statement with its words joined by single blanks; all spans count in it.
        type: which of the kernel's probe events it is.
        group: that of its type when none is given: ``kprobes``, ``fprobes``, ``tracepoints``.
        event: as given, or the kernel's default name (``p_vfs_read_0``).
        is_named: whether the event's name was given.
        maxactive: of ``rN``; 0 when it was not given.
        filter: of the event, as given beside the statement; "" for none.
        synthetic_fields: that its records have after its own, given beside the statement, too.
        triggers: of the event, likewise.
        soft_enable: the number of the word that says whether it is recorded, in soft mode; or 0.
    """

    command: str
    kind: Kind
    group: str
    event: str
    is_named: bool
    place: Place
    args: tuple[FetchArg, ...]
    maxactive: int = 0
    filter: str = ""
    synthetic_fields: SyntheticFields = NO_SYNTHETIC_FIELDS
    triggers: tuple[Trigger, ...] = ()
    soft_enable: int = 0
    type: EventType = EventType.KPROBE

    @property
    def letter(self) -> str:
        """What its statement begins with."""
        return _LETTERS.get(self.type, self.kind.value)

    @property
    def function(self) -> str:
        """The name of the function that is probed, or its pattern; "" of a place by address."""
        symbol = self.place.symbol
        return f"{ITERATOR}{symbol}" if self.type is EventType.TRACEPOINT else symbol


class Deletion(Struct, frozen=True, kw_only=True):
    """``-:[GRP/]EVENT [WORDS]``: remove every probe that matches.

    Attributes:
        group: None matches every group.
        event: ``""`` matches every event of the group.
        words: place, then ``NAME=EXPR``s, as the listing has them; those given must match.
    """

    command: str
    group: str | None
    event: str
    words: tuple[str, ...]


Statement = Definition | Deletion
