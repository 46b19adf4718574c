"""Code of unknown size: how far it reaches, and what it does to a window of memory."""

from hypothesis import given
from hypothesis import strategies as st

from kprobes.arch.aarch64.disasm import follow, reaches
from kprobes.errors import MemoryFault
from kprobes.units import Addr
from tests.build.a64 import NOP, RET, START, b, bl, code_of
from tests.build.armed_sites import SparseMemory

WINDOW = 0xFF18_0000_0000_0000
INSIDE = range(START, START + 0x1000)
CONSTANT = "d2800000 f2ffe300"
"""movz x0, #0; movk x0, #0xff18, lsl #48"""


def pieces(words: str) -> tuple[tuple[Addr, bytes], ...]:
    memory = SparseMemory({START: code_of(words) + bytes(32)})
    return follow(memory.read, START, INSIDE)


def found(words: str) -> list[tuple[int, int, bool]]:
    seen = reaches(START, pieces(words), range(WINDOW, WINDOW + 0x1000))
    return [(each.offset, each.size, each.is_write) for _, each in sorted(seen.items())]


def test_code_ends_at_its_return() -> None:
    assert pieces(f"{NOP} {RET} {NOP}") == ((START, code_of(f"{NOP} {RET}")),)


def test_both_ways_of_a_branch_belong_to_it_and_what_lies_between_does_not() -> None:
    # cbz x0, +12; ret; (a word of others); nop; ret
    assert pieces(f"b4000060 {RET} d4200000 {NOP} {RET}") == (
        (START, code_of(f"b4000060 {RET}")),
        (START + 12, code_of(f"{NOP} {RET}")),
    )


def test_what_it_calls_inside_belongs_to_it_and_outside_does_not() -> None:
    inside = pieces(f"{bl(START + 12)} {RET} d4200000 {NOP} {RET}")
    outside = pieces(f"{bl(START + 0x10_0000)} {RET}")

    assert [addr for addr, _ in inside] == [START, START + 12]
    assert [len(code) for _, code in outside] == [8]


def test_a_loop_is_followed_once() -> None:
    assert len(pieces(f"{NOP} {b(START, at=START + 4)}")) == 1


def test_memory_that_cannot_be_read_is_where_it_ends() -> None:
    memory = SparseMemory()

    assert follow(memory.read, START, INSIDE) == ()


@given(st.lists(st.integers(0, 2**32 - 1), max_size=50))
def test_any_words_have_an_end(words: list[int]) -> None:
    code = b"".join(word.to_bytes(4, "little") for word in words)

    def read(addr: int, size: int) -> bytes:
        at = addr - START
        if at < 0 or at + size > len(code):
            raise MemoryFault(addr, size)
        return code[at : at + size]

    seen = follow(read, START, INSIDE)

    assert sum(len(piece) for _, piece in seen) <= len(code)
    assert all(
        0 <= r.size <= 64 for r in reaches(START, seen, range(WINDOW, WINDOW + 0x1000)).values()
    )


def test_loads_and_stores_by_a_constant_are_seen() -> None:
    # str x1, [x0, #16]; ldrb w2, [x0, #3]; stp x1, x2, [x0, #32]; ldr x3, [x1]
    assert found(f"{CONSTANT} f9000801 39400c02 a9020801 f9400023 {RET}") == [
        (16, 8, True),
        (3, 1, False),
        (32, 16, True),
    ]


def test_sums_and_copies_are_followed() -> None:
    # add x4, x0, #0x20; mov x5, x4; add x5, x5, x9; str w1, [x5, #4]; ldr x1, [x0, x9]
    assert found(f"{CONSTANT} 91008004 aa0403e5 8b0900a5 b90004a1 f8696801 {RET}") == [
        (0x20, 0, False),
        (0x20, 0, False),
        (0x24, 4, True),
        (0, 8, False),
    ]


def test_where_an_unknown_was_added_tells_places_apart() -> None:
    # add x5, x0, x9; str x1, [x5]; str x1, [x0]
    code = pieces(f"{CONSTANT} 8b090005 f90000a1 f9000001 {RET}")

    seen = reaches(START, code, range(WINDOW, WINDOW + 4096))

    assert [seen[Addr(START + at)].origin - START for at in (12, 16)] == [8, 4]


def test_atomics_write_and_a_base_that_moves_is_followed() -> None:
    # ldadd x1, x2, [x0]; cas x1, x2, [x0]; str x1, [x0], #8; ldr x1, [x0]
    assert found(f"{CONSTANT} f8210002 c8a17c02 f8008401 f9400001 {RET}") == [
        (0, 8, True),
        (0, 8, True),
        (0, 8, True),
        (8, 8, False),
    ]


def test_a_callee_may_change_what_it_need_not_keep() -> None:
    # bl; str x1, [x0]
    assert found(f"{CONSTANT} {bl(START + 0x10_0000, at=START + 8)} f9000001 {RET}") == []
    # mov x19, x0; bl; str x1, [x19]
    kept = f"{CONSTANT} aa0003f3 {bl(START + 0x10_0000, at=START + 12)} f9000261 {RET}"
    assert found(kept) == [(0, 8, True)]


def test_ways_that_disagree_leave_nothing_known() -> None:
    # movz, movk; cbz x1, +8; mov x0, x2; str x1, [x0]
    assert found(f"{CONSTANT} b4000041 aa0203e0 f9000001 {RET}") == []


def test_code_that_is_called_may_lie_before_the_entry() -> None:
    # movz, movk; str x1, [x0, #8]; ret; then the entry: bl back; ret
    words = f"{CONSTANT} f9000401 {RET} {bl(START, at=START + 16)} {RET}"
    memory = SparseMemory({START: code_of(words) + bytes(32)})

    entry = Addr(START + 16)
    code = follow(memory.read, entry, INSIDE)

    (seen,) = reaches(entry, code, range(WINDOW, WINDOW + 0x1000)).values()
    assert (seen.offset, seen.size, seen.is_write) == (8, 8, True)
