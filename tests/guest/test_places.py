"""Meaning of definitions on one kernel, and the first of several errors, as the kernel finds it."""

import struct
from collections.abc import Mapping

import numpy as np
import pytest
from msgspec.structs import replace

from kprobes.arch.aarch64.arch import AARCH64
from kprobes.arch.x86_64.arch import X86_64
from kprobes.errors import DefinitionError, RefusedError, TargetError, UsageError
from kprobes.formats import btf_index
from kprobes.formats.btf import Btf
from kprobes.guest.places import FindSite, Places, Unpatched
from kprobes.guest.text import Text
from kprobes.image.types import BtfTypes
from kprobes.model.kernel import Kernel, TextTables
from kprobes.model.plan import Site, Strategy
from kprobes.model.source import SourceInfo
from kprobes.plan.ftrace import Sites
from kprobes.plan.strategy import Wish
from kprobes.resolve.explain import explain
from kprobes.units import Addr
from tests.build.btf import BtfBuilder
from tests.build.kernel import TEXT, FakeSymbols, make_kernel, read, symbol
from tests.build.pages import FakeRam
from tests.build.typed import SYMBOLS, builder


def make_types(b: BtfBuilder) -> BtfTypes:
    return BtfTypes(Btf(btf_index.parse(b.build())))


def _memory() -> FakeRam:
    return FakeRam(0x10000, start=TEXT)


def make_places(
    *events: tuple[str, str], module_types: Mapping[str, BtfTypes] | None = None
) -> Places:
    addrs = np.array(sorted(s.addr for s in SYMBOLS if s.is_text), np.uint64)
    kernel = make_kernel(SYMBOLS, types=make_types(builder()))
    kernel = replace(kernel, module_types=module_types or {})
    sites = Sites(addrs=addrs, records=np.zeros(len(addrs), np.uint64))
    text = Text(kernel=kernel, open_memory=_memory, read_tables=TextTables)
    return Places(text, X86_64, sites, events=lambda: frozenset(events))


@pytest.mark.parametrize(
    ("marked", "code"),
    [
        ("p ^nosuch %zz", "BAD_PROBE_ADDR"),
        ("p:9 ^nosuch", "BAD_PROBE_ADDR"),
        ("p ^twice $arg", "NON_UNIQ_SYMBOL"),
        ("r ^vfs_read+4 %zz", "BAD_RETPROBE"),
        ("p:^9 vfs_read file->nosuch", "BAD_EVENT_NAME"),
        ("p vfs_read ^%zz file->nosuch", "BAD_REG_NAME"),
        ("p vfs_read file->^nosuch %zz", "NO_BTF_FIELD"),
        ("p vfs_read ^nosuch %di:u9", "NO_BTFARG"),
        ("p vfs_read %zz ^$arg0", "BAD_ARG_NUM"),
        ("p vfs_read%^foo nosuch", "BAD_ADDR_SUFFIX"),
        ("p nosuch:thing ^%zz", "BAD_REG_NAME"),
    ],
)
def test_the_leftmost_of_several_errors_is_told(marked: str, code: str) -> None:
    text = marked.replace("^", "", 1)
    with pytest.raises(DefinitionError) as caught:
        read(text)
    caught.value.add_note("line 7")

    found = make_places().first_kernel_error(caught.value)

    at = marked.index("^") - (code == "BAD_ADDR_SUFFIX")
    assert (found.code, found.column, found.command) == (code, at, text)
    assert found.__notes__ == ["line 7"]


def test_the_name_of_another_event_is_taken() -> None:
    places = make_places(("sched", "switch"), ("kprobes", "mine"))

    with pytest.raises(DefinitionError) as caught:
        places.resolve(read("p:sched/switch vfs_read"), event_id=1)

    assert (caught.value.code, caught.value.column) == ("EVENT_EXIST", 0)
    for text in ("p:sched/other vfs_read", "p:switch vfs_read", "p:mine vfs_read"):
        assert places.resolve(read(text), event_id=1).function == TEXT


def test_a_pattern_with_a_module_stays_in_it() -> None:
    places = make_places()

    assert [d.place.symbol for d in places.expand(read("p ext4:*s*"))] == ["ext4_sync"]
    assert [d.event for d in places.expand(read("p ext4:*s*"))] == ["p_ext4_ext4_sync_0"]
    with pytest.raises(RefusedError, match="matches 'vfs_"):
        places.expand(read("p ext4:vfs_*"))


def test_a_function_that_returns_nothing_has_no_returned_value() -> None:
    places = make_places()

    with pytest.raises(DefinitionError):
        places.resolve(read("r void_fn $retval"), event_id=1)
    assert places.resolve(read("r vfs_read $retval"), event_id=1).layout.event == "r_vfs_read_0"


@pytest.mark.parametrize("place", ["ext4_sync", "ext4:ext4_sync"])
def test_a_module_s_function_has_its_module_s_types(place: str) -> None:
    own = builder()
    own.func("ext4_sync", 0, [("sb", own.ptr(own.struct("super", 8, [("s_dev", 1, 32)])))])
    definition = read(f"p {place} dev=sb->s_dev:u32")

    found = make_places(module_types={"ext4": make_types(own)}).resolve(definition, event_id=1)

    assert explain(found.fetches[0]) == "u32 at %di + 0x4, read from kernel memory"
    with pytest.raises(DefinitionError, match="No BTF entry"):
        make_places(module_types={"fuse": make_types(own)}).resolve(definition, event_id=1)


@pytest.mark.parametrize(
    ("offset", "strategy", "found"),
    [
        (0, None, (Strategy.FTRACE, 4, 0)),
        (0, Strategy.JUMP, (Strategy.JUMP, 0, 0)),
        (4, None, (Strategy.FTRACE, 4, 4)),
        (8, None, (Strategy.JUMP, 8, 8)),
    ],
)
def test_an_arm64_entry_is_probed_at_its_site_and_has_its_own_address(
    offset: int, strategy: Strategy | None, found: tuple[Strategy, int, int]
) -> None:
    memory = _memory()
    # mov x9, x30; nop; mov x0, #1; ret
    memory.write(TEXT, bytes.fromhex("e9031eaa 1f2003d5 200080d2 c0035fd6"))
    kernel = replace(make_kernel([symbol("f", TEXT, size=16)]), arch="aarch64")
    text = Text(kernel=kernel, open_memory=lambda: memory, read_tables=TextTables)
    sites = Sites(addrs=np.array([TEXT + 4], np.uint64), records=np.zeros(1, np.uint64))
    places = Places(text, AARCH64, sites, events=frozenset)

    site = places.find_site(Wish(strategy=strategy))(Addr(TEXT + offset))

    assert (site.strategy, site.addr - TEXT, site.ip - TEXT) == found
    assert places.locate(kernel.symbols.named("f")) == TEXT


class Fleeting(FakeSymbols, frozen=True):
    """Names of which all from MODULE on are init text."""

    def is_fleeting(self, addr: int) -> bool:
        return addr >= MODULE


MODULE = TEXT + 0x100_0000
MANY = [Addr(TEXT + 0x20 * n) for n in range(1, 80)]


def _found(find_site: FindSite, addr: Addr) -> Site | str:
    try:
        return find_site(addr)
    except RefusedError as error:
        return str(error)


def test_many_places_that_are_looked_at_together_are_what_each_of_them_is() -> None:
    memory = FakeRam(0x110_0000, start=TEXT)
    addrs = [*MANY, Addr(MODULE + 0x40)]
    records = [Addr(TEXT + 0x8000 + 16 * n) for n in range(len(addrs))]
    for n, (addr, record) in enumerate(zip(addrs, records, strict=True)):
        memory.write(record, struct.pack("<QQ", addr, n))
        # Some hold what no nop is.
        memory.write(addr, X86_64.site.nops[0] if n % 9 else b"\xcc" * X86_64.site.size)
    kernel = replace(make_kernel([]), symbols=Fleeting([symbol("f", TEXT, size=0x4000)]))
    sites = Sites(addrs=np.array(addrs, np.uint64), records=np.array(records, np.uint64))
    text = Text(kernel=kernel, open_memory=lambda: memory, read_tables=TextTables)
    places = Places(text, X86_64, sites)

    together = places.find_site(Wish(), addrs=addrs)
    alone = places.find_site(Wish())

    found = [_found(together, addr) for addr in addrs]
    assert found == [_found(alone, addr) for addr in addrs]
    assert sum(isinstance(each, Site) for each in found) == 70
    assert "init text" in str(found[-1])


class Bytes:
    """Memory from 0 on. Implements ``ports.Memory``."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def read(self, addr: int, size: int) -> bytes:
        return self.data[addr : addr + size]


@pytest.mark.parametrize("others", [0, 100])
def test_text_is_read_as_it_was_before_it_was_patched(others: int) -> None:
    before = bytes(range(200))
    patched = {Addr(50): before[50:55], Addr(58): before[58:59]}
    now = bytearray(before)
    for at, old in patched.items():
        now[at : at + len(old)] = b"\xcc" * len(old)
    patched |= {Addr(1000 + 8 * n): b"\x90" for n in range(others)}
    memory = Unpatched(Bytes(bytes(now)), patched)

    for start in range(30, 70):
        for size in (1, 5, 16):
            assert memory.read(start, size) == before[start : start + size]


def test_names_away_from_an_entry_are_the_kernels_own_error_without_debug_information() -> None:
    places = make_places()
    definition = read("p vfs_read+4 count")

    assert places.expand(definition) == [definition]
    with pytest.raises(TargetError, match="lines and variables need debug information"):
        places.expand(read("p vfs_read:4"))


def test_a_mistyped_name_is_told_also_where_nothing_reads_debug_information() -> None:
    def without_library(kernel: Kernel, module: str = "") -> SourceInfo:
        del kernel, module
        raise UsageError("libdw.so.1 is not there")

    places = make_places()
    places.open_source = without_library

    (same,) = places.expand(read("p vfs_raed"))
    with pytest.raises(DefinitionError, match="did you mean vfs_read"):
        places.resolve(same, event_id=1)
    # Variables need it.
    with pytest.raises(UsageError, match="is not there"):
        places.expand(read("p vfs_read $vars"))
