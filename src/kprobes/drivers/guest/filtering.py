"""Filters as text to filters of one guest's probes: it knows its CPUs and functions."""

from dataclasses import replace
from functools import partial

from kprobes.drivers.guest.guest import Guest
from kprobes.drivers.guest.layout import per_cpu_bases
from kprobes.lang.filter import parse_filter
from kprobes.lang.filter_scan import Known
from kprobes.model.filter import Filter, every
from kprobes.model.resolved import Resolved
from kprobes.model.symbol import span_of
from kprobes.resolve.filter import filter_fields


def with_filter(probe: Resolved, guest: Guest, tasks: Filter | None) -> Resolved:
    """Give a probe the filter that its definition has.

    Args:
        probe: without one.
        guest: whose probe it is.
        tasks: what a hit must pass before that.

    Raises:
        DefinitionError: the filter is wrong, or names what the event has not.
    """
    text = probe.definition.filter
    own = parse_filter(text, _known(probe, guest)) if text else None
    chosen = every([each for each in (tasks, own) if each is not None])
    return replace(probe, filter=chosen) if chosen is not None else probe


def _known(probe: Resolved, guest: Guest) -> Known:
    function = partial(span_of, guest.kernel.symbols)
    cpus = len(per_cpu_bases(guest.memory, guest.kernel))
    return Known(fields=filter_fields(probe, of_guest=True), cpus=cpus, function=function)
