"""Exits of an aarch64 function, with proof that there is no other, or why there is none.

Paths begin at the entry, and at cases that only tables lead to. What a compiler guarantees is
relied on: a function comes back to its caller with the stack as it was, and jumps to another
function only with the stack and x30 as at its own entry. By that a path's stack and x30 tell a
tail call from a jump within hand-written code.

Compilers compute the place of a case right before the branch: the address of a label inside,
which ``adr`` gives, and a distance from a table, in words:

    adr x1, LABEL; add x0, x1, w0, sxth #2; br x0

Only words that end a path, branch, are led to or change what is followed are looked at one by one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from kprobes.arch.aarch64.decode import FLOWS, Function, Instruction, decode_function
from kprobes.arch.aarch64.insn import LINK, NOP, SIZE, Kind, first_register, fits, target_register
from kprobes.arch.aarch64.stack import ENTRY, Link, Stack, after, merged, touching
from kprobes.arch.aarch64.verdict import hides_another, insn_verdict
from kprobes.arch.cfg import EXIT_KINDS, Cfg, build_cfg
from kprobes.arch.insn import Flow, forbidden_place
from kprobes.model.kernel import TextPart, TextTables
from kprobes.model.plan import Exit, Exits, Unproven

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


_Cfg = Cfg[Instruction, Stack]


class _Code:
    def __init__(self, function: Function, tables: TextTables) -> None:
        self.parts = function.parts
        self._function = function
        self._tables = tables
        self._halts = _halts(function, tables)
        self._dead = function.data | function.fillers
        self._is_reached = np.zeros(len(function.words), np.bool_)
        self._at_tables: Stack | None = None

    def next(self, addr: int, source: Instruction | None) -> Instruction | None:
        # The next halt.
        del source
        row = self._function.row(addr)
        if row is None or addr in self._dead:
            return None
        halt = int(self._halts[row])
        self._is_reached[row : halt + 1] = True
        return self._function.instruction(halt)

    def is_inside(self, addr: int) -> bool:
        return addr % SIZE != 0

    def is_own(self, addr: int) -> bool:
        return self._function.part_of(addr) is not None

    def decode(self, part: TextPart) -> Iterable[Instruction]:
        found = decode_function("", (part,))
        return (found.instruction(row) for row in range(len(found.words)))

    def after(self, i: Instruction, stack: Stack) -> tuple[Flow, Stack]:
        if i.addr in self._tables.ftrace:
            # The function tracer's call, which gives x30 back from x9.
            return Flow.NEXT, stack
        if hides_another(i) and i.next in self._tables.ftrace:
            # The guest's own probe, on what keeps x30 in x9 for that call.
            return Flow.NEXT, stack
        return i.flow, after(i.word, i.kind, stack)

    def merged(self, one: Stack, other: Stack) -> Stack:
        return merged(one, other)

    def missed(self, reached: Mapping[int, Stack]) -> Iterator[tuple[int, Stack]]:
        # Cases of some table, as nothing else leads there.
        del reached
        while self._at_tables is not None and (addr := self._unreached()) is not None:
            yield addr, self._at_tables

    def _unreached(self) -> int | None:
        addrs = self._function.addrs[~self._is_reached].tolist()
        return next((addr for addr in addrs if addr not in self._dead), None)

    def leave(self, i: Instruction, stack: Stack, cfg: _Cfg) -> None:
        if i.kind is Kind.RET and first_register(i.word) != LINK:
            cfg.unproven[i.addr] = "it returns by another register than x30"
        elif i.flow is Flow.RETURN:
            cfg.leaving[i.addr] = i
        else:
            self._jump_indirectly(i, stack, cfg)

    def _jump_indirectly(self, i: Instruction, stack: Stack, cfg: _Cfg) -> None:
        row = self._function.row(i.addr)
        assert row is not None
        match jump_kind(self._function, row):
            case JumpKind.TABLE:
                known = self._at_tables
                self._at_tables = stack if known is None else merged(known, stack)
            case JumpKind.OUT:
                cfg.leaving[i.addr] = i
            case JumpKind.UNKNOWN:
                cfg.unproven[i.addr] = "it may jump by a table of the function's own"

    def hidden(self, i: Instruction) -> str | None:
        return "a breakpoint there hides another instruction" if hides_another(i) else None

    def is_trap(self, i: Instruction) -> bool:
        return i.flow is Flow.TRAP

    def is_last(self, i: Instruction) -> bool:
        # Nothing after it goes elsewhere before the function's end: a compiler's code never runs
        # on there, and what alternatives boot has copied from may be in between.
        function = self._function
        row, part = function.row(i.addr), function.part_of(i.addr)
        assert row is not None
        assert part is not None
        if i.kind is Kind.UDF:
            return True
        stop = row + (part.stop - i.addr) // SIZE
        if row + 1 < stop and i.flow is not Flow.TRAP and function.kinds[row + 1] == Kind.PACIASP:
            # A function that has no name of its own.
            return True
        while row + 1 < stop:
            row = int(self._halts[row + 1])
            following = function.instruction(row)
            if following.addr in self._dead or following.kind is Kind.BTI:
                return True
            if following.flow is not Flow.NEXT or following.addr in function.targets:
                return False
        return True


def _halts(function: Function, tables: TextTables) -> NDArray[np.int64]:
    # The row of the first word at or after each that has to be looked at; each part's last has.
    count = len(function.words)
    is_halt = np.isin(function.kinds, [int(kind) for kind in FLOWS])
    is_halt |= touching(function.words, function.kinds)
    for addr in _places(function, tables):
        row = function.row(addr)
        if row is not None:
            is_halt[row] = True
    is_halt[[row - 1 for row in (*function.rows[1:], count) if row]] = True
    rows = np.where(is_halt, np.arange(count), count)
    return np.minimum.accumulate(rows[::-1])[::-1]


def _places(function: Function, tables: TextTables) -> Iterator[int]:
    yield from function.targets
    for addr in function.data | function.fillers:
        # What is before it runs on into it.
        yield from (addr - SIZE, addr)
    for part in function.parts:
        inside = range(part.addr, part.stop, SIZE)
        for table in (tables.table_sources, tables.replacements, tables.ftrace):
            yield from (addr for addr in inside if addr in table) if table else ()


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
        refusal = "it is not a function, only padding"
    if refusal is not None:
        return Exits(entry=entry, refusal=refusal)
    cfg = build_cfg(_Code(function, tables), ENTRY, tables)
    leaving = [cfg.leaving[addr] for addr in sorted(cfg.leaving)]
    exits = tuple(_exit(function, i, tables) for i in leaving)
    gap = next(_unproven(cfg, exits), None)
    return cfg.exits(entry, exits, gap)


def _exit(function: Function, i: Instruction, tables: TextTables) -> Exit:
    verdict = insn_verdict(function, i.addr, tables)
    why = verdict.why if verdict.is_refused else ""
    return Exit(addr=i.addr, kind=EXIT_KINDS[i.flow], target=i.target, size=SIZE, why=why)


def _unproven(cfg: _Cfg, exits: Sequence[Exit]) -> Iterator[Unproven]:
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
