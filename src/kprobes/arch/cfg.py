"""Walking all paths through a function: what was found, what is still to do, what tables lead to.

An architecture follows one path from a step to its end; here is what that adds to, with its own
types of instructions and of what is known of the stack.

Code that no symbol tells the size of: what is reached from its entry, and what that computes.

An architecture says where one instruction leads, and what it does to what registers hold.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kprobes.model.kernel import TextTables
from kprobes.model.plan import Exit, Exits, Unproven
from kprobes.units import Addr

InstructionT = TypeVar("InstructionT")
StackT = TypeVar("StackT")


@dataclass(kw_only=True, eq=False)
class Cfg(Generic[InstructionT, StackT]):
    """What was found.

    Attributes:
        stacks: of instructions that are reached, by address: of those that matter.
        leaving: instructions that leave the function for good.
        noreturn_sites: instructions after which no path goes on.
        unproven: instructions at which a path is lost, and why.
        last_calls: those that are, unless what they call never returns.
    """

    stacks: dict[int, StackT] = field(default_factory=dict[int, StackT])
    leaving: dict[int, InstructionT] = field(default_factory=dict[int, InstructionT])
    noreturn_sites: set[Addr] = field(default_factory=set[Addr])
    unproven: dict[Addr, str] = field(default_factory=dict[Addr, str])
    last_calls: dict[Addr, Addr] = field(default_factory=dict[Addr, Addr])

    def lost(self) -> Iterator[Unproven]:
        """Yield where a path is lost, by address."""
        for addr, why in sorted(self.unproven.items()):
            yield Unproven(addr=addr, why=why, callee=self.last_calls.get(addr))

    def exits(self, entry: Addr, exits: tuple[Exit, ...], gap: Unproven | None) -> Exits:
        """Return what they prove of the function's ways out, given each of those and one gap."""
        is_endless = gap is None and all(each.target == entry for each in exits)
        return Exits(
            entry=entry,
            exits=exits,
            noreturn_sites=tuple(sorted(self.noreturn_sites)),
            why_not=gap,
            refusal="it never returns" if is_endless else None,
            is_endless=is_endless,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Generic[InstructionT, StackT]):
    """Where a path is to be followed from.

    Attributes:
        stack: as it is there.
        source: what led there, if an instruction did.
    """

    addr: int
    stack: StackT
    source: InstructionT | None


class Worklist(Generic[InstructionT, StackT]):
    """Steps that are still to be made, the surest first.

    After a call or trap that perhaps never comes back: what is there has most often been reached
    otherwise by then, with the stack that it really has. A trap less often does.
    """

    def __init__(self) -> None:
        self._sure: list[Step[InstructionT, StackT]] = []
        self._called: list[Step[InstructionT, StackT]] = []
        self._trapped: list[Step[InstructionT, StackT]] = []

    def take(self) -> Iterator[tuple[Step[InstructionT, StackT], bool]]:
        """Yield each step and whether it is sure, until none is left; more may come meanwhile."""
        while todo := self._sure or self._called or self._trapped:
            is_sure = todo is self._sure
            yield todo.pop(), is_sure

    def go_on(self, addr: int, stack: StackT, source: InstructionT | None = None) -> None:
        """Add a step that is sure."""
        self._sure.append(Step(addr=addr, stack=stack, source=source))

    def come_back(self, addr: int, stack: StackT, source: InstructionT, *, is_trap: bool) -> None:
        """Add a step after a call, or a trap, that perhaps never comes back."""
        todo = self._trapped if is_trap else self._called
        todo.append(Step(addr=addr, stack=stack, source=source))


def table_targets(tables: TextTables, addr: int) -> Iterator[tuple[int, str]]:
    """Yield where tables let an instruction go, and what is wrong if that is elsewhere."""
    fixup, label = tables.exceptions.get(addr), tables.jump_labels.get(addr)
    if fixup is not None:
        yield fixup, "the exception table leads out of the function"
    if label is not None:
        yield label, "a jump label leads out of the function"


_MAX_CODE = 1 << 16
"""Instructions that are followed: a probe of 128 arguments has some thousands."""

Instruction = TypeVar("Instruction")
Held = TypeVar("Held")
Pieces = tuple[tuple[Addr, bytes], ...]
"""(address, bytes) by address; neighbours are one piece."""
Led = tuple[bytes, Iterable[int]]
"""An instruction, and where it leads by itself."""


def pieces_from(entry: int, inside: range, led: Callable[[int], Led | None]) -> Pieces:
    """Return what can be reached from an address by direct branches and calls.

    Args:
        entry: of the code.
        inside: which addresses belong to it; what leads elsewhere is not followed.
        led: the instruction at an address, or None where none is.
    """
    found: dict[int, bytes] = {}
    waiting = [entry]
    while waiting and len(found) < _MAX_CODE:
        addr = waiting.pop()
        if addr in found or addr not in inside:
            continue
        instruction = led(addr)
        if instruction is not None:
            found[addr], targets = instruction
            waiting += targets
    return _joined(found)


def _joined(found: Mapping[int, bytes]) -> Pieces:
    pieces: list[tuple[Addr, bytes]] = []
    for addr in sorted(found):
        code = found[addr]
        if pieces and pieces[-1][0] + len(pieces[-1][1]) == addr:
            pieces[-1] = pieces[-1][0], pieces[-1][1] + code
        else:
            pieces.append((Addr(addr), code))
    return tuple(pieces)


def states_of(
    code: Mapping[int, Instruction],
    entry: int,
    successors: Callable[[Instruction], Iterable[int]],
    after: Callable[[Instruction, Mapping[int, Held]], Mapping[int, Held]],
) -> dict[int, Mapping[int, Held]]:
    """Return what is known of registers before each instruction, on every way there.

    Args:
        code: instructions by address.
        entry: where nothing is known; a piece that only calls lead to begins so, too.
        successors: where an instruction leads.
        after: what registers hold after an instruction.
    """
    states: dict[int, Mapping[int, Held]] = {}
    waiting: list[tuple[int, Mapping[int, Held]]] = [(entry, {})]
    while waiting:
        addr, state = waiting.pop()
        if addr not in code:
            continue
        known = states.get(addr)
        merged = state if known is None else dict(known.items() & state.items())
        if merged == known:
            continue
        states[addr] = merged
        following = after(code[addr], merged)
        waiting += [(successor, following) for successor in successors(code[addr])]
    return states
