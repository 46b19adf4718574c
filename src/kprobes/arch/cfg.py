"""Control-flow graphs: all paths through a function, and through code of unknown size.

A function is followed as the CPU would run it, also to where the exception table, jump labels and
alternatives lead. An architecture says, by its ``FunctionCode``, what its instructions are, where
each goes on, and what it does to the stack. Code that no symbol tells the size of is what direct
branches and calls reach from its entry.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from msgspec import Struct, field

from kprobes.arch.insn import Flow
from kprobes.model.kernel import TextPart, TextTables
from kprobes.model.plan import Exit, ExitKind, Exits, Unproven
from kprobes.units import Addr

EXIT_KINDS = {
    Flow.RETURN: ExitKind.RETURN,
    Flow.JUMP: ExitKind.TAIL,
    Flow.BRANCH: ExitKind.BRANCH,
    Flow.INDIRECT_JUMP: ExitKind.INDIRECT,
}
_LEAVING = frozenset({Flow.RETURN, Flow.INDIRECT_JUMP, Flow.LEAVE, Flow.UNKNOWN})


class Insn(Protocol):
    """An instruction of some architecture."""

    @property
    def addr(self) -> Addr:
        """Where it is."""
        ...

    @property
    def next(self) -> Addr:
        """The first address after it."""
        ...

    @property
    def flow(self) -> Flow:
        """Where it goes on."""
        ...

    @property
    def target(self) -> Addr | None:
        """Where a direct branch or call goes; None for others."""
        ...


class StackState(Protocol):
    """What is known of the stack before an instruction."""

    @property
    def is_as_at_entry(self) -> bool:
        """Whether a jump to a function would be one more call of it."""
        ...


InstructionT = TypeVar("InstructionT", bound=Insn)
StackT = TypeVar("StackT", bound=StackState)


class Cfg(Struct, Generic[InstructionT, StackT], kw_only=True, eq=False):
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
        """Return what the paths prove of a function's ways out.

        Args:
            entry: of the function.
            exits: of each instruction in ``leaving``.
            gap: why there may be others, or None.
        """
        is_endless = gap is None and all(each.target == entry for each in exits)
        return Exits(
            entry=entry,
            exits=exits,
            noreturn_sites=tuple(sorted(self.noreturn_sites)),
            why_not=gap,
            refusal="it never returns" if is_endless else None,
            is_endless=is_endless,
        )


class FunctionCode(Protocol[InstructionT, StackT]):
    """The instructions of one function, as far as architectures differ."""

    @property
    def parts(self) -> Sequence[TextPart]:
        """The function's pieces, the one with its entry first."""
        ...

    def next(self, addr: int, source: InstructionT | None) -> InstructionT | None:
        """Return the first instruction from an address on that does not simply go on.

        Instructions that do may be returned, too; ``source`` led there, if one did. None where the
        path leads to no instruction of the function.
        """
        ...

    def is_inside(self, addr: int) -> bool:
        """Return whether an address is in the middle of an instruction."""
        ...

    def is_own(self, addr: int) -> bool:
        """Return whether code belongs to the function: in its parts, or run as one of them."""
        ...

    def decode(self, part: TextPart) -> Iterable[InstructionT]:
        """Return the instructions of a replacement."""
        ...

    def after(self, i: InstructionT, stack: StackT) -> tuple[Flow, StackT]:
        """Return where an instruction goes on in this function, and the stack after it."""
        ...

    def merged(self, one: StackT, other: StackT) -> StackT:
        """Return what is known where two paths meet."""
        ...

    def missed(self, reached: Mapping[int, StackT]) -> Iterator[tuple[int, StackT]]:
        """Yield where code is that no path has led to, and the stack there.

        Each is followed, which adds to ``reached``, before the next is asked for.
        """
        ...

    def leave(self, i: InstructionT, stack: StackT, cfg: Cfg[InstructionT, StackT]) -> None:
        """Note a return, or an indirect jump.

        Args:
            i: the instruction.
            stack: after it.
            cfg: where it is noted, as leaving or as unproven, if it leaves the function.
        """
        ...

    def hidden(self, i: InstructionT) -> str | None:
        """Return why another instruction may be in the place of a breakpoint, or None."""
        ...

    def is_trap(self, i: InstructionT) -> bool:
        """Return whether an instruction stops the kernel, or makes it warn."""
        ...

    def is_last(self, i: InstructionT) -> bool:
        """Return whether a call or trap is the last on its path, if it never comes back."""
        ...


class Step(Struct, Generic[InstructionT, StackT], frozen=True, kw_only=True):
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
        """Add a step that is sure.

        Args:
            addr: where the path goes on.
            stack: as it is there.
            source: what leads there, if an instruction does.
        """
        self._sure.append(Step(addr=addr, stack=stack, source=source))

    def come_back(self, addr: int, stack: StackT, source: InstructionT, *, is_trap: bool) -> None:
        """Add a step after a call, or a trap, that perhaps never comes back.

        Args:
            addr: the first address after it.
            stack: as it is there.
            source: the call or trap.
            is_trap: it is less likely that it comes back.
        """
        todo = self._trapped if is_trap else self._called
        todo.append(Step(addr=addr, stack=stack, source=source))


def build_cfg(
    code: FunctionCode[InstructionT, StackT], entry: StackT, tables: TextTables
) -> Cfg[InstructionT, StackT]:
    """Follow every path through a function.

    Args:
        code: its instructions.
        entry: the stack at its entry.
        tables: what is known of the kernel's text.
    """
    found = _Builder(code, tables)
    found.follow(entry)
    return found.cfg


class _Builder(Generic[InstructionT, StackT]):
    def __init__(self, code: FunctionCode[InstructionT, StackT], tables: TextTables) -> None:
        self.cfg = Cfg[InstructionT, StackT]()
        self._code = code
        self._tables = tables
        self._entry = code.parts[0].addr
        self._pending = Worklist[InstructionT, StackT]()

    def follow(self, stack: StackT) -> None:
        self._follow_from(self._entry, stack)
        for addr, missed in self._code.missed(self.cfg.stacks):
            self._follow_from(addr, missed)

    def _follow_from(self, addr: int, stack: StackT) -> None:
        self._pending.go_on(addr, stack)
        for step, is_sure in self._pending.take():
            self._run(step, is_sure=is_sure)

    def _run(self, step: Step[InstructionT, StackT], *, is_sure: bool) -> None:
        # Straight on, until the path ends or comes to what is known.
        code, stacks, replacements = self._code, self.cfg.stacks, self._tables.replacements
        table_sources, next_, after = self._tables.table_sources, code.next, code.after
        at, stack, source = step.addr, step.stack, step.source
        while True:
            i = next_(at, source)
            if i is None:
                return self._lost(at, source)
            addr = i.addr
            known = stacks.get(addr)
            if known is not None and (
                known == stack or not is_sure or known == (stack := code.merged(known, stack))
            ):
                return None
            stacks[addr] = stack
            if addr in table_sources:
                self._follow_tables(i, stack)
            if addr in replacements:
                self._replace(i, stack)
            flow, stack = after(i, stack)
            if flow is not Flow.NEXT and not self._goes_on(i, stack):
                return None
            at, source, is_sure = i.next, i, True

    def _lost(self, at: int, source: InstructionT | None) -> None:
        if source is not None and at == source.next:
            why = "it runs on into what is after the function"
        elif self._code.is_inside(at):
            why = "it leads into the middle of an instruction"
        else:
            why = "it leads to where no instruction is"
        self.cfg.unproven[Addr(at) if source is None else source.addr] = why

    def _follow_tables(self, i: InstructionT, stack: StackT) -> None:
        fixup = self._tables.exceptions.get(i.addr)
        label = self._tables.jump_labels.get(i.addr)
        if label is not None:
            # It may be a jump now, and a nop later.
            self._pending.go_on(i.next, stack)
        for target, name in ((fixup, "the exception table"), (label, "a jump label")):
            if target is not None and self._code.is_own(target):
                self._pending.go_on(target, stack, i)
            elif target is not None:
                self.cfg.unproven[i.addr] = f"{name} leads out of the function"

    def _replace(self, i: InstructionT, stack: StackT) -> None:
        # Whatever boot makes of it leads to where some replacement does.
        for part, stop in self._tables.replacements[i.addr]:
            at = stack
            for each in self._code.decode(part):
                if each.flow in _LEAVING or not self._branch_within(each, at):
                    self.cfg.unproven[i.addr] = (
                        "it is an alternative, which boot may make a way out"
                    )
                _, at = self._code.after(each, at)
                if not each.flow.falls_through:
                    break
            else:
                self._pending.go_on(stop, at)

    def _branch_within(self, i: InstructionT, stack: StackT) -> bool:
        if i.flow not in (Flow.JUMP, Flow.BRANCH) or i.target is None:
            return True
        if not self._code.is_own(i.target):
            return i.target in self._tables.no_return
        self._pending.go_on(i.target, stack, i)
        return True

    def _goes_on(self, i: InstructionT, stack: StackT) -> bool:
        # Whether the next instruction is reached for sure; other ways on are put aside.
        match i.flow:
            case Flow.JUMP | Flow.BRANCH:
                self._jump(i, stack)
            case Flow.CALL | Flow.INDIRECT_CALL | Flow.TRAP:
                self._pause(i, stack)
            case Flow.INDIRECT_JUMP | Flow.RETURN:
                self._code.leave(i, stack, self.cfg)
            case Flow.LEAVE:
                self.cfg.unproven[i.addr] = "it leaves by another way than it came"
            case Flow.UNKNOWN:
                self.cfg.unproven[i.addr] = "its bytes are not an instruction"
            case Flow.TRANSACTION:
                self.cfg.unproven[i.addr] = "it begins or ends a transaction"
            case Flow.NEXT:
                pass
        return i.flow in (Flow.BRANCH, Flow.TRANSACTION, Flow.NEXT)

    def _jump(self, i: InstructionT, stack: StackT) -> None:
        target = i.target
        if target is None:
            self.cfg.unproven[i.addr] = "it jumps to another code segment"
        elif target in self._tables.no_return:
            self.cfg.noreturn_sites.add(i.addr)
        elif self._is_left_for(target, stack):
            self.cfg.leaving[i.addr] = i
        else:
            self._pending.go_on(target, stack, i)

    def _is_left_for(self, target: Addr, stack: StackT) -> bool:
        # A function's own entry is one more call of it, unless it is in the middle of something.
        if target == self._entry:
            return stack.is_as_at_entry
        return not self._code.is_own(target)

    def _pause(self, i: InstructionT, stack: StackT) -> None:
        why, target = self._code.hidden(i), i.target
        if why is None and target is not None and self._is_own_middle(target):
            why = "it calls into its own middle"
        if why is not None:
            self.cfg.unproven[i.addr] = why
            return
        is_last, is_trap = self._code.is_last(i), self._code.is_trap(i)
        if target in self._tables.no_return or (is_last and is_trap):
            self.cfg.noreturn_sites.add(i.addr)
        elif is_last:
            self.cfg.unproven[i.addr] = "it is last, and calls what is not known never to return"
            if target is not None:
                self.cfg.last_calls[i.addr] = target
        else:
            self._pending.come_back(i.next, stack, i, is_trap=is_trap)

    def _is_own_middle(self, target: Addr) -> bool:
        inside = any(part.addr <= target < part.stop for part in self._code.parts)
        return inside and target != self._entry


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
