"""Tables of a kernel's text: intact, absent, damaged."""

import struct
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kprobes.errors import MemoryFault, RefusedError, TargetError
from kprobes.image.init_tables import read_image_tables
from kprobes.image.tables import disjoint, read_function, read_tables
from kprobes.model.kernel import Forbidden, Kernel, Symbol, TextPart
from kprobes.units import Addr
from tests.build.armed_sites import SparseMemory
from tests.build.kernel import TEXT, make_kernel, symbol

DATA = TEXT + 0x200_0000
LIST = 0xFFFF_8880_0000_1000
F, G, INIT = TEXT + 0x100, TEXT + 0x800, TEXT + 0x300_0000


def array(memory: SparseMemory, names: tuple[str, str], at: int, data: bytes) -> list[Symbol]:
    memory.pieces[at] = data
    return [symbol(names[0], at, type="R"), symbol(names[1], at + len(data), type="R")]


def relative(at: int, rows: Sequence[Sequence[int]], columns: int) -> bytes:
    """Rows of s32 of which the first columns, given as addresses, count from themselves."""
    data = b""
    for row in rows:
        for i, word in enumerate(row):
            value = word - at - len(data) if i < columns else word
            data += struct.pack("<i", value)
    return data


def running() -> tuple[SparseMemory, list[Symbol]]:
    memory = SparseMemory()
    exceptions = relative(DATA, [(F + 1, G + 1, 3), (INIT, INIT, 0)], 2)
    labels = relative(DATA + 0x100, [(F + 2, F + 9, 0, 0), (G + 3, G + 8, 1, 2)], 2)
    calls = relative(DATA + 0x200, [(F + 5, 8), (INIT, 0)], 1)
    found = array(memory, ("__start___ex_table", "__stop___ex_table"), DATA, exceptions)
    found += array(memory, ("__start___jump_table", "__stop___jump_table"), DATA + 0x100, labels)
    found += array(
        memory, ("__start_static_call_sites", "__stop_static_call_sites"), DATA + 0x200, calls
    )
    return memory, found


def blacklist(memory: SparseMemory, entries: Sequence[tuple[int, int, int]]) -> Symbol:
    """A list of (next, start, stop) at LIST, LIST + 32, ..."""
    memory.pieces[DATA + 0x300] = struct.pack("<QQ", LIST, LIST)
    data = b"".join(struct.pack("<QQQQ", after, 0, start, stop) for after, start, stop in entries)
    memory.pieces[LIST] = data
    return symbol("kprobe_blacklist", DATA + 0x300, type="d")


def area(start: int, stop: int, why: str) -> Forbidden:
    return Forbidden(start=Addr(start), stop=Addr(stop), why=why)


def test_tables_are_read_and_what_boot_has_freed_is_left_out() -> None:
    memory, symbols = running()

    found = read_tables(memory, make_kernel(symbols), ftrace=[F])

    assert found.exceptions == {F + 1: G + 1}
    assert found.jump_labels == {F + 2: F + 9, G + 3: G + 8}
    assert found.static_calls == {F + 5}
    assert found.ftrace == {F}
    assert found.table_targets == {G + 1, F + 9, G + 8}


@pytest.mark.parametrize(
    ("names", "pointers"), [(["ftrace_ops_nop_func"], {G - 8, F - 8}), ([], set[int]())]
)
def test_the_tracer_s_pointers_are_where_its_sites_say(
    names: list[str], pointers: set[int]
) -> None:
    kernel = replace(make_kernel([symbol(name, G) for name in names]), arch="aarch64")

    # Without and with bti c before the tracer's words.
    found = read_tables(SparseMemory({F: bytes(16), G: bytes(16)}), kernel, ftrace=[F + 4, G + 8])

    assert found.pointers == pointers


def test_a_kernel_without_tables_has_none() -> None:
    found = read_tables(SparseMemory(), make_kernel([]))

    assert (found.exceptions, found.forbidden, found.has_jump_tables) == ({}, (), True)


def test_thunks_are_found_by_name() -> None:
    names = ("__x86_return_thunk", "__x86_indirect_thunk_rax", "__x86_indirect_call_thunk_rax")
    symbols = [symbol(name, F + 32 * i) for i, name in enumerate(names)]

    found = read_tables(SparseMemory(), make_kernel(symbols))

    assert found.returns == {F}
    assert found.indirect == {F + 32, F + 64}
    assert not found.has_jump_tables


def test_sections_are_forbidden() -> None:
    edges = [symbol("__noinstr_text_start", F), symbol("__noinstr_text_end", G)]

    (found,) = read_tables(SparseMemory(), make_kernel(edges)).forbidden

    assert (found.start, found.stop) == (F, G)
    assert "noinstr" in found.why


def test_the_names_of_all_functions_in_a_section_are_known() -> None:
    symbols = [symbol("a", F, size=8), symbol("b", F + 8, size=8), symbol("c", G, size=8)]
    edges = [symbol("__noinstr_text_start", F), symbol("__noinstr_text_end", F + 16)]

    found = read_tables(SparseMemory(), make_kernel([*symbols, *edges]))

    assert found.forbidden_names == {"a", "b"}


@pytest.mark.parametrize("types", [None, {}])
def test_the_kernels_own_blacklist_is_forbidden(types: dict[str, tuple[int, int]] | None) -> None:
    memory = SparseMemory()
    head = blacklist(memory, [(LIST + 32, F, F + 9), (DATA + 0x300, G, G + 4)])

    found = read_tables(memory, make_kernel([head], types=types)).forbidden

    assert [(each.start, each.stop) for each in found] == [(F, F + 9), (G, G + 4)]


def test_the_blacklists_layout_is_the_kernels_types() -> None:
    memory = SparseMemory()
    head = blacklist(memory, [])
    memory.pieces[LIST] = struct.pack("<QQQQQ", DATA + 0x300, 0, 7, F, F + 9)
    places = {"start_addr": (24, 8), "end_addr": (32, 8)}
    types = {f"kprobe_blacklist_entry.{name}": place for name, place in places.items()}

    (found,) = read_tables(memory, make_kernel([head], types=types)).forbidden

    assert (found.start, found.stop) == (F, F + 9)


def test_a_blacklist_that_never_ends_ends_somewhere() -> None:
    memory = SparseMemory()
    head = blacklist(memory, [(LIST + 32, F, F + 9), (LIST, 0, 1 << 63)])

    found = read_tables(memory, make_kernel([head])).forbidden

    assert len(found) == 1


def test_a_blacklist_that_leads_nowhere_is_an_error() -> None:
    memory = SparseMemory()
    head = blacklist(memory, [(0x1234, F, F + 9)])

    with pytest.raises(MemoryFault):
        read_tables(memory, make_kernel([head]))


@pytest.mark.parametrize("size", [-12, 13, 1 << 40])
def test_a_table_that_cannot_be_is_an_error(size: int) -> None:
    edges = [symbol("__start___ex_table", DATA), symbol("__stop___ex_table", DATA + size)]

    with pytest.raises(TargetError, match="damaged"):
        read_tables(SparseMemory({DATA: bytes(100)}), make_kernel(edges))


@given(data=st.binary(max_size=120))
def test_any_bytes_of_a_table_are_taken_without_harm(data: bytes) -> None:
    memory = SparseMemory()
    data = data[: len(data) // 16 * 16]
    symbols = array(memory, ("__start___jump_table", "__stop___jump_table"), DATA, data)

    found = read_tables(memory, make_kernel(symbols))

    assert all(TEXT <= site < TEXT + 0x100_0000 for site in found.jump_labels)


def test_what_runs_while_a_cpu_starts_is_forbidden() -> None:
    memory, symbols = running()
    starts = symbol("secondary_startup_64", F, size=32)

    found = read_tables(memory, make_kernel([*symbols, starts]))

    (only,) = found.forbidden
    assert (only.start, only.stop) == (F, F + 32)
    assert "while a CPU starts" in only.why


def test_areas_that_overlap_are_cut() -> None:
    found = disjoint([area(8, 12, "c"), area(0, 10, "a"), area(2, 4, "b")])

    assert found == (area(0, 10, "a"), area(10, 12, "c"))


@pytest.mark.parametrize(("release", "size"), [("6.1.0", 12), ("6.12.9", 14), ("7.2.1", 14)])
def test_a_file_has_the_tables_of_boot_too(release: str, size: int) -> None:
    memory, symbols = running()
    rest = bytes(size - 10)
    aux, put = INIT + 0x1000, INIT + 0x2000
    jump = b"\xe9" + struct.pack("<i", aux - F - 21)
    memory.pieces |= {F + 16: jump, aux: b"\x90" * 48, put: b"\x66\x66\x90"}
    first = struct.pack("<ii", F + 16 - INIT, put - INIT - 4) + rest + bytes([5, 3])
    second = struct.pack("<ii", INIT - INIT - size, 0) + rest + bytes([5, 3])
    names = ("__alt_instructions", "__alt_instructions_end")
    symbols += array(memory, names, INIT, first + second)
    locks = relative(INIT + 0x100, [(G + 7,)], 1)
    symbols += array(memory, ("__smp_locks", "__smp_locks_end"), INIT + 0x100, locks)
    mcount = struct.pack("<QQ", F, INIT)
    symbols += array(memory, ("__start_mcount_loc", "__stop_mcount_loc"), INIT + 0x200, mcount)
    names = ("__start_kprobe_blacklist", "__stop_kprobe_blacklist")
    symbols += array(memory, names, INIT + 0x300, struct.pack("<Q", G))
    symbols.append(symbol("g", G, size=0x20))

    found = read_image_tables(memory, make_kernel(symbols, release=release))

    assert found.exceptions == {F + 1: G + 1}
    assert found.alternatives == ((F + 16, F + 21), (G + 7, G + 8))
    replacement = TextPart(addr=Addr(put), code=b"\x66\x66\x90")
    assert found.replacements == {F + 16: ((replacement, F + 21),)}
    assert found.annexes[aux].code == b"\x90" * 48
    assert found.ftrace == {F}
    assert [(each.start, each.stop) for each in found.forbidden] == [(G, G + 0x20)]
    assert "g" in found.forbidden_names


def text(*symbols: Symbol) -> tuple[SparseMemory, Kernel]:
    memory = SparseMemory({s.addr: bytes([s.size]) * s.size for s in symbols if s.size < 1 << 16})
    return memory, make_kernel(symbols)


def test_a_function_is_its_own_range_and_its_cold_part() -> None:
    memory, kernel = text(symbol("f", F, size=16), symbol("f.cold", G, size=4))

    name, parts = read_function(memory, kernel, F + 3)

    assert name == "f"
    assert [(part.addr, len(part.code)) for part in parts] == [(F, 16), (G, 4)]
    assert read_function(memory, kernel, G + 1) == (name, parts)


def test_a_cold_part_without_its_function_stands_alone() -> None:
    memory, kernel = text(symbol("f.cold", G, size=4))

    assert [part.addr for part in read_function(memory, kernel, G)[1]] == [G]


def test_every_cold_part_of_a_name_is_taken() -> None:
    colds = [symbol("f.cold", G, size=4), symbol("f.cold", G + 16, size=4)]
    memory, kernel = text(symbol("f", F, size=16), *colds)

    assert len(read_function(memory, kernel, F)[1]) == 3


@pytest.mark.parametrize(
    ("symbols", "words"),
    [
        ([], "in no function"),
        ([symbol("d", F, type="D")], "in no function"),
        ([symbol("f", F, size=1 << 30)], "which no function has"),
        ([symbol("f", F), *[symbol("f.cold", G + i, size=1) for i in range(64)]], "parts"),
    ],
)
def test_what_is_no_function_is_refused(symbols: list[Symbol], words: str) -> None:
    memory, kernel = text(*symbols)

    with pytest.raises(RefusedError, match=words):
        read_function(memory, kernel, F)


@pytest.mark.parametrize(
    ("functions", "missing"),
    [
        ([], ""),
        (["search_exception_tables"], "its exception table was"),
        (["jump_label_text_reserved", "static_call_text_reserved"], "its jump labels and its sta"),
        (["register_kprobe"], "its probe blacklist was"),
    ],
)
def test_a_table_that_a_kernel_has_and_nothing_leads_to_is_missing_not_empty(
    functions: list[str], missing: str
) -> None:
    kernel = make_kernel([symbol(name, F + 0x40 * n) for n, name in enumerate(functions)])

    found = read_tables(SparseMemory(), kernel).missing

    assert found.startswith(missing) if missing else found == ""


def test_what_was_found_is_not_missing() -> None:
    memory, symbols = running()
    functions = ("search_exception_tables", "jump_label_text_reserved", "register_kprobe")
    symbols += [symbol(name, G + 0x40 * n) for n, name in enumerate(functions)]
    symbols.append(blacklist(memory, []))
    memory.pieces[DATA + 0x300] = struct.pack("<QQ", DATA + 0x300, DATA + 0x300)

    assert read_tables(memory, make_kernel(symbols)).missing == ""


@pytest.mark.parametrize("is_alone", [True, False, None])
def test_a_kernel_that_began_with_one_cpu_gives_its_locks_back(*, is_alone: bool | None) -> None:
    memory, symbols = running()
    locks = relative(DATA + 0x400, [(G + 7,), (F + 20,)], 1)
    symbols += array(memory, ("__smp_locks", "__smp_locks_end"), DATA + 0x400, locks)
    symbols.append(symbol("uniproc_patched", DATA + 0x500, type="b"))
    if is_alone is not None:
        memory.pieces[DATA + 0x500] = bytes([is_alone])

    found = read_tables(memory, make_kernel(symbols))

    # Where it is not in a file, it is not set.
    assert found.alternatives == (((F + 20, F + 21), (G + 7, G + 8)) if is_alone else ())
