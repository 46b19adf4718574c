"""A function's bytes to every way out of it, with proof that there is no other, or why not.

What a compiler guarantees is relied on: a function comes back to its caller with the stack as it
was, and jumps to another function only with the stack as at its own entry.
"""

from collections.abc import Iterator, Sequence

from kprobes.arch.x86_64.decode import decode_function
from kprobes.arch.x86_64.detour import TRAP_PATH
from kprobes.arch.x86_64.function import Flow, Function, Instruction
from kprobes.arch.x86_64.judge import forbidden, judge
from kprobes.arch.x86_64.jump_run import jump_run
from kprobes.arch.x86_64.paths import Paths, find_paths
from kprobes.errors import RefusedError
from kprobes.model.exits import Exit, ExitKind, Exits, Gap
from kprobes.model.text import TextPart, TextTables

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
    paths = find_paths(function, tables)
    leaving = [paths.leaving[addr] for addr in sorted(paths.leaving)]
    exits = tuple(_exit(function, i, tables) for i in leaving)
    gap = next(_gaps(function, paths, tables), None) or _trapped(function, exits)
    return paths.exits(entry, exits, gap)


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


def _gaps(function: Function, paths: Paths, tables: TextTables) -> Iterator[Gap]:
    yield from paths.lost()
    for i in paths.leaving.values():
        why = _in_the_way(function, i, paths, tables)
        if why is not None:
            yield Gap(addr=i.addr, why=why)


def _trapped(function: Function, exits: Sequence[Exit]) -> Gap | None:
    if function.name not in TRAP_PATH:
        return None
    why = "our own breakpoints come through it, and this would need one"
    return next((Gap(addr=exit_.addr, why=why) for exit_ in exits if not exit_.has_jump), None)


def _in_the_way(function: Function, i: Instruction, paths: Paths, tables: TextTables) -> str | None:
    depth = paths.stacks[i.addr].depth
    if function.part_of(i.addr) is None:
        return "it is left in code that other functions use, too"
    if i.flow is Flow.INDIRECT_JUMP and _may_lead_inside(function, paths, tables):
        return "it may jump by a table of the function's own"
    if i.flow is Flow.RETURN and depth:
        return "it returns to what the function itself has pushed"
    if i.flow is not Flow.RETURN and depth is None:
        return "it jumps out with a stack that is not known"
    if i.flow is not Flow.RETURN and depth:
        return "it jumps out with something of the function's own on the stack"
    judgement = judge(function, i.addr, tables)
    if judgement.is_refused:
        return judgement.why
    return None


def _may_lead_inside(function: Function, paths: Paths, tables: TextTables) -> bool:
    # To an address that the code has taken, and where the stack is, or may be, as at a tail call.
    # To the function's own entry is one more call of it.
    if tables.has_jump_tables:
        return True
    taken = {
        function.instructions[at].mention for at in paths.stacks.keys() & function.instructions
    }
    inside = {a for a in taken if a is not None and function.part_of(a) is not None}
    return any(paths.stacks[a].depth in (None, 0) for a in inside - {function.parts[0].addr})
