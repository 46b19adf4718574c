"""The guard around code that calls into the guest: no preemption, and no recursion.

Each CPU has a word with one bit per context (task, softirq, hardirq, NMI). A hit whose
context's bit is set comes from a function that our own hit path called: it is counted as
missed and nothing else happens. An interrupt on top is another context and is recorded.
"""

from collections.abc import Callable

from kprobes.codegen.context import Context
from kprobes.codegen.ir import Value, const
from kprobes.codegen.per_cpu import change
from kprobes.model.abi import PERCPU_GUARD
from kprobes.model.layout import CONTEXT_HARDIRQ, CONTEXT_NMI

_SERVING_SOFTIRQ = 0x100
"""The softirq count is odd while serving one; even steps are bottom halves disabled."""


def enter(context: Context, event: str, out: str) -> None:
    """Hold preemption and take this context's bit; or count a miss and go to ``out``."""
    hold(context, lambda: count(context, event, context.abi.missed), out)


def hold(context: Context, miss: Callable[[], None], out: str) -> None:
    """Hold preemption and take this context's bit; or do ``miss`` and go to ``out``."""
    f = context.out
    _add_preempt(context, 1)
    bit = _context_bit(context)
    taken, free = f.label("taken"), f.label("free")
    f.branch(f.compare("ne", f.op("and", _word(context), bit), 0), taken, free, is_likely=False)
    f.place(taken)
    _add_preempt(context, -1)
    miss()
    f.jump(out)
    f.place(free)
    change(context, context.code.per_cpu_or, _place(context), bit)
    context.holds_preemption = True


def leave(context: Context) -> None:
    """Give the context's bit back and let preemption be."""
    f = context.out
    mask = f.op("xor", _context_bit(context), -1)
    change(context, context.code.per_cpu_and, _place(context), mask)
    _add_preempt(context, -1)
    context.holds_preemption = False


def check(context: Context, event: str, out: str) -> None:
    """Go to ``out``, counted, when a guarded hit of this context is in progress on this CPU."""
    f = context.out
    look, inside, free = f.label("look"), f.label("inside"), f.label("free")
    word = _word(context)
    f.branch(f.compare("ne", word, 0), look, free, is_likely=False)
    f.place(look)
    taken = f.op("and", word, _context_bit(context))
    f.branch(f.compare("ne", taken, 0), inside, free)
    f.place(inside)
    count(context, event, context.abi.missed)
    f.jump(out)
    f.place(free)


def count(context: Context, event: str, counters: int) -> None:
    """Add one to the counter of an event among those of all events."""
    f = context.out
    count_at(context, f.op("add", f.op("shl", f.address_of(event), 3), counters))


def count_at(context: Context, place: Value) -> None:
    """Add one to the u64 at an address."""
    context.out.asm(context.code.locked_increment, "r,~{flags},~{memory}", [place])


def context_number(context: Context) -> Value:
    """Return which context this is: 0 a task's, 1 softirq's, 2 hardirq's, 3 NMI's."""
    f, bit = context.out, _context_bit(context)
    return f.op("sub", f.op("lshr", bit, 1), f.op("lshr", bit, 3))


def _place(context: Context) -> int:
    return context.abi.percpu + PERCPU_GUARD


def _word(context: Context) -> Value:
    return context.out.load(const(_place(context)), "i32", gs=True)


def _context_bit(context: Context) -> Value:
    f = context.out
    count = f.load(const(context.abi.task.preempt_count), "i32", gs=True)
    bit = const(1, "i32")
    for mask, value in ((_SERVING_SOFTIRQ, 2), (CONTEXT_HARDIRQ, 4), (CONTEXT_NMI, 8)):
        inside = f.compare("ne", f.op("and", count, mask), 0)
        bit = f.select(inside, const(value, "i32"), bit)
    return bit


def _add_preempt(context: Context, n: int) -> None:
    place = context.abi.task.preempt_count
    change(context, context.code.per_cpu_add, place, const(n, "i32"))
