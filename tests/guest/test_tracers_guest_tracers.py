"""Users of the guest's ftrace, from memory as its kernel lays it out."""

import struct

from hypothesis import given
from hypothesis import strategies as st

from kprobes.guest.tracers import Tracers
from kprobes.model.kernel import Kernel
from tests.build.armed_sites import SparseMemory
from tests.build.kernel import SITE, TEXT, make_kernel, symbol

LIST, OPS, HANDLER, END = (TEXT + at for at in (0x5000, 0x6000, 0x7000, 0x8000))
BOTH, FILTER, BUCKETS, ENTRY = (0xFFFF_8880_0000_0000 + at for at in (0, 0x100, 0x1000, 0x200))
TRAMPOLINE = 0xFFFF_FFFF_C000_0000
TYPES = {
    "ftrace_ops.func": (0, 8),
    "ftrace_ops.next": (8, 8),
    "ftrace_ops.flags": (16, 8),
    "ftrace_ops.func_hash": (88, 8),
    "ftrace_ops.trampoline": (144, 8),
    "ftrace_ops.trampoline_size": (152, 8),
    "ftrace_ops_hash.notrace_hash": (0, 8),
    "ftrace_ops_hash.filter_hash": (8, 8),
    "ftrace_hash.size_bits": (0, 8),
    "ftrace_hash.buckets": (8, 8),
    "ftrace_hash.count": (16, 8),
    "ftrace_func_entry.ip": (16, 8),
}


def kernel() -> Kernel:
    return make_kernel(
        [
            symbol("ftrace_ops_list", LIST, type="D", size=8),
            symbol("ftrace_list_end", END, type="D", size=8),
            symbol("my_ops", OPS, type="d", size=0x200),
            symbol("my_handler", HANDLER),
        ],
        types=TYPES,
    )


def make_memory(
    *, following: int = END, chosen: int | None = SITE, spared: bool = False, size: int = 0x200
) -> SparseMemory:
    ops = bytearray(0x100)
    struct.pack_into("<QQ", ops, 0, HANDLER, following)
    struct.pack_into("<Q", ops, 88, BOTH)
    struct.pack_into("<QQ", ops, 144, TRAMPOLINE, size)
    hashes = (FILTER, 0) if spared else (0, FILTER)
    # hash_64() of the site, in Linux's words.
    bits = 4
    key = ((chosen or 0) * 0x61C8864680B583EB & (1 << 64) - 1) >> (64 - bits)
    buckets = [0] * (1 << bits)
    buckets[key] = ENTRY
    return SparseMemory(
        {
            LIST: struct.pack("<Q", OPS),
            OPS: bytes(ops),
            BOTH: struct.pack("<QQ", *hashes),
            FILTER: struct.pack("<QQQ", bits, BUCKETS, 0 if chosen is None else 1),
            BUCKETS: struct.pack(f"<{len(buckets)}Q", *buckets),
            ENTRY: struct.pack("<QQQ", 0, 0, chosen or 0),
        }
    )


def test_a_user_is_found_with_its_handler_and_trampoline() -> None:
    tracers = Tracers(make_memory(), kernel())

    (tracer,) = tracers.all
    assert (tracer.name, tracer.handler_name) == ("my_ops", "my_handler")
    assert tracer.trampoline == range(TRAMPOLINE, TRAMPOLINE + 0x200)
    assert tracers.with_trampoline(TRAMPOLINE + 5) == tracer
    assert tracers.with_trampoline(TRAMPOLINE + 0x200) is None


def test_it_traces_what_its_filter_has_and_nothing_else() -> None:
    tracers = Tracers(make_memory(), kernel())

    assert len(tracers.of(SITE)) == 1
    assert tracers.of(SITE + 0x40) == ()


def test_an_empty_filter_is_all_functions() -> None:
    assert len(Tracers(make_memory(chosen=None), kernel()).of(SITE + 0x40)) == 1


def test_what_is_spared_is_not_traced() -> None:
    tracers = Tracers(make_memory(spared=True), kernel())

    assert tracers.of(SITE) == ()
    assert len(tracers.of(SITE + 0x40)) == 1


def test_a_list_that_leads_round_for_ever_ends() -> None:
    assert len(Tracers(make_memory(following=OPS), kernel()).all) == 1


def test_a_trampoline_of_a_size_that_none_has_is_none() -> None:
    (tracer,) = Tracers(make_memory(size=1 << 40), kernel()).all

    assert not tracer.trampoline


def test_a_kernel_whose_types_do_not_tell_has_none() -> None:
    untyped = make_kernel([symbol("ftrace_ops_list", LIST, type="D")])

    assert Tracers(make_memory(), untyped).all == ()


@given(st.binary(min_size=0x100, max_size=0x100), st.binary(min_size=24, max_size=24))
def test_any_memory_is_read_without_a_crash(ops: bytes, chosen: bytes) -> None:
    memory = make_memory()
    memory.pieces |= {OPS: ops, FILTER: chosen}

    Tracers(memory, kernel()).of(SITE)


def test_how_many_trace_a_site_and_whether_one_wants_all_registers() -> None:
    memory = make_memory()
    tracers = Tracers(memory, kernel())
    assert tracers.are_there
    assert tracers.wanted([SITE, SITE + 0x40]) == [(1, False), (0, False)]

    ops = bytearray(memory.pieces[OPS])
    struct.pack_into("<Q", ops, 16, 1 << 2)
    memory.pieces[OPS] = bytes(ops)

    assert Tracers(memory, kernel()).wanted([SITE]) == [(1, True)]


def test_where_types_do_not_tell_it_is_not_known_who_traces_but_that_somebody_does() -> None:
    untyped = make_kernel([symbol("ftrace_ops_list", LIST, type="D")])
    tracers = Tracers(make_memory(), untyped)

    assert (tracers.are_there, tracers.wanted([SITE])) == (True, [None])


def test_an_empty_list_is_nobody() -> None:
    memory = make_memory()
    memory.pieces[LIST] = struct.pack("<Q", END)

    assert not Tracers(memory, kernel()).are_there
