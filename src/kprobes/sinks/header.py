"""The lines above the events of a kernel's trace file, as its ``nop`` tracer prints them."""

from kprobes.model.layout import MIGRATE_SINCE
from kprobes.sinks.flags import BH_SINCE
from kprobes.sinks.origin import Origin

_TITLE = """\
# tracer: nop
#
"""
_FOUR = """\
#                                _-----=> irqs-off
#                               / _----=> need-resched
#                              | / _---=> hardirq/softirq
#                              || / _--=> preempt-depth
#                              ||| /     delay
#           TASK-PID     CPU#  ||||   TIMESTAMP  FUNCTION
#              | |         |   ||||      |         |
"""
_FIVE = """\
#                                _-----=> irqs-off/BH-disabled
#                               / _----=> need-resched
#                              | / _---=> hardirq/softirq
#                              || / _--=> preempt-depth
#                              ||| / _-=> migrate-disable
#                              |||| /     delay
#           TASK-PID     CPU#  |||||  TIMESTAMP  FUNCTION
#              | |         |   |||||     |         |
"""


def before_counts() -> bytes:
    """Return what stands before the line of counts."""
    return _TITLE.encode()


def counts(entries: int, cpus: int) -> bytes:
    """Return the line of counts for a buffer that holds all that was written to it."""
    return b"# entries-in-buffer/entries-written: %d/%d   #P:%d\n" % (entries, entries, cpus)


def after_counts(origin: Origin) -> bytes:
    """Return what stands between the line of counts and the events."""
    if origin.version < MIGRATE_SINCE:
        columns = _FOUR
    elif origin.version < BH_SINCE:
        columns = _FIVE.replace("/BH-disabled", "")
    else:
        columns = _FIVE
    return f"#\n{columns}".encode()
