"""What a recording counted, by probe."""

from collections.abc import Iterable

from kprobes.lang.listing import place_as_given
from kprobes.model.hits import Counts, Hits
from kprobes.model.resolved import Resolved


def hits_of(recorded: Iterable[Resolved], fresh: Iterable[Resolved], counts: Counts) -> list[Hits]:
    """Return every probe's numbers.

    Args:
        recorded: probes of the recording, those of modules that are gone included.
        fresh: probes that may have been added since; of these nothing is counted yet, whatever
            had their numbers in the recording.
        counts: of the recording.
    """
    # A return probe is at every exit of its function, one of a module wherever that is loaded.
    counted = {(_name(probe), probe.layout.event_id): probe for probe in recorded}
    names = {name for name, _ in counted}
    newer = {_name(probe): probe for probe in fresh if _name(probe) not in names}
    none = Counts(recorded={}, missed={}, lost=0, damaged=0)
    found = [_hits(probe, counts) for probe in counted.values()]
    return found + [_hits(probe, none) for probe in newer.values()]


def _name(probe: Resolved) -> tuple[str, str, str]:
    return probe.layout.group, probe.layout.event, place_as_given(probe.definition)


def _hits(probe: Resolved, counts: Counts) -> Hits:
    number = probe.layout.event_id
    return Hits(
        event=probe.layout.event,
        function=place_as_given(probe.definition),
        recorded=counts.recorded.get(number, 0),
        missed=counts.missed.get(number, 0),
        unkept=counts.unkept.get(number, 0),
    )
