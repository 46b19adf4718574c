"""The rings as the host sees them, over pages that lie apart."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprobes.errors import MemoryFault
from kprobes.guest.arena import reset
from kprobes.guest.guest import GuestMemory
from kprobes.guest.rings import MappedRange, Ring, open_rings
from kprobes.model.abi import CPU_SHIFT, PERCPU_LIMIT, PERCPU_LOST, PERCPU_WORD, SLACK
from tests.build.guest import CPUS, DATA, RING, make_arena, make_memory
from tests.build.pages import PAGE, FakeRam

SIZE = 9 * PAGE
MEMORY = make_memory()
PATTERN = bytes(n * 31 >> 3 & 0xFF for n in range(SIZE))


def _rings() -> tuple[GuestMemory, tuple[Ring, ...]]:
    memory, arena = make_memory(), make_arena()
    reset(arena, memory)
    return memory, open_rings(arena, memory)


@given(st.integers(0, 3 * PAGE), st.integers(1, SIZE), st.data())
def test_a_window_shows_what_is_there(start: int, size: int, data: st.DataObject) -> None:
    MEMORY.write(DATA, PATTERN)
    size = min(size, SIZE - start)
    offset = data.draw(st.integers(0, size))
    length = data.draw(st.integers(0, size - offset))
    window = MappedRange(MEMORY, DATA + start, size)

    found = window.read(offset, length)

    assert found.tobytes() == PATTERN[start + offset :][:length]


def test_a_window_is_a_copy() -> None:
    memory = make_memory()
    window = MappedRange(memory, DATA, PAGE)

    found = window.read(0, 8)
    memory.set_u64(DATA, 7)

    assert found.tolist() == [0] * 8
    assert window.u64(0) == 7


def test_a_window_works_where_ram_cannot_be_viewed() -> None:
    memory = make_memory()
    memory.write(DATA, PATTERN)
    assert isinstance(memory.ram, FakeRam)
    memory.ram.has_views = False

    assert MappedRange(memory, DATA, SIZE).read(5, 3 * PAGE).tobytes() == PATTERN[5 : 5 + 3 * PAGE]


def test_words_of_a_window_can_be_written() -> None:
    memory = make_memory()
    window = MappedRange(memory, DATA + PAGE, 2 * PAGE)

    window.set_u64(PAGE + 16, 1 << 63)

    assert memory.u64(DATA + 2 * PAGE + 16) == 1 << 63
    assert window.u64(PAGE + 16) == 1 << 63


def test_a_window_with_a_hole_is_a_fault() -> None:
    with pytest.raises(MemoryFault):
        MappedRange(MEMORY, DATA - PAGE, 2 * PAGE)


def test_every_cpu_has_a_ring_of_its_own() -> None:
    memory, rings = _rings()
    arena = make_arena()

    for ring in rings:
        memory.set_u64(arena.ring(ring.cpu), 100 + ring.cpu)
        memory.set_u64(arena.ring(ring.cpu) + RING + SLACK - 8, 200 + ring.cpu)

    assert len(rings) == CPUS
    assert [ring.data.u64(0) for ring in rings] == [100, 101]
    assert [ring.data.u64(RING + SLACK - 8) for ring in rings] == [200, 201]


def test_a_fresh_ring_is_empty_and_all_of_it_is_free() -> None:
    memory, rings = _rings()
    arena = make_arena()

    for ring in rings:
        assert (ring.head, ring.lost) == (0, 0)
        assert memory.u64(arena.words(ring.cpu) + PERCPU_WORD) == ring.cpu << CPU_SHIFT
        assert memory.u64(arena.words(ring.cpu) + PERCPU_LIMIT) == ring.cpu << CPU_SHIFT | RING


def test_heads_and_lost_counts_are_read_as_the_guest_changes_them() -> None:
    memory, rings = _rings()
    arena = make_arena()

    memory.set_u64(arena.words(1) + PERCPU_WORD, 1 << CPU_SHIFT | 4096)
    memory.set_u64(arena.words(1) + PERCPU_LOST, 3)

    assert [(ring.head, ring.lost) for ring in rings] == [(0, 0), (4096, 3)]


@pytest.mark.parametrize("tail", [0, 48, RING, (1 << 40) + 8])
def test_what_was_read_is_given_back_to_the_guest(tail: int) -> None:
    memory, rings = _rings()

    rings[1].free(tail)

    limit = memory.u64(make_arena().words(1) + PERCPU_LIMIT)
    assert limit == 1 << CPU_SHIFT | tail + RING
