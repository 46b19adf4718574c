"""Hist triggers of events as machine code: hits are recorded and counted, each by its own rules."""

from collections.abc import Mapping

import pytest
from msgspec.structs import replace

from kprobes.lang.filter import parse_filter
from kprobes.lang.hist import parse_hist
from kprobes.lang.trigger import parse_trigger
from kprobes.model.hist import HistTable
from kprobes.model.resolved import Resolved
from kprobes.model.trigger import (
    Command,
    CompiledTrigger,
    is_there_offset,
    left_offset,
    soft_enable_offset,
)
from kprobes.resolve.hist import known_fields
from kprobes.units import Addr
from tests.build import arm64, machine
from tests.build.counted import Counted, make_counted
from tests.build.filtered import known_of
from tests.build.overridden import AMD64, ARM64, Isa
from tests.build.records import records

ISAS = [pytest.param(AMD64, id="amd64"), pytest.param(ARM64, id="arm64")]
EVERY_ISA = pytest.mark.parametrize("isa", ISAS)
_WORDS = 0x7_0000
"""Of the data: after the tables."""


def with_triggers(probe: Resolved, *texts: str, hists: tuple[int, ...] = ()) -> Resolved:
    """Give a probe triggers: the n-th has number n, word n of soft enables, and table n.

    Args:
        probe: without any.
        texts: of the triggers; a hist trigger has a table of the least size.
        hists: the words that are about other hist triggers.
    """
    made: list[CompiledTrigger] = []
    for number, text in enumerate(texts, 1):
        found = parse_trigger(text).trigger
        trigger = replace(found, number=number, soft_enable=number, table=number, hists=hists)
        hist = None
        if trigger.command is Command.HIST:
            hist = parse_hist(trigger.text, known_fields(probe.layout, of_guest=True))
            trigger = replace(trigger, hist=hist, filter=hist.filter)
        table = hist and HistTable(trigger=replace(hist, size=128), number=number)
        chosen = parse_filter(trigger.filter, known_of(probe)) if trigger.filter else None
        made.append(CompiledTrigger(trigger=trigger, filter=chosen, hist=table))
    return replace(probe, triggers=tuple(made))


class Triggered(Counted):
    """Functions whose events have hist triggers; all of these count at first."""

    def __init__(self, isa: Isa, *sites: Resolved, tracing: int = 1) -> None:
        module = arm64 if isa is ARM64 else machine
        self._page = module.DATA + _WORDS
        abi = replace(module.ABI, words=Addr(self._page), checks_tracing_on=True)
        super().__init__(isa, *([each] for each in sites), abi=abi)
        self.set_words({0: tracing, **{soft_enable_offset(n): 1 for n in range(1, 8)}})

    def set_words(self, words: Mapping[int, int]) -> None:
        """Write words by their offsets."""
        for offset, number in words.items():
            self.machine.cpu.set_number(self._page + offset, number)

    def word(self, offset: int) -> int:
        """Return a word."""
        return self.machine.cpu.number(self._page + offset)

    def recorded(self) -> list[object]:
        """Return the first argument of each event."""
        return [each.values[0] for each in records(self.machine, 0)]  # pyright: ignore[reportArgumentType] - either is read alike


@EVERY_ISA
def test_hits_are_recorded_and_counted_each_by_a_filter_of_its_own(isa: Isa) -> None:
    probe = make_counted(isa, "p f a=$arg1 b=$arg2", "", "a != 2")
    texts = ("hist:keys=a:vals=b", "hist:keys=b if a > 1", "hist:keys=a if b == 77")
    found = Triggered(isa, with_triggers(probe, *texts))

    for arguments in ((1, 10), (2, 20), (2, 20), (3, 10)):
        found.hit(*arguments)

    assert found.recorded() == [1, 3]
    second, third = found.others
    assert found.tables.read().counts == {(1,): (1, 10), (2,): (2, 40), (3,): (1, 10)}
    assert second.read().counts == {(20,): (2,), (10,): (1,)}
    assert third.read().counts == {}


@EVERY_ISA
def test_hits_are_counted_also_where_nothing_is_recorded(isa: Isa) -> None:
    # trace_event_buffer_lock_reserve(): triggers look at an event that is not kept.
    probe = with_triggers(make_counted(isa, "p f a=$arg1", ""), "hist:keys=a")
    off = Triggered(isa, probe, tracing=0)
    off.hit(5)
    disabled = Triggered(isa, replace(probe, soft_enable=7))
    disabled.set_words({soft_enable_offset(7): 0})
    disabled.hit(6)

    assert (off.recorded(), off.tables.read().counts) == ([], {(5,): (1,)})
    assert (disabled.recorded(), disabled.tables.read().counts) == ([], {(6,): (1,)})


@EVERY_ISA
def test_what_counts_in_place_of_recording_counts_no_event_that_is_disabled(isa: Isa) -> None:
    probe = replace(make_counted(isa, "p f a=$arg1", "keys=a"), soft_enable=1)
    found = Triggered(isa, probe)

    found.hit(5)
    found.set_words({soft_enable_offset(1): 0})
    found.hit(5)
    found.set_words({soft_enable_offset(1): 1, 0: 0})
    found.hit(5)

    assert found.tables.read().counts == {(5,): (1,)}


@EVERY_ISA
def test_one_that_is_paused_counts_nothing_and_others_go_on(isa: Isa) -> None:
    probe = make_counted(isa, "p f a=$arg1", "")
    found = Triggered(isa, with_triggers(probe, "hist:keys=a", "hist:keys=comm:vals=a"))
    comm = found.tables
    found.hit(1)
    found.set_words({soft_enable_offset(1): 0})
    found.hit(2)
    found.set_words({soft_enable_offset(1): 1})
    found.hit(3)

    assert found.recorded() == [1, 2, 3]
    assert comm.read().counts == {(1,): (1,), (3,): (1,)}
    ((hitcount, total),) = found.others[0].read().counts.values()
    assert (hitcount, total) == (3, 6)


@EVERY_ISA
def test_an_event_pauses_anothers_as_often_as_it_may(isa: Isa) -> None:
    counted = make_counted(isa, "p f a=$arg1", "")
    switch = make_counted(isa, "p f a=$arg1", "", number=1)
    texts = ("disable_hist:g:e:2 if a == 5", "enable_hist:g:e if a == 6")
    switched = with_triggers(switch, *texts, hists=(3, 4))
    three = with_triggers(counted, "traceon", "traceon", "hist:keys=a", "hist:keys=a:vals=a")
    found = Triggered(isa, three, switched)
    switches = [each.trigger for each in switched.triggers]
    found.set_words({left_offset(1): 2, **{is_there_offset(each): 1 for each in switches}})

    def switch_by(argument: int) -> tuple[int, int]:
        found.hit(argument, site=1)
        return found.word(soft_enable_offset(3)), found.word(soft_enable_offset(4))

    assert switch_by(5) == (0, 0)
    found.hit(1)
    assert switch_by(6) == (1, 1)
    found.hit(2)
    # What changes nothing takes one of the two, too.
    assert switch_by(5) == (0, 0)
    assert found.word(left_offset(1)) == 0
    assert switch_by(6) == (1, 1)
    assert switch_by(5) == (1, 1)
    found.hit(2)

    assert found.tables.read().counts == {(2,): (2,)}
    assert found.others[0].read().counts == {(2,): (2, 4)}


@EVERY_ISA
def test_a_number_of_memory_is_the_same_in_the_record_and_in_every_table(isa: Isa) -> None:
    probe = make_counted(isa, "p f a=+0($arg1):u16", "", "a > 1")
    found = Triggered(isa, with_triggers(probe, "hist:keys=a if a > 3", "hist:keys=a"))
    place = arm64.KERNEL if isa is ARM64 else machine.KERNEL
    for number in (1, 2, 4, 4):
        found.machine.cpu.set_number(place, number)
        found.hit(place)

    assert found.recorded() == [2, 4, 4]
    assert found.tables.read().counts == {(4,): (2,)}
    assert found.others[0].read().counts == {(1,): (1,), (2,): (1,), (4,): (2,)}


@EVERY_ISA
def test_a_full_table_keeps_no_hit_from_being_recorded(isa: Isa) -> None:
    probe = with_triggers(make_counted(isa, "p f a=$arg1", ""), "hist:keys=a")
    found = Triggered(isa, probe)

    for argument in range(130):
        found.hit(argument)

    table = found.tables.read()
    assert (len(table.entries), table.dropped) == (128, 2)
    assert found.recorded() == [*range(130)]
