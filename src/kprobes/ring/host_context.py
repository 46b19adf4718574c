"""The context of a hit as ``struct trace_entry`` has it, in the words of ``model.layout``.

    TRACE_FLAG_IRQS_OFF 0x01, NEED_RESCHED_LAZY 0x02 (6.13), NEED_RESCHED 0x04, HARDIRQ 0x08,
    SOFTIRQ 0x10, PREEMPT_RESCHED 0x20, NMI 0x40, BH_OFF 0x80

and a count: of preemption, of which since 5.15 the high half counts migrate_disable.
"""

import numpy as np
from numpy.typing import NDArray

from kprobes.model.layout import (
    CONTEXT_HARDIRQ,
    CONTEXT_IRQS_ON,
    CONTEXT_MIGRATE_SHIFT,
    CONTEXT_NEED_RESCHED,
    CONTEXT_NEED_RESCHED_LAZY,
    CONTEXT_NMI,
    CONTEXT_NO_PREEMPT_RESCHED,
    CONTEXT_SERVING_SOFTIRQ,
    MIGRATE_SINCE,
)

_SOFTIRQ_OFF = 2 * CONTEXT_SERVING_SOFTIRQ
_SET = {
    0x02: CONTEXT_NEED_RESCHED_LAZY,
    0x04: CONTEXT_NEED_RESCHED,
    0x08: CONTEXT_HARDIRQ & -CONTEXT_HARDIRQ,
    0x10: CONTEXT_SERVING_SOFTIRQ,
    0x40: CONTEXT_NMI & -CONTEXT_NMI,
    0x80: _SOFTIRQ_OFF,
}
_CLEAR = {0x01: CONTEXT_IRQS_ON, 0x20: CONTEXT_NO_PREEMPT_RESCHED}


class Contexts:
    """Tables from a record's two bytes to its context word, of one kernel release."""

    def __init__(self, version: tuple[int, int]) -> None:
        self._flags = np.array([_of_flags(flags) for flags in range(256)], np.uint32)
        has_migrate = version >= MIGRATE_SINCE
        counts = [_of_count(count, has_migrate=has_migrate) for count in range(256)]
        self._counts = np.array(counts, np.uint32)

    def of(self, flags: NDArray[np.uint8], counts: NDArray[np.uint8]) -> NDArray[np.uint32]:
        """Return the context column."""
        return self._flags[flags] | self._counts[counts]


def _of_flags(flags: int) -> int:
    word = sum(bits for flag, bits in _SET.items() if flags & flag)
    return word + sum(bits for flag, bits in _CLEAR.items() if not flags & flag)


def _of_count(count: int, *, has_migrate: bool) -> int:
    if not has_migrate:
        return count
    return count & 0xF | count >> 4 << CONTEXT_MIGRATE_SHIFT
