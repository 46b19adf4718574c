"""When Python is called for a probe, and by whom: all probes of one address together."""

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum

from kprobes.handlers.dispatch import Dispatch
from kprobes.handlers.kprobe import Kprobe
from kprobes.handlers.kretprobe import Kretprobe
from kprobes.handlers.live import LiveKernel
from kprobes.handlers.place import HandlerPlace
from kprobes.handlers.probe import Probe
from kprobes.handlers.report import Report
from kprobes.handlers.return_dispatch import CallerOf, ReturnDispatch
from kprobes.model.upcall import Waiting


class Side(StrEnum):
    """When Python is called."""

    BEFORE = "before the instruction"
    ENTERED = "when the function is entered"
    AFTER = "after the instruction"
    RETURNED = "when the function returns"


def sides_of(probe: Probe) -> list[Side]:
    """Return when Python is called for a probe."""
    found: list[Side] = []
    if isinstance(probe, Kprobe):
        handlers = ((Side.BEFORE, probe.pre_handler), (Side.AFTER, probe.post_handler))
        found = [side for side, handler in handlers if handler is not None]
    if isinstance(probe, Kretprobe):
        found = [Side.ENTERED, Side.RETURNED] if probe.keeps else [Side.RETURNED]
    return found


def serving(
    live: LiveKernel,
    place: HandlerPlace,
    probes: Sequence[Probe],
    *,
    report: Report,
    caller_of: CallerOf,
) -> Mapping[Side, Callable[[Waiting], None]]:
    """Return what serves the hits of one address; ``probes`` in the order of their handlers."""
    sites = Dispatch(
        live=live,
        place=place,
        probes=[probe for probe in probes if isinstance(probe, Kprobe)],
        report=report,
    )
    calls = ReturnDispatch(
        live=live,
        place=place,
        probes=[probe for probe in probes if isinstance(probe, Kretprobe)],
        report=report,
        caller_of=caller_of,
    )
    return {
        Side.BEFORE: sites.before,
        Side.ENTERED: calls.entered,
        Side.AFTER: sites.after,
        Side.RETURNED: calls.returned,
    }
