"""Hits that are counted in the middle of another that is counted, and tasks that are moved."""

from functools import partial
from random import Random

import pytest

from kprobes.units import U64
from tests.build.counted import CPUS, Counted, Table, make_counted, rivals, signed
from tests.build.machine import NMI
from tests.build.overridden import Isa
from tests.codegen.test_hist import EVERY_ISA, PLAIN, SIZE, SUMS, counted

PAIRS = [(3, -4), (-4, 3)]


def racing(isa: Isa, trigger: str = SUMS, probe: str = PLAIN) -> Counted:
    """Return two functions that count in one table, the second to be called in interrupts."""
    text = f"{trigger}:size={SIZE}"
    sites = ([make_counted(isa, probe, text, number=number)] for number in range(2))
    return Counted(isa, *sites, is_watched=True)


def expected(*hits: tuple[int, int]) -> dict[int, tuple[int, int, int, int]]:
    by_key = {key: [value for each, value in hits if each == key] for key, _ in hits}
    return {key: (len(v), sum(v), min(v), max(v)) for key, v in by_key.items()}


@EVERY_ISA
@pytest.mark.parametrize("values", PAIRS)
@pytest.mark.parametrize("is_same", [True, False], ids=["same", "other"])
@pytest.mark.parametrize("known", ["none", "outer", "inner", "both"])
def test_a_hit_in_an_interrupt_before_any_instruction_is_counted_and_so_is_the_other(
    isa: Isa, values: tuple[int, int], is_same: bool, known: str
) -> None:
    found = racing(isa)
    first, second = rivals(found)
    outer, inner = (first, values[0]), (first if is_same else second, values[1])
    before = {"none": (), "outer": (outer,), "inner": (inner,), "both": (outer, inner)}[known]
    for hit in before:
        found.hit(*hit)
    start, sizes = found.tables.copy(), set[int]()

    def interrupt() -> None:
        expect_whole(found.tables.read(), {outer[0], inner[0]})
        found.interrupt(*inner, site=1)
        expect_whole(found.tables.read(), {outer[0], inner[0]})

    for step in range(found.steps(*outer)):
        found.tables.restore(start)

        found.hit(*outer, at={step: interrupt})

        table = found.tables.read()
        assert table.totals == expected(*before, outer, inner), step
        assert (table.dropped, table.unmeasured) == (0, 0)
        sizes.add(len(table.entries))
    # Only where both make an entry of one key it may have two.
    one = len({outer[0], inner[0]})
    assert sizes == ({1, 2} if is_same and known == "none" else {one})


def expect_whole(table: Table, keys: set[int]) -> None:
    written = [each for each in table.entries if each.mark == 1]
    assert len(written) <= 1
    for entry in table.entries:
        assert entry.mark == 1 or entry.keys[0] in keys
        # What was never hit has its least and greatest the wrong way round.
        is_hit = entry.mark != 1 and entry.hitcount
        assert not is_hit or signed(entry.vals[1]) <= signed(entry.vals[2])


@EVERY_ISA
def test_an_onlooker_sees_whole_entries_before_any_instruction(isa: Isa) -> None:
    found = racing(isa, "keys=a,common_pid.execname:vals=b,b.min")
    found.set_task(b"fifteen letters", 5)
    steps, seen = found.steps(7, -3), set[tuple[object, ...]]()

    def inspect() -> None:
        for each in found.tables.read().entries:
            if each.mark != 1:
                seen.add((each.keys, each.comm, each.hitcount, each.vals if each.hitcount else ()))

    for step in range(steps):
        found.tables.clear()
        found.hit(7, -3, at={step: inspect})

    entry = (7, 5), b"fifteen letters\0"
    assert seen == {(*entry, 0, ()), (*entry, 1, (U64 - 2, U64 - 2))}


@EVERY_ISA
@pytest.mark.parametrize("is_same", [True, False], ids=["same", "other"])
@pytest.mark.parametrize("free", [1, 0])
def test_of_two_hits_for_the_last_entry_one_is_dropped_and_counted(
    isa: Isa, is_same: bool, free: int
) -> None:
    found = racing(isa)
    first, second = rivals(found)
    outer, inner = (first, 3), (first if is_same else second, -4)
    old = [(key, 0) for key in range(1000, 1000 + SIZE - free)]
    for hit in old:
        found.hit(*hit)
    start, full = found.tables.copy(), expected(*old)
    counted_hits = [(outer,), (inner,), (outer, inner)] if free else [()]
    steps, dropped = found.steps(*outer), set[int]()

    for step in range(steps):
        found.tables.restore(start)
        found.hit(*outer, at={step: lambda: found.interrupt(*inner, site=1)})

        table = found.tables.read()
        new = {key: row for key, row in table.totals.items() if key not in full}
        assert {key: row for key, row in table.totals.items() if key in full} == full
        assert table.dropped + sum(hits for hits, *_ in new.values()) == 2, step
        assert new in [expected(*hits) for hits in counted_hits]
        assert table.used == SIZE
        dropped.add(table.dropped)
    assert dropped == ({2} if not free else {0, 1} if is_same else {1})


@EVERY_ISA
def test_hits_of_three_contexts_on_top_of_each_other_are_all_counted(isa: Isa) -> None:
    found = racing(isa)
    random, keys = Random(1), rivals(found)
    steps = found.steps(keys[0], 0)
    # With an entry there, of which nothing is less or greater.
    shortest = found.steps(keys[0], 0)
    for step in range(steps):
        found.tables.clear()
        first, second, third = ((random.choice(keys), random.randrange(-9, 9)) for _ in range(3))
        last = {random.randrange(shortest): partial(found.interrupt, *third, level=NMI)}

        found.hit(*first, at={step: partial(found.interrupt, *second, site=1, at=last)})

        assert found.tables.read().totals == expected(first, second, third), step


@EVERY_ISA
def test_a_task_that_is_moved_before_any_instruction_counts_once_and_where_it_is(isa: Isa) -> None:
    found = counted(isa, PLAIN, "keys=cpu,a:vals=b", is_watched=True)
    guest, cpus = found.machine, set[int]()
    expects = 0

    def move() -> None:
        nonlocal expects
        # Who holds preemption off stays where it is.
        if not guest.preempt_count & 0xFF:
            expects = int(not found.tables.read().entries)
            guest.move_to(1)

    for step in range(found.steps(7, 2)):
        found.tables.clear()
        guest.move_to(0)
        expects = 0

        found.hit(7, 2, at={step: move})

        counts = [found.tables.read(cpu).counts for cpu in range(CPUS)]
        assert counts[expects] == {(expects, 7): (1, 2)}, step
        assert counts[1 - expects] == {}
        cpus.add(expects)
    assert cpus == {0, 1}
