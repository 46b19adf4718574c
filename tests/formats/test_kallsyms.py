"""kallsyms tables to columns."""

import functools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kprobes.formats import kallsyms
from kprobes.formats.kallsyms import SymbolTable
from tests.build.kallsyms import Layout, Named, Tables, build, many

BASE = 0xFFFF_FFFF_8100_0000
RODATA = BASE + 0x80_0000


def rows(table: SymbolTable) -> list[Named]:
    names = table.blob[1:-1].decode().split("\0")
    return list(zip(table.addrs.tolist(), table.types.decode(), names, strict=True))


@functools.cache
def sound(layout: Layout) -> Tables:
    return build(many(BASE, 300), layout, addr=RODATA, base=BASE)


def percpu() -> list[Named]:
    return [(0, "A", "fixed_percpu_data"), (0x1F000, "D", "current_task")]


@pytest.mark.parametrize("layout", list(Layout))
def test_every_layout_gives_the_symbols_that_went_in(layout: Layout) -> None:
    symbols = many(BASE)
    if layout in (Layout.V5_10, Layout.V6_1, Layout.V6_4):
        symbols = percpu() + symbols

    found = kallsyms.find(build(symbols, layout, addr=RODATA, base=BASE).data, RODATA)

    assert found is not None
    assert rows(found) == symbols


@pytest.mark.parametrize("n", [257, 511, 512, 513, 1000])
def test_the_last_chunk_may_have_any_size(n: int) -> None:
    symbols = many(BASE, n)

    found = kallsyms.find(build(symbols, Layout.V6_4, addr=RODATA, base=BASE).data, RODATA)

    assert found is not None
    assert len(found.addrs) == n


@pytest.mark.parametrize("layout", list(Layout))
def test_the_sources_leave_out_what_the_kernel_relocates(layout: Layout) -> None:
    moved = 0x1D80_0000
    boots = [
        build(many(BASE + slide), layout, addr=RODATA + slide, base=BASE + slide)
        for slide in (0, moved)
    ]

    tables = [kallsyms.find(boots[0].data, RODATA), kallsyms.find(boots[1].data, RODATA + moved)]

    pieces: list[list[bytes]] = []
    for table, boot, start in zip(tables, boots, (RODATA, RODATA + moved), strict=True):
        assert table is not None
        pieces.append([boot.data[at - start :][:size] for at, size in table.sources])
    assert pieces[0] == pieces[1]
    assert tables[0] is not None
    assert tables[1] is not None
    assert rows(tables[0].shifted(moved)) == rows(tables[1])
    assert tables[0].shifted(moved).sources == tables[1].sources


def test_a_shift_leaves_per_cpu_values_alone() -> None:
    symbols = percpu() + many(BASE)
    found = kallsyms.find(build(symbols, Layout.V5_10, addr=RODATA, base=BASE).data, RODATA)
    assert found is not None

    moved = found.shifted(0x1000)

    assert moved.addrs[1] == 0x1F000
    assert moved.addrs[2] == BASE + 0x1000


def test_tables_that_are_elsewhere_in_the_data_are_found() -> None:
    noise = random.Random(1).randbytes(200_000)
    before = noise + b"0\x001\x002\x003\x004\x005\x006\x007\x008\x009\0" + noise[:8]
    tables = build(many(BASE), Layout.V6_1, addr=RODATA, base=BASE, before=before)

    found = kallsyms.find(tables.data + noise, RODATA)

    assert found is not None
    assert rows(found) == many(BASE)


def test_data_without_tables_has_none() -> None:
    assert kallsyms.find(b"", RODATA) is None
    assert kallsyms.find(bytes(100_000), RODATA) is None
    assert kallsyms.find(b"0\x001\x002\x003\x004\x005\x006\x007\x008\x009\0" * 2000, RODATA) is None


def test_addresses_that_do_not_ascend_are_not_believed() -> None:
    symbols = many(BASE)
    symbols[100], symbols[200] = symbols[200], symbols[100]

    tables = build(symbols, Layout.V6_4, addr=RODATA, base=BASE)

    assert kallsyms.find(tables.data, RODATA) is None


def test_a_marker_that_is_off_by_one_is_not_believed() -> None:
    tables = build(many(BASE), Layout.V6_4, addr=RODATA, base=BASE)
    damaged = bytearray(tables.data)
    damaged[tables.markers + 8] ^= 1

    assert kallsyms.find(bytes(damaged), RODATA) is None


def test_a_symbol_without_a_name_is_not_believed() -> None:
    tables = build(many(BASE), Layout.V6_4, addr=RODATA, base=BASE)
    damaged = bytearray(tables.data)
    first = damaged[tables.names]
    # Length 0, and the next symbol as much longer: all markers still fit.
    damaged[tables.names] = 0
    damaged[tables.names + 1] = first - 1

    assert kallsyms.find(bytes(damaged), RODATA) is None


@pytest.mark.parametrize("layout", list(Layout))
@settings(max_examples=25)
@given(data=st.data())
def test_damage_gives_symbols_or_none_and_nothing_worse(
    layout: Layout, data: st.DataObject
) -> None:
    tables = sound(layout)
    damaged = bytearray(tables.data)
    starts = (tables.names, tables.markers, tables.tokens, tables.token_index, tables.offsets)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.sampled_from(starts)) + data.draw(st.integers(-16, 600))
        damaged[place % len(damaged)] = data.draw(st.sampled_from([0, 1, 127, 128, 255]))
    stop = data.draw(st.integers(len(damaged) - 600, len(damaged)))

    found = kallsyms.find(bytes(damaged[:stop]), RODATA)

    assert found is None or len(found.types) == len(found.addrs) == len(found.starts)
