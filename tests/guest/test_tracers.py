"""The guest's own kprobes, from memory as its kernel lays it out."""

import struct
from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kprobes.guest.tracers import GuestProbe, missing_probes, read_guest_probes
from kprobes.model.kernel import Kernel
from kprobes.units import Addr
from tests.build.armed_sites import SparseMemory
from tests.build.kernel import SITE, TEXT, make_kernel, symbol

TABLE, AGGREGATE, DISPATCHER, HANDLER = (TEXT + at for at in (0x5000, 0x6000, 0x7000, 0x8000))
FIRST, SECOND, EVENT, NAME = (0xFFFF_8880_0000_0000 + at for at in (0, 0x400, 0x800, 0xC00))
SLOT, DETOUR = 0xFFFF_FFFF_C000_0000, 0xFFFF_FFFF_C000_1000
BUCKETS = 64
TYPES = {
    "kprobe.hlist": (0, 16),
    "kprobe.list": (16, 16),
    "kprobe.addr": (40, 8),
    "kprobe.pre_handler": (64, 8),
    "kprobe.opcode": (80, 1),
    "kprobe.ainsn": (88, 32),
    "kprobe.flags": (120, 4),
    "optimized_kprobe.optinsn": (144, 24),
    "optimized_kprobe.optinsn.insn": (152, 8),
    "trace_kprobe.rp.kp": (24, 128),
    "trace_kprobe.tp.event": (224, 8),
    "trace_probe_event.call": (80, 144),
    "trace_event_call.name": (24, 8),
}


def kernel() -> Kernel:
    return make_kernel(
        [
            symbol("kprobe_table", TABLE, type="b", size=8 * BUCKETS),
            symbol("aggr_pre_handler", AGGREGATE),
            symbol("kprobe_dispatcher", DISPATCHER),
            symbol("my_handler", HANDLER),
        ],
        types=TYPES,
    )


def kprobe(
    *, handler: int, flags: int = 0, following: int = 0, children: int = 0, detour: int = 0
) -> bytes:
    data = bytearray(256)
    struct.pack_into("<Q", data, 0, following)
    struct.pack_into("<Q", data, 16, children)
    struct.pack_into("<Q", data, 40, SITE)
    struct.pack_into("<Q", data, 64, handler)
    data[80] = 0x41
    struct.pack_into("<Q", data, 88, SLOT)
    struct.pack_into("<I", data, 120, flags)
    data[144:148] = bytes.fromhex("57415641")
    struct.pack_into("<Q", data, 152, detour)
    return bytes(data)


def memory(heads: Sequence[int], pieces: dict[int, bytes]) -> SparseMemory:
    table = struct.pack(f"<{BUCKETS}Q", *heads, *[0] * (BUCKETS - len(heads)))
    return SparseMemory({TABLE: table, **pieces})


def test_a_breakpoint_and_its_handler_are_found() -> None:
    found = read_guest_probes(memory([0, FIRST], {FIRST: kprobe(handler=HANDLER)}), kernel())

    assert found == (
        GuestProbe(
            addr=Addr(SITE),
            opcode=b"\x41",
            handlers=("my_handler",),
            is_ftrace=False,
            is_disabled=False,
            slot=Addr(SLOT),
            detour=None,
            copied=b"",
        ),
    )


def test_an_optimised_one_has_a_detour_and_the_events_of_its_children() -> None:
    # The event's trace_kprobe lies around the child.
    trace = SECOND - 24
    child = kprobe(handler=DISPATCHER)
    child = child[:16] + struct.pack("<Q", FIRST + 16) + child[24:]
    around = bytes(24) + child[:200] + struct.pack("<Q", EVENT) + child[208:]
    pieces = {
        FIRST: kprobe(handler=AGGREGATE, flags=4, children=SECOND + 16, detour=DETOUR),
        trace: around,
        EVENT + 80 + 24: struct.pack("<Q", NAME),
        NAME: b"mid\0".ljust(64, b"\0"),
    }

    (found,) = read_guest_probes(memory([FIRST], pieces), kernel())

    assert found.handlers == ("event mid",)
    assert found.detour == DETOUR
    assert found.copied.hex() == "57415641"


def test_two_in_one_bucket_are_both_found_and_gone_ones_are_not() -> None:
    pieces = {FIRST: kprobe(handler=HANDLER, following=SECOND), SECOND: kprobe(handler=0, flags=1)}

    assert len(read_guest_probes(memory([FIRST], pieces), kernel())) == 1


def test_flags_tell_the_kernels_ftrace_and_what_is_off() -> None:
    (found,) = read_guest_probes(
        memory([FIRST], {FIRST: kprobe(handler=HANDLER, flags=8 | 2)}), kernel()
    )

    assert (found.is_ftrace, found.is_disabled) == (True, True)


def test_a_bucket_that_leads_round_for_ever_ends() -> None:
    pieces = {FIRST: kprobe(handler=AGGREGATE, following=FIRST, children=FIRST + 16)}

    assert len(read_guest_probes(memory([FIRST, FIRST], pieces), kernel())) == 1


def test_a_kernel_without_kprobes_or_types_has_none() -> None:
    assert read_guest_probes(SparseMemory(), make_kernel([], types=TYPES)) == ()
    untyped = make_kernel([symbol("kprobe_table", TABLE, type="b")])
    assert read_guest_probes(SparseMemory(), untyped) == ()


@given(st.binary(min_size=256, max_size=256), st.integers(0, (1 << 64) - 1))
def test_any_memory_is_read_without_a_crash(data: bytes, head: int) -> None:
    read_guest_probes(memory([FIRST, head], {FIRST: data}), kernel())


def test_a_table_that_was_not_found_is_not_taken_for_an_empty_one() -> None:
    own = symbol("register_kprobe", TEXT)

    assert "kprobe_table" in missing_probes(make_kernel([own], types=TYPES))
    assert missing_probes(make_kernel([], types=TYPES)) == ""
    assert missing_probes(kernel()) == ""
