"""The arena's map: nothing overlaps, and a guest's own numbers are not believed blindly."""

import struct

import pytest

from kprobes.codegen.breakpoint import BLOCK_SIZE
from kprobes.errors import TargetError
from kprobes.guest.arena import ArenaSize, data_size, fitting_ring
from kprobes.guest.kernel_abi import per_cpu_bases
from kprobes.model.abi import MAX_STRING, SLACK, TEXT_SLOTS
from kprobes.transport.qemu_command import MACHINE_TYPES
from kprobes.units import GIB, MIB
from tests.build.guest import CPUS, DATA, PERCPU, RING, make_arena, make_memory
from tests.build.kernel import make_kernel, symbol

EVENTS = 1 << 16
KERNEL = make_kernel([symbol("nr_cpu_ids", DATA), symbol("__per_cpu_offset", DATA + 64)])


def test_counters_and_rings_do_not_overlap() -> None:
    arena = make_arena()
    parts = [(arena.missed, 8 * EVENTS)]
    parts += [(arena.ring(cpu), RING + SLACK) for cpu in range(CPUS)]
    parts.append((arena.texts, CPUS * TEXT_SLOTS * MAX_STRING))
    parts += [(arena.mailbox, arena.mailbox_layout.size), (arena.block, BLOCK_SIZE)]

    ends = [start + size for start, size in parts]

    assert all(end <= start for end, (start, _) in zip(ends, parts[1:], strict=False))
    assert ends[-1] == DATA + data_size(CPUS, RING)


def test_code_finds_every_ring_by_its_cpus_number() -> None:
    arena = make_arena()

    for cpu in range(CPUS):
        assert arena.ring(cpu) == arena.rings + cpu * (RING + SLACK)


def test_per_cpu_words_wrap_around_the_address_space() -> None:
    arena = make_arena()

    assert [arena.words(cpu) for cpu in range(CPUS)] == [base + 0x100 for base in PERCPU]


@pytest.mark.parametrize("count", [1, 2, 64])
def test_per_cpu_memory_is_where_the_guest_says(count: int) -> None:
    memory = make_memory()
    memory.write(DATA, struct.pack("<I", count))
    memory.write(DATA + 64, struct.pack(f"<{count}Q", *range(100, 100 + count)))

    assert per_cpu_bases(memory, KERNEL) == tuple(range(100, 100 + count))


@pytest.mark.parametrize("count", [0, 1025, 0xFFFF_FFFF])
def test_a_count_of_cpus_beyond_reason_is_told(count: int) -> None:
    memory = make_memory()
    memory.write(DATA, struct.pack("<I", count))

    with pytest.raises(TargetError, match=f"{count} CPUs"):
        per_cpu_bases(memory, KERNEL)


@pytest.mark.parametrize(
    ("ram", "cpus"), [(64 * MIB, 1), (256 * MIB, 2), (16 * GIB, 4), (128 * MIB, 64)]
)
def test_rings_fit_the_guest(ram: int, cpus: int) -> None:
    ring = fitting_ring(ram, cpus)

    assert ring & ring - 1 == 0
    assert ring > SLACK
    assert ring * cpus <= max(ram // 15, cpus * 2 * SLACK)


@pytest.mark.parametrize("memory_mib", [64, 128, 256, 512])
def test_what_the_firmware_takes_does_not_halve_the_rings(memory_mib: int) -> None:
    ram = sum(run.size for run in MACHINE_TYPES["amd64"].ram(memory_mib))

    assert ram < memory_mib * MIB
    assert fitting_ring(ram, 2) == memory_mib * MIB // 32


def test_the_ring_s_size_is_the_guest_s_by_default() -> None:
    assert not ArenaSize().ring
