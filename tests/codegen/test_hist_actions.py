"""Actions of hist triggers as machine code: the fields of one hit, whatever comes in between."""

from random import Random

import pytest

from kprobes.units import U64
from tests.build.counted import Counted, Entry
from tests.build.machine import NMI
from tests.build.overridden import Isa
from tests.codegen.test_hist import EVERY_ISA, counted
from tests.codegen.test_hist_races import racing

_KEPT = "keys=key:x=num:onmax($x).save(key,num)"
PLAIN = "p f key=$arg1 num=$arg2 small=$arg3:s16"


def _entry(found: Counted, key: int = 7) -> Entry:
    (entry,) = (each for each in found.tables.read().entries if each.keys == (key,))
    return entry


@EVERY_ISA
def test_the_first_hit_with_the_greatest_number_is_kept_and_none_with_0(isa: Isa) -> None:
    found = counted(isa, PLAIN, "keys=key:x=num:onmax($x).save(small,num)")
    random, model = Random(5), (0, 0, 0)
    for n in range(300):
        number = random.choice((0, n, n >> 3, U64 - n if n > 250 else 1))
        small = random.randrange(-100, 100)
        if number > model[0]:
            model = number, small & U64, number

        found.hit(7, number, small)

        version, kept, _, *saved = _entry(found).tracked
        assert (kept, *saved) == model
        assert version % 2 == 0
    assert _entry(found).hitcount == 300


@EVERY_ISA
def test_an_expression_is_looked_at_and_each_key_keeps_its_own(isa: Isa) -> None:
    found = counted(isa, PLAIN, "keys=key:vals=num.max:x=num*2-small:onmax($x).save(num)")

    for key, number, small in ((1, 10, 3), (2, 20, -5), (1, 9, -30), (2, 3, 1)):
        found.hit(key, number, small)

    rows = {key: (_entry(found, key).vals, _entry(found, key).tracked[1:]) for key in (1, 2)}
    assert {key: (vals, kept, saved) for key, (vals, (kept, _, saved)) in rows.items()} == {
        1: ((10,), 48, 9),
        2: ((20,), 45, 20),
    }


@EVERY_ISA
@pytest.mark.parametrize("numbers", [(5, 9), (9, 5), (9, 9)])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_hit_in_an_interrupt_before_any_instruction_is_whole_or_dropped_and_counted(
    isa: Isa, numbers: tuple[int, int], is_known: bool
) -> None:
    found = racing(isa, _KEPT, PLAIN)
    outer, inner = numbers
    if is_known:
        found.hit(7, 1)
    start, dropped = found.tables.copy(), 0

    for step in range(found.steps(7, outer)):
        found.tables.restore(start)
        found.hit(7, outer, at={step: lambda: found.interrupt(7, inner, site=1, level=NMI)})

        table = found.tables.read()
        every = [each for each in table.entries if each.hitcount]
        hits = sum(each.hitcount for each in every) - is_known
        assert hits + table.dropped == 2, step
        assert all(each.tracked[0] % 2 == 0 for each in table.entries)
        best = max(every, key=lambda each: each.tracked[1]).tracked
        # What is saved is of the hit whose number is kept.
        assert (best[3], best[4]) == (7, best[1]), step
        assert best[1] == (outer if table.dropped else max(numbers)), step
        dropped += table.dropped
    # Only before the last word is written; without a greater number only before the first one is.
    assert 0 < dropped < (40 if inner > outer else 4)


@EVERY_ISA
def test_an_onlooker_sees_the_words_of_one_hit_where_the_version_is_even(isa: Isa) -> None:
    found = racing(isa, _KEPT, PLAIN)
    found.hit(7, 3)
    start, seen = found.tables.copy(), set[tuple[int, ...]]()

    def inspect() -> None:
        tracked = _entry(found).tracked
        if tracked[0] % 2 == 0:
            seen.add((tracked[0], tracked[1], *tracked[3:]))

    for step in range(found.steps(7, 4)):
        found.tables.restore(start)
        found.hit(7, 4, at={step: inspect})

    assert seen == {(2, 3, 7, 3), (4, 4, 7, 4)}
