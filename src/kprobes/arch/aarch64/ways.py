"""How a function's instructions may be patched: one branch covers exactly one of them."""

from collections.abc import Callable, Sequence

from kprobes.arch.aarch64.decode import decode_function, decode_one
from kprobes.arch.aarch64.function import Function, Instruction
from kprobes.arch.aarch64.judge import judge
from kprobes.arch.aarch64.words import SIZE, Kind
from kprobes.arch.listed import Study
from kprobes.model.plan import Displaced, Ways
from kprobes.model.text import TextPart, TextTables
from kprobes.units import Addr

NO_BREAKPOINT = "one branch covers any instruction here: breakpoints are not used"


def examine(name: str, parts: Sequence[TextPart], tables: TextTables) -> Callable[[Addr], Ways]:
    """Return what tells how a function's instructions may be patched."""
    function = decode_function(name, parts, tables)

    def ways(addr: Addr) -> Ways:
        opinion = judge(function, addr, tables)
        is_boundary = _is_instruction(function, addr)
        if opinion.is_refused:
            return Ways(breakpoint=opinion.why, jump=opinion.why, is_boundary=is_boundary)
        instruction = function.at(addr)
        assert instruction is not None
        return Ways(breakpoint=NO_BREAKPOINT, jump=displaced(instruction), is_boundary=True)

    return ways


def study(name: str, parts: Sequence[TextPart], tables: TextTables) -> Study:
    """Decode a function and be ready to judge its instructions."""
    function = decode_function(name, parts, tables)
    sizes = {addr: SIZE for addr in function.addrs.tolist() if _is_instruction(function, addr)}
    return Study(sizes=sizes, judge=lambda addr: judge(function, addr, tables))


def first(code: bytes) -> int:
    """Return the offset of a function's first instruction that can be probed.

    Calls through pointers land on bti, which must stay.
    """
    return SIZE if decode_one(code, 0).kind is Kind.BTI else 0


def displaced(instruction: Instruction) -> Displaced:
    """Return what a branch in the place of an instruction displaces."""
    return Displaced(addr=instruction.addr, code=instruction.code, count=1, stop=instruction.next)


def _is_instruction(function: Function, addr: int) -> bool:
    is_word = function.row(addr) is not None
    return is_word and addr not in function.data and addr not in function.fillers
