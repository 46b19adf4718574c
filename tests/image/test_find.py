"""Guest RAM to a kernel."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kprobes.arch.x86_64.machine import MACHINE
from kprobes.arch.x86_64.paging import PTI_USER
from kprobes.errors import FormatError, TargetError
from kprobes.image.cache import KernelCache
from kprobes.image.find import FoundKernel, find_spaces, read_kernel
from kprobes.model.kernel import Symbol
from kprobes.ports import MappedRun, Tables
from kprobes.units import Addr, Phys
from tests.build.kallsyms import Layout
from tests.build.linux import (
    BANNER,
    BUILD_ID,
    LINK,
    MODULE,
    RODATA,
    LinuxGuest,
    LinuxSpec,
    boot,
    module_symbols,
)
from tests.build.pages import NX, PAGE, FakeRam, Pages


def find(guest: LinuxGuest, cache: KernelCache | None = None) -> FoundKernel:
    return read_kernel(
        find_spaces(guest.ram, MACHINE, [{"cr3": guest.cr3, "rip": guest.spec.text}]), cache=cache
    )


def rows(found: FoundKernel) -> list[tuple[int, str, str, str]]:
    symbols = found.kernel.symbols.glob("*")
    return sorted((s.addr, s.type, s.name, s.module) for s in symbols)


def expected(guest: LinuxGuest) -> list[tuple[int, str, str, str]]:
    own = [(*symbol, "") for symbol in guest.symbols]
    modules = guest.spec.modules if guest.spec.has_data_symbols and guest.spec.has_btf else ()
    for i, name in enumerate(modules):
        own += [(*symbol, name) for symbol in module_symbols(name, MODULE + 0x1000 * i)]
    return sorted(own)


@pytest.mark.parametrize("has_views", [True, False], ids=["views", "stub"])
@pytest.mark.parametrize("layout", list(Layout))
def test_a_kernel_is_found_with_all_its_symbols(layout: Layout, has_views: bool) -> None:
    guest = boot(LinuxSpec(layout=layout), has_views=has_views)

    found = find(guest)

    kernel = found.kernel
    assert (kernel.release, kernel.banner, kernel.build_id) == ("6.1.0-test", BANNER, BUILD_ID)
    assert (kernel.arch, kernel.version, kernel.slide) == ("x86_64", (6, 1), guest.spec.slide)
    assert kernel.text == (guest.spec.text, guest.spec.text + 16 * 300)
    assert kernel.types is not None
    assert kernel.types.offset("module", "list") == 8
    assert rows(found) == expected(guest)
    assert found.tables.root == guest.master
    assert found.tables.read(guest.spec.text + RODATA, 5) == b"Linux"


@pytest.mark.parametrize(
    "spec",
    [
        LinuxSpec(levels=5),
        LinuxSpec(is_protected=False),
        LinuxSpec(has_module_mem=True),
        LinuxSpec(modules=()),
        LinuxSpec(has_btf=False),
        LinuxSpec(slide=0),
    ],
    ids=["5 levels", "unprotected", "6.4 modules", "no modules", "no types", "no slide"],
)
def test_kernels_of_other_kinds_are_found_too(spec: LinuxSpec) -> None:
    guest = boot(spec)

    found = find(guest)

    assert rows(found) == expected(guest)
    assert found.kernel.slide == spec.slide
    assert (found.kernel.types is not None) == spec.has_btf


def test_without_data_symbols_the_rest_is_found_by_its_looks() -> None:
    guest = boot(LinuxSpec(has_data_symbols=False))

    found = find(guest)

    assert found.kernel.build_id == BUILD_ID
    assert found.kernel.types is not None
    assert found.tables.root == guest.master
    assert rows(found) == expected(guest)


def test_a_processs_page_table_is_not_taken_for_the_kernels() -> None:
    guest = boot(LinuxSpec(has_data_symbols=False, has_master_user=False))

    with pytest.raises(TargetError, match=r"6.1.0-test: where it has its own page table"):
        find(guest)


def test_a_user_mode_cr3_under_isolation_leads_to_the_kernels() -> None:
    guest = boot()
    user = Pages(guest.ram, guest.cr3 | PTI_USER)
    user.map(guest.spec.text, guest.phys(guest.spec.text), flags=0)

    found = read_kernel(
        find_spaces(guest.ram, MACHINE, [{"cr3": guest.cr3 | PTI_USER, "rip": 0x40_0000}])
    )

    assert rows(found) == expected(guest)
    assert found.tables.root == guest.master


@pytest.mark.parametrize("is_protected", [True, False])
def test_code_that_is_larger_than_the_kernel_is_not_taken_for_it(is_protected: bool) -> None:
    guest = boot(LinuxSpec(is_protected=is_protected))
    code = MappedRun(
        virt=Addr(LINK + 0x1000_0000),
        phys=Phys(0),
        size=0x10_0000,
        is_writable=False,
        is_executable=True,
    )

    def images(tables: Tables) -> list[tuple[MappedRun, ...]]:
        return [(code,), *MACHINE.paging.images(tables)]

    paging = replace(MACHINE.paging, images=images)
    spaces = find_spaces(guest.ram, replace(MACHINE, paging=paging), [{"cr3": guest.cr3}])

    assert rows(read_kernel(spaces)) == expected(guest)
    assert (spaces[0].runs == (code,)) is not is_protected


def test_without_any_cr3_the_kernels_own_note_leads_to_it() -> None:
    guest = boot(LinuxSpec(told_slide=0x60_0000))

    found = read_kernel(find_spaces(guest.ram, MACHINE, [{"cr3": 0}]))

    assert found.tables.root == guest.master
    assert rows(found) == expected(guest)


def test_the_kernel_knows_its_slide_best() -> None:
    found = find(boot(LinuxSpec(slide=0x60_0000, told_slide=0x40_0000)))

    assert found.kernel.slide == 0x40_0000


@pytest.mark.parametrize("told", [0x123, 1 << 62])
def test_a_slide_that_cannot_be_is_not_believed(told: int) -> None:
    found = find(boot(LinuxSpec(slide=0x60_0000, told_slide=told)))

    assert found.kernel.slide == 0x60_0000


def test_an_alias_is_named_as_the_kernel_names_it() -> None:
    guest = boot()
    symbols = find(guest).kernel.symbols
    text = guest.spec.text

    def name(addr: int) -> str:
        symbol = symbols.at(addr)
        return symbol.name if symbol else ""

    assert name(text) == "_text"
    assert name(text + 160 + 5) == "vfs_read"
    assert name(MODULE + 0xC01) == "alpha_open"
    assert name(text - 1) == ""
    assert symbols.at(MODULE + 0xC01) == Symbol(
        addr=Addr(MODULE + 0xC00), name="alpha_open", type="T", size=0x40, module="alpha"
    )


def test_a_guest_in_firmware_has_no_kernel() -> None:
    ram = FakeRam(1 << 16)
    Pages(ram, 0x1000).map(0x1000, 0x1000)

    with pytest.raises(TargetError, match="still in firmware, or not Linux"):
        read_kernel(find_spaces(ram, MACHINE, [{"cr3": 0x1000, "rip": 0xFFF0}]))


def test_another_system_is_not_linux() -> None:
    ram = FakeRam(1 << 16)
    Pages(ram, 0x1000).map_range(0xFFFF_FFFF_8010_0000, 0x8000, 4 * PAGE, flags=NX)

    with pytest.raises(TargetError, match="nothing says 'Linux version'"):
        read_kernel(find_spaces(ram, MACHINE, [{"cr3": 0x1000}]))


def test_damaged_symbols_are_one_clear_error() -> None:
    guest = boot()
    at = guest.ram.data.index(b"0\x001\x002\0")
    guest.ram.data[at : at + 600] = bytes(600)

    with pytest.raises(TargetError, match=r"Linux version 6\.1\.0-test: no intact kallsyms"):
        find(guest)


def test_damaged_types_are_no_types() -> None:
    guest = boot()
    at = guest.ram.data.index(b"\x9f\xeb\x01")
    guest.ram.data[at + 60 : at + 200] = b"\xff" * 140

    found = find(guest)

    assert found.kernel.types is None
    assert len(found.kernel.symbols) == len(guest.symbols)


@pytest.mark.parametrize("which", ["ring", "gone"])
def test_a_damaged_module_list_ends(which: str) -> None:
    guest = boot()
    link = guest.phys(guest.spec.text) + 0x8_0000 + 8
    target = MODULE + 8 if which == "ring" else 0xDEAD_0000_0000_0000
    guest.ram.write(link, target.to_bytes(8, "little"))

    names = {symbol.module for symbol in find(guest).kernel.symbols.glob("*_open")}

    assert names == {"alpha"}


def test_a_warm_cache_gives_the_same_kernel_at_another_slide(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    find(boot(LinuxSpec()), cache)
    guest = boot(LinuxSpec(slide=0xA0_0000))

    found = find(guest, cache)

    assert len(list(tmp_path.glob("*/*"))) == 1
    assert found.kernel.slide == 0xA0_0000
    assert rows(found) == expected(guest)


def test_a_forged_build_id_gets_nobody_elses_symbols(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    planted = [(LinuxSpec().text + 50, "t", "planted")]
    find(boot(LinuxSpec(symbols=planted)), cache)
    guest = boot(LinuxSpec())

    found = find(guest, cache)

    assert rows(found) == expected(guest)


@settings(max_examples=60)
@given(data=st.data())
def test_hostile_memory_is_a_kernel_or_a_clear_error(data: st.DataObject) -> None:
    guest = boot(replace(LinuxSpec(), told_slide=0x60_0000))
    size = len(guest.ram.data)
    places = [(0x1_0000, 0x1_8000), (0x11_0000, 0x13_2100), (0x18_0000, 0x18_2000)]
    for _ in range(data.draw(st.integers(1, 6))):
        start, stop = data.draw(st.sampled_from(places))
        at = data.draw(st.integers(start, stop - 1))
        guest.ram.data[at % size] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))

    try:
        found = find(guest)
    except (TargetError, FormatError):
        return
    found.kernel.symbols.at(guest.spec.text + 200)
    assert len(found.kernel.symbols.glob("*")) == len(found.kernel.symbols)
