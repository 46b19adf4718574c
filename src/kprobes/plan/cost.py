"""Predictions: the time of a hit, and for how long a guest stands still while probes are armed.

They rest on figures of emulated guests (docs/howto/limits.md says how they were got). Under KVM the
exception of a breakpoint takes a part of that only: a prediction errs on the guest's side.
"""

from collections.abc import Collection, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from kprobes.model.plan import Plan, Role, Strategy
from kprobes.model.resolved import Resolved, Storage, count_reads

SITE_NS = {Strategy.FTRACE: 10, Strategy.JUMP: 50, Strategy.BREAKPOINT: 1230}
"""Nanoseconds by strategy from the patched instruction to the code of its probes, and back."""
_PAUSE_S, SITE_PAUSE_S = 0.002, 25e-6
"""Seconds of a pause, and of each site that is changed in it."""


class CodeCost(Struct, frozen=True, kw_only=True):
    """Nanoseconds that the code of a probe takes on one architecture.

    Attributes:
        record: for a record with nothing but its header and registers.
        read: for each read of memory that may fault.
        string: for a short string beside that.
        keep: for what the entry of a return probe keeps.
    """

    record: float
    read: float
    string: float
    keep: float


CODE = {
    "x86_64": CodeCost(record=50, read=85, string=120, keep=60),
    "aarch64": CodeCost(record=150, read=270, string=300, keep=150),
}
"""By architecture, in the kernel's words."""


def predicted_ns(arch: str, probe: Resolved, sites: Sequence[Strategy]) -> float:
    """Return what a hit that is recorded takes.

    Args:
        arch: of the kernel.
        probe: that is hit.
        sites: that a hit passes: of a return probe those of the entry, if it is probed, and exit.
    """
    cost = CODE[arch]
    reads = sum(count_reads(fetch.operand) for fetch in probe.fetches)
    strings = sum(fetch.field.storage is Storage.STRING for fetch in probe.fetches)
    code = cost.record + cost.read * reads + cost.string * strings + cost.keep * (len(sites) - 1)
    return code + sum(SITE_NS[each] for each in sites)


def predicted_pause_s(sites: int) -> float:
    """Return for how many seconds a guest stands still while so many sites are armed at once."""
    return _PAUSE_S + SITE_PAUSE_S * sites


def site_costs(plans: Collection[Plan], size: int) -> NDArray[np.float64]:
    """Return the seconds that each event's hit takes besides the code of its probe.

    Args:
        plans: that are armed.
        size: from which event id on there is none.

    Returns:
        A new array of shape (size,), by event id. A return has also its entry's, and of several
        exits the dearest.
    """
    found, exits = np.zeros(size), np.zeros(size)
    for plan in plans:
        site_s = SITE_NS[plan.site.strategy] * 1e-9
        for probe in plan.probes:
            found[probe.layout.event_id] += site_s
        for each in plan.returning:
            for probe in each.returns.probes:
                number = probe.layout.event_id
                if each.role in (Role.ENTER, Role.HOOK):
                    found[number] += site_s
                else:
                    exits[number] = max(exits[number], site_s)
    return found + exits
