"""A function's bytes to every way out of it, with proof that there is no other, or why not.

What a compiler guarantees is relied on: a function comes back to its caller with the stack as it
was, and jumps to another function only with the stack and x30 as at its own entry.
"""

from collections.abc import Iterator, Sequence

from kprobes.arch.aarch64.decode import decode_function
from kprobes.arch.aarch64.function import Flow, Function, Instruction
from kprobes.arch.aarch64.judge import judge
from kprobes.arch.aarch64.paths import Paths, find_paths
from kprobes.arch.aarch64.stack import Link, Stack
from kprobes.arch.aarch64.words import NOP, SIZE, Kind
from kprobes.arch.forbidden import forbidden_place
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
    refusal = forbidden_place(function.name, function.parts, entry, tables)
    if refusal is None and all(word in (0, NOP) for word in function.words.tolist()):
        refusal = "it is no function, only padding"
    if refusal is not None:
        return Exits(entry=entry, refusal=refusal)
    paths = find_paths(function, tables)
    leaving = [paths.leaving[addr] for addr in sorted(paths.leaving)]
    exits = tuple(_exit(function, i, tables) for i in leaving)
    gap = next(_gaps(paths, exits), None)
    return paths.exits(entry, exits, gap)


def _exit(function: Function, i: Instruction, tables: TextTables) -> Exit:
    opinion = judge(function, i.addr, tables)
    why = opinion.why if opinion.is_refused else ""
    return Exit(addr=i.addr, kind=_KINDS[i.flow], target=i.target, size=SIZE, why=why)


def _gaps(paths: Paths, exits: Sequence[Exit]) -> Iterator[Gap]:
    yield from paths.lost()
    for exit_ in exits:
        i = paths.leaving[exit_.addr]
        why = _in_the_way(i, paths.stacks[i.addr]) or exit_.why
        if why:
            yield Gap(addr=i.addr, why=why)


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
