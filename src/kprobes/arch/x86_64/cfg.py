"""A decoded function to all paths through it: where they leave it, and where they are lost.

Cfg begin at the entry and go on as the CPU would, also to where the exception table, jump
labels and addresses in the code lead. A path's stack tells a tail call from a jump within
hand-written code: at a tail call it is as at the entry.

A function's bytes to every way out of it, with proof that there is no other, or why not.

What a compiler guarantees is relied on: a function comes back to its caller with the stack as it
was, and jumps to another function only with the stack as at its own entry.
"""

from collections.abc import Iterator, Mapping, Sequence

from iced_x86 import Mnemonic

from kprobes.arch import cfg
from kprobes.arch.insn import Flow
from kprobes.arch.x86_64.decode import decode_annex, decode_function, decode_one
from kprobes.arch.x86_64.insn import ENTRY, UNKNOWN, Function, Instruction, Stack, after
from kprobes.arch.x86_64.trampoline import TRAP_PATH
from kprobes.arch.x86_64.verdict import forbidden, insn_verdict, jump_run
from kprobes.errors import RefusedError
from kprobes.model.kernel import TextPart, TextTables
from kprobes.model.plan import Exit, ExitKind, Exits, Unproven
from kprobes.units import Addr

_NEAR_RETURNS = frozenset({Mnemonic.RET, Mnemonic.JMP})
"""The second is a jump to a return thunk."""
_UD = frozenset({Mnemonic.UD0, Mnemonic.UD1, Mnemonic.UD2})
_LEAVING = frozenset({Flow.RETURN, Flow.INDIRECT_JUMP, Flow.UNKNOWN})


Cfg = cfg.Cfg[Instruction, Stack]
_Step = cfg.Step[Instruction, Stack]


def build_cfg(function: Function, tables: TextTables) -> Cfg:
    """Follow every path through a function."""
    found = _Builder(function, tables)
    found.follow()
    return found.cfg


class _Builder:
    def __init__(self, function: Function, tables: TextTables) -> None:
        self.cfg = Cfg()
        self._function = function
        self._tables = tables
        self._code: Mapping[int, Instruction] = function.instructions
        entry = function.parts[0].addr
        self._pending = cfg.Worklist[Instruction, Stack]()
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
        return (self._code[addr] for addr in self.cfg.stacks)

    def _is_missed(self, addr: Addr) -> bool:
        return addr not in self.cfg.stacks and self._function.part_of(addr) is not None

    def _merged(self, step: _Step, *, is_sure: bool) -> Stack | None:
        known = self.cfg.stacks.get(step.addr)
        if known is None:
            return step.stack
        if known == step.stack or not is_sure:
            return None
        merged = Stack(*(a if a == b else None for a, b in zip(known, step.stack, strict=True)))
        return None if merged == known else merged

    def _run(self, step: _Step, stack: Stack) -> None:
        # Straight on, until the path ends or comes to what is known.
        stacks = self.cfg.stacks
        at, source = step.addr, step.source
        while True:
            i = self._code.get(at)
            if i is None or _is_run_into(i, source):
                self._lost(at, source)
                return
            stacks[at] = stack
            if at in self._tables.table_sources:
                self._follow_tables(i, stack)
            if at in self._tables.replacements:
                self._replace(i, stack)
            stack = _after(i, stack)
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
            why = "it runs on into what is after the function"
        elif function.covering(at) is None:
            why = "it leads to where no instruction is"
        else:
            why = "it leads into the middle of an instruction"
        self.cfg.unproven[place] = why

    def _follow_tables(self, i: Instruction, stack: Stack) -> None:
        if i.addr in self._tables.jump_labels:
            # It may be a jump now, and a nop later.
            self._pending.go_on(i.next, stack)
        for target, why in cfg.table_targets(self._tables, i.addr):
            if self._is_own(target):
                self._pending.go_on(target, stack, i)
            else:
                self.cfg.unproven[i.addr] = why

    def _replace(self, i: Instruction, stack: Stack) -> None:
        # Whatever boot makes of it leads to where some replacement does.
        for part, stop in self._tables.replacements[i.addr]:
            at = stack
            for each in decode_function("", (part,)).instructions.values():
                if each.flow in _LEAVING or not self._branch_within(each, at):
                    self.cfg.unproven[i.addr] = (
                        "it is an alternative, which boot may make a way out"
                    )
                at = _after(each, at)
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
                self.cfg.leaving[i.addr] = i
                return False
            case Flow.RETURN:
                self._return(i, stack)
                return False
            case Flow.UNKNOWN:
                self.cfg.unproven[i.addr] = "its bytes are no instruction"
                return False
            case Flow.TRANSACTION:
                self.cfg.unproven[i.addr] = "it begins or ends a transaction"
                return True
            case Flow.NEXT:
                return True

    def _jump(self, i: Instruction, stack: Stack) -> None:
        target = i.target
        if target is None:
            self.cfg.unproven[i.addr] = "it jumps to another code segment"
        elif target in self._tables.no_return:
            self.cfg.noreturn_sites.add(i.addr)
        elif self._is_left_for(target, stack):
            self.cfg.leaving[i.addr] = i
        else:
            self._pending.go_on(target, stack, i)

    def _is_left_for(self, target: Addr, stack: Stack) -> bool:
        # A function's own entry is one more call of it, unless it is in the middle of something.
        if target == self._function.parts[0].addr:
            return stack.depth == 0
        return not self._is_own(target)

    def _pause(self, i: Instruction, stack: Stack) -> None:
        if i.mnemonic == Mnemonic.INT3:
            self.cfg.unproven[i.addr] = "an int3 there may hide another instruction"
            return
        entry, target = self._function.parts[0].addr, i.target
        if target is not None and target != entry and self._function.part_of(target) is not None:
            self.cfg.unproven[i.addr] = "it calls into its own middle"
            return
        is_last = self._is_last(i)
        if target in self._tables.no_return or (is_last and i.mnemonic in _UD):
            self.cfg.noreturn_sites.add(i.addr)
        elif is_last:
            self.cfg.unproven[i.addr] = "it is last, and calls what is not known never to return"
            if target is not None:
                self.cfg.last_calls[i.addr] = target
        else:
            self._pending.come_back(i.next, stack, i, is_trap=i.mnemonic in _UD)

    def _is_last(self, i: Instruction) -> bool:
        following = self._code.get(i.next)
        while following is not None and following.is_padding and not following.is_filler:
            following = self._code.get(following.next)
        # The last is a function that has no name of its own.
        return following is None or following.is_filler or following.mnemonic == Mnemonic.ENDBR64

    def _return(self, i: Instruction, stack: Stack) -> None:
        if i.mnemonic in _NEAR_RETURNS:
            self.cfg.leaving[i.addr] = i
        elif i.mnemonic == Mnemonic.IRETQ and i.next in self._function.targets:
            # As sync_core(): back to after itself, to wait for all that came before.
            self._pending.go_on(i.next, stack, i)
        else:
            self.cfg.unproven[i.addr] = "it leaves by another way than it came"


def _is_run_into(i: Instruction, source: Instruction | None) -> bool:
    # Fillers that something leads to are none.
    return i.is_filler and source is not None and i.addr == source.next and not source.is_filler


def _after(i: Instruction, stack: Stack) -> Stack:
    if i.stack is None:
        return after(decode_one(i.code, i.addr), stack)
    if i.stack and stack.depth is not None:
        return stack._replace(depth=stack.depth - i.stack)
    return stack


_KINDS = {
    Flow.RETURN: ExitKind.RETURN,
    Flow.JUMP: ExitKind.TAIL,
    Flow.BRANCH: ExitKind.BRANCH,
    Flow.INDIRECT_JUMP: ExitKind.INDIRECT,
}


def find_exits(name: str, parts: Sequence[TextPart], tables: TextTables) -> Exits:
    """Find every way out of a function.

    Args:
        name: of its symbol.
        parts: its range, then its ``.cold`` ones.
        tables: what is known of the kernel's text.
    """
    return exits_of(decode_function(name, parts, tables), tables)


def exits_of(function: Function, tables: TextTables) -> Exits:
    """Find every way out of a decoded function."""
    entry = function.parts[0].addr
    refusal = forbidden(function, entry, tables) or _no_function(function, tables)
    if refusal is not None:
        return Exits(entry=entry, refusal=refusal)
    cfg = build_cfg(function, tables)
    leaving = [cfg.leaving[addr] for addr in sorted(cfg.leaving)]
    exits = tuple(_exit(function, i, tables) for i in leaving)
    gap = next(_unproven(function, cfg, tables), None) or _trapped(function, exits)
    return cfg.exits(entry, exits, gap)


def _no_function(function: Function, tables: TextTables) -> str | None:
    if function.parts[0].addr in tables.returns | tables.indirect:
        return "it is a thunk, by which other functions return or jump"
    if all(i.is_padding for i in function.instructions.values()):
        return "it is no function, only padding"
    return None


def _exit(function: Function, i: Instruction, tables: TextTables) -> Exit:
    try:
        run, why = jump_run(function, i.addr, tables), ""
        size = run.stop - run.addr
    except RefusedError as error:
        size, why = 1, str(error)
    target = None if i.flow in (Flow.RETURN, Flow.INDIRECT_JUMP) else i.target
    return Exit(addr=i.addr, kind=_KINDS[i.flow], target=target, size=size, why=why)


def _unproven(function: Function, cfg: Cfg, tables: TextTables) -> Iterator[Unproven]:
    yield from cfg.lost()
    for i in cfg.leaving.values():
        why = _in_the_way(function, i, cfg, tables)
        if why is not None:
            yield Unproven(addr=i.addr, why=why)


def _trapped(function: Function, exits: Sequence[Exit]) -> Unproven | None:
    if function.name not in TRAP_PATH:
        return None
    why = "our own breakpoints come through it, and this would need one"
    return next((Unproven(addr=exit_.addr, why=why) for exit_ in exits if not exit_.has_jump), None)


def _in_the_way(function: Function, i: Instruction, cfg: Cfg, tables: TextTables) -> str | None:
    depth = cfg.stacks[i.addr].depth
    if function.part_of(i.addr) is None:
        return "it is left in code that other functions use, too"
    if i.flow is Flow.INDIRECT_JUMP and _may_jump_inside(function, cfg, tables):
        return "it may jump by a table of the function's own"
    if i.flow is Flow.RETURN and depth:
        return "it returns to what the function itself has pushed"
    if i.flow is not Flow.RETURN and depth is None:
        return "it jumps out with a stack that is not known"
    if i.flow is not Flow.RETURN and depth:
        return "it jumps out with something of the function's own on the stack"
    slot_verdict = insn_verdict(function, i.addr, tables)
    if slot_verdict.is_refused:
        return slot_verdict.why
    return None


def _may_jump_inside(function: Function, cfg: Cfg, tables: TextTables) -> bool:
    # To an address that the code has taken, and where the stack is, or may be, as at a tail call.
    # To the function's own entry is one more call of it.
    if tables.has_jump_tables:
        return True
    taken = {function.instructions[at].mention for at in cfg.stacks.keys() & function.instructions}
    inside = {a for a in taken if a is not None and function.part_of(a) is not None}
    return any(cfg.stacks[a].depth in (None, 0) for a in inside - {function.parts[0].addr})
