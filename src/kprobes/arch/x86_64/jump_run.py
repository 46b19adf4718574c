"""A run of instructions that one five-byte jump may replace, as far as static facts go.

As the kernel's can_optimize() and copy_optimized_instructions() (arch/x86/kernel/kprobes/opt.c),
but exact where those refuse a whole function. What no table tells stays with the caller: saved
instruction pointers of sleeping or interrupted tasks inside the run.
"""

from dataclasses import dataclass

from kprobes.arch.x86_64 import site
from kprobes.arch.x86_64.function import Flow, Function, Instruction
from kprobes.arch.x86_64.judge import judge
from kprobes.arch.x86_64.slot import slots
from kprobes.errors import RefusedError
from kprobes.model.text import TextTables
from kprobes.units import Addr

_CALLS = frozenset({Flow.CALL, Flow.INDIRECT_CALL})


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Adjacent instructions that one jump may replace.

    Attributes:
        instructions: that are displaced.
        stop: the first address behind the bytes that the jump may cover: int3 behind a return
            included.
    """

    instructions: tuple[Instruction, ...]
    stop: Addr

    @property
    def addr(self) -> Addr:
        """Where it begins."""
        return self.instructions[0].addr

    def detour(self, at: Addr) -> bytes:
        """Return code that runs the displaced instructions at ``at``, and goes on behind them.

        Raises:
            RefusedError: too far from what an instruction names.
        """
        return slots(self.instructions, at)


_NO_TABLES = TextTables()


def jump_run(function: Function, addr: int, tables: TextTables = _NO_TABLES) -> Run:
    """Return the shortest run from an address that a five-byte jump may replace.

    Args:
        function: whole, with its ``.cold`` parts.
        addr: the run's first instruction.
        tables: what is known of the kernel's text.

    Raises:
        RefusedError: there is none, with the reason.
    """
    displaced, stop = list[Instruction](), Addr(addr)
    while stop - addr < site.SIZE:
        found = function.instructions.get(stop)
        if displaced and not displaced[-1].flow.falls_through:
            stop = _past_gap(function, found, stop)
            continue
        _check(function, stop, tables)
        assert found is not None
        if displaced and displaced[-1].flow in _CALLS:
            raise RefusedError(
                f"the call at {function.place(displaced[-1].addr)} returns into the five bytes"
            )
        displaced.append(found)
        stop = found.next
    run = Run(instructions=tuple(displaced), stop=stop)
    _check_inside(function, run, tables)
    return run


def has_jump_table(function: Function, tables: TextTables) -> bool:
    """Return whether an indirect jump of a function may lead into the function itself.

    Hand-written code computes targets from addresses inside itself.
    """
    if not any(i.flow is Flow.INDIRECT_JUMP for i in function.instructions.values()):
        return False
    mentions = (i.mention for i in function.instructions.values())
    return tables.has_jump_tables or any(a is not None and function.part_of(a) for a in mentions)


def _check(function: Function, addr: Addr, tables: TextTables) -> None:
    judgement = judge(function, addr, tables)
    if judgement.is_refused:
        raise RefusedError(f"{function.place(addr)}: {judgement.why}")


def _past_gap(function: Function, found: Instruction | None, at: Addr) -> Addr:
    # Only int3: nops at a function's end may belong to the next one, and be patched.
    if found is None or not found.is_filler or found.code != b"\xcc":
        raise RefusedError(f"{function.place(at)} is behind the end of what one jump may cover")
    return found.next


def _check_inside(function: Function, run: Run, tables: TextTables) -> None:
    inside = range(run.addr + 1, run.stop)
    reached = function.targets.intersection(inside)
    if reached:
        raise RefusedError(f"something leads to {function.place(min(reached))}, inside the bytes")
    if len(run.instructions) == 1:
        # Nothing but a branch into the middle of an instruction could come in between.
        return
    if function.doubts:
        raise RefusedError(f"branches of {function.name}: {next(iter(function.doubts.values()))}")
    if has_jump_table(function, tables):
        raise RefusedError(f"{function.name} has an indirect jump that may lead into the bytes")
