"""Plan for one site: what to write where, which probes run there, and how returns are probed.

A function is left by every return and tail jump of it, or it is said why they are not all known. A
call in progress has an instance where something must be kept for its return:

    struct instance {
        u64 slot;       // where its return address is on its stack, 0: free; written first;
                        // where a register has that, the stack pointer at the entry
        u64 caller;     // the return address, where the trampoline's has taken its place, else 0
        u64 origin;     // with it: the same, but where that is a trampoline too, what it stands for
        u64 exit;       // the tail jump by which it was left, or 0
        u64 counter;    // the CPU's raw cycle counter at its entry, or the guest's clock
        u64 generation; // ``Returns.generation`` of the code that has written it
        u64 values[];   // what its entry has left for its return: ``Returns.kept``
    };

A slot belongs to one call at a time, whatever CPU, task or context runs: only who stands on that
stack touches its instance, so that nobody waits for anybody. Instances are found from
``slot * INSTANCE_MULTIPLIER >> 32``, modulo 2^32, times their number, again ``>> 32``; then one by
one, around the end.

In front of every trampoline are two u64: where its function's instances are, and
``stride << 32 | number`` of them.
"""

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct

from kprobes.model.override import Override
from kprobes.model.resolved import Operand, Resolved
from kprobes.model.upcall import Upcall
from kprobes.units import Addr


class ExitKind(StrEnum):
    """What an exit does."""

    RETURN = "return"
    TAIL = "tail jump"
    BRANCH = "conditional tail jump"
    INDIRECT = "indirect tail jump"


class ReturnMethod(StrEnum):
    """How a function's returns are probed: docs/internals/returns.md. The cheapest comes first."""

    RETINSN = "retinsn"
    """At its return instructions: there are no other exits."""
    TAIL = "tail"
    """At its return instructions, and by taking over the return at its tail jumps."""
    RETHOOK = "rethook"
    """By replacing the return address at its entry: its exits are not proven."""
    REFUSED = "refused"
    """In no way."""


class Exit(Struct, frozen=True, kw_only=True):
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


class Unproven(Struct, frozen=True, kw_only=True):
    """What is missing in a proof.

    Attributes:
        addr: of the instruction that it is about.
        why: in words that name no address, so that gaps can be counted by them.
        callee: what would close it if it never returned, or None.
    """

    addr: Addr
    why: str
    callee: Addr | None = None


class Exits(Struct, frozen=True, kw_only=True):
    """All ways out of one function.

    Attributes:
        entry: its first address.
        exits: by address; after a gap, those that were found.
        noreturn_sites: instructions after which nothing of it runs: calls that do not return, ud2.
        why_not: why these may not be all exits, or None when they are proven to be.
        refusal: why its returns cannot be probed at all, or None.
        is_endless: whether it is proven never to come back to its caller.
    """

    entry: Addr
    exits: tuple[Exit, ...] = ()
    noreturn_sites: tuple[Addr, ...] = ()
    why_not: Unproven | None = None
    refusal: str | None = None
    is_endless: bool = False

    @property
    def return_method(self) -> ReturnMethod:
        """How its returns are probed."""
        if self.refusal is not None:
            return ReturnMethod.REFUSED
        if self.why_not is not None:
            return ReturnMethod.RETHOOK
        return ReturnMethod.TAIL if self.tails else ReturnMethod.RETINSN

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


INSTANCE_SLOT, INSTANCE_CALLER, INSTANCE_ORIGIN = 0, 8, 16
INSTANCE_EXIT, INSTANCE_COUNTER, INSTANCE_GENERATION, INSTANCE_VALUES = 24, 32, 40, 48
INSTANCE_MULTIPLIER = 0x9E37_79B9_7F4A_7C15
TRAMPOLINE_HEADER = 24
"""After it, 8 bytes after a multiple of 16, a trampoline begins: ``instances.c`` says why."""


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
    TRAMPOLINE = "trampoline"
    """In the trampoline: record, and return to where the function was called from."""


class InstanceTable(Struct, frozen=True, kw_only=True):
    """Room for the calls of one function that are in progress.

    Attributes:
        addr: of the first instance.
        count: of instances.
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


class Returns(Struct, frozen=True, kw_only=True):
    """All return probes of one function.

    Attributes:
        entry: the address of its probe at the entry.
        return_method: how its returns are probed.
        probes: newest first, as all of them run at every return.
        kept: operands, as they are at the entry, that the records of its returns tell.
        is_timed: whether the entry's time is kept.
        upcalls: what Python does at every return, after the probes.
        room: values that an instance has room for at least.
        generation: how often the probes have changed while calls were in progress.
        since: by event id, the first generation whose entries keep what a probe needs; of probes
            that are not here all do.
    """

    entry: Addr
    return_method: ReturnMethod
    probes: tuple[Resolved, ...]
    kept: tuple[Operand, ...] = ()
    is_timed: bool = False
    upcalls: tuple[Upcall, ...] = ()
    room: int = 0
    generation: int = 0
    since: tuple[tuple[int, int], ...] = ()

    @property
    def keeps(self) -> bool:
        """Whether something of the entry is kept for the return."""
        return bool(self.kept) or self.is_timed

    @property
    def takes_over(self) -> bool:
        """Whether return addresses are replaced by the trampoline's."""
        return self.return_method in (ReturnMethod.TAIL, ReturnMethod.RETHOOK)

    @property
    def has_instances(self) -> bool:
        """Whether each call in progress needs an instance."""
        return self.keeps or self.takes_over

    @property
    def stride(self) -> int:
        """Bytes of one instance."""
        return INSTANCE_VALUES + 8 * max(self.room, len(self.kept))

    @property
    def first_generations(self) -> tuple[int, ...]:
        """For each probe the first generation of the calls that it records."""
        since = dict(self.since)
        return tuple(since.get(probe.layout.event_id, 0) for probe in self.probes)

    @property
    def maxactive(self) -> int:
        """Calls in progress that the probes' definitions ask for, 0 where they say nothing."""
        return max((probe.definition.maxactive for probe in self.probes), default=0)


class Returning(Struct, frozen=True, kw_only=True):
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
        kept = returns.kept, returns.is_timed, returns.stride
        generations = returns.generation, returns.first_generations
        return self.role, *kept, *generations, bool(returns.upcalls), probes


LONGEST_PATCH = 32
"""Bytes of text that a patch may take the place of, at most."""


class Strategy(StrEnum):
    """How a site is patched: docs/internals/patching.md. The cheapest comes first."""

    FTRACE = "ftrace"
    JUMP = "jump"
    BREAKPOINT = "breakpoint"


class Patch(Struct, frozen=True, kw_only=True):
    """One write to the guest's memory, with the bytes it replaces."""

    addr: Addr
    old: bytes
    new: bytes

    def __post_init__(self) -> None:
        """Refuse a patch that would change more than it knows."""
        if len(self.old) != len(self.new):
            raise ValueError(f"{len(self.old)} bytes replaced by {len(self.new)}")


class Displaced(Struct, frozen=True, kw_only=True):
    """Whole instructions that a detour runs in the place of their own.

    Attributes:
        addr: of the first.
        code: their bytes, one after the other.
        count: of the instructions.
        stop: the first address after the bytes that a patch may change.
    """

    addr: Addr
    code: bytes
    count: int
    stop: Addr


class PatchOptions(Struct, frozen=True, kw_only=True):
    """How one address of a kernel's text may be patched, besides as a function tracer's site.

    Attributes:
        breakpoint: what a breakpoint there displaces, or why there can be none.
        jump: what a jump there displaces, or why there can be none.
        is_boundary: whether an instruction begins there.
    """

    breakpoint: Displaced | str
    jump: Displaced | str
    is_boundary: bool


class Site(Struct, frozen=True, kw_only=True):
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
        is_tracepoint: whether ``addr`` is a tracepoint's struct, and the bytes are those of a
            function of ours that it calls, wherever that is: as at an ftrace site.
    """

    strategy: Strategy
    addr: Addr
    old: bytes
    record: Addr | None = None
    flags: int = 0
    displaced: Displaced | None = None
    why: str = ""
    shown: Addr | None = None
    is_tracepoint: bool = False

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


class Plan(Struct, frozen=True, kw_only=True):
    """One site, and what shares its patch: probes, return probes, overrides, and Python."""

    site: Site
    probes: tuple[Resolved, ...]
    upcalls: tuple[Upcall, ...] = ()
    returning: tuple[Returning, ...] = ()
    overrides: tuple[Override, ...] = ()

    @property
    def recorded(self) -> tuple[Resolved, ...]:
        """All probes that have something to do here, those at returns last."""
        if not self.returning:
            return self.probes
        return (*self.probes, *(p for each in self.returning for p in each.returns.probes))

    @property
    def calls_guest(self) -> bool:
        """Whether a hit runs functions of the guest, so that all of its probes must be guarded."""
        filtered = (override.probe for override in self.overrides)
        return any(probe.calls_guest for probe in (*self.recorded, *filtered))

    @property
    def before(self) -> tuple[Upcall, ...]:
        """What Python does before the instruction."""
        return tuple(upcall for upcall in self.upcalls if not upcall.is_after)

    @property
    def after(self) -> tuple[Upcall, ...]:
        """What Python does after it."""
        return tuple(upcall for upcall in self.upcalls if upcall.is_after)

    @property
    def name(self) -> str:
        """What to call it where something is wrong with its patch."""
        if self.recorded:
            return self.recorded[0].layout.event
        if self.overrides:
            return f"override of {self.overrides[0].probe.definition.place.symbol}"
        return f"handler at {self.site.addr:#x}"
