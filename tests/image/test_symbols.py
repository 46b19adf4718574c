"""Names of a kernel and its modules."""

import numpy as np
import pytest

from kprobes.errors import AmbiguousSymbolError, UnknownSymbolError
from kprobes.formats.kallsyms import SymbolTable
from kprobes.image.modules import table_of
from kprobes.image.symbols import ModuleSymbols, SymbolMap, kernel_ranges

BASE = 0xFFFF_FFFF_8100_0000
MOD = 0xFFFF_FFFF_C000_0000


def symbols() -> SymbolMap:
    kernel = [
        (0x40, "A", "percpu"),
        (BASE, "T", "_text"),
        (BASE, "T", "_stext"),
        (BASE + 0x100, "t", "__do_sys_getppid"),
        (BASE + 0x100, "T", "__ia32_sys_getppid"),
        (BASE + 0x100, "T", "__x64_sys_getppid"),
        (BASE + 0x140, "T", "vfs_read"),
        (BASE + 0x200, "t", "helper"),
        (BASE + 0x300, "t", "helper"),
        (BASE + 0x400, "T", "vfs_write"),
        (BASE + 0x1000, "B", "_end"),
        (BASE + 0x1100, "b", "after"),
    ]
    module = [
        (MOD + 0x80, "t", "late"),
        (MOD + 0x10, "T", "mod_open"),
        (MOD + 0x10, "t", "mod_alias"),
        (MOD + 0x100, "t", "vfs_read"),
    ]
    owned = ModuleSymbols(name="mod", table=table(module), ranges=((MOD, MOD + 0x200),))
    return SymbolMap(table(kernel), [owned])


def table(rows: list[tuple[int, str, str]]) -> SymbolTable:
    return table_of(
        [name.encode() for _, _, name in rows],
        np.array([addr for addr, _, _ in rows], np.uint64),
        "".join(kind for _, kind, _ in rows).encode(),
    )


@pytest.mark.parametrize(
    ("addr", "name", "size"),
    [
        (BASE, "_text", 0x100),
        (BASE + 0x100, "__do_sys_getppid", 0x40),
        (BASE + 0x13F, "__do_sys_getppid", 0x40),
        (BASE + 0x140, "vfs_read", 0xC0),
        (BASE + 0xFFF, "vfs_write", 0xC00),
        (MOD + 0x10, "mod_open", 0x70),
        (MOD + 0x90, "late", 0x80),
        (MOD + 0x1FF, "vfs_read", 0x100),
    ],
)
def test_an_address_has_the_first_alias_below_it(addr: int, name: str, size: int) -> None:
    found = symbols().at(addr)

    assert found is not None
    assert (found.name, found.size) == (name, size)


@pytest.mark.parametrize(
    "addr", [0x40, BASE - 1, BASE + 0x1000, BASE + 0x1100, MOD, MOD + 0x200, 1 << 64, -1]
)
def test_an_address_outside_of_kernel_and_modules_has_no_symbol(addr: int) -> None:
    assert symbols().at(addr) is None


def test_a_name_gives_its_one_symbol() -> None:
    found = symbols().named("vfs_write")

    assert (found.addr, found.type, found.size, found.module) == (BASE + 0x400, "T", 0xC00, "")


def test_the_kernels_symbol_comes_before_a_modules() -> None:
    both = symbols().all_named("vfs_read")

    assert [symbol.module for symbol in both] == ["", "mod"]
    assert symbols().find("vfs_read") == both[0]
    assert symbols().find("mod_alias") is not None
    assert symbols().find("absent") is None


def test_an_unknown_name_comes_with_near_ones() -> None:
    with pytest.raises(UnknownSymbolError) as caught:
        symbols().named("vfs_raed")

    assert "vfs_read" in caught.value.near


def test_a_name_like_no_other_comes_alone() -> None:
    with pytest.raises(UnknownSymbolError) as caught:
        symbols().named("qqq")

    assert caught.value.near == ()


def test_two_places_of_one_name_are_ambiguous() -> None:
    with pytest.raises(AmbiguousSymbolError) as caught:
        symbols().named("helper")

    assert caught.value.addresses == (BASE + 0x200, BASE + 0x300)


def test_a_name_is_unique_where_one_symbol_has_it() -> None:
    names = ("mod_open", "vfs_read", "helper", "nosuch")

    assert [symbols().is_unique(name) for name in names] == [True, False, False, False]


def test_a_glob_gives_symbols_by_address() -> None:
    found = symbols().glob("vfs_*")

    assert [(symbol.addr, symbol.name) for symbol in found] == [
        (BASE + 0x140, "vfs_read"),
        (BASE + 0x400, "vfs_write"),
        (MOD + 0x100, "vfs_read"),
    ]


def test_all_names_are_counted() -> None:
    assert len(symbols()) == 16


def test_without_its_border_symbols_a_kernel_is_where_its_addresses_are() -> None:
    rows = [(0x40, "A", "percpu"), (BASE, "T", "a"), (BASE + 0x10, "T", "b")]

    assert kernel_ranges(table(rows)) == ((BASE, BASE + 0x11),)
    assert kernel_ranges(table(rows[:1])) == ((0, 0),)


def test_no_address_of_a_module_is_shown_by_a_mapping_symbol() -> None:
    rows = [
        (MOD, "t", "$x"),
        (MOD, "t", "mod_init"),
        (MOD + 0x20, "t", ".Lend"),
        (MOD + 0x40, "d", "$d.7"),
        (MOD + 0x80, "t", "$xyz"),
    ]
    owned = ModuleSymbols(name="mod", table=table(rows), ranges=((MOD, MOD + 0x100),))

    symbols = SymbolMap(table([(BASE, "T", "_stext")]), [owned])

    found = symbols.at(MOD + 0x7F)
    assert found is not None
    assert (found.name, found.size) == ("mod_init", 0x80)
    assert symbols.at(MOD + 0x80) == symbols.named("$xyz")
    assert symbols.named("$x").addr == MOD


def test_no_address_of_data_has_a_symbol_where_names_of_data_are_left_out() -> None:
    borders = ("_stext", "_etext", "found_after_all", "_sinittext", "_einittext")
    rows = [(BASE + 0x1000 * number, "T", name) for number, name in enumerate(borders)]

    symbols = SymbolMap(table(rows))

    assert symbols.at(BASE + 0xFFF) == symbols.named("_stext")
    assert symbols.at(BASE + 0x3FFF) == symbols.named("_sinittext")
    for addr in (0x1000, 0x2000, 0x2FFF, 0x4000):
        assert symbols.at(BASE + addr) is None
    assert symbols.named("found_after_all").addr == BASE + 0x2000


def test_bytes_that_are_no_text_are_shown_as_escapes() -> None:
    odd = table_of([b"\xff\xfe"], np.array([BASE], np.uint64), b"t")

    assert SymbolMap(odd).glob("*")[0].name == "\\xff\\xfe"


def test_many_symbols_at_once_are_what_each_is_by_itself() -> None:
    found = symbols().glob("*")

    assert len(found) == len(symbols())
    for symbol in found:
        assert symbol in symbols().all_named(symbol.name)
