"""What planning decides for one site: what to write where, and which probes run there."""

from dataclasses import dataclass
from enum import StrEnum

from kprobes.model.resolved import Resolved
from kprobes.model.returns import Returning
from kprobes.model.upcall import Upcall
from kprobes.units import Addr


class Strategy(StrEnum):
    """How a site is patched; DESIGN section 5. The cheapest comes first."""

    FTRACE = "ftrace"
    JUMP = "jump"
    BREAKPOINT = "breakpoint"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One write to the guest's memory, with the bytes it replaces."""

    addr: Addr
    old: bytes
    new: bytes

    def __post_init__(self) -> None:
        """Refuse a patch that would change more than it knows."""
        if len(self.old) != len(self.new):
            raise ValueError(f"{len(self.old)} bytes replaced by {len(self.new)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Displaced:
    """Whole instructions that a detour runs in the place of their own.

    Attributes:
        addr: of the first.
        code: their bytes, one behind the other.
        count: of the instructions.
        stop: the first address behind the bytes that a patch may change.
    """

    addr: Addr
    code: bytes
    count: int
    stop: Addr


@dataclass(frozen=True, slots=True, kw_only=True)
class Ways:
    """How one address of a kernel's text may be patched, besides as a function tracer's site.

    Attributes:
        breakpoint: what a breakpoint there displaces, or why there can be none.
        jump: what a jump there displaces, or why there can be none.
        is_boundary: whether an instruction begins there.
    """

    breakpoint: Displaced | str
    jump: Displaced | str
    is_boundary: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One address that a patch goes to, as it is now.

    Attributes:
        strategy: of the patch.
        addr: of the bytes.
        old: what they are; all that planning relies on.
        record: of the guest's dyn_ftrace for an ftrace site that runs; else None.
        flags: of that record.
        displaced: what the detour runs, other than at an ftrace site.
        why: why it is no cheaper strategy, or "".
        shown: the address that its probes have, if not its own; or None.
    """

    strategy: Strategy
    addr: Addr
    old: bytes
    record: Addr | None = None
    flags: int = 0
    displaced: Displaced | None = None
    why: str = ""
    shown: Addr | None = None

    @property
    def ip(self) -> Addr:
        """The address that its probes have."""
        return self.addr if self.shown is None else self.shown

    @property
    def covered(self) -> tuple[tuple[Addr, Addr], ...]:
        """Addresses [start, stop) that nobody may come back to when the patch is written."""
        if self.displaced is None or self.displaced.count == 1:
            return ()
        return ((Addr(self.addr + 1), self.displaced.stop),)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One site, and what shares its patch: probes, what return probes do there, and Python."""

    site: Site
    probes: tuple[Resolved, ...]
    upcalls: tuple[Upcall, ...] = ()
    returning: tuple[Returning, ...] = ()

    @property
    def recorded(self) -> tuple[Resolved, ...]:
        """All probes that have something to do here, those at returns last."""
        return (*self.probes, *(p for each in self.returning for p in each.returns.probes))

    @property
    def before(self) -> tuple[Upcall, ...]:
        """What Python does before the instruction."""
        return tuple(upcall for upcall in self.upcalls if not upcall.is_after)

    @property
    def after(self) -> tuple[Upcall, ...]:
        """What Python does behind it."""
        return tuple(upcall for upcall in self.upcalls if upcall.is_after)

    @property
    def name(self) -> str:
        """What to call it where something is wrong with its patch."""
        if self.recorded:
            return self.recorded[0].layout.event
        return f"handler at {self.site.addr:#x}"
