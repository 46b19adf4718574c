"""Names that a kernel's image has of itself."""

import pytest
from msgspec.structs import replace

from kprobes.arch.x86_64.paging import PageTables
from kprobes.errors import MemoryFault, TargetError
from kprobes.image.build import Build, Region, extract, kernel_of
from kprobes.units import Addr
from tests.build.linux import BANNER, BUILD_ID, RODATA, LinuxGuest, LinuxSpec, boot


def regions(guest: LinuxGuest) -> list[Region]:
    start = guest.spec.text + RODATA
    data = guest.ram.read(guest.phys(start), 0x2_0000)
    return [Region(addr=Addr(start - 4096), data=bytes(4096)), Region(addr=Addr(start), data=data)]


def build(spec: LinuxSpec) -> Build:
    guest = boot(spec)
    return extract(PageTables(guest.ram, guest.cr3), regions(guest))


def test_a_build_has_all_that_its_symbols_point_at() -> None:
    found = build(LinuxSpec())

    assert (found.banner, found.release, found.build_id) == (BANNER, "6.1.0-test", BUILD_ID)
    assert found.text == LinuxSpec().text
    assert found.address(b"vfs_read") == LinuxSpec().text + 160
    assert found.btf.startswith(b"\x9f\xeb")
    assert found.sources[-1] == (found.btf_at, len(found.btf))


def test_two_boots_have_one_digest_and_another_build_has_another() -> None:
    first, moved = build(LinuxSpec()), build(LinuxSpec(slide=0))
    other = build(LinuxSpec(symbols=[(LinuxSpec().text + 50, "t", "more")]))

    assert first.digest == moved.digest
    assert first.digest != other.digest
    assert first.shifted(-0x60_0000).sources == moved.sources


def test_what_memory_does_not_hold_is_left_out() -> None:
    class Nothing:
        def read(self, addr: int, size: int) -> bytes:
            raise MemoryFault(addr, size)

    found = extract(Nothing(), regions(boot()))

    assert (found.banner, found.build_id, found.btf) == (BANNER, b"", b"")


@pytest.mark.parametrize("is_named", [True, False])
def test_a_banner_without_the_build_s_number_is_the_kernel_s_only_by_name(is_named: bool) -> None:
    early, late = BANNER.replace("#1", "#"), BANNER
    spec = LinuxSpec(banner=f"{early}\n\0{late}", has_data_symbols=is_named)

    found = build(spec)

    assert early != late
    assert found.banner == (early if is_named else late)


def test_no_banner_is_no_linux() -> None:
    with pytest.raises(TargetError, match="no Linux kernel there"):
        extract(PageTables(boot().ram, 0), [])


def test_a_banner_alone_is_a_kernel_without_symbols() -> None:
    region = Region(addr=Addr(0), data=b"..Linux version 5.10.1-x (me) #1\n")

    with pytest.raises(TargetError, match=r"Linux version 5\.10\.1-x: no intact kallsyms"):
        extract(PageTables(boot().ram, 0), [region])


def test_symbols_without_text_are_no_kernel() -> None:
    found = build(LinuxSpec())
    hidden = found.table.blob.replace(b"\0_etext\0", b"\0_Etext\0")
    table = type(found.table)(
        addrs=found.table.addrs, types=found.table.types, blob=hidden, starts=found.table.starts
    )
    blind = replace(found, table=table)

    with pytest.raises(TargetError, match="where its text is"):
        kernel_of(blind, None, arch="x86_64", slide=0)
