"""x86-64 page tables."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kprobes.arch.x86_64.paging import PageTables, check_long_mode
from kprobes.errors import MemoryFault, TargetError
from kprobes.ports import MappedRun
from kprobes.units import Addr, Phys
from tests.build.pages import LARGE, NX, PAGE, PRESENT, USER, WRITE, FakeRam, Pages

KERNEL = 0xFFFF_FFFF_8100_0000
MIB2, GIB = 1 << 21, 1 << 30
END = 1 << 64
ENTRIES = st.tuples(st.integers(0, 511), st.integers(0, 6), st.integers(0, 255))


def guest(levels: int = 4) -> tuple[FakeRam, Pages, PageTables]:
    ram = FakeRam(1 << 20)
    pages = Pages(ram, 0x1000, levels=levels)
    return ram, pages, PageTables(ram, 0x1000 | 0xFFF, levels=levels)


@pytest.mark.parametrize("levels", [4, 5])
def test_an_address_goes_through_all_levels(levels: int) -> None:
    ram, pages, tables = guest(levels)
    pages.map(KERNEL, 0x8_0000)
    ram.write(0x8_0123, b"hello")

    assert tables.physical(KERNEL + 0x123) == 0x8_0123
    assert tables.read(KERNEL + 0x123, 5) == b"hello"


@pytest.mark.parametrize(("level", "size"), [(1, PAGE), (2, MIB2), (3, GIB)])
def test_pages_of_every_size_translate(level: int, size: int) -> None:
    _, pages, tables = guest()
    pages.map(KERNEL & -size, 3 * size, level=level, flags=NX)

    entry = tables.entry((KERNEL & -size) + size - 1)

    assert entry is not None
    assert (entry.phys, entry.size) == (3 * size, size)
    assert not entry.is_writable
    assert not entry.is_executable
    assert tables.physical((KERNEL & -size) + size - 1) == 4 * size - 1


@pytest.mark.parametrize("level", [1, 2])
def test_attributes_are_what_an_entry_says_besides_where_its_page_is(level: int) -> None:
    _, pages, tables = guest()
    pages.map(KERNEL, 0, level=level, flags=WRITE | NX)

    assert tables.attributes(KERNEL + 0x123) == PRESENT | WRITE | NX
    with pytest.raises(MemoryFault):
        tables.attributes(KERNEL + GIB)


def test_rights_are_those_of_all_levels_together() -> None:
    _, pages, tables = guest()
    pages.map(KERNEL, 0x8_0000, flags=WRITE)
    top = int.from_bytes(pages.ram.read(0x1000 + 8 * 511, 8), "little")
    pages.put(0x1000, KERNEL, 4, top & ~WRITE | NX)

    entry = tables.entry(KERNEL)
    (run,) = tables.mapped_runs(KERNEL, KERNEL + PAGE)

    assert entry is not None
    assert (entry.is_writable, entry.is_executable) == (False, False)
    assert (run.is_writable, run.is_executable) == (False, False)


def test_a_read_crosses_pages_that_lie_apart() -> None:
    ram, pages, tables = guest()
    pages.map(KERNEL, 0x9_0000)
    pages.map(KERNEL + PAGE, 0x8_0000)
    ram.write(0x9_0FFE, b"ab")
    ram.write(0x8_0000, b"cd")

    assert tables.read(KERNEL + 0xFFE, 4) == b"abcd"
    assert list(tables.pieces(KERNEL + 0xFFE, 4)) == [(0x9_0FFE, 2), (0x8_0000, 2)]


def test_what_is_not_mapped_is_a_fault_and_no_entry() -> None:
    _, pages, tables = guest()
    pages.map(KERNEL, 0x8_0000)

    assert tables.entry(KERNEL + PAGE) is None
    with pytest.raises(MemoryFault):
        tables.physical(KERNEL + PAGE)
    with pytest.raises(MemoryFault):
        tables.read(KERNEL + PAGE - 1, 2)


@pytest.mark.parametrize("addr", [1 << 47, 0xFFFF_7FFF_FFFF_FFFF, 1 << 63, 1 << 64, -1])
def test_an_address_that_is_not_canonical_is_a_fault(addr: int) -> None:
    _, _, tables = guest()

    with pytest.raises(MemoryFault, match="canonical"):
        tables.physical(addr)


def test_five_levels_reach_where_four_do_not() -> None:
    _, pages, tables = guest(5)
    pages.map(1 << 50, 0x8_0000)

    assert tables.physical(1 << 50) == 0x8_0000


def test_a_table_outside_of_ram_is_a_fault() -> None:
    _, pages, tables = guest()
    pages.put(0x1000, KERNEL, 4, 0x7000_0000_0000 | PRESENT)

    with pytest.raises(MemoryFault):
        tables.physical(KERNEL)
    with pytest.raises(MemoryFault):
        tables.mapped_runs(KERNEL, END)


def test_tables_that_contain_themselves_are_walked_to_an_end() -> None:
    ram = FakeRam(1 << 16)
    for index in range(512):
        ram.write(0x1000 + 8 * index, (0x1000 | PRESENT | WRITE | USER).to_bytes(8, "little"))
    tables = PageTables(ram, 0x1000)

    assert tables.physical(KERNEL) == 0x1000
    with pytest.raises(MemoryFault, match="without end"):
        tables.mapped_runs(0xFFFF_8000_0000_0000, END)


@pytest.mark.parametrize("has_views", [True, False])
def test_runs_join_neighbours_of_equal_rights(has_views: bool) -> None:
    ram, pages, tables = guest()
    ram.has_views = has_views
    pages.map(KERNEL, 16 * MIB2, level=2, flags=0)
    pages.map(KERNEL + MIB2, 17 * MIB2, level=2, flags=0)
    pages.map(KERNEL + 2 * MIB2, 18 * MIB2, flags=0)
    pages.map(KERNEL + 2 * MIB2 + PAGE, 18 * MIB2 + PAGE, flags=WRITE | NX)
    pages.map(KERNEL + 2 * MIB2 + 2 * PAGE, 0x8_0000, flags=WRITE | NX)

    runs = tables.mapped_runs(0xFFFF_FFFF_8000_0000, END)

    assert [(run.virt - KERNEL, run.phys, run.size) for run in runs] == [
        (0, 16 * MIB2, 2 * MIB2 + PAGE),
        (2 * MIB2 + PAGE, 18 * MIB2 + PAGE, PAGE),
        (2 * MIB2 + 2 * PAGE, 0x8_0000, PAGE),
    ]
    assert [(run.is_writable, run.is_executable) for run in runs] == [
        (False, True), (True, False), (True, False),
    ]  # fmt: skip


def test_runs_are_clipped_to_the_range() -> None:
    _, pages, tables = guest()
    pages.map(KERNEL, 16 * MIB2, level=2)

    (run,) = tables.mapped_runs(KERNEL + 0x3000, KERNEL + 0x5000)

    assert run == MappedRun(
        virt=Addr(KERNEL + 0x3000),
        phys=Phys(16 * MIB2 + 0x3000),
        size=0x2000,
        is_writable=True,
        is_executable=True,
    )
    assert run.stop == KERNEL + 0x5000


def test_nothing_mapped_gives_no_runs() -> None:
    _, _, tables = guest()

    assert tables.mapped_runs(KERNEL, END) == ()


def test_a_large_bit_in_the_top_levels_is_not_a_page() -> None:
    _, pages, tables = guest()
    pages.put(0x1000, KERNEL, 4, 0x2000 | LARGE | PRESENT)

    assert tables.entry(KERNEL) is None


@settings(max_examples=40)
@given(st.lists(ENTRIES, max_size=40))
def test_hostile_tables_fault_or_translate(entries: list[tuple[int, int, int]]) -> None:
    ram = FakeRam(1 << 16)
    for index, page, flags in entries:
        word = page << 12 | flags | PRESENT
        ram.write(0x1000 + 8 * (index * 8 % 2048), word.to_bytes(8, "little"))
    tables = PageTables(ram, 0x1000)

    for ask in (
        lambda: tables.read(KERNEL, 64),
        lambda: tables.mapped_runs(0xFFFF_FFFF_8000_0000, END),
    ):
        try:
            ask()
        except MemoryFault:
            continue


@pytest.mark.parametrize(
    ("registers", "why"),
    [
        ({"cr0": 0x10}, "real mode"),
        ({"cr0": 0x11, "efer": 0}, "not in 64-bit mode"),
        ({"cr0": 0x11, "efer": 0x500}, "paging turned off"),
    ],
)
def test_a_guest_that_is_not_up_yet_is_told_from_one_that_is(
    registers: dict[str, int], why: str
) -> None:
    with pytest.raises(TargetError, match=why):
        check_long_mode(registers)


def test_long_mode_and_unknown_registers_pass() -> None:
    check_long_mode({"cr0": 0x8005_0033, "efer": 0xD01})
    check_long_mode({})
