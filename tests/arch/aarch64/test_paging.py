"""aarch64 page tables, built for every granule and width."""

import struct

import pytest

from kprobes.arch.aarch64.machine import PAGING, images, link, signature, window
from kprobes.arch.aarch64.paging import Layout, PageTables
from kprobes.errors import MemoryFault, TargetError
from kprobes.formats.vmcoreinfo import parse
from kprobes.units import MIB, U64
from tests.build.a64_pages import DIRTY_WRITE, PXN, READ_ONLY, ROOT, TABLE, UXN, VALID, Built, tcr
from tests.build.pages import FakeRam

EL1 = 0b0101
HALF = U64 + 1 - (1 << 47)


@pytest.mark.parametrize(
    ("shift", "va_bits", "first", "entries"),
    [
        (12, 39, 1, 512),
        (12, 48, 0, 512),
        (12, 52, -1, 16),
        (14, 36, 2, 2048),
        (14, 47, 1, 2048),
        (14, 48, 0, 2),
        (14, 52, 0, 32),
        (16, 42, 2, 8192),
        (16, 48, 1, 64),
        (16, 52, 1, 1024),
    ],
)
def test_pages_are_found_through_tables_of_every_form(
    shift: int, va_bits: int, first: int, entries: int
) -> None:
    built = Built(shift, va_bits)
    page = 1 << shift
    virt = -page & U64
    built.map(virt, 0x80_0000, flags=PXN)
    built.ram.write(0x80_0010, b"here")

    tables = built.tables

    assert (tables.layout.first, tables.layout.count(first)) == (first, entries)
    assert tables.physical(virt + 0x10) == 0x80_0010
    assert tables.read(virt + 0x10, 4) == b"here"
    assert tables.entry(virt - page) is None
    (run,) = tables.mapped_runs(1 << 63, U64 + 1)
    assert (run.virt, run.phys, run.size) == (virt, 0x80_0000, page)
    assert (run.is_writable, run.is_executable) == (True, False)


@pytest.mark.parametrize(
    ("shift", "level", "size"), [(12, 1, 1 << 30), (12, 2, 1 << 21), (14, 2, 1 << 25)]
)
def test_a_block_maps_many_pages(shift: int, level: int, size: int) -> None:
    built = Built(shift, 48)
    built.map(HALF, size, level=level, flags=READ_ONLY)

    entry = built.tables.entry(HALF + 0x5000)

    assert entry is not None
    assert (entry.phys, entry.size) == (size, size)
    assert (entry.is_writable, entry.is_executable) == (False, True)
    assert built.tables.physical(HALF + 0x5001) == size + 0x5001


@pytest.mark.parametrize(
    ("flags", "above", "rights"),
    [
        (0, 0, (True, True)),
        (READ_ONLY | PXN, 0, (False, False)),
        (READ_ONLY | DIRTY_WRITE | PXN, 0, (True, False)),
        (UXN, 0, (True, True)),
        (0, 1 << 59, (True, False)),
        (0, 1 << 62, (False, True)),
    ],
)
def test_rights_are_those_of_all_levels(flags: int, above: int, rights: tuple[bool, bool]) -> None:
    built = Built(12, 48)
    built.map(HALF, 0x80_0000, flags=flags, above=above)

    entry = built.tables.entry(HALF)
    (run,) = built.tables.mapped_runs(HALF, HALF + 4096)

    assert entry is not None
    assert (entry.is_writable, entry.is_executable) == rights
    assert (run.is_writable, run.is_executable) == rights


def test_wide_physical_addresses_are_put_together() -> None:
    large = Built(16, 52, more=0b110 << 32)
    large.map(-(1 << 16) & U64, 0x5 << 12 | 0x7_0000)
    small = Built(12, 52, more=1 << 59 | 0b110 << 32)
    small.map(-4096 & U64, 0b11 << 8 | 0b10 << 48 | 0x7000)

    assert large.tables.physical(-(1 << 16) & U64) == 0x5 << 48 | 0x7_0000
    assert small.tables.physical(-4096 & U64) == 0b1110 << 48 | 0x7000
    assert large.layout.base(0x4_0018) == 0x6 << 48 | 0x4_0000


def test_the_asid_and_the_lowest_bit_of_a_table_register_do_not_matter() -> None:
    tables = PageTables(FakeRam(16), 0x4A00_0000_4158_F001, tcr=tcr(12, 48))

    assert tables.root == 0x4158_F000


def test_addresses_of_the_other_half_are_not_there() -> None:
    built = Built(12, 48)

    with pytest.raises(MemoryFault):
        built.tables.physical(0x1000)
    assert built.tables.mapped_runs(0, 1 << 47) == ()


def test_a_task_s_tables_are_for_the_lower_half_and_ignore_tags() -> None:
    built = Built(12, 48, more=16 | 1 << 37)
    built.map(0x5000, 0x80_0000, flags=UXN)

    user = built.tables.of_user(ROOT | 7 << 48)

    assert user.physical(0x5001) == 0x80_0001
    assert user.physical(0x3C00_0000_0000_5001) == 0x80_0001
    (run,) = user.mapped_runs(0, 1 << 48)
    assert (run.virt, run.is_executable) == (0x5000, False)


def test_tables_that_lead_to_themselves_end() -> None:
    built = Built(12, 48)
    for index in range(512):
        built.ram.write(ROOT + 8 * index, struct.pack("<Q", ROOT | VALID | TABLE))

    with pytest.raises(MemoryFault, match="without end"):
        built.tables.mapped_runs(1 << 63, U64 + 1)


@pytest.mark.parametrize("wrong", [0, 0b00 << 30 | 16 << 16, 0b10 << 30 | 5 << 16])
def test_a_guest_without_a_kernel_s_settings_is_refused(wrong: int) -> None:
    with pytest.raises(TargetError, match="TCR_EL1"):
        PageTables(FakeRam(16), ROOT, tcr=wrong)


def test_firmware_is_told_from_a_kernel() -> None:
    with pytest.raises(TargetError, match="firmware"):
        PAGING.check({"cpsr": EL1, "TTBR1_EL1": 0, "TCR_EL1": 0})
    PAGING.check({"cpsr": EL1, "TTBR1_EL1": ROOT, "TCR_EL1": tcr(12, 48)})


def test_a_kernels_image_is_code_and_what_lies_beside_it_in_memory() -> None:
    built = Built(12, 48)
    start, module = HALF + 0x800_0000, HALF + 0x10_0000
    for page in range(4):
        built.map(start + 4096 * page, 0x80_0000 + 4096 * page, flags=READ_ONLY)
    built.map(start + 4096 * 4, 0x80_4000, flags=READ_ONLY | PXN)
    built.map(start + 4096 * 9, 0x80_9000, flags=PXN)
    built.map(module, 0x90_0000, flags=READ_ONLY)
    built.map(start + 4096 * 20, 0x91_0000, flags=PXN)

    code, kernel = images(built.tables)

    assert [run.virt for run in code] == [module]
    found = [(run.virt - start, run.size) for run in kernel]
    assert found == [(0, 0x4000), (0x4000, 0x1000), (0x9000, 0x1000)]
    assert images(Built(12, 48).tables) == []


@pytest.mark.parametrize(
    ("shift", "va_bits", "version", "addr"),
    [
        (12, 48, (5, 10), 0xFFFF_8000_1000_0000),
        (12, 48, (6, 1), 0xFFFF_8000_0800_0000),
        (12, 48, (6, 12), 0xFFFF_8000_8000_0000),
        (12, 39, (6, 1), 0xFFFF_FFC0_0800_0000),
        (16, 52, (6, 1), 0xFFFF_8000_0800_0000),
        (14, 52, (6, 12), 0xFFFF_C000_8000_0000),
    ],
)
def test_a_kernel_is_linked_after_its_modules(
    shift: int, va_bits: int, version: tuple[int, int], addr: int
) -> None:
    layout = Layout(tcr(shift, va_bits), is_user=False)

    assert link(layout, version) == addr
    assert window(layout)[0] <= addr < window(layout)[1]


def test_a_signature_may_be_in_every_bit_above_an_address_but_one() -> None:
    assert signature(Layout(tcr(12, 48), is_user=False)) == 0xFF7F << 48
    assert signature(Layout(tcr(12, 39), is_user=False)) == 0xFF7F_FF80 << 32


def test_in_user_mode_under_isolation_the_kernels_table_is_near() -> None:
    ram = FakeRam(16 * MIB)

    found = PAGING.tables(ram, {"cpsr": EL1, "TTBR1_EL1": ROOT, "TCR_EL1": tcr(14, 47)})

    assert [each.root - ROOT for each in found] == [0, 0x8000, 0x4000]
    assert PAGING.tables(ram, PAGING.again(found[1]))[0].root == found[1].root
    assert PAGING.tables(ram, {"cpsr": EL1, "TTBR1_EL1": 0, "TCR_EL1": 0}) == ()


def test_a_kernels_own_note_leads_to_its_table() -> None:
    note = (
        b"OSRELEASE=6.1.0\nPAGESIZE=16384\nSYMBOL(swapper_pg_dir)=ffff800009000000\n"
        b"NUMBER(kimage_voffset)=0xffff7fffc7000000\nNUMBER(TCR_EL1_T1SZ)=0x11\n"
    )

    (tables,) = PAGING.noted(FakeRam(16), parse(note))

    assert tables.root == 0x4200_0000
    assert PAGING.task_size(tables) == 1 << 47
    assert PAGING.noted(FakeRam(16), parse(b"OSRELEASE=6.1.0\n")) == ()


@pytest.mark.parametrize("bits", [36, 39, 47, 48, 52])
def test_user_space_has_as_many_addresses_as_the_kernel(bits: int) -> None:
    """With 52 bits the kernel's own memory begins there where with 48 nothing is."""
    tables = PageTables(FakeRam(16), 0, tcr=0b10 << 30 | (64 - bits) << 16)

    assert PAGING.task_size(tables) == 1 << bits
    assert tables.start == (1 << 64) - (1 << bits)


@pytest.mark.parametrize("level", [2, 3])
def test_attributes_are_those_of_a_page_whatever_maps_it(level: int) -> None:
    built = Built(12, 48)
    addr = HALF - (1 << 47)
    flags = READ_ONLY | UXN | 1 << 10
    built.map(addr, 0x20_0000, flags=flags | 1 << 52, level=level)

    assert built.tables.attributes(addr + 0x10) == flags | VALID | TABLE
    with pytest.raises(MemoryFault):
        built.tables.attributes(addr + 0x20_0000)
