"""Text that boot rewrites, from the lists in a kernel's file."""

import struct

import pytest

from kprobes.errors import TargetError
from kprobes.image.init_tables import BootPatch, Rewritten, read_boot_patches
from kprobes.model.kernel import Symbol
from tests.build.armed_sites import SparseMemory
from tests.build.kernel import TEXT, make_kernel, symbol

LISTS = TEXT + 0x200_0000
ALL = range(TEXT, TEXT + 0x100_0000)


def listed(memory: SparseMemory, name: str, at: int, data: bytes, *, end: str = "") -> list[Symbol]:
    memory.pieces[at] = data
    return [symbol(name, at, type="R"), symbol(end or f"{name}_end", at + len(data), type="R")]


def relative(at: int, *places: int) -> bytes:
    return b"".join(struct.pack("<i", p - at - 4 * i) for i, p in enumerate(places))


def test_every_list_is_read_by_address() -> None:
    memory = SparseMemory()
    at = LISTS
    alternative = struct.pack("<iiHBB", TEXT + 0x40 - at, 0, 9, 3, 2)
    symbols = listed(memory, "__alt_instructions", at, alternative)
    at += 0x100
    symbols += listed(memory, "__return_sites", at, relative(at, TEXT + 0x80, TEXT + 0x20))
    at += 0x100
    symbols += listed(memory, "__retpoline_sites", at, relative(at, TEXT + 0x90))
    at += 0x100
    # The last one is not padded.
    calls = struct.pack("<QBB6x", TEXT + 0x10, 1, 7) + struct.pack("<QBB2x", TEXT + 0x60, 1, 5)
    symbols += listed(memory, "__parainstructions", at, calls)
    at += 0x100
    symbols += listed(
        memory,
        "__start_runtime_ptr_USER_PTR_MAX",
        at,
        relative(at, TEXT + 0x52),
        end="__stop_runtime_ptr_USER_PTR_MAX",
    )

    found = read_boot_patches(memory, make_kernel(symbols), ALL)

    assert [(f.start - TEXT, f.stop - f.start, f.why) for f in found] == [
        (0x10, 7, BootPatch.PARAVIRT),
        (0x20, 5, BootPatch.RETURN),
        (0x40, 3, BootPatch.ALTERNATIVE),
        (0x52, 8, BootPatch.CONSTANT),
        (0x60, 5, BootPatch.PARAVIRT),
        (0x80, 5, BootPatch.RETURN),
        (0x90, 6, BootPatch.RETPOLINE),
    ]
    assert found[3].what == "USER_PTR_MAX"


def test_only_what_touches_the_text_asked_for_is_returned() -> None:
    memory = SparseMemory()
    places = relative(LISTS, TEXT + 0x10, TEXT + 0x20, TEXT + 0x30)
    kernel = make_kernel(listed(memory, "__return_sites", LISTS, places))

    found = read_boot_patches(memory, kernel, range(TEXT + 0x24, TEXT + 0x30))

    why = BootPatch.RETURN
    assert found == (Rewritten(start=TEXT + 0x20, stop=TEXT + 0x25, why=why),)


def test_a_kernel_without_lists_has_nothing() -> None:
    assert read_boot_patches(SparseMemory(), make_kernel([]), ALL) == ()


def test_a_list_that_cannot_be_is_refused() -> None:
    symbols = [symbol("__return_sites", LISTS), symbol("__return_sites_end", LISTS - 8)]

    with pytest.raises(TargetError, match="__return_sites"):
        read_boot_patches(SparseMemory(), make_kernel(symbols), ALL)
