"""The ftrace strategy: the guest's list of sites, where a function's is, what it holds."""

import random
import struct
from contextlib import suppress

import numpy as np
import pytest

from kprobes.arch.aarch64.arch import SITE as ARM64
from kprobes.arch.arch import FtraceInfo
from kprobes.arch.x86_64.arch import SITE
from kprobes.errors import MemoryFault, RefusedError, TargetError
from kprobes.model.kernel import Kernel
from kprobes.model.plan import Site
from kprobes.plan.ftrace import (
    Sites,
    have_sites,
    idle_sites,
    inspect,
    is_in_use,
    locate,
    read_sites,
    site_of,
    sites_in_image,
)
from kprobes.units import Addr
from tests.build.ftrace import RECORD_SIZE, write_list, write_page
from tests.build.kernel import TEXT, make_kernel, symbol
from tests.build.pages import FakeRam

LIST = TEXT + 0x8000
SITES = [[TEXT + 0x300, TEXT + 0x100], [TEXT + 0x204], [], [TEXT + 0x400]]


def _memory() -> FakeRam:
    memory = FakeRam(0x10000, start=TEXT)
    write_list(memory, LIST, SITES)
    return memory


def _kernel() -> Kernel:
    return make_kernel([symbol("ftrace_pages_start", LIST, type="d")])


def _sites(memory: FakeRam | None = None) -> Sites:
    return read_sites(memory or _memory(), _kernel())


def test_every_site_of_every_page_is_found_with_its_record() -> None:
    memory = _memory()

    sites = _sites(memory)

    assert sites.addrs.tolist() == sorted(addr for page in SITES for addr in page)
    for page in SITES:
        for addr in page:
            record = sites.find(addr)
            assert record is not None
            assert struct.unpack("<Q", memory.read(record, 8)) == (addr,)


@pytest.mark.parametrize("addr", [0, TEXT, TEXT + 0x101, TEXT + 0x500, (1 << 64) - 1])
def test_other_addresses_are_no_sites(addr: int) -> None:
    assert _sites().find(addr) is None


def test_a_kernel_without_a_single_site_has_none() -> None:
    memory = FakeRam(0x10000, start=TEXT)

    assert _sites(memory).find(TEXT) is None


def test_a_kernel_without_dynamic_ftrace_has_no_sites() -> None:
    assert len(read_sites(_memory(), make_kernel([])).addrs) == 0


@pytest.mark.parametrize("sites", [[], [TEXT + 0x100]])
def test_a_list_without_end_is_told(sites: list[int]) -> None:
    memory = _memory()
    page = LIST + 64
    write_page(memory, page, sites, records=page + 64, next=page)

    with pytest.raises(TargetError, match="no end"):
        _sites(memory)


@pytest.mark.parametrize("count", [-1, 1 << 30, 1_000_001])
def test_a_count_beyond_reason_is_not_read(count: int) -> None:
    memory = _memory()
    memory.write(LIST + 64 + 16, struct.pack("<i", count))

    with pytest.raises(TargetError, match="no end"):
        _sites(memory)


@pytest.mark.parametrize("offset", [0, 8])
def test_pointers_to_nowhere_are_faults(offset: int) -> None:
    memory = _memory()
    memory.write(LIST + 64 + offset, struct.pack("<Q", 0xDEAD_0000))

    with pytest.raises(MemoryFault):
        _sites(memory)


def test_a_function_s_site_is_at_its_start_or_after_endbr64() -> None:
    plain, with_endbr = symbol("plain", TEXT + 0x100), symbol("ibt", TEXT + 0x200)

    found = [locate(function, _sites(), SITE) for function in (plain, with_endbr)]

    assert found == [TEXT + 0x100, TEXT + 0x204]


@pytest.mark.parametrize("addr", [TEXT + 0x500, TEXT + 0xFF, TEXT + 0x3F8])
def test_a_function_may_have_no_site(addr: int) -> None:
    assert locate(symbol("lonely", addr), _sites(), SITE) is None


@pytest.mark.parametrize("info", [SITE, ARM64], ids=["x86_64", "aarch64"])
def test_of_many_functions_those_have_sites_in_which_one_is_located(info: FtraceInfo) -> None:
    functions = [symbol(f"f{at:x}", TEXT + at) for at in range(0x80, 0x500, 4)]

    found = have_sites(functions, _sites(), info)

    assert found == [locate(function, _sites(), info) is not None for function in functions]
    assert 3 < sum(found) < len(found)


@pytest.mark.parametrize("nop", SITE.nops)
def test_an_idle_site_is_seen_as_it_is(nop: bytes) -> None:
    memory = _memory()
    sites = _sites(memory)
    memory.write(TEXT + 0x100, nop)
    record = sites.find(TEXT + 0x100)
    assert record is not None
    memory.write(record + 8, struct.pack("<Q", 1 << 63 | 5))

    site = inspect(Addr(TEXT + 0x100), memory, sites, SITE)

    assert (site.addr, site.old) == (TEXT + 0x100, nop)
    assert (site.record, site.flags) == (record, 1 << 63 | 5)


def test_a_site_with_a_call_of_the_guest_s_own_ftrace_is_in_use() -> None:
    memory = _memory()
    sites, addr = _sites(memory), Addr(TEXT + 0x100)
    nop = memory.read(addr, SITE.size)
    memory.write(addr, b"\xe8" + (0x7000 - 0x105).to_bytes(4, "little", signed=True))

    assert is_in_use(addr, memory, sites, SITE)
    with pytest.raises(RefusedError, match="neither a nop"):
        inspect(addr, memory, sites, SITE)

    memory.write(addr, nop)
    assert not is_in_use(addr, memory, sites, SITE)


@pytest.mark.parametrize("found", ["e900000000", "cc1f440000", "0f1f440001", "0000000000"])
def test_a_site_that_holds_something_else_is_refused_with_its_bytes(found: str) -> None:
    memory = _memory()
    memory.write(TEXT + 0x100, bytes.fromhex(found))

    with pytest.raises(RefusedError, match=found):
        inspect(Addr(TEXT + 0x100), memory, _sites(memory), SITE)


def test_a_site_whose_record_serves_another_purpose_now_is_refused() -> None:
    memory = _memory()
    sites = _sites(memory)
    record = sites.find(TEXT + 0x100)
    assert record is not None
    memory.write(record, struct.pack("<Q", 0x20_0000_4020_0BC3))

    with pytest.raises(RefusedError, match="its module was unloaded"):
        inspect(Addr(TEXT + 0x100), memory, sites, SITE)


MANY = [Addr(TEXT + 0x100 * n + 0x10) for n in range(1, 0x70)]

OTHERS = [Addr(TEXT + 0x101), Addr(TEXT + 0xFF00)]


def _inspected(memory: FakeRam, sites: Sites, info: FtraceInfo) -> dict[Addr, Site]:
    found: dict[Addr, Site] = {}
    for addr in (*MANY, *OTHERS):
        with suppress(RefusedError):
            found[addr] = inspect(addr, memory, sites, info)
    return found


@pytest.mark.parametrize("info", [SITE, ARM64], ids=["x86_64", "aarch64"])
def test_many_sites_are_what_each_of_them_is(info: FtraceInfo) -> None:
    memory = FakeRam(0x10000, start=TEXT)
    write_list(memory, LIST, [MANY[:50], MANY[50:]])
    sites, chance = read_sites(memory, _kernel()), random.Random(7)
    calls = b"\xe8\x12\x34\x56\x78"[: info.size].ljust(info.size, b"\0")
    for n, addr in enumerate(MANY):
        old = chance.choice([*info.nops, calls])
        preamble = info.preamble if n % 5 else bytes(len(info.preamble))
        memory.write(addr - len(preamble), preamble + old)
        record = sites.find(addr)
        assert record is not None
        memory.write(record + 8, struct.pack("<Q", n << 32 | n))
        if n % 7 == 0:
            memory.write(record, struct.pack("<Q", 0x1234))

    inspected = _inspected(memory, sites, info)
    found = idle_sites([*MANY, *OTHERS], memory, sites, info)

    assert found == inspected
    assert 20 < len(found) < len(MANY)


@pytest.mark.parametrize(("start", "at"), [(TEXT, TEXT + 0x0FFD), (TEXT + 0x1000, TEXT + 0x800)])
def test_of_many_sites_one_on_two_pages_or_one_that_cannot_be_read_is_left_out(
    start: int, at: int
) -> None:
    memory = FakeRam(0x10000, start=start)
    records = TEXT + 0x8000
    sites = Sites(
        addrs=np.array([at, TEXT + 0x2000], np.uint64),
        records=np.array([records, records + 16], np.uint64),
    )
    memory.write(records, struct.pack("<QQQQ", at, 0, TEXT + 0x2000, 0))
    # What the page of the first one begins with is not the site.
    for addr in (TEXT, at, TEXT + 0x2000):
        if addr >= start:
            memory.write(addr, SITE.nops[0])

    wanted = [Addr(at), Addr(TEXT + 0x2000)]
    assert [*idle_sites(wanted, memory, sites, SITE)] == wanted[1:]


def test_an_address_between_sites_is_refused() -> None:
    memory = _memory()

    with pytest.raises(RefusedError, match="not an ftrace site"):
        inspect(Addr(TEXT + 0x101), memory, _sites(memory), SITE)


def test_records_are_sixteen_bytes_apart() -> None:
    sites = _sites()

    first, second = (sites.find(addr) for addr in SITES[0])

    assert first is not None
    assert second is not None
    assert second - first == RECORD_SIZE


def _image(*sites: int) -> tuple[FakeRam, Kernel]:
    memory = FakeRam(0x10000, start=TEXT)
    memory.write(LIST, b"".join(struct.pack("<Q", site) for site in sites))
    kernel = make_kernel(
        [
            symbol("__start_mcount_loc", LIST, type="D"),
            symbol("__stop_mcount_loc", LIST + 8 * len(sites), type="D"),
            symbol("_sinittext", TEXT + 0x7000),
            symbol("_einittext", TEXT + 0x7100),
        ]
    )
    return memory, kernel


def test_a_file_s_sites_are_those_that_its_boot_will_leave() -> None:
    memory, kernel = _image(TEXT + 0x300, 0, TEXT + 0x7010, TEXT + 0x100, TEXT + 0x7100)

    sites = sites_in_image(memory, kernel)

    assert sites.addrs.tolist() == [TEXT + 0x100, TEXT + 0x300, TEXT + 0x7100]
    assert sites.find(TEXT + 0x100) is not None


def test_a_file_without_a_list_of_sites_has_none() -> None:
    memory, kernel = _image()

    assert len(sites_in_image(memory, make_kernel([])).addrs) == 0
    assert sites_in_image(memory, kernel).addrs.tolist() == []


def test_a_file_whose_list_ends_before_it_begins_is_damaged() -> None:
    ends = [symbol("__start_mcount_loc", LIST), symbol("__stop_mcount_loc", LIST - 8)]

    with pytest.raises(TargetError, match="damaged"):
        sites_in_image(FakeRam(0x10000, start=TEXT), make_kernel(ends))


def _arm64_site(preamble: bytes, old: bytes) -> tuple[FakeRam, Sites]:
    memory = FakeRam(0x10000, start=TEXT)
    write_list(memory, LIST, [[TEXT + 0x104, TEXT + 0x208]])
    memory.write(TEXT + 0x100, preamble + old)
    return memory, _sites(memory)


def test_an_arm64_function_s_site_is_after_the_address_that_is_shown() -> None:
    _, sites = _arm64_site(b"", b"")
    plain, with_bti = symbol("plain", TEXT + 0x100), symbol("bti", TEXT + 0x200)

    found = [(locate(f, sites, ARM64), site_of(f.addr, sites, ARM64)) for f in (plain, with_bti)]

    assert found == [(TEXT + 0x100, TEXT + 0x104), (TEXT + 0x200, TEXT + 0x208)]


@pytest.mark.parametrize(("old", "is_used"), [("1f2003d5", False), ("bf1b0094", True)])
def test_an_arm64_site_is_a_nop_or_a_call_after_the_caller_s_address(
    old: str, is_used: bool
) -> None:
    memory, sites = _arm64_site(ARM64.preamble, bytes.fromhex(old))

    assert is_in_use(Addr(TEXT + 0x104), memory, sites, ARM64) == is_used


def test_the_guests_own_probe_may_be_before_an_arm64_site() -> None:
    memory, sites = _arm64_site(ARM64.probed_preamble, ARM64.nops[0])

    assert inspect(Addr(TEXT + 0x104), memory, sites, ARM64).old == ARM64.nops[0]


def test_a_site_of_another_kind_is_refused() -> None:
    memory, sites = _arm64_site(ARM64.nops[0], ARM64.nops[0])

    with pytest.raises(RefusedError, match="comes after 1f2003d5"):
        inspect(Addr(TEXT + 0x104), memory, sites, ARM64)
