"""Tables of modules: intact, absent, damaged."""

import struct

import numpy as np
import pytest
from msgspec.structs import replace

from kprobes.image.module_types import with_loaded_modules
from kprobes.image.modules import table_of
from kprobes.image.symbols import ModuleSymbols, SymbolMap
from kprobes.image.tables import ModuleTables, read_module_tables, read_tables
from kprobes.model.kernel import Kernel
from tests.build.armed_sites import SparseMemory
from tests.build.kernel import TEXT, make_kernel

MODULE, RECORD, DATA = 0xFFFF_FFFF_C000_0000, 0xFFFF_FFFF_C000_8000, 0xFFFF_FFFF_C000_9000
MEMBERS = (
    *("extable", "num_exentries", "jump_entries", "num_jump_entries"),
    *("static_call_sites", "num_static_call_sites", "kprobes_text_start", "kprobes_text_size"),
)
PLACES = {f"module.{name}": (8 * n, 8) for n, name in enumerate(MEMBERS)}


def make(
    record: dict[str, int], *, types: dict[str, tuple[int, int]] | None = None
) -> tuple[SparseMemory, Kernel]:
    """One module whose struct has some members, the rest of them 0."""
    memory = SparseMemory()
    memory.pieces[RECORD] = struct.pack("<8Q", *(record.get(name, 0) for name in MEMBERS))
    names = table_of([b"_text"], np.array([TEXT], np.uint64), b"T")
    own = table_of([b"f"], np.array([MODULE], np.uint64), b"t")
    module = ModuleSymbols(name="m", table=own, ranges=((MODULE, MODULE + 0x1000),), record=RECORD)
    kernel = make_kernel([], types=PLACES if types is None else types)
    return memory, replace(kernel, symbols=SymbolMap(names, [module]))


def counted(at: int, *words: int) -> bytes:
    """One entry whose first words, given as addresses, count from themselves."""
    return b"".join(
        struct.pack("<i", word - at - 4 * n if word > 1 << 32 else word)
        for n, word in enumerate(words)
    )


def read(record: dict[str, int], data: bytes = b"") -> ModuleTables:
    memory, kernel = make(record)
    memory.pieces[DATA] = data
    return read_module_tables(memory, kernel)


def test_a_modules_tables_are_read_and_are_among_the_kernels() -> None:
    memory, kernel = make(
        {
            "extable": DATA,
            "num_exentries": 1,
            "jump_entries": DATA + 0x40,
            "num_jump_entries": 1,
            "static_call_sites": DATA + 0x80,
            "num_static_call_sites": 1,
            "kprobes_text_start": MODULE + 0x80,
            "kprobes_text_size": 16,
        }
    )
    memory.pieces[DATA] = counted(DATA, MODULE + 1, MODULE + 9, 0)
    memory.pieces[DATA + 0x40] = counted(DATA + 0x40, MODULE + 2, MODULE + 20, 0, 0)
    memory.pieces[DATA + 0x80] = counted(DATA + 0x80, MODULE + 3, 0)

    found = read_tables(memory, kernel)

    assert found.exceptions == {MODULE + 1: MODULE + 9}
    assert found.jump_labels == {MODULE + 2: MODULE + 20}
    assert found.static_calls == {MODULE + 3}
    assert [(area.start, area.stop) for area in found.forbidden] == [(MODULE + 0x80, MODULE + 0x90)]


def test_entries_of_text_that_is_elsewhere_are_left_out() -> None:
    entry = counted(DATA, TEXT + 1, MODULE + 9, 0)

    assert read({"extable": DATA, "num_exentries": 1}, entry).exceptions == {}


@pytest.mark.parametrize("count", [1 << 40, 3])
def test_a_module_whose_tables_do_not_read_can_carry_nothing(count: int) -> None:
    found = read({"extable": DATA, "num_exentries": count}, bytes(12))

    (area,) = found.forbidden
    assert (area.start, area.stop) == (MODULE, MODULE + 0x1000)
    assert "cannot be read" in area.why


def test_what_a_kernels_modules_do_not_have_is_empty() -> None:
    memory, kernel = make({}, types={})

    found = read_module_tables(memory, kernel)

    assert (found.exceptions, found.jump_labels, found.forbidden) == ({}, {}, ())


def test_a_kernel_that_was_not_found_in_memory_stays_as_it_is() -> None:
    kernel = make_kernel([])

    assert with_loaded_modules(kernel, SparseMemory()) is kernel
