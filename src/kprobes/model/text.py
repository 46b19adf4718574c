"""Kernel text and what else is known of it, besides its bytes."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kprobes.units import Addr


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPart:
    """One piece of a function: its own range, or that of its ``.cold`` part.

    Attributes:
        addr: where it is.
        code: its bytes, as they were before anybody's probes changed them.
    """

    addr: Addr
    code: bytes

    @property
    def stop(self) -> Addr:
        """The first address behind it."""
        return Addr(self.addr + len(self.code))


@dataclass(frozen=True, slots=True, kw_only=True)
class Forbidden:
    """Addresses [start, stop) that may carry no probe, and why."""

    start: Addr
    stop: Addr
    why: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TextTables:
    """What a kernel's tables say of its text; what is empty is not known.

    Attributes:
        exceptions: instructions whose faults the exception table repairs, to where.
        jump_labels: instructions that the kernel flips between nop and jump, to their target.
        static_calls: instructions that the kernel points elsewhere while it runs.
        ftrace: sites of the kernel's function tracer.
        pointers: where it keeps eight bytes in front of functions, each an ftrace_ops' address.
        alternatives: (start, stop) of text that boot still rewrites: in images only.
        replacements: by such text's start: each code that boot may put there, where it is linked,
            and the first address behind the text.
        annexes: by address, code elsewhere that functions run as part of themselves: repairs of
            faults, and what alternatives jump to until boot has rewritten them.
        forbidden: by address, overlapping nowhere.
        probed: by address, what the kernel's own kprobes have at this moment; may overlap.
        forbidden_names: of the functions there: what compilers split from one, and name after
            it with a suffix, is forbidden too.
        returns: return thunks: a jump there is a return.
        indirect: retpolines: a call or jump there goes wherever a register says.
        has_jump_tables: whether the compiler may have made any: not with retpolines or IBT.
        has_landings: whether calls through pointers land only on instructions made for it, which
            then must stay; True where that is not known.
        no_return: functions that never come back to their caller.
        missing: what says where probes do harm and was not found, in words; "" when all was.
        landings: where the exception table and jump labels lead.
        landings_from: the instructions that these belong to.
    """

    exceptions: Mapping[int, int] = field(default_factory=dict[int, int])
    jump_labels: Mapping[int, int] = field(default_factory=dict[int, int])
    static_calls: frozenset[int] = frozenset()
    ftrace: frozenset[int] = frozenset()
    pointers: frozenset[int] = frozenset()
    alternatives: tuple[tuple[int, int], ...] = ()
    replacements: Mapping[int, tuple[tuple[TextPart, Addr], ...]] = field(
        default_factory=dict[int, tuple[tuple[TextPart, Addr], ...]]
    )
    annexes: Mapping[int, TextPart] = field(default_factory=dict[int, TextPart])
    forbidden: tuple[Forbidden, ...] = ()
    probed: tuple[Forbidden, ...] = ()
    forbidden_names: frozenset[str] = frozenset()
    returns: frozenset[int] = frozenset()
    indirect: frozenset[int] = frozenset()
    has_jump_tables: bool = True
    has_landings: bool = True
    no_return: frozenset[int] = frozenset()
    missing: str = ""
    landings: frozenset[int] = field(init=False)
    landings_from: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        led_to = (*self.exceptions.values(), *self.jump_labels.values())
        object.__setattr__(self, "landings", frozenset(led_to))
        object.__setattr__(self, "landings_from", frozenset((*self.exceptions, *self.jump_labels)))
