"""A decoded function to all paths through it: where they leave it, and where they are lost.

Cfg begin at the entry and go on as the CPU would, also to where the exception table, jump
labels and tables of cases lead. A path's stack and x30 tell a tail call from a jump within
hand-written code: at a tail call both are as at the entry.

Only words that end a path, branch, are led to or change what is followed are looked at one by one.

Where a branch to a register may lead: into the function by a table, or out of it.

Compilers compute the place of a case right before the branch: the address of a label inside,
which ``adr`` gives, and a distance from a table, in words:

    adr x1, LABEL; add x0, x1, w0, sxth #2; br x0

A function's bytes to every way out of it, with proof that there is no other, or why not.

What a compiler guarantees is relied on: a function comes back to its caller with the stack as it
was, and jumps to another function only with the stack and x30 as at its own entry.
"""

from collections.abc import Iterator, Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from kprobes.arch import cfg
from kprobes.arch.aarch64.decode import FLOWS, Function, Instruction, decode_function
from kprobes.arch.aarch64.insn import LINK, NOP, SIZE, Kind, first_register, fits, target_register
from kprobes.arch.aarch64.stack import ENTRY, Link, Stack, after, merged, touching
from kprobes.arch.aarch64.verdict import hides_another, insn_verdict
from kprobes.arch.insn import Flow, forbidden_place
from kprobes.model.kernel import TextPart, TextTables
from kprobes.model.plan import Exit, ExitKind, Exits, Unproven
from kprobes.units import Addr

_FAR_BACK = 16
"""Words that are looked at before the branch, and again before the addition."""
_ADD_EXTENDED = (0xFFE00000, 0x8B200000)
_ADD_SHIFTED = (0xFF200000, 0x8B000000)
_ADD_IMMEDIATE = (0xFF800000, 0x91000000)
_LDR_INDEXED = (0xFFE00C00, 0xF8600800)
_STORE = (0x0A400000, 0x08000000)


class JumpKind(Enum):
    """Where it leads."""

    TABLE = "table"
    """To code of the function's own, by a table."""
    OUT = "out"
    """Where a pointer says: out of the function."""
    UNKNOWN = "unknown"


def jump_kind(function: Function, row: int) -> JumpKind:
    """Return where the branch in a row leads."""
    register = first_register(int(function.words[row]))
    made = _made(function, row, register)
    if made is None:
        return JumpKind.OUT
    word = int(function.words[made])
    if fits(word, _ADD_EXTENDED) or fits(word, _ADD_SHIFTED):
        bases = (first_register(word), word >> 16 & 31)
        return (
            JumpKind.TABLE
            if any(_is_own(function, made, each) for each in bases)
            else JumpKind.UNKNOWN
        )
    if fits(word, _ADD_IMMEDIATE) or fits(word, _LDR_INDEXED):
        return JumpKind.UNKNOWN
    named = int(function.named[made])
    return JumpKind.UNKNOWN if named and function.part_of(named) else JumpKind.OUT


def _made(function: Function, row: int, register: int) -> int | None:
    # The row of the last word before that sets a register, as far as one may look.
    for at in range(row - 1, max(row - _FAR_BACK, 0) - 1, -1):
        word = int(function.words[at])
        if target_register(word) == register and not fits(word, _STORE):
            return at
    return None


def _is_own(function: Function, row: int, register: int) -> bool:
    made = _made(function, row, register)
    if made is None or function.kinds[made] != Kind.ADR:
        return False
    return function.part_of(int(function.named[made])) is not None


_LEAVING = frozenset({Flow.RETURN, Flow.INDIRECT_JUMP, Flow.LEAVE, Flow.UNKNOWN})


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
        self._halts = _halts(function, tables)
        self._dead = function.data | function.fillers
        self._is_reached = np.zeros(len(function.words), np.bool_)
        entry = function.parts[0].addr
        self._pending = cfg.Worklist[Instruction, Stack]()
        self._pending.go_on(entry, ENTRY)
        self._at_tables: Stack | None = None

    def follow(self) -> None:
        self._follow_all()
        while self._at_tables is not None and (row := self._unreached()) is not None:
            # A case of some table, as nothing else leads there.
            addr = int(self._function.addrs[row])
            self._pending.go_on(addr, self._at_tables)
            self._follow_all()

    def _follow_all(self) -> None:
        for step, is_sure in self._pending.take():
            self._run(step, is_sure=is_sure)

    def _unreached(self) -> int | None:
        for row in np.flatnonzero(~self._is_reached).tolist():
            addr = int(self._function.addrs[row])
            if addr not in self._dead:
                return row
        return None

    def _run(self, step: _Step, *, is_sure: bool) -> None:
        # Straight on, from one halt to the next, until the path ends or comes to what is known.
        at, stack, source = step.addr, step.stack, step.source
        while True:
            i = self._next_halt(at, source)
            if i is None:
                return
            known = self.cfg.stacks.get(i.addr)
            if known is not None:
                stack = merged(known, stack)
                if stack == known or not is_sure:
                    return
            self.cfg.stacks[i.addr] = stack
            self._check_neighbours(i, stack)
            is_next, stack = self._past(i, stack)
            if not is_next:
                return
            # Only where the path began may it be that nothing comes there.
            at, source, is_sure = i.next, i, True

    def _next_halt(self, at: int, source: Instruction | None) -> Instruction | None:
        function = self._function
        row = function.row(at)
        if row is None or at in self._dead:
            self._lost(at, source)
            return None
        part = function.part_of(at)
        assert part is not None
        stop = row + (part.stop - at) // SIZE
        halt = min(int(self._halts[row]), stop)
        self._is_reached[row : halt + 1] = True
        if halt == stop or int(function.addrs[halt]) in self._dead:
            last = function.instruction(halt - 1)
            self._lost(last.next, last)
            return None
        return function.instruction(halt)

    def _lost(self, at: int, source: Instruction | None) -> None:
        place = source.addr if source is not None else Addr(at)
        if source is not None and at == source.next:
            why = "it runs on into what is after the function"
        elif at % SIZE:
            why = "it leads into the middle of an instruction"
        else:
            why = "it leads to where no instruction is"
        self.cfg.unproven[place] = why

    def _past(self, i: Instruction, stack: Stack) -> tuple[bool, Stack]:
        if i.addr in self._tables.ftrace:
            # The function tracer's call, which gives x30 back from x9.
            return True, stack
        if hides_another(i) and i.next in self._tables.ftrace:
            # The guest's own probe, on what keeps x30 in x9 for that call.
            return True, stack
        following = after(i.word, i.kind, stack)
        return self._goes_on(i, following), following

    def _check_neighbours(self, i: Instruction, stack: Stack) -> None:
        if i.addr in self._tables.table_sources:
            self._follow_tables(i, stack)
        if i.addr in self._tables.replacements:
            self._replace(i, stack)

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
            found = decode_function("", (part,))
            at = stack
            for each in (found.instruction(row) for row in range(len(found.words))):
                if each.flow in _LEAVING or not self._branch_within(each, at):
                    self.cfg.unproven[i.addr] = (
                        "it is an alternative, which boot may make a way out"
                    )
                at = after(each.word, each.kind, at)
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
        return self._function.part_of(target) is not None

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
                self._jump_indirectly(i, stack)
                return False
            case Flow.RETURN:
                self._return(i)
                return False
            case Flow.LEAVE:
                self.cfg.unproven[i.addr] = "it leaves by another way than it came"
                return False
            case Flow.UNKNOWN:
                self.cfg.unproven[i.addr] = "its bytes are no instruction"
                return False
            case Flow.NEXT:
                return True

    def _jump(self, i: Instruction, stack: Stack) -> None:
        target = i.target
        assert target is not None
        if target in self._tables.no_return:
            self.cfg.noreturn_sites.add(i.addr)
        elif self._is_left_for(target, stack):
            self.cfg.leaving[i.addr] = i
        else:
            self._pending.go_on(target, stack, i)

    def _is_left_for(self, target: Addr, stack: Stack) -> bool:
        # A function's own entry is one more call of it, unless it is in the middle of something.
        if target == self._function.parts[0].addr:
            return stack == stack._replace(depth=0, link=ENTRY.link)
        return not self._is_own(target)

    def _jump_indirectly(self, i: Instruction, stack: Stack) -> None:
        row = self._function.row(i.addr)
        assert row is not None
        match jump_kind(self._function, row):
            case JumpKind.TABLE:
                known = self._at_tables
                self._at_tables = stack if known is None else merged(known, stack)
            case JumpKind.OUT:
                self.cfg.leaving[i.addr] = i
            case JumpKind.UNKNOWN:
                self.cfg.unproven[i.addr] = "it may jump by a table of the function's own"

    def _pause(self, i: Instruction, stack: Stack) -> None:
        if hides_another(i):
            self.cfg.unproven[i.addr] = "a breakpoint there hides another instruction"
            return
        entry, target = self._function.parts[0].addr, i.target
        if target is not None and target != entry and self._is_own(target):
            self.cfg.unproven[i.addr] = "it calls into its own middle"
            return
        is_last, is_trap = self._is_last(i), i.flow is Flow.TRAP
        if target in self._tables.no_return or i.kind is Kind.UDF or (is_last and is_trap):
            self.cfg.noreturn_sites.add(i.addr)
        elif is_last:
            self.cfg.unproven[i.addr] = "it is last, and calls what is not known never to return"
            if target is not None:
                self.cfg.last_calls[i.addr] = target
        else:
            self._pending.come_back(i.next, stack, i, is_trap=is_trap)

    def _is_last(self, i: Instruction) -> bool:
        # Nothing after it goes elsewhere before the function's end: a compiler's code never runs
        # on there, and what alternatives boot has copied from may be in between.
        function = self._function
        row = function.row(i.addr)
        part = function.part_of(i.addr)
        assert row is not None
        assert part is not None
        stop = row + (part.stop - i.addr) // SIZE
        if row + 1 < stop and i.flow is not Flow.TRAP and function.kinds[row + 1] == Kind.PACIASP:
            # A function that has no name of its own.
            return True
        while row + 1 < stop:
            row = int(self._halts[row + 1])
            if row >= stop or int(function.addrs[row]) in self._dead:
                return True
            following = function.instruction(row)
            if following.kind is Kind.BTI:
                return True
            if following.flow is not Flow.NEXT or following.addr in function.targets:
                return False
        return True

    def _return(self, i: Instruction) -> None:
        if i.kind is Kind.RET and first_register(i.word) != LINK:
            self.cfg.unproven[i.addr] = "it returns by another register than x30"
        else:
            self.cfg.leaving[i.addr] = i


def _halts(function: Function, tables: TextTables) -> NDArray[np.int64]:
    # The row of the first word at or after each that has to be looked at.
    count = len(function.words)
    is_halt = np.isin(function.kinds, [int(kind) for kind in FLOWS])
    is_halt |= touching(function.words, function.kinds)
    for addr in _places(function, tables):
        row = function.row(addr)
        if row is not None:
            is_halt[row] = True
    rows = np.where(is_halt, np.arange(count), count)
    return np.minimum.accumulate(rows[::-1])[::-1]


def _places(function: Function, tables: TextTables) -> Iterator[int]:
    yield from function.targets
    yield from function.data
    yield from function.fillers
    for part in function.parts:
        inside = range(part.addr, part.stop, SIZE)
        for table in (tables.table_sources, tables.replacements, tables.ftrace):
            yield from (addr for addr in inside if addr in table) if table else ()


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
    refusal = forbidden_place(function.name, function.parts, entry, tables)
    if refusal is None and all(word in (0, NOP) for word in function.words.tolist()):
        refusal = "it is no function, only padding"
    if refusal is not None:
        return Exits(entry=entry, refusal=refusal)
    cfg = build_cfg(function, tables)
    leaving = [cfg.leaving[addr] for addr in sorted(cfg.leaving)]
    exits = tuple(_exit(function, i, tables) for i in leaving)
    gap = next(_unproven(cfg, exits), None)
    return cfg.exits(entry, exits, gap)


def _exit(function: Function, i: Instruction, tables: TextTables) -> Exit:
    verdict = insn_verdict(function, i.addr, tables)
    why = verdict.why if verdict.is_refused else ""
    return Exit(addr=i.addr, kind=_KINDS[i.flow], target=i.target, size=SIZE, why=why)


def _unproven(cfg: Cfg, exits: Sequence[Exit]) -> Iterator[Unproven]:
    yield from cfg.lost()
    for exit_ in exits:
        i = cfg.leaving[exit_.addr]
        why = _in_the_way(i, cfg.stacks[i.addr]) or exit_.why
        if why:
            yield Unproven(addr=i.addr, why=why)


def _in_the_way(i: Instruction, stack: Stack) -> str | None:
    if i.flow is Flow.RETURN:
        return _at_return(i, stack)
    if stack.depth is None:
        return "it jumps out with a stack that is not known"
    if stack.depth:
        return "it jumps out with something of the function's own on the stack"
    if stack.link is not Link.RETURN:
        return "it jumps out and x30 is not known to be the return address"
    return None


def _at_return(i: Instruction, stack: Stack) -> str | None:
    if stack.depth:
        return "it returns with something of the function's own on the stack"
    if stack.link is Link.CHANGED:
        return "it returns to where the function itself has made x30 point"
    is_signed = stack.link is Link.SIGNED
    if stack.link is not None and is_signed != (i.kind is Kind.RET_AUTH):
        return "it returns by an address that is signed, or checks one that is not"
    return None
