"""One instruction as people read it, of whatever architecture."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from kprobes.units import Addr

Read = Callable[[int, int], bytes]
"""(address, size) to exactly so many bytes; raises MemoryFault."""


class Syntax(StrEnum):
    """How instructions are written."""

    ATT = "att"
    INTEL = "intel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One line of a listing.

    Attributes:
        addr: where it is.
        code: its bytes; one byte where they are no instruction.
        mnemonic, operands: as text; ``(bad)`` for what is no instruction.
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
        """The first address behind it."""
        return Addr(self.addr + len(self.code))

    @property
    def text(self) -> str:
        """Mnemonic and operands."""
        return f"{self.mnemonic} {self.operands}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """A memory operand, or an address computed, a constant behind a window of memory's start.

    Attributes:
        offset: that constant: bytes from the window's start; what is added besides is unknown.
        origin: of the last instruction that added what is no constant; else of the one that
            brought the window's address. It tells one such place from another.
        size: bytes that are accessed; 0 where the address is only computed.
        is_write: whether memory is written.
    """

    offset: int
    origin: Addr
    size: int
    is_write: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A whole function, understood.

    Attributes:
        sizes: bytes of each of its instructions, by address.
        judge: an address to whether it may carry a probe.
    """

    sizes: Mapping[int, int]
    judge: Callable[[int], Opinion]

    def start_of(self, addr: int) -> Addr | None:
        """Return where the instruction begins that an address lies in, or None."""
        starts = (at for at in range(addr, addr - 20, -1) if at in self.sizes)
        return next((Addr(at) for at in starts if addr < at + self.sizes[at]), None)
