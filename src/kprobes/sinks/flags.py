"""The context of a hit as the characters the kernel's trace prints for it.

trace_print_lat_fmt in kernel/trace/trace_output.c and tracing_gen_ctx_irq_test in trace.c.
"""

from kprobes.model.layout import (
    CONTEXT_HARDIRQ,
    CONTEXT_IRQS_ON,
    CONTEXT_MIGRATE_SHIFT,
    CONTEXT_NEED_RESCHED,
    CONTEXT_NEED_RESCHED_LAZY,
    CONTEXT_NMI,
    CONTEXT_NO_PREEMPT_RESCHED,
    CONTEXT_PREEMPT,
    CONTEXT_SERVING_SOFTIRQ,
    CONTEXT_SOFTIRQ,
    MIGRATE_SINCE,
)

BH_SINCE = (5, 18)
"""289e7b0f7eb4 (tracing: Account bottom half disabled sections): ``b`` and ``D``."""
LAZY_SINCE = (6, 13)
"""The lazy reschedule flag: ``B``, ``L``, ``b`` and ``l``."""
NEWEST = (99, 0)
"""Every column there is."""

_BH_OFF = CONTEXT_SOFTIRQ & ~CONTEXT_SERVING_SOFTIRQ

_RESCHED = {
    # (task's flag, the preempt count's, task's lazy flag)
    (True, True, True): "B",
    (True, True, False): "N",
    (False, True, True): "L",
    (True, False, True): "b",
    (True, False, False): "n",
    (False, True, False): "p",
    (False, False, True): "l",
    (False, False, False): ".",
}


def flags(context: int, version: tuple[int, int]) -> str:
    """Return the context column of a kernel version: five characters, four before 5.15."""
    depth = context & CONTEXT_PREEMPT
    first = _irqs(context, version) + _resched(context, version) + _interrupt(context)
    if version < MIGRATE_SINCE:
        return first + _hex(depth)
    migrate = context >> CONTEXT_MIGRATE_SHIFT & 0xF
    return first + _hex(min(depth, 0xF)) + _hex(migrate)


def _irqs(context: int, version: tuple[int, int]) -> str:
    is_off = not context & CONTEXT_IRQS_ON
    if version >= BH_SINCE and context & _BH_OFF:
        return "D" if is_off else "b"
    return "d" if is_off else "."


def _resched(context: int, version: tuple[int, int]) -> str:
    is_lazy = version >= LAZY_SINCE and bool(context & CONTEXT_NEED_RESCHED_LAZY)
    is_needed = bool(context & CONTEXT_NEED_RESCHED)
    return _RESCHED[is_needed, not context & CONTEXT_NO_PREEMPT_RESCHED, is_lazy]


def _interrupt(context: int) -> str:
    is_hard = bool(context & CONTEXT_HARDIRQ)
    if context & CONTEXT_NMI:
        return "Z" if is_hard else "z"
    if is_hard:
        return "H" if context & CONTEXT_SERVING_SOFTIRQ else "h"
    return "s" if context & CONTEXT_SERVING_SOFTIRQ else "."


def _hex(number: int) -> str:
    return f"{number:x}" if number else "."
