"""How a function's returns are probed: what is done at its entry, at its exits, and in between.

A call in progress has a frame where something must be kept for its return:

    struct frame {
        u64 slot;       // where its return address is on its stack, 0: free; written first;
                        // where a register has that, the stack pointer at the entry
        u64 caller;     // the return address, where the trampoline's has taken its place, else 0
        u64 origin;     // with it: the same, but where that is a trampoline too, what it stands for
        u64 exit;       // the tail jump by which it was left, or 0
        u64 counter;    // the CPU's raw cycle counter at its entry, or the guest's clock
        u64 values[];   // what its entry has left for its return: ``Returns.kept``
    };

A slot belongs to one call at a time, whatever CPU, task or context runs: only who stands on that
stack touches its frame, so that nobody waits for anybody. Frames are found from
``slot * FRAME_MULTIPLIER >> 32``, modulo 2^32, times their number, again ``>> 32``; then one by
one, around the end.

In front of every trampoline are two u64: where its function's frames are, and
``stride << 32 | number`` of them.
"""

from dataclasses import dataclass
from enum import StrEnum

from kprobes.model.exits import ReturnWay
from kprobes.model.resolved import Operand, Resolved
from kprobes.model.upcall import Upcall
from kprobes.units import Addr

FRAME_SLOT, FRAME_CALLER, FRAME_ORIGIN = 0, 8, 16
FRAME_EXIT, FRAME_COUNTER, FRAME_VALUES = 24, 32, 40
FRAME_MULTIPLIER = 0x9E37_79B9_7F4A_7C15
TRAMPOLINE_HEADER = 16


class Role(StrEnum):
    """What the return probes of a function do at one place."""

    ENTER = "enter"
    """At the entry: keep what the return will tell."""
    HOOK = "hook"
    """At the entry: keep it, and have the call return to the trampoline."""
    RETURN = "return"
    """At a return instruction: record."""
    TAIL = "tail"
    """At a jump into another function: have that return to the trampoline."""
    LAND = "land"
    """In the trampoline: record, and return to where the function was called from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frames:
    """Room for the calls of one function that are in progress.

    Attributes:
        addr: of the first frame.
        count: of frames.
        stride: bytes of one.
        trampoline: that takes the place of return addresses, or 0 when none does.
    """

    addr: Addr
    count: int
    stride: int
    trampoline: Addr

    @property
    def size(self) -> int:
        """Bytes of all."""
        return self.count * self.stride


@dataclass(frozen=True, slots=True, kw_only=True)
class Returns:
    """All return probes of one function.

    Attributes:
        entry: the address of its probe at the entry.
        way: how its returns are probed.
        probes: newest first, as all of them run at every return.
        kept: operands, as they are at the entry, that the records of its returns tell.
        is_timed: whether the entry's time is kept.
        upcalls: what Python does at every return, behind the probes.
    """

    entry: Addr
    way: ReturnWay
    probes: tuple[Resolved, ...]
    kept: tuple[Operand, ...] = ()
    is_timed: bool = False
    upcalls: tuple[Upcall, ...] = ()

    @property
    def keeps(self) -> bool:
        """Whether something of the entry is kept for the return."""
        return bool(self.kept) or self.is_timed

    @property
    def takes_over(self) -> bool:
        """Whether return addresses are replaced by the trampoline's."""
        return self.way in (ReturnWay.TAIL, ReturnWay.RETHOOK)

    @property
    def stride(self) -> int:
        """Bytes of one frame."""
        return FRAME_VALUES + 8 * len(self.kept)

    @property
    def maxactive(self) -> int:
        """Calls in progress that the probes' definitions ask for, 0 where they say nothing."""
        return max((probe.definition.maxactive for probe in self.probes), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Returning:
    """What return probes do at one site.

    Attributes:
        is_conditional: whether the instruction there is a TAIL only when its branch is taken.
    """

    role: Role
    returns: Returns
    is_conditional: bool = False

    @property
    def is_compiled(self) -> bool:
        """Whether machine code has something to do here: there may be only Python."""
        return self.role is not Role.RETURN or bool(self.returns.probes)

    @property
    def shape(self) -> tuple[object, ...]:
        """What its machine code depends on: equal shapes differ in numbers only."""
        returns = self.returns
        probes = tuple(probe.shape for probe in returns.probes)
        return self.role, returns.kept, returns.is_timed, bool(returns.upcalls), probes
