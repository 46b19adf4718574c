"""Guard around code that calls into the guest: no preemption, and no recursion.

A hit whose context's bit is set in its CPU's word comes from a function that our own hit path has
called: it is counted as missed, and nothing else happens. An interrupt on top is another context,
and is recorded.
"""

from collections.abc import Callable

from kprobes.codegen import per_cpu
from kprobes.codegen.context import Context
from kprobes.codegen.ir import Value, const
from kprobes.codegen.per_cpu import Change
from kprobes.model.abi import PERCPU_GUARD
from kprobes.model.resolved import CONTEXT_HARDIRQ, CONTEXT_NMI, CONTEXT_SERVING_SOFTIRQ


# The word of a CPU:
#
#     bit      0      1         2         3
#              task   softirq   hardirq   NMI
#
# An interrupt gives back every bit that it takes, before what it has interrupted goes on. So the
# word need not be changed atomically; but the task must stay on the CPU whose word it changes, so
# preemption is held first and let go last. That calls no scheduler: an interrupt that wanted one
# meanwhile has left its flag, which the next one finds.
def enter(context: Context, event: str, out: str) -> None:
    """Hold preemption and take this context's bit; or count a miss and go to ``out``.

    Args:
        context: what is being written.
        event: whose misses are counted.
        out: where to go when a hit of this context is in progress.
    """
    hold(context, lambda: count(context, event, context.abi.missed), out)


def hold(context: Context, miss: Callable[[], None], out: str) -> None:
    """Hold preemption and take this context's bit; or do ``miss`` and go to ``out``.

    Args:
        context: what is being written.
        miss: adds code.
        out: where to go when a hit of this context is in progress.
    """
    f = context.out
    per_cpu.add_preempt(context, 1)
    bit = _context_bit(context)
    taken, free = f.label("taken"), f.label("free")
    f.branch(f.compare("ne", f.op("and", _word(context), bit), 0), taken, free, is_likely=False)
    f.place(taken)
    per_cpu.add_preempt(context, -1)
    miss()
    f.jump(out)
    f.place(free)
    per_cpu.change(context, Change.OR, _place(context), bit)
    # A record has the preempt count of the probed code: from here on one less than what is read
    # (record.py, _context_bits).
    context.holds_preemption = True


def leave(context: Context) -> None:
    """Give the context's bit back and let preemption be."""
    f = context.out
    mask = f.op("xor", _context_bit(context), -1)
    per_cpu.change(context, Change.AND, _place(context), mask)
    per_cpu.add_preempt(context, -1)
    context.holds_preemption = False


def check(context: Context, event: str, out: str) -> None:
    """Go to ``out``, counted, when a guarded hit of this context is in progress on this CPU.

    Args:
        context: what is being written.
        event: whose misses are counted.
        out: where to go then.
    """
    check_free(context, lambda: count(context, event, context.abi.missed), out)


def check_free(context: Context, miss: Callable[[], None], out: str) -> None:
    """Do ``miss`` and go to ``out`` when a guarded hit of this context is in progress on this CPU.

    Args:
        context: what is being written.
        miss: adds code.
        out: where to go then.
    """
    f = context.out
    held, inside, free = f.label("held"), f.label("inside"), f.label("free")
    word = _word(context)
    f.branch(f.compare("ne", word, 0), held, free, is_likely=False)
    f.place(held)
    f.branch(_is_taken(context, word), inside, free)
    f.place(inside)
    miss()
    f.jump(out)
    f.place(free)


def count(context: Context, event: str, counters: int) -> None:
    """Add one to the counter of an event.

    Args:
        context: what is being written.
        event: the symbol of its number.
        counters: the address of all events' u64.
    """
    f = context.out
    count_at(context, f.op("add", f.op("shl", f.address_of(event), 3), counters))


def count_at(context: Context, place: Value) -> None:
    """Add one to the u64 at an address."""
    if context.code.increment is None:
        context.out.increase(place, const(1))
    else:
        context.out.asm(*context.code.increment, [place])


def context_number(context: Context) -> Value:
    """Return which context this is: 0 a task's, 1 softirq's, 2 hardirq's, 3 NMI's."""
    # 1, 2, 4, 8 to 0, 1, 2, 3.
    f, bit = context.out, _context_bit(context)
    return f.op("sub", f.op("lshr", bit, 1), f.op("lshr", bit, 3))


def _is_taken(context: Context, word: Value) -> Value:
    f = context.out
    if per_cpu.can_slip(context):
        # It may be another CPU's, whose task is none of ours: look again, and stay for it.
        per_cpu.add_preempt(context, 1)
        word = _word(context)
        per_cpu.add_preempt(context, -1)
    return f.compare("ne", f.op("and", word, _context_bit(context)), 0)


def _place(context: Context) -> int:
    return context.abi.percpu + PERCPU_GUARD


def _word(context: Context) -> Value:
    return per_cpu.load(context, _place(context), "i32")


def _context_bit(context: Context) -> Value:
    f = context.out
    # The innermost context is the one whose depth is farthest up in the preempt count.
    count = per_cpu.preempt_count(context)
    bit = const(1, "i32")
    for mask, value in ((CONTEXT_SERVING_SOFTIRQ, 2), (CONTEXT_HARDIRQ, 4), (CONTEXT_NMI, 8)):
        inside = f.compare("ne", f.op("and", count, mask), 0)
        bit = f.select(inside, const(value, "i32"), bit)
    return bit
