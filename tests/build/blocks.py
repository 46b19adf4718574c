"""A function's instructions in runs that execute together: who runs one of a run runs all of it."""

from collections.abc import Container, Iterator, Sequence

from kprobes.arch.insn import Flow
from tests.build.decoded import Decoded, Instruction


def runs(function: Decoded, faulting: Container[int] = ()) -> Iterator[Sequence[Instruction]]:
    """Yield runs with one way in and one way out.

    A call ends one: its caller may sleep in it, or never come back.

    Args:
        function: decoded.
        faulting: addresses of instructions that the exception table repairs, elsewhere maybe.
    """
    run: list[Instruction] = []
    for instruction in sorted(function.instructions.values(), key=lambda each: each.addr):
        if run and (_is_entered(function, instruction) or run[-1].next != instruction.addr):
            yield run
            run = []
        run.append(instruction)
        if instruction.flow != Flow.NEXT or instruction.addr in faulting:
            yield run
            run = []
    if run:
        yield run


def _is_entered(function: Decoded, instruction: Instruction) -> bool:
    return instruction.addr in function.targets
