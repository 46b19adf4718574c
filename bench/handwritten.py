"""The code of a probe as a person would write it: same record, same reservation, no compiler."""

from collections.abc import Mapping

from bench.isa import Isa
from kprobes.model.abi import (
    CPU_SHIFT,
    PERCPU_LIMIT,
    PERCPU_LOST,
    PERCPU_WORD,
    SLACK,
    GuestAbi,
    Template,
)
from kprobes.model.resolved import COMM, COUNTER, EVENT_BITS, HEADER, PID

_HALF = 8
"""Of a task's name."""


def registers_record(
    isa: Isa, abi: GuestAbi, arguments: int, registers: Mapping[str, str] | None = None
) -> Template:
    """Return code that records the first 1 to 3 arguments as 64-bit numbers.

    Args:
        isa: of the guest.
        abi: its constants and the session's.
        arguments: how many.
        registers: the code's names to those of registers; by default as the kernel has them.
    """
    by_hand = isa.by_hand
    fields = (by_hand.field(number, HEADER + 8 * number) for number in range(arguments))
    text = by_hand.probe.format(
        **_places(abi),
        **_task(abi),
        **(by_hand.registers if registers is None else registers),
        size=HEADER + 8 * arguments,
        migration=_migration(isa, abi),
        fields="\n".join(fields),
    )
    return isa.assemble(text)


def _places(abi: GuestAbi) -> dict[str, int]:
    return {
        "percpu": abi.percpu,
        "word": abi.percpu + PERCPU_WORD,
        "limit": abi.percpu + PERCPU_LIMIT,
        "lost": abi.percpu + PERCPU_LOST,
        "cpu_shift": CPU_SHIFT,
        "stride": abi.ring_size + SLACK,
        "rings": abi.rings,
        "ring_size": abi.ring_size,
        "ring_mask": abi.ring_size - 1,
        "ring_bits": abi.ring_size.bit_length() - 1,
        "counter": COUNTER,
        "pid_at": PID,
        "comm_at": COMM,
        "comm_half_at": COMM + _HALF,
        "event_bits": EVENT_BITS,
    }


def _task(abi: GuestAbi) -> dict[str, int]:
    task = abi.task
    lowest = task.resched_mask & -task.resched_mask
    return {
        "current": task.current,
        "pid": task.pid,
        "preempt": task.preempt_count,
        "flags": task.flags,
        "resched": task.resched_mask,
        "resched_at": lowest.bit_length() - 1,
        "resched_bits": (task.resched_mask // lowest).bit_length(),
        "comm": task.comm,
        "comm_half": task.comm + _HALF,
    }


def _migration(isa: Isa, abi: GuestAbi) -> str:
    found = abi.task.migration_disabled
    if found is None:
        return ""
    offset, size = found
    if size != 2:
        raise ValueError(f"migration_disabled of {size} bytes")
    return isa.by_hand.migration.format(offset=offset)
