"""A decoded function: its words by address, and what each of them does to the way through it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from kprobes.arch.aarch64.words import SIZE, Addrs, Kind, Kinds, Words, code_of
from kprobes.model.text import TextPart
from kprobes.units import Addr


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
    LEAVE = "leave"
    UNKNOWN = "unknown"

    @property
    def falls_through(self) -> bool:
        """Whether the next instruction may be reached: from a callee, or behind a WARN's brk."""
        return self not in _ENDS


_ENDS = frozenset({Flow.JUMP, Flow.INDIRECT_JUMP, Flow.RETURN, Flow.LEAVE})

FLOWS: Mapping[Kind, Flow] = {
    Kind.UNALLOCATED: Flow.UNKNOWN,
    Kind.UDF: Flow.TRAP,
    Kind.B: Flow.JUMP,
    Kind.BL: Flow.CALL,
    Kind.B_COND: Flow.BRANCH,
    Kind.CBZ: Flow.BRANCH,
    Kind.TBZ: Flow.BRANCH,
    Kind.BR: Flow.INDIRECT_JUMP,
    Kind.BLR: Flow.INDIRECT_CALL,
    Kind.RET: Flow.RETURN,
    Kind.RET_AUTH: Flow.RETURN,
    Kind.ERET: Flow.LEAVE,
    Kind.BRK: Flow.TRAP,
    Kind.HLT: Flow.TRAP,
}
"""Of kinds that do not simply go on to the next instruction."""

BRANCHING = frozenset({Kind.B, Kind.BL, Kind.B_COND, Kind.CBZ, Kind.TBZ})
"""Kinds that go to an address of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction.

    Attributes:
        addr: where it is.
        word: its four bytes, as the CPU reads them.
        kind: what it is.
        target: of a direct branch or call; else None.
        mention: an address that it computes or loads from, without going there; or None.
    """

    addr: Addr
    word: int
    kind: Kind
    target: Addr | None = None
    mention: Addr | None = None

    @property
    def code(self) -> bytes:
        """Its bytes."""
        return code_of(self.word)

    @property
    def next(self) -> Addr:
        """The first address behind it."""
        return Addr(self.addr + SIZE)

    @property
    def flow(self) -> Flow:
        """Where it goes on."""
        return FLOWS.get(self.kind, Flow.NEXT)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Function:
    """A decoded function.

    Attributes:
        name: of its symbol.
        parts: its pieces, the one with its entry first.
        addrs, words, kinds, named: columns, one row for each word of all parts: where it is, what
            it is, and the address that it names or 0.
        rows: where each part's rows begin.
        targets: addresses inside that something may go to: branches of its own, exception
            fixups, jump labels, addresses that its code takes.
        data: addresses inside that its code reads constants from: they are no instructions.
        fillers: addresses behind the last instruction of a part.
    """

    name: str
    parts: tuple[TextPart, ...]
    addrs: Addrs
    words: Words
    kinds: Kinds
    named: Addrs
    rows: tuple[int, ...]
    targets: frozenset[int]
    data: frozenset[int]
    fillers: frozenset[int] = field(default=frozenset())

    def part_of(self, addr: int) -> TextPart | None:
        """Return the part that an address lies in, or None."""
        return next((part for part in self.parts if part.addr <= addr < part.stop), None)

    def row(self, addr: int) -> int | None:
        """Return the row of the word that begins at an address, or None."""
        for part, first in zip(self.parts, self.rows, strict=True):
            if part.addr <= addr <= part.stop - SIZE and not (addr - part.addr) % SIZE:
                return first + (addr - part.addr) // SIZE
        return None

    def at(self, addr: int) -> Instruction | None:
        """Return the instruction that begins at an address, or None."""
        row = self.row(addr)
        return None if row is None else self.instruction(row)

    def instruction(self, row: int) -> Instruction:
        """Return the instruction of a row."""
        kind, named = Kind(int(self.kinds[row])), int(self.named[row])
        is_branch = kind in BRANCHING
        return Instruction(
            addr=Addr(int(self.addrs[row])),
            word=int(self.words[row]),
            kind=kind,
            target=Addr(named) if is_branch else None,
            mention=Addr(named) if named and not is_branch else None,
        )

    def place(self, addr: int) -> str:
        """Return an address as ``name+0x12``."""
        return f"{self.name}+{addr - self.parts[0].addr:#x}"
