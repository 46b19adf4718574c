"""A decoded function to all paths through it: where they leave it, and where they are lost.

Paths begin at the entry and go on as the CPU would, also to where the exception table, jump
labels and addresses in the code lead. A path's stack tells a tail call from a jump within
hand-written code: at a tail call it is as at the entry.
"""

from collections.abc import Iterator, Mapping

from iced_x86 import Mnemonic

from kprobes.arch import walk
from kprobes.arch.x86_64.decode import decode_annex, decode_function, decode_one
from kprobes.arch.x86_64.function import Flow, Function, Instruction
from kprobes.arch.x86_64.stack import ENTRY, UNKNOWN, Stack, after
from kprobes.model.text import TextTables
from kprobes.units import Addr

_NEAR_RETURNS = frozenset({Mnemonic.RET, Mnemonic.JMP})
"""The second is a jump to a return thunk."""
_UD = frozenset({Mnemonic.UD0, Mnemonic.UD1, Mnemonic.UD2})
_LEAVING = frozenset({Flow.RETURN, Flow.INDIRECT_JUMP, Flow.UNKNOWN})


Paths = walk.Paths[Instruction, Stack]
_Step = walk.Step[Instruction, Stack]


def find_paths(function: Function, tables: TextTables) -> Paths:
    """Follow every path through a function."""
    found = _Walk(function, tables)
    found.follow()
    return found.paths


class _Walk:
    def __init__(self, function: Function, tables: TextTables) -> None:
        self.paths = Paths()
        self._function = function
        self._tables = tables
        self._code: Mapping[int, Instruction] = function.instructions
        entry = function.parts[0].addr
        self._pending = walk.Pending[Instruction, Stack]()
        self._pending.go_on(entry, ENTRY)

    def follow(self) -> None:
        self._follow_all()
        mentions = {i.mention for i in self._reached()}
        for addr in sorted(a for a in mentions if a is not None and self._is_missed(a)):
            # Its address is taken, which alone leads to it.
            self._pending.go_on(addr, UNKNOWN)
            self._follow_all()

    def _follow_all(self) -> None:
        for step, is_sure in self._pending.take():
            stack = self._merged(step, is_sure=is_sure)
            if stack is not None:
                self._run(step, stack)

    def _reached(self) -> Iterator[Instruction]:
        return (self._code[addr] for addr in self.paths.stacks)

    def _is_missed(self, addr: Addr) -> bool:
        return addr not in self.paths.stacks and self._function.part_of(addr) is not None

    def _merged(self, step: _Step, *, is_sure: bool) -> Stack | None:
        known = self.paths.stacks.get(step.addr)
        if known is None:
            return step.stack
        if known == step.stack or not is_sure:
            return None
        merged = Stack(*(a if a == b else None for a, b in zip(known, step.stack, strict=True)))
        return None if merged == known else merged

    def _run(self, step: _Step, stack: Stack) -> None:
        # Straight on, until the path ends or comes to what is known.
        stacks = self.paths.stacks
        at, source = step.addr, step.source
        while True:
            i = self._code.get(at)
            if i is None or _is_run_into(i, source):
                self._lost(at, source)
                return
            stacks[at] = stack
            if at in self._tables.landings_from:
                self._land(i, stack)
            if at in self._tables.replacements:
                self._replace(i, stack)
            stack = _behind(i, stack)
            if i.flow is not Flow.NEXT and not self._goes_on(i, stack):
                return
            at, source = i.next, i
            known = stacks.get(at)
            if known is not None:
                if known != stack:
                    self._pending.go_on(at, stack, i)
                return

    def _lost(self, at: int, source: Instruction | None) -> None:
        function = self._function
        place = source.addr if source is not None else Addr(at)
        if source is not None and at == source.next:
            why = "it runs on into what is behind the function"
        elif function.covering(at) is None:
            why = "it leads to where no instruction is"
        else:
            why = "it leads into the middle of an instruction"
        self.paths.gaps[place] = why

    def _land(self, i: Instruction, stack: Stack) -> None:
        if i.addr in self._tables.jump_labels:
            # It may be a jump now, and a nop later.
            self._pending.go_on(i.next, stack)
        for target, why in walk.landings(self._tables, i.addr):
            if self._is_own(target):
                self._pending.go_on(target, stack, i)
            else:
                self.paths.gaps[i.addr] = why

    def _replace(self, i: Instruction, stack: Stack) -> None:
        # Whatever boot makes of it leads to where some replacement does.
        for part, stop in self._tables.replacements[i.addr]:
            at = stack
            for each in decode_function("", (part,)).instructions.values():
                if each.flow in _LEAVING or not self._branch_within(each, at):
                    self.paths.gaps[i.addr] = "it is an alternative, which boot may make a way out"
                at = _behind(each, at)
                if not each.flow.falls_through:
                    break
            else:
                self._pending.go_on(stop, at)

    def _branch_within(self, i: Instruction, stack: Stack) -> bool:
        if i.flow not in (Flow.JUMP, Flow.BRANCH) or i.target is None:
            return True
        if not self._is_own(i.target):
            return i.target in self._tables.no_return
        self._pending.go_on(i.target, stack, i)
        return True

    def _is_own(self, target: int) -> bool:
        if self._function.part_of(target) is not None or target in self._code:
            return True
        annex = self._tables.annexes.get(target)
        if annex is None:
            return False
        self._code = {**decode_annex(annex), **self._code}
        return True

    def _goes_on(self, i: Instruction, stack: Stack) -> bool:
        # Whether the next instruction is reached for sure; other ways on are put aside.
        match i.flow:
            case Flow.JUMP | Flow.BRANCH:
                self._jump(i, stack)
                return i.flow is Flow.BRANCH
            case Flow.CALL | Flow.INDIRECT_CALL | Flow.TRAP:
                self._pause(i, stack)
                return False
            case Flow.INDIRECT_JUMP:
                self.paths.leaving[i.addr] = i
                return False
            case Flow.RETURN:
                self._return(i, stack)
                return False
            case Flow.UNKNOWN:
                self.paths.gaps[i.addr] = "its bytes are no instruction"
                return False
            case Flow.TRANSACTION:
                self.paths.gaps[i.addr] = "it begins or ends a transaction"
                return True
            case Flow.NEXT:
                return True

    def _jump(self, i: Instruction, stack: Stack) -> None:
        target = i.target
        if target is None:
            self.paths.gaps[i.addr] = "it jumps to another code segment"
        elif target in self._tables.no_return:
            self.paths.ends.add(i.addr)
        elif self._is_left_for(target, stack):
            self.paths.leaving[i.addr] = i
        else:
            self._pending.go_on(target, stack, i)

    def _is_left_for(self, target: Addr, stack: Stack) -> bool:
        # A function's own entry is one more call of it, unless it is in the middle of something.
        if target == self._function.parts[0].addr:
            return stack.depth == 0
        return not self._is_own(target)

    def _pause(self, i: Instruction, stack: Stack) -> None:
        if i.mnemonic == Mnemonic.INT3:
            self.paths.gaps[i.addr] = "an int3 there may hide another instruction"
            return
        entry, target = self._function.parts[0].addr, i.target
        if target is not None and target != entry and self._function.part_of(target) is not None:
            self.paths.gaps[i.addr] = "it calls into its own middle"
            return
        is_last = self._is_last(i)
        if target in self._tables.no_return or (is_last and i.mnemonic in _UD):
            self.paths.ends.add(i.addr)
        elif is_last:
            self.paths.gaps[i.addr] = "it is last, and calls what is not known never to return"
            if target is not None:
                self.paths.last_calls[i.addr] = target
        else:
            self._pending.come_back(i.next, stack, i, is_trap=i.mnemonic in _UD)

    def _is_last(self, i: Instruction) -> bool:
        behind = self._code.get(i.next)
        while behind is not None and behind.is_padding and not behind.is_filler:
            behind = self._code.get(behind.next)
        # The last is a function that has no name of its own.
        return behind is None or behind.is_filler or behind.mnemonic == Mnemonic.ENDBR64

    def _return(self, i: Instruction, stack: Stack) -> None:
        if i.mnemonic in _NEAR_RETURNS:
            self.paths.leaving[i.addr] = i
        elif i.mnemonic == Mnemonic.IRETQ and i.next in self._function.targets:
            # As sync_core(): back to behind itself, to wait for all that came before.
            self._pending.go_on(i.next, stack, i)
        else:
            self.paths.gaps[i.addr] = "it leaves by another way than it came"


def _is_run_into(i: Instruction, source: Instruction | None) -> bool:
    # Fillers that something leads to are none.
    return i.is_filler and source is not None and i.addr == source.next and not source.is_filler


def _behind(i: Instruction, stack: Stack) -> Stack:
    if i.stack is None:
        return after(decode_one(i.code, i.addr), stack)
    if i.stack and stack.depth is not None:
        return stack._replace(depth=stack.depth - i.stack)
    return stack
