"""A task's memory: which page table, how far, and what may be written."""

import pytest

from kprobes.errors import MemoryFault, RefusedError
from tests.build.handled import DATA, NAME, RODATA, USER_DATA, USER_ROOT, make_handled
from tests.build.kernel import TEXT
from tests.build.pages import NX, PAGE, USER, WRITE, Pages


def test_kernel_and_user_addresses_go_through_their_own_page_tables() -> None:
    made = make_handled()
    made.put(USER_DATA, b"user's\0")

    assert made.memory.string(USER_DATA) == "user's"
    assert made.memory.string(NAME) == "hosts"
    assert made.live.string(NAME) == "hosts"
    with pytest.raises(MemoryFault, match=r"regs\.user"):
        made.live.string(USER_DATA)


@pytest.mark.parametrize("start", [DATA, USER_DATA])
def test_what_lies_on_two_pages_is_one(start: int) -> None:
    made = make_handled()
    made.memory.write(start + PAGE - 3, b"abcdef\0")

    assert made.memory.read(start + PAGE - 3, 6) == b"abcdef"
    assert made.memory.string(start + PAGE - 3) == "abcdef"
    assert made.memory.string(start + PAGE - 3, 4) == "abcd"


def test_numbers_are_little_endian() -> None:
    made = make_handled()
    made.put(DATA, 0x8877665544332211)

    assert made.memory.read_u8(DATA) == 0x11
    assert made.memory.read_u16(DATA) == 0x2211
    assert made.memory.read_u32(DATA) == 0x44332211
    assert made.live.read_u64(DATA) == 0x8877665544332211


def test_a_string_may_end_where_memory_ends_but_not_after_it() -> None:
    made = make_handled()
    end = USER_DATA + 2 * PAGE
    made.put(end - 3, b"ab\0")

    assert made.memory.string(end - 3) == "ab"
    made.put(end - 1, b"c")
    with pytest.raises(MemoryFault) as caught:
        made.memory.string(end - 3)
    assert caught.value.addr == end


def test_bytes_that_are_no_text_become_escapes() -> None:
    made = make_handled()
    made.put(DATA, b"a\xff\0")

    assert made.memory.string(DATA) == "a\\xff"


@pytest.mark.parametrize(
    ("addr", "size"),
    [
        (0, 8),
        (8, 1),
        (USER_DATA + 2 * PAGE - 1, 2),
        (RODATA + PAGE, 1),
        (1 << 63, 8),
        (1 << 64, 1),
        ((1 << 64) - 4, 8),
        (-8, 8),
        (0x7FFF_FFFF_EFFF, 2),
        (DATA, -1),
        (DATA, (1 << 24) + 1),
    ],
)
def test_what_is_not_there_is_a_fault(addr: int, size: int) -> None:
    with pytest.raises(MemoryFault):
        make_handled().memory.read(addr, size)


@pytest.mark.parametrize(
    ("addr", "why"),
    [
        (RODATA, "read-only"),
        (RODATA - 2, "read-only"),
        (USER_DATA + 4 * PAGE, "read-only"),
        (USER_DATA + 2 * PAGE - 2, "not mapped"),
    ],
)
def test_what_the_guest_may_not_write_is_not_written(addr: int, why: str) -> None:
    made = make_handled()
    before = bytes(made.ram.data)

    with pytest.raises(MemoryFault, match=f"cannot write 4 bytes at {addr:#x}: {why}"):
        made.memory.write(addr, b"1234")

    assert bytes(made.ram.data) == before


def test_code_is_not_written() -> None:
    made = make_handled()

    with pytest.raises(RefusedError, match="is code"):
        made.live.write(TEXT + 8, b"\xcc")


def test_nothing_can_be_written_anywhere() -> None:
    make_handled().memory.write(RODATA, b"")


def test_each_task_has_its_own_memory_whoever_was_looked_at_before() -> None:
    made, other = make_handled(), 0xC_0000
    Pages(made.ram, other).map(USER_DATA, 0xA000, flags=WRITE | USER | NX)
    made.put(USER_DATA, b"one")
    made.ram.write(0xA000, b"two")

    found = [made.live.memory_of(root).read(USER_DATA, 3) for root in (USER_ROOT, other) * 2]

    assert found == [b"one", b"two"] * 2
    there = [made.live.typed(made.live.memory_of(root)).memory for root in (USER_ROOT, other)]
    assert [each.read(USER_DATA, 3) for each in there] == found[:2]
