"""The comparison with the kernel's records: what begins or ends in the middle is nobody's fault."""

import pytest
from msgspec.structs import replace

from tests.system.oracle import Comparison, Hit, compare

FIRST = Hit(
    comm="cat",
    pid=7,
    cpu=1,
    flags="d....",
    ts_us=1_000,
    event="opened",
    where="do_sys_openat2+0x4/0x100",
    values=("1",),
)
LATER_US = 90_000
"""What an emulated CPU waits for one of this machine's."""


def at(ts_us: int, hit: Hit = FIRST, **others: object) -> Hit:
    """Return a hit at another time."""
    return replace(hit, ts_us=ts_us, **others)


def unpaired(found: Comparison) -> tuple[list[Hit], list[Hit]]:
    return found.ours_only, found.native_only


OTHER = at(60_000, pid=8, cpu=0)
BEGUN = [at(1_000), at(50_000, values=("2",)), OTHER]


@pytest.mark.parametrize("is_ours_first", [True, False])
def test_a_second_record_that_comes_long_after_the_first_ones_end_is_the_last_hits(
    is_ours_first: bool,
) -> None:
    second = [at(1_001), at(50_000 + LATER_US, values=("2",)), at(60_001, OTHER)]
    pair = (BEGUN, second) if is_ours_first else (second, BEGUN)

    found = compare(*pair, is_ours_first=is_ours_first)

    assert unpaired(found) == ([], [])
    assert len(found.pairs) == 3
    assert found.wrong_values() == []


@pytest.mark.parametrize("is_ours_first", [True, False])
def test_of_the_last_hit_on_a_cpu_the_second_record_may_be_missing_but_of_no_other(
    is_ours_first: bool,
) -> None:
    second = [at(60_001, OTHER)]
    pair = (BEGUN, second) if is_ours_first else (second, BEGUN)

    found = compare(*pair, is_ours_first=is_ours_first)

    missing = unpaired(found)
    assert missing == (([BEGUN[0]], []) if is_ours_first else ([], [BEGUN[0]]))


@pytest.mark.parametrize("is_ours_first", [True, False])
def test_a_cpu_that_waited_before_it_took_the_time_of_its_last_ends_the_first_for_itself_alone(
    is_ours_first: bool,
) -> None:
    late = at(60_000 + LATER_US, OTHER)
    ended = at(70_000)
    pair = ([*BEGUN[:2], late], [*BEGUN[:2], ended, late])

    found = compare(*(pair if is_ours_first else pair[::-1]), is_ours_first=is_ours_first)

    assert unpaired(found) == ([], [])
    assert len(found.pairs) == 3


def test_what_only_one_has_in_the_middle_of_a_cpus_records_is_missing() -> None:
    extra = at(20_000, pid=9)

    assert unpaired(compare(BEGUN, [*BEGUN, extra])) == ([], [extra])
    assert unpaired(compare([*BEGUN, extra], BEGUN)) == ([extra], [])


def test_later_records_of_other_hits_are_nobodys() -> None:
    second = [at(1_001), at(50_001, values=("2",)), at(60_001, OTHER)]
    later = [at(50_000 + LATER_US, values=("3",)), at(LATER_US, OTHER, event="closed")]

    found = compare(BEGUN, [*second, *later])

    assert unpaired(found) == ([], [])
    assert len(found.pairs) == 3


def test_what_the_kernel_missed_is_told_from_the_next_hit_also_in_the_same_microsecond() -> None:
    # On the way out of an interrupt, which the flags do not say any more.
    missed, following = at(1_000, pid=0), at(3_000, pid=0, values=("2",))

    found = compare([missed, following, at(9_000, pid=0)], [following, at(9_001, pid=0)])

    assert unpaired(found) == ([missed], [])
    assert found.wrong_values() == []


def test_two_hits_of_a_microsecond_are_two_though_one_has_a_wrong_value() -> None:
    first, second = at(3_000), at(3_000, values=("2",))

    assert compare([first, second], [first, second]).wrong_values() == []
    wrong = compare([first, second], [at(3_000, values=("3",)), second])
    assert len(wrong.wrong_values()) == 1


@pytest.mark.parametrize("latency_us", [0, 1, 2])
@pytest.mark.parametrize("values", ["12", "11", "121", "111"])
@pytest.mark.parametrize("flags", ["d....", "d.h.."])
def test_hits_a_microsecond_apart_have_a_record_each(
    latency_us: int, values: str, flags: str
) -> None:
    hits = [at(3_000 + n, values=(value,), flags=flags) for n, value in enumerate(values)]
    records = [at(hit.ts_us + latency_us, hit) for hit in hits]

    found = compare([*hits, at(9_000, flags=flags)], [*records, at(9_001, flags=flags)])

    assert unpaired(found) == ([], [])
    assert found.wrong_values() == []


def test_an_interrupt_that_the_kernel_missed_a_microsecond_before_another_is_told() -> None:
    missed, following = (at(3_000 + n, flags="d.h..", values=(str(n),)) for n in (0, 1))
    last = at(9_000, flags="d.h..")

    for late in (0, 1):
        found = compare([missed, following, last], [at(3_001 + late, following), last])

        assert unpaired(found) == ([missed], [])
        assert found.wrong_values() == []
