"""Per-CPU words of the running CPU, and words of the running task.

Where single instructions reach per-CPU memory no interrupt comes in between. A place that a signed
32-bit displacement reaches stands in the instruction. What a guest gives us can be farther away,
after its first chunk of per-CPU memory, and then takes a register.

Where a register has its base the task may have moved when that is used. A reservation word names
its CPU: it is exchanged so that other CPUs may do the same, and is good on the one it is of.
Everything else is only touched while preemption is held, where what an interrupt changes it puts
back; counters can be added to from anywhere.
"""

from collections.abc import Sequence
from enum import StrEnum
from typing import assert_never

from kprobes.arch.arch import Base, Segment
from kprobes.codegen.context import Context
from kprobes.codegen.ir import Value, const

_REACH = 1 << 31


class Change(StrEnum):
    """What is done to a 32-bit word: LLVM's names."""

    OR = "or"
    AND = "and"
    ADD = "add"


def base(context: Context) -> Value:
    """Return what to add to per-CPU places, read now; nothing where instructions do it."""
    match context.code.per_cpu:
        case Segment():
            return const(0)
        case Base(expression=expression):
            return context.out.value("i64", expression)
        case _:
            assert_never(context.code.per_cpu)


def load(context: Context, place: int, type_: str = "i64", *, at: Value | None = None) -> Value:
    """Read a per-CPU word.

    Args:
        context: what is being written.
        place: its per-CPU offset.
        type_: its IR type.
        at: what ``base`` has returned before, to use instead of another look.
    """
    match context.code.per_cpu:
        case Segment(space=space):
            return context.out.load(const(place), type_, space=space)
        case Base():
            return context.out.load(_address(context, place, at), type_)
        case _:
            assert_never(context.code.per_cpu)


def exchange(
    context: Context, place: int, words: tuple[Value, Value], *, at: Value | None = None
) -> Value:
    """Put one u64 where another is expected; return what was there before.

    Args:
        context: what is being written.
        place: its per-CPU offset.
        words: what is expected, and what is put there.
        at: as of ``load``.
    """
    match context.code.per_cpu:
        case Segment(exchange=(text, constraints)):
            return context.out.asm_value(*_at(place, text, constraints, words))
        case Base():
            return context.out.exchange(_address(context, place, at), *words)
        case _:
            assert_never(context.code.per_cpu)


def change(context: Context, how: Change, place: int, operand: Value) -> None:
    """Change a u32 of a CPU that is held.

    Args:
        context: what is being written.
        how: what is done to it.
        place: its per-CPU offset.
        operand: of that.
    """
    match context.code.per_cpu:
        case Segment() as segment:
            texts = {Change.OR: segment.or_, Change.AND: segment.and_, Change.ADD: segment.add}
            context.out.asm(*_at(place, texts[how], segment.change, (operand,)))
        case Base():
            _change(context, how, _address(context, place, None), operand)
        case _:
            assert_never(context.code.per_cpu)


def count(context: Context, place: int) -> None:
    """Add one to a u64 counter."""
    match context.code.per_cpu:
        case Segment() as segment:
            context.out.asm(*_at(place, segment.count, segment.change, (const(1),)))
        case Base():
            context.out.increase(_address(context, place, None), const(1))
        case _:
            assert_never(context.code.per_cpu)


def task(context: Context) -> Value:
    """Return the running task's address."""
    if context.code.current is not None:
        return context.out.value("i64", context.code.current)
    return load(context, context.abi.task.current)


def preempt_count(context: Context, *, of: Value | None = None) -> Value:
    """Return the preempt count, a u32; of the running task, where that was read before."""
    place = context.abi.task.preempt_count
    if context.code.current is None:
        return load(context, place, "i32")
    # An emulated CPU looks up whether that register may be read: a load is cheaper.
    current = of or task(context)
    return context.out.load(context.out.op("add", current, place), "i32")


def no_resched(context: Context, *, of: Value) -> Value:
    """Return a task's word that is 1 while no preemption is wanted, where it has such a word."""
    place = context.abi.task.preempt_count + 4
    return context.out.load(context.out.op("add", of, place), "i32")


def add_preempt(context: Context, n: int) -> None:
    """Add to the preempt count."""
    place, number = context.abi.task.preempt_count, const(n, "i32")
    if context.code.current is None:
        change(context, Change.ADD, place, number)
    else:
        # The task's own word moves with it.
        _change(context, Change.ADD, context.out.op("add", task(context), place), number)


def can_slip(context: Context) -> bool:
    """Whether a word that was read can be of a CPU that the task was moved away from meanwhile."""
    return isinstance(context.code.per_cpu, Base)


def _address(context: Context, place: int, at: Value | None) -> Value:
    return context.out.op("add", base(context) if at is None else at, place)


# Load, change and store. An interrupt in between finds the old word, and puts back what it changes
# before it returns; no other CPU writes the word meanwhile.
def _change(context: Context, how: Change, address: Value, operand: Value) -> None:
    f = context.out
    f.put(address, f.op(how, f.load(address, operand.type), operand))


# The place becomes a part of the text, as a displacement of gs; where it is farther than that
# reaches, the text gets a register for it, and the register's number after those of its operands:
#
#     addl $0, %gs:1234     "ri,~{flags}"        addl $0, %gs:($1)     "ri,r,~{flags}"
def _at(
    place: int, text: str, constraints: str, operands: Sequence[Value]
) -> tuple[str, str, Sequence[Value]]:
    offset = const(place)
    if -_REACH <= int(offset.text) < _REACH:
        return text.format(offset.text), constraints, operands
    own, clobbers = constraints.split(",~", 1)
    number = own.count(",") + 1
    return text.format(f"(${number})"), f"{own},r,~{clobbers}", (*operands, offset)
