"""The line that one counter's cycles are scaled by, and whether it is one."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kprobes.errors import TargetError
from kprobes.guest.clock import SchedClock, find_line, open_clock
from kprobes.guest.guest import GuestMemory
from kprobes.model.kernel import Kernel
from kprobes.units import U64, Addr
from tests.build.guest import PERCPU, make_memory
from tests.build.kernel import TEXT, make_kernel, symbol

SCHED_CLOCK, COUNTER, LOCAL = TEXT + 0x100, TEXT + 0x200, TEXT + 0x300
CD = TEXT + 0xD40
MEMORY = make_memory()


def write_line(
    memory: GuestMemory,
    point: tuple[int, int] = (0, 0),
    slope: tuple[int, int] = (1, 0),
    *,
    read: int = COUNTER,
    latch: int = 0,
) -> None:
    line = struct.pack("<QQQQII", *point, (1 << 56) - 1, read, *slope)
    other = struct.pack("<QQQQII", 1, 1, 1, 1, 1, 1)
    lines = other + line if latch & 1 else line + other
    memory.write(CD, struct.pack("<II", latch, 0) + lines)


def make_arm64(memory: GuestMemory) -> Kernel:
    """Return a kernel whose ``sched_clock`` names ``cd``."""
    page = (CD >> 12) - (SCHED_CLOCK >> 12)
    adrp = 0x9000_0014 | (page & 3) << 29 | (page >> 2 & 0x7FFFF) << 5
    add = 0x9100_0295 | (CD & 0xFFF) << 10
    memory.write(SCHED_CLOCK, struct.pack("<III", adrp, add, 0xD65F_03C0))
    symbols = [
        symbol("sched_clock", SCHED_CLOCK, size=12),
        symbol("arch_counter_get_cntvct", COUNTER, size=8),
        symbol("trace_clock_local", LOCAL),
    ]
    return replace(make_kernel(symbols), arch="aarch64")


def test_the_line_is_where_the_function_that_uses_it_says() -> None:
    memory = make_memory()
    write_line(memory, (5, 7), (16_777_216, 24))

    found = find_line(memory, make_arm64(memory))

    assert found is not None
    assert found[0] == CD
    assert (found[1].ns_at, found[1].cycles, found[1].rate) == (5, 7, 1_000_000_000)


@pytest.mark.parametrize(
    ("slope", "read"),
    [((0, 24), COUNTER), ((1, 33), COUNTER), ((1, 24), COUNTER + 4), ((1, 24), LOCAL)],
)
def test_what_makes_no_sense_is_no_line_and_the_guest_is_asked(
    slope: tuple[int, int], read: int
) -> None:
    memory = make_memory()
    write_line(memory, slope=slope, read=read)
    kernel = make_arm64(memory)

    assert find_line(memory, kernel) is None
    assert open_clock(memory, kernel, PERCPU).function == LOCAL


def test_a_line_spares_asking() -> None:
    memory = make_memory()
    write_line(memory, slope=(3, 1))
    kernel = make_arm64(memory)

    clock = open_clock(memory, kernel, PERCPU)
    assert clock.function is None
    assert clock.ns(np.array([10], np.uint64), 1).tolist() == [15]


@given(
    st.tuples(st.integers(0, 1 << 62), st.integers(0, 1 << 56)),
    st.integers(1, 1 << 30),
    st.integers(0, 32),
    st.lists(st.integers(-(1 << 20), 1 << 32), min_size=1),
    st.integers(0, 3),
)
def test_every_count_is_what_python_s_integers_say(
    point: tuple[int, int], mult: int, shift: int, since: list[int], latch: int
) -> None:
    write_line(MEMORY, point, (mult, shift), latch=latch)
    counts = np.array([point[1] + each & U64 for each in since], np.uint64)

    found = SchedClock(MEMORY, Addr(CD)).ns(counts, 0)

    assert found.tolist() == [point[0] + (each * mult >> shift) & U64 for each in since]


def test_a_line_that_is_drawn_anew_is_followed() -> None:
    memory = make_memory()
    write_line(memory)
    clock = SchedClock(memory, Addr(CD))
    write_line(memory, (100, 50), (2, 0), latch=1)

    clock.refresh()

    assert clock.ns(np.array([60], np.uint64), 0).tolist() == [120]


def test_a_line_that_is_lost_is_told() -> None:
    memory = make_memory()
    write_line(memory)
    clock = SchedClock(memory, Addr(CD))
    write_line(memory, slope=(0, 0))

    with pytest.raises(TargetError, match="its memory is corrupted"):
        clock.refresh()
