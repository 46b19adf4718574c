"""Code of unknown size: how far it reaches, and what it does to a window of memory."""

from hypothesis import given
from hypothesis import strategies as st

from kprobes.arch.x86_64.disasm import follow, reaches
from kprobes.errors import MemoryFault
from kprobes.units import Addr
from tests.build.armed_sites import SparseMemory
from tests.build.text import START, to

WINDOW = 0xFF18_0000_0000_0000
INSIDE = range(START, START + 0x1000)
CONSTANT = f"48b8{WINDOW.to_bytes(8, 'little').hex()}"
"""movabs WINDOW, %rax"""


def pieces(code: str) -> tuple[tuple[Addr, bytes], ...]:
    memory = SparseMemory({START: bytes.fromhex(code) + bytes(32)})
    return follow(memory.read, START, INSIDE)


def found(code: str) -> list[tuple[int, int, bool]]:
    seen = reaches(START, pieces(code), range(WINDOW, WINDOW + 0x1000))
    return [(each.offset, each.size, each.is_write) for _, each in sorted(seen.items())]


def test_code_ends_at_its_return() -> None:
    assert pieces("5058c3") == ((START, bytes.fromhex("5058c3")),)


def test_both_ways_of_a_branch_belong_to_it_and_what_lies_between_does_not() -> None:
    # je +2; ret; (a byte of others); nop; ret
    assert pieces("7402c3cc90c3") == ((START, bytes.fromhex("7402c3")), (START + 4, b"\x90\xc3"))


def test_what_it_calls_inside_belongs_to_it_and_outside_does_not() -> None:
    inside = pieces(f"e8{to(START + 8, 5)}c3cccc58c3")
    outside = pieces(f"e8{to(START + 0x10_0000, 5)}c3")

    assert [addr for addr, _ in inside] == [START, START + 8]
    assert [len(code) for _, code in outside] == [6]


def test_a_loop_is_followed_once() -> None:
    assert pieces("90ebfd") == ((START, bytes.fromhex("90ebfd")),)


def test_memory_that_cannot_be_read_is_where_it_ends() -> None:
    memory = SparseMemory()

    assert follow(memory.read, START, INSIDE) == ()


@given(st.binary(max_size=200))
def test_any_bytes_have_an_end(code: bytes) -> None:
    def read(addr: int, size: int) -> bytes:
        at = addr - START
        if at < 0 or at + size > len(code) + 16:
            raise MemoryFault(addr, size)
        return (code + bytes(16))[at : at + size]

    seen = follow(read, START, range(START, START + len(code)))

    assert all(addr >= START and addr + len(data) <= START + len(code) + 16 for addr, data in seen)
    reaches(START, seen, range(1 << 64))


def test_a_store_after_a_constant_is_told_by_its_offset() -> None:
    # movabs; mov %rdi, 0x38(%rax); mov %edi, (%rax); mov 8(%rax), %rcx
    code = f"{CONSTANT} 48897838 8938 488b4808 c3"

    assert found(code) == [(0x38, 8, True), (0, 4, True), (8, 8, False)]


def test_what_is_added_besides_counts_as_nothing_and_makes_another_place() -> None:
    # movabs; lea (%r11,%rax), %r13; add $0x80, %r13; mov %r13, %rbp; mov %rdx, 8(%rbp)
    code = f"{CONSTANT} 4d8d2c03 4981c580000000 4c89ed 48895508 c3"

    seen = reaches(START, pieces(code), range(WINDOW, WINDOW + 0x1000))

    assert found(code)[-1] == (0x88, 8, True)
    assert seen[max(seen)].origin == START + 10


def test_a_register_that_is_written_is_forgotten() -> None:
    # movabs; pop %rax; mov %rdi, 8(%rax)
    assert found(f"{CONSTANT} 58 48897808 c3") == []


def test_what_a_callee_may_write_is_forgotten_and_what_it_must_not_is_kept() -> None:
    # movabs; mov %rax, %rbx; call outside; mov %rdi, 8(%rax); mov %rdi, 8(%rbx)
    call = f"e8{to(START + 0x10_0000, 5, place=START + 13)}"

    assert found(f"{CONSTANT} 4889c3 {call} 48897808 48897b08 c3") == [(8, 8, True)]


def test_ways_that_disagree_know_nothing_where_they_meet() -> None:
    # movabs; je L; add $8, %rax; L: mov %rdi, (%rax)
    assert found(f"{CONSTANT} 7404 4883c008 488938 c3") == []


def test_constants_elsewhere_and_nops_are_nothing() -> None:
    # movabs 0x1234...; mov %rdi, 8(%rax); movabs WINDOW; nopl 8(%rax)
    assert found(f"48b80000000000000001 48897808 {CONSTANT} 0f1f4008 c3") == []


def test_code_that_is_called_may_lie_before_the_entry() -> None:
    # movabs; mov %rdi, 8(%rax); ret; nop; then the entry: call back; ret
    called = f"{CONSTANT} 48897808 c3 90"
    entry = Addr(START + 16)
    code = bytes.fromhex(f"{called} e8{to(START, 5, place=entry)} c3")
    memory = SparseMemory({START: code + bytes(32)})

    found = follow(memory.read, entry, INSIDE)

    (seen,) = reaches(entry, found, range(WINDOW, WINDOW + 0x1000)).values()
    assert (seen.offset, seen.size, seen.is_write) == (8, 8, True)
