"""Kernel memory of a guest: every page on its own."""

from typing import cast

import pytest

from kprobes.errors import MemoryFault
from kprobes.guest.guest import GuestMemory, PageCache, remembering
from kprobes.ports import MappedRun
from kprobes.units import Phys
from tests.build.guest import DATA, PERCPU, make_memory
from tests.build.pages import PAGE, FakeRam


def test_bytes_across_scattered_pages_come_back_as_written() -> None:
    memory = make_memory()
    data = bytes(n * 7 & 0xFF for n in range(5 * PAGE))

    memory.write(DATA + 100, data)

    assert memory.read(DATA + 100, len(data)) == data
    assert memory.read(DATA + 100 + PAGE, 50) == data[PAGE : PAGE + 50]


def test_pieces_end_at_page_borders_and_miss_nothing() -> None:
    memory = make_memory()

    pieces = list(memory.pieces(DATA + PAGE - 3, PAGE + 5))

    assert [(at, size) for _, at, size in pieces] == [(0, 3), (3, PAGE), (PAGE + 3, 2)]
    assert [phys for phys, _, _ in pieces] == [
        memory.physical(DATA + at) for at in (PAGE - 3, PAGE, 2 * PAGE)
    ]


@pytest.mark.parametrize("addr", [0, DATA - 8, 1 << 60])
def test_what_is_not_mapped_is_a_fault(addr: int) -> None:
    memory = make_memory()

    with pytest.raises(MemoryFault):
        memory.read(addr, 8)
    with pytest.raises(MemoryFault):
        memory.write(addr, b"x" * 8)


def test_words_are_little_endian() -> None:
    memory = make_memory()

    memory.set_u64(DATA, 0x0102_0304_0506_0708)

    assert memory.read(DATA, 8) == bytes(range(8, 0, -1))
    assert memory.u64(DATA) == 0x0102_0304_0506_0708


def test_remembered_tables_say_the_same_and_are_read_once() -> None:
    memory = make_memory()
    again, ram = remembering(memory), cast("FakeRam", memory.ram)
    places = [DATA + n * PAGE // 2 for n in range(24)] + [PERCPU[1] + 8]
    expected = [memory.physical(addr) for addr in places]
    first = [again.physical(addr) for addr in places]
    before = ram.reads

    found = [again.physical(addr) for addr in places]

    assert first == found == expected
    assert ram.reads == before


@pytest.mark.parametrize("addr", [0, DATA - 8, 1 << 60, (1 << 64) - 8, 1 << 70])
def test_what_is_not_mapped_is_a_fault_with_remembered_tables_too(addr: int) -> None:
    again = remembering(make_memory())

    with pytest.raises(MemoryFault):
        again.read(addr, 8)


def test_what_was_unmapped_for_a_moment_is_found_with_remembered_tables_too() -> None:
    memory = make_memory()
    again = remembering(GuestMemory(memory.ram, _UnmappedAtFirst(memory)))

    assert [again.physical(DATA + at) for at in (0, PAGE, 0)] == [
        memory.physical(DATA + at) for at in (0, PAGE, 0)
    ]


def test_each_page_is_as_it_was_when_it_was_read_first() -> None:
    memory = make_memory()
    again, ram = PageCache(memory), cast("FakeRam", memory.ram)
    before = {at: memory.read(DATA + at, 16) for at in (0, PAGE - 8, PAGE - 16, PAGE)}
    found = {at: again.read(DATA + at, 16) for at in before}
    memory.write(DATA, b"x" * 2 * PAGE)
    reads = ram.reads

    assert found == before
    assert [again.read(DATA + at, 16) for at in (0, PAGE - 16, PAGE)] == [
        before[at] for at in (0, PAGE - 16, PAGE)
    ]
    assert ram.reads == reads
    assert again.read(DATA + 2 * PAGE, 4) == memory.read(DATA + 2 * PAGE, 4)


@pytest.mark.parametrize(("addr", "size"), [(8, 4), (DATA - 4, 8), ((1 << 64) - 4, 8)])
def test_what_is_not_mapped_is_a_fault_of_what_was_wanted(addr: int, size: int) -> None:
    with pytest.raises(MemoryFault) as caught:
        PageCache(make_memory()).read(addr, size)

    assert caught.value.addr in range(addr, addr + size)


class _UnmappedAtFirst:
    """Page tables that had no page when they were read in bulk."""

    def __init__(self, memory: GuestMemory) -> None:
        self._memory = memory

    def physical(self, addr: int) -> Phys:
        return self._memory.physical(addr)

    def mapped_runs(self, start: int, stop: int) -> tuple[MappedRun, ...]:
        del start, stop
        return ()
