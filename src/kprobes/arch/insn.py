"""One instruction as people read it, of whatever architecture.

Places of a kernel's text that may carry no probe, whatever instruction is there.
"""

import bisect
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct

from kprobes.model.kernel import TextPart, TextTables
from kprobes.units import Addr

Read = Callable[[int, int], bytes]
"""(address, size) to exactly so many bytes; raises MemoryFault."""


class Syntax(StrEnum):
    """How instructions are written."""

    ATT = "att"
    INTEL = "intel"


class Flow(StrEnum):
    """Where an instruction goes on."""

    NEXT = "next"
    JUMP = "jump"
    BRANCH = "branch"
    CALL = "call"
    INDIRECT_JUMP = "indirect jump"
    INDIRECT_CALL = "indirect call"
    RETURN = "return"
    TRAP = "trap"
    TRANSACTION = "transaction"
    """x86: it begins or ends one."""
    LEAVE = "leave"
    """arm64: for another exception level."""
    UNKNOWN = "unknown"

    @property
    def falls_through(self) -> bool:
        """Whether the next instruction may be reached: from a callee, or after a WARN's trap."""
        return self not in _ENDS


_ENDS = frozenset({Flow.JUMP, Flow.INDIRECT_JUMP, Flow.RETURN, Flow.LEAVE})


class Disassembled(Struct, frozen=True, kw_only=True):
    """One line of a listing.

    Attributes:
        addr: where it is.
        code: its bytes; one byte where they are not an instruction.
        mnemonic, operands: as text; ``(bad)`` for what is not an instruction.
        target: of a direct branch or call, or None.
        place: a fixed address that its memory operand has, or None.
        value: a constant that may be an address, or None.
        per_cpu: offset of a fixed operand in per-CPU memory, or None.
        fields: (offset, bytes) in the code of what may hold an address that is linked in.
    """

    addr: Addr
    code: bytes
    mnemonic: str
    operands: str
    target: Addr | None = None
    place: Addr | None = None
    value: int | None = None
    per_cpu: int | None = None
    fields: tuple[tuple[int, int], ...] = ()

    @property
    def next(self) -> Addr:
        """The first address after it."""
        return Addr(self.addr + len(self.code))

    @property
    def text(self) -> str:
        """Mnemonic and operands."""
        return f"{self.mnemonic} {self.operands}".rstrip()


class MemoryAccess(Struct, frozen=True, kw_only=True):
    """A memory operand, or an address computed, a constant after a window of memory's start.

    Attributes:
        offset: that constant: bytes from the window's start; what is added besides is unknown.
        origin: of the last instruction that added what is not a constant; else of the one that
            brought the window's address. It tells one such place from another.
        size: bytes that are accessed; 0 where the address is only computed.
        is_write: whether memory is written.
    """

    offset: int
    origin: Addr
    size: int
    is_write: bool


class InsnVerdict(Struct, frozen=True, kw_only=True):
    """Whether an instruction may carry a probe.

    Attributes:
        verdict: ``copy``, ``relocate``, ``emulate``: what a slot does with it; or ``refuse``.
        why: the reason, for a user.
    """

    verdict: str
    why: str

    @property
    def is_refused(self) -> bool:
        """Whether no slot may run it."""
        return self.verdict == "refuse"


class Analysis(Struct, frozen=True, kw_only=True):
    """A whole function, understood.

    Attributes:
        sizes: bytes of each of its instructions, by address.
        insn_verdict: an address to whether it may carry a probe.
    """

    sizes: Mapping[int, int]
    insn_verdict: Callable[[int], InsnVerdict]

    def start_of(self, addr: int) -> Addr | None:
        """Return where the instruction begins that an address lies in, or None."""
        starts = (at for at in range(addr, addr - 20, -1) if at in self.sizes)
        return next((Addr(at) for at in starts if addr < at + self.sizes[at]), None)


PREAMBLES = ("__pfx_", "__cfi_")
"""Beginnings of the names of what lies before functions."""


def forbidden_place(
    name: str, parts: Sequence[TextPart], addr: int, tables: TextTables
) -> str | None:
    """Return why a place of a function may carry no probe, or None.

    Args:
        name: of the function.
        parts: its pieces, the one with its entry first.
        addr: the place.
        tables: what is known of the kernel's text.
    """
    if tables.missing:
        return f"which instructions a probe would break is not known: {tables.missing} not found"
    if name.startswith(PREAMBLES):
        return "it is padding before a function, which the kernel keeps for itself"
    entry = parts[0].addr
    # A .cold part is forbidden with its function, as the kernel looks both names up.
    is_cold = not entry <= addr < parts[0].stop
    for place in (addr, entry) if is_cold else (addr,):
        after = bisect.bisect_right(tables.forbidden, place, key=lambda range_: range_.start)
        if after and place < tables.forbidden[after - 1].stop:
            return tables.forbidden[after - 1].why
    # within_kprobe_blacklist() looks up what is before the first dot.
    base, dot, _ = name.partition(".")
    if dot and base in tables.forbidden_names:
        return f"it was split from {base}, which the kernel forbids to probe"
    return None


def probed_place(addr: int, tables: TextTables) -> str | None:
    """Return why the kernel's own kprobes leave no room for one of ours, or None."""
    return next((each.why for each in tables.probed if each.start <= addr < each.stop), None)


def reserved_place(start: int, stop: int, tables: TextTables) -> str | None:
    """Return why the kernel itself needs an instruction to stay where and as it is, or None.

    Args:
        start: the instruction's address.
        stop: the first address after it.
        tables: what is known of the kernel's text.
    """
    if start in tables.jump_labels:
        return "it is a jump label, which the kernel flips between nop and jump"
    if start in tables.exceptions:
        return "the exception table repairs its faults, and knows it by its address"
    last = bisect.bisect_left(tables.alternatives, (stop,)) - 1
    if last >= 0 and start < tables.alternatives[last][1]:
        return "it is an alternative, which the kernel rewrites"
    return None
