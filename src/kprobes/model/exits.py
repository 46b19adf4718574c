"""How a function is left: every return and tail jump of it, or why they are not all known."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from kprobes.units import Addr


class ExitKind(StrEnum):
    """What an exit does."""

    RETURN = "return"
    TAIL = "tail jump"
    BRANCH = "conditional tail jump"
    INDIRECT = "indirect tail jump"


class ReturnWay(StrEnum):
    """How a function's returns are probed; DESIGN section 7. The cheapest comes first."""

    RETINSN = "retinsn"
    """At its return instructions: there are no other exits."""
    TAIL = "tail"
    """At its return instructions, and by taking over the return at its tail jumps."""
    RETHOOK = "rethook"
    """By replacing the return address at its entry: its exits are not proven."""
    REFUSED = "refused"
    """In no way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """One instruction by which a function is left for good.

    Attributes:
        addr: where it is.
        kind: what it does.
        target: where it jumps to, or None: a return, or where a register says.
        size: bytes from ``addr`` on that a patch may cover.
        why: why these are too few for a jump, or "".
    """

    addr: Addr
    kind: ExitKind
    target: Addr | None
    size: int
    why: str = ""

    @property
    def has_jump(self) -> bool:
        """Whether one jump may replace it."""
        return not self.why


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """What is missing in a proof.

    Attributes:
        addr: of the instruction that it is about.
        why: in words that name no address, so that gaps can be counted by them.
        callee: what would close it if it never returned, or None.
    """

    addr: Addr
    why: str
    callee: Addr | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exits:
    """All ways out of one function.

    Attributes:
        entry: its first address.
        exits: by address; after a gap, those that were found.
        ends: instructions behind which nothing of it runs: calls that do not return, and ud2.
        why_not: why these may not be all exits, or None when they are proven to be.
        refusal: why its returns cannot be probed at all, or None.
        is_endless: whether it is proven never to come back to its caller.
    """

    entry: Addr
    exits: tuple[Exit, ...] = ()
    ends: tuple[Addr, ...] = ()
    why_not: Gap | None = None
    refusal: str | None = None
    is_endless: bool = False

    @property
    def way(self) -> ReturnWay:
        """How its returns are probed."""
        if self.refusal is not None:
            return ReturnWay.REFUSED
        if self.why_not is not None:
            return ReturnWay.RETHOOK
        return ReturnWay.TAIL if self.tails else ReturnWay.RETINSN

    @property
    def returns(self) -> tuple[Exit, ...]:
        """The exits that return."""
        return _of(self.exits, is_return=True)

    @property
    def tails(self) -> tuple[Exit, ...]:
        """The exits that jump into another function, which returns instead."""
        return _of(self.exits, is_return=False)


def _of(exits: Iterable[Exit], *, is_return: bool) -> tuple[Exit, ...]:
    return tuple(each for each in exits if (each.kind is ExitKind.RETURN) == is_return)
