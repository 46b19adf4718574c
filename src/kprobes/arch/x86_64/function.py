"""A decoded function: its instructions, where each goes on, and where proof of them ends."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from iced_x86 import Mnemonic

from kprobes.model.text import TextPart
from kprobes.units import Addr

MAX_SIZE = 15
"""Bytes of the longest instruction."""
PREFIX_SIZE = 5
"""Of a forced emulation prefix, which counts as part of what it is for."""

_PADDING = frozenset({Mnemonic.NOP, Mnemonic.INT3})


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
    UNKNOWN = "unknown"

    @property
    def falls_through(self) -> bool:
        """Whether the next instruction may be reached: from a callee, or behind a WARN's ud2."""
        return self not in _ENDS


_ENDS = frozenset({Flow.JUMP, Flow.INDIRECT_JUMP, Flow.RETURN})


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction.

    Attributes:
        addr: where it is.
        code: its bytes, prefixes included.
        mnemonic: iced's number of it.
        flow: where it goes on; to a thunk is where the thunk goes.
        target: of a direct branch or call; else None.
        mention: an address that it computes or holds, without going there; or None.
        is_filler: padding that nothing is known to reach: at the end, or behind a jump.
        stack: what it adds to the stack pointer, a callee's work aside; None: something else.
    """

    addr: Addr
    code: bytes
    mnemonic: int
    flow: Flow
    target: Addr | None = None
    mention: Addr | None = None
    is_filler: bool = False
    stack: int | None = 0

    @property
    def next(self) -> Addr:
        """The first address behind it."""
        return Addr(self.addr + len(self.code))

    @property
    def is_padding(self) -> bool:
        """Whether it is what linkers and compilers fill gaps with."""
        return self.mnemonic in _PADDING


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Function:
    """A decoded function.

    Attributes:
        name: of its symbol.
        parts: its pieces, the one with its entry first.
        instructions: by address.
        targets: addresses inside that something may go to: branches of its own, exception
            fixups, jump labels, addresses that its code takes.
        doubts: one for each part whose boundaries are not proven to the end: from which address
            on, and why.
    """

    name: str
    parts: tuple[TextPart, ...]
    instructions: Mapping[int, Instruction]
    targets: frozenset[int]
    doubts: Mapping[int, str]

    def part_of(self, addr: int) -> TextPart | None:
        """Return the part that an address lies in, or None."""
        return next((part for part in self.parts if part.addr <= addr < part.stop), None)

    def covering(self, addr: int) -> Instruction | None:
        """Return the instruction that an address lies in, or None."""
        longest = MAX_SIZE + PREFIX_SIZE
        found = (self.instructions.get(addr - back) for back in range(longest))
        return next((i for i in found if i is not None and addr < i.next), None)

    def before(self, addr: int) -> Instruction | None:
        """Return the instruction that ends at an address, or None."""
        found = self.covering(addr - 1)
        return found if found is not None and found.next == addr else None

    def doubt(self, addr: int) -> str | None:
        """Return why an address is not proven to be a boundary, or None where it is."""
        part = self.part_of(addr)
        starts = (at for at in self.doubts if part and part.addr <= at <= addr)
        return next((self.doubts[at] for at in starts), None)

    def place(self, addr: int) -> str:
        """Return an address as ``name+0x12``."""
        return f"{self.name}+{addr - self.parts[0].addr:#x}"

    @property
    def exits(self) -> frozenset[int]:
        """Addresses outside that its jumps and branches lead to: tail calls and thunks."""
        found = (i.target for i in self.instructions.values() if i.mnemonic != Mnemonic.CALL)
        return frozenset(t for t in found if t is not None and self.part_of(t) is None)

    @property
    def overruns(self) -> tuple[Instruction, ...]:
        """The last instruction of each part that may go on behind the part's end."""
        real = [i for i in self.instructions.values() if not i.is_filler]
        lasts = {part.addr: i for i in real if (part := self.part_of(i.addr)) is not None}
        return tuple(i for i in lasts.values() if i.flow.falls_through)
