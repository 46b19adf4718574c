"""Exits of an x86-64 function, with proof that there is no other, or why there is none.

Paths begin at the entry, and at addresses that the code takes. What a compiler guarantees is
relied on: a function comes back to its caller with the stack as it was, and jumps to another
function only with the stack as at its own entry. By that a path's stack tells a tail call from a
jump within hand-written code.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from iced_x86 import Mnemonic

from kprobes.arch.cfg import EXIT_KINDS, Cfg, build_cfg
from kprobes.arch.insn import Flow
from kprobes.arch.x86_64.decode import decode_annex, decode_function, decode_one
from kprobes.arch.x86_64.insn import ENTRY, UNKNOWN, Function, Instruction, Stack, after
from kprobes.arch.x86_64.trampoline import TRAP_PATH
from kprobes.arch.x86_64.verdict import forbidden, insn_verdict, jump_run
from kprobes.errors import RefusedError
from kprobes.model.kernel import TextPart, TextTables
from kprobes.model.plan import Exit, Exits, Unproven

_NEAR_RETURNS = frozenset({Mnemonic.RET, Mnemonic.JMP})
"""The second is a jump to a return thunk."""
_IRETQ = Mnemonic.IRETQ
_UD = frozenset({Mnemonic.UD0, Mnemonic.UD1, Mnemonic.UD2})
_Cfg = Cfg[Instruction, Stack]


class _Code:
    def __init__(self, function: Function, tables: TextTables) -> None:
        self.parts = function.parts
        self._function = function
        self._tables = tables
        self._code: Mapping[int, Instruction] = function.instructions

    def next(self, addr: int, source: Instruction | None) -> Instruction | None:
        i = self._code.get(addr)
        return None if i is None or (i.is_filler and _is_run_into(i, source)) else i

    def is_inside(self, addr: int) -> bool:
        return self._function.covering(addr) is not None

    def is_own(self, addr: int) -> bool:
        if self._function.part_of(addr) is not None or addr in self._code:
            return True
        annex = self._tables.annexes.get(addr)
        if annex is None:
            return False
        self._code = {**decode_annex(annex), **self._code}
        return True

    def decode(self, part: TextPart) -> Iterable[Instruction]:
        return decode_function("", (part,)).instructions.values()

    def after(self, i: Instruction, stack: Stack) -> tuple[Flow, Stack]:
        flow, added = i.flow, i.stack
        if added is None:
            return flow, after(decode_one(i.code, i.addr), stack)
        if not added:
            return flow, stack
        if i.mnemonic == _IRETQ and i.next in self._function.targets:
            # As sync_core(): back to after itself, to wait for all that came before.
            flow = Flow.NEXT
        depth, frame, caller = stack
        return flow, stack if depth is None else Stack(depth - added, frame, caller)

    def merged(self, one: Stack, other: Stack) -> Stack:
        return Stack(*(a if a == b else None for a, b in zip(one, other, strict=True)))

    def missed(self, reached: Mapping[int, Stack]) -> Iterator[tuple[int, Stack]]:
        # Their address is taken, which alone leads to them.
        mentions = {self._code[addr].mention for addr in reached}
        own = (a for a in mentions if a is not None and self._function.part_of(a) is not None)
        for addr in sorted(a for a in own if a not in reached):
            yield addr, UNKNOWN

    def leave(self, i: Instruction, stack: Stack, cfg: _Cfg) -> None:
        del stack
        if i.flow is Flow.INDIRECT_JUMP or i.mnemonic in _NEAR_RETURNS:
            cfg.leaving[i.addr] = i
        else:
            cfg.unproven[i.addr] = "it leaves by another way than it came"

    def hidden(self, i: Instruction) -> str | None:
        is_hidden = i.mnemonic == Mnemonic.INT3
        return "an int3 there may hide another instruction" if is_hidden else None

    def is_trap(self, i: Instruction) -> bool:
        return i.mnemonic in _UD

    def is_last(self, i: Instruction) -> bool:
        following = self._code.get(i.next)
        while following is not None and following.is_padding and not following.is_filler:
            following = self._code.get(following.next)
        # The last is a function that has no name of its own.
        return following is None or following.is_filler or following.mnemonic == Mnemonic.ENDBR64


def _is_run_into(filler: Instruction, source: Instruction | None) -> bool:
    # Fillers that something leads to are none.
    return source is not None and filler.addr == source.next and not source.is_filler


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
    cfg = build_cfg(_Code(function, tables), ENTRY, tables)
    leaving = [cfg.leaving[addr] for addr in sorted(cfg.leaving)]
    exits = tuple(_exit(function, i, tables) for i in leaving)
    gap = next(_unproven(function, cfg, tables), None) or _trapped(function, exits)
    return cfg.exits(entry, exits, gap)


def _no_function(function: Function, tables: TextTables) -> str | None:
    if function.parts[0].addr in tables.returns | tables.indirect:
        return "it is a thunk, by which other functions return or jump"
    if all(i.is_padding for i in function.instructions.values()):
        return "it is not a function, only padding"
    return None


def _exit(function: Function, i: Instruction, tables: TextTables) -> Exit:
    try:
        run, why = jump_run(function, i.addr, tables), ""
        size = run.stop - run.addr
    except RefusedError as error:
        size, why = 1, str(error)
    target = None if i.flow in (Flow.RETURN, Flow.INDIRECT_JUMP) else i.target
    return Exit(addr=i.addr, kind=EXIT_KINDS[i.flow], target=target, size=size, why=why)


def _unproven(function: Function, cfg: _Cfg, tables: TextTables) -> Iterator[Unproven]:
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


def _in_the_way(function: Function, i: Instruction, cfg: _Cfg, tables: TextTables) -> str | None:
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


def _may_jump_inside(function: Function, cfg: _Cfg, tables: TextTables) -> bool:
    # To an address that the code has taken, and where the stack is, or may be, as at a tail call.
    # To the function's own entry is one more call of it.
    if tables.has_jump_tables:
        return True
    taken = {function.instructions[at].mention for at in cfg.stacks.keys() & function.instructions}
    inside = {a for a in taken if a is not None and function.part_of(a) is not None}
    return any(cfg.stacks[a].depth in (None, 0) for a in inside - {function.parts[0].addr})
