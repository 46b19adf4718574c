"""Memory that is taken, let go of and free again: never twice, never while somebody is inside."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kprobes.errors import NoRoomError, UsageError
from kprobes.guest.release import CodeMemory
from kprobes.guest.room import NOWHERE, Area, Pool, Retired, Room
from kprobes.model.plan import InstanceTable
from kprobes.model.upcall import MAX_UPCALLS
from kprobes.ports import Text
from kprobes.units import Addr
from tests.build.guest import make_arena

START, SIZE = Addr(0x1000), 0x400


def _room() -> Room:
    room = Room()
    room.give(START, SIZE)
    return room


def _taken(room: Room, size: int) -> Addr:
    addr = room.find(size)
    assert addr is not None
    room.take(addr, size)
    return addr


def test_the_first_part_that_is_large_enough_is_taken() -> None:
    room = _room()
    first, _, third = (_taken(room, size) for size in (0x20, 0x10, 0x20))
    room.give(first, 0x20)

    assert (first, third) == (START, START + 0x30)
    assert room.find(0x20) == first
    assert room.find(0x30) == START + 0x50
    assert room.find(SIZE - 0x50 + 1) is None


def test_what_is_found_stays_free_until_it_is_taken() -> None:
    room = _room()

    assert room.find(SIZE) == room.find(SIZE) == START


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_parts_that_are_given_back_are_one_again_in_whatever_order(order: tuple[int, ...]) -> None:
    room = _room()
    taken = [_taken(room, SIZE // 4) for _ in range(4)]

    for number in order:
        room.give(taken[number], SIZE // 4)

    assert room.find(3 * SIZE // 4) == START
    assert room.find(SIZE) is None
    room.give(taken[3], SIZE // 4)
    assert room.find(SIZE) == START


@given(st.lists(st.tuples(st.integers(1, 0x90), st.booleans()), max_size=40))
def test_nothing_is_taken_twice_and_all_of_it_comes_back(steps: list[tuple[int, bool]]) -> None:
    room, taken = _room(), list[tuple[Addr, int]]()

    for size, gives in steps:
        if gives and taken:
            room.give(*taken.pop(size % len(taken)))
        elif room.find(size) is not None:
            taken.append((_taken(room, size), size))
        spans = sorted((addr, -(-(addr + size) // 16) * 16) for addr, size in taken)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
        assert all(START <= start < stop <= START + SIZE for start, stop in spans)
    for addr, size in taken:
        room.give(addr, size)

    assert room.find(SIZE) == START


def _code(size: int) -> bytes:
    return b"\x90" * size


def test_code_takes_the_bytes_that_it_has_and_not_those_that_it_might_have_had() -> None:
    area = Area(text=(START, Addr(START + SIZE)))

    first, code = area.fill(0x100, lambda _: _code(0x11))
    second, _ = area.fill(0x100, lambda _: _code(0x10))

    assert (first, len(code), second) == (START, 0x11, START + 0x20)


def test_code_that_might_not_fit_is_not_made() -> None:
    area = Area(text=(START, Addr(START + SIZE)))

    with pytest.raises(NoRoomError, match="no room is left for the probes' code"):
        area.fill(SIZE + 1, lambda _: pytest.fail("it was made"))


def test_what_an_area_has_no_more_is_made_again() -> None:
    stub, veneer, other = (Addr(START + 0x20 * n) for n in range(3))
    area = Area(text=(START, Addr(START + SIZE)), entry_stub=stub, called={"clock": veneer})
    area.routines = [(stub, b"a"), (veneer, b"b"), (other, b"c")]

    area.forget({other})
    assert (area.entry_stub, area.called) == (stub, {"clock": veneer})
    area.forget({stub, veneer})

    assert (area.entry_stub, area.called, area.routines) == (None, {}, [])


def _pool(*, instances: int = 0x200) -> Pool:
    return Pool(replace(make_arena(), instances_size=instances))


def _take(pool: Pool, size: int) -> Text:
    place, code = pool.take_code(pool.areas[0], size, lambda _: _code(size))
    return place, Addr(place + len(code))


def _table(addr: Addr, size: int = 0x100) -> InstanceTable:
    return InstanceTable(addr=addr, count=size // 64, stride=64, trampoline=Addr(0))


def test_of_what_fails_in_the_middle_nothing_is_taken() -> None:
    pool = _pool()
    area = pool.areas[0]
    kept = _take(pool, 0x20)

    def fail() -> None:
        with pool.all_or_nothing():
            _take(pool, 0x40)
            area.entry_stub = pool.take_routine(area, 0x10, lambda _: _code(0x10))[0]
            pool.take_instances(0x200)
            assert pool.take_number() == 0
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()

    assert (area.entry_stub, area.routines) == (None, [])
    assert _take(pool, 0x40)[0] == kept[1]
    assert pool.take_instances(0x200)
    assert pool.take_number() == 0


def test_what_was_taken_before_is_not_given_back_when_something_fails() -> None:
    pool = _pool()
    with pool.all_or_nothing():
        first = _take(pool, 0x20)

    with pytest.raises(NoRoomError), pool.all_or_nothing():
        pool.take_instances(0x201)

    assert _take(pool, 0x20) != first


def test_numbers_are_as_many_as_the_mailbox_has_and_are_told_when_used_up() -> None:
    pool = _pool()

    assert [pool.take_number() for _ in range(MAX_UPCALLS)] == list(range(MAX_UPCALLS))
    with pytest.raises(UsageError, match="at too many places"):
        pool.take_number()


def test_only_where_nobody_is_inside_is_what_was_let_go_of_free_again() -> None:
    pool = _pool()
    numbers = [pool.take_number() for _ in range(3)]
    texts = [_take(pool, 0x20) for _ in range(3)]
    pool.retired = [
        Retired(text=text, numbers=(number,)) for text, number in zip(texts, numbers, strict=True)
    ]

    assert pool.free_retired([False, True, False], (), ()) == []

    assert [each.text for each in pool.retired] == [texts[1]]
    assert [_take(pool, 0x20)[0] for _ in range(2)] == [texts[0][0], texts[2][0]]
    assert {pool.take_number(), pool.take_number()} == {numbers[0], numbers[2]}
    pool.free_retired([False], (), ())
    assert _take(pool, 0x20)[0] == texts[1][0]
    assert pool.retired == []


def test_a_trampoline_that_calls_return_to_is_kept_with_its_table() -> None:
    pool = _pool()
    table = _table(pool.take_instances(0x100))
    text = _take(pool, 0x20)
    pool.retired = [Retired(text=text, instances=table)]

    assert pool.free_retired([False], [table], ()) == []
    assert _take(pool, 0x20)[0] != text[0]
    assert pool.free_retired([False], (), ()) == [table]

    assert _take(pool, 0x20)[0] == text[0]
    assert pool.take_instances(0x100) == table.addr


def test_a_table_is_free_when_no_version_of_its_function_has_it() -> None:
    pool = _pool()
    table = _table(pool.take_instances(0x100))
    older, newer = (replace(table, trampoline=Addr(at)) for at in (0x10, 0x20))
    pool.retired = [Retired(instances=older), Retired(instances=older, text=NOWHERE)]

    assert pool.free_retired([False, False], (), [newer]) == []
    pool.retired = [Retired(instances=newer), Retired(instances=older)]
    assert pool.free_retired([True, False], (), ()) == []
    assert pool.free_retired([False], (), ()) == [newer]


def test_memory_that_is_added_is_taken_first_and_what_is_in_the_other_goes_back_there() -> None:
    pool = _pool(instances=0)
    text = _take(pool, 0x20)
    more = CodeMemory(addr=Addr(make_arena().code.addr + 0x10_0000), size=0x100)

    pool.grow(replace(make_arena(), code=more, instances_size=0x100))

    assert _take(pool, 0x20)[0] == more.addr
    assert pool.near[-1] == (more.addr, more.stop)
    assert pool.take_instances(0x100)
    pool.give_code(text)
    assert pool.areas[1].room.find(0x20) == text[0]
