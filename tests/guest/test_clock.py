"""Raw counters to nanoseconds, exactly as the kernel computes them."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprobes.errors import TargetError
from kprobes.guest.clock import AnyClock, GuestClock, TscClock, clock_function, open_clock
from kprobes.guest.guest import GuestMemory
from kprobes.guest.rings import MappedRange
from kprobes.model.kernel import Kernel
from kprobes.units import U64
from tests.build.guest import DATA, PERCPU, make_memory
from tests.build.kernel import TEXT, make_kernel, symbol

CYC2NS = 0x40
NATIVE, LOCAL, GLOBAL = TEXT + 0x100, TEXT + 0x200, TEXT + 0x300
KEYS, CALL, TRACE, CLOCKS = DATA, DATA + 0x100, DATA + 0x200, DATA + 0x300
words = st.integers(0, U64)


def write_scale(
    memory: GuestMemory, cpu: int, lines: list[tuple[int, int, int]], latch: int = 0
) -> None:
    data = b"".join(struct.pack("<IIQ", *line) for line in lines)
    memory.write(PERCPU[cpu] + CYC2NS, data + struct.pack("<I", latch))


def _clock(memory: GuestMemory) -> AnyClock:
    return open_clock(memory, make_kernel([symbol("cyc2ns", CYC2NS)]), PERCPU)


MEMORY = make_memory()


@given(st.lists(words, min_size=1), st.integers(0, 0xFFFF_FFFF), st.integers(0, 32), words)
def test_every_counter_is_what_python_s_integers_say(
    counters: list[int], mul: int, shift: int, offset: int
) -> None:
    write_scale(MEMORY, 0, [(mul, shift, offset), (0, 0, 0)])
    clock = TscClock([MappedRange(MEMORY, PERCPU[0] + CYC2NS, 36)])

    found = clock.ns(np.array(counters, np.uint64), 0)

    assert found.tolist() == [(count * mul >> shift) + offset & U64 for count in counters]


def test_each_cpu_has_a_scale_of_its_own() -> None:
    memory = make_memory()
    write_scale(memory, 0, [(1, 0, 0), (0, 0, 0)])
    write_scale(memory, 1, [(2, 0, 5), (0, 0, 0)])
    counter = np.array([100], np.uint64)

    found = [_clock(memory).ns(counter, cpu).tolist() for cpu in (0, 1)]

    assert found == [[100], [205]]


@pytest.mark.parametrize(("latch", "factor"), [(0, 3), (1, 5), (2, 3), (7, 5)])
def test_the_line_that_the_latch_names_is_the_one(latch: int, factor: int) -> None:
    memory = make_memory()
    write_scale(memory, 0, [(3, 0, 0), (5, 0, 0)], latch)
    write_scale(memory, 1, [(1, 0, 0), (1, 0, 0)])

    assert _clock(memory).ns(np.array([10], np.uint64), 0).tolist() == [10 * factor]


def test_a_scale_that_the_guest_refines_is_followed() -> None:
    memory = make_memory()
    for cpu in (0, 1):
        write_scale(memory, cpu, [(1, 0, 0), (1, 0, 0)])
    clock = _clock(memory)
    write_scale(memory, 0, [(4, 0, 0), (1, 0, 0)])

    clock.refresh()

    assert clock.ns(np.array([10], np.uint64), 0).tolist() == [40]


@pytest.mark.parametrize("shift", [33, 64, 0xFFFF_FFFF])
def test_a_scale_beyond_reason_is_told(shift: int) -> None:
    memory = make_memory()
    write_scale(memory, 0, [(1, shift, 0), (1, 0, 0)])

    with pytest.raises(TargetError, match="its memory is corrupted"):
        _clock(memory)


def test_a_kernel_without_the_scale_has_no_such_clock() -> None:
    with pytest.raises(TargetError, match="no cyc2ns"):
        open_clock(make_memory(), make_kernel([]), PERCPU)


def test_nanoseconds_of_the_guest_s_own_are_taken_as_they_are() -> None:
    counter = np.array([1, 2, 3], np.uint64)

    assert GuestClock().ns(counter, 0) is counter


# Which clock the guest's own trace uses.


def _kernel(*, is_stable: bool = True, call: int = NATIVE, clock: int = 0) -> Kernel:
    MEMORY.write(KEYS, struct.pack("<II", 1, is_stable))
    MEMORY.set_u64(CALL, call)
    MEMORY.write(TRACE + 16, struct.pack("<i", clock))
    for n, function in enumerate((LOCAL, GLOBAL, 0x1234)):
        MEMORY.write(CLOCKS + 24 * n, struct.pack("<QQi4x", function, 0, 1))
    MEMORY.write(CLOCKS + 24 * 3, struct.pack("<QQi4x", GLOBAL, 0, 0))
    return make_kernel(
        [
            symbol("cyc2ns", CYC2NS),
            symbol("native_sched_clock", NATIVE),
            symbol("trace_clock_local", LOCAL),
            symbol("trace_clock_global", GLOBAL),
            symbol("__use_tsc", KEYS),
            symbol("__sched_clock_stable", KEYS + 4),
            symbol("__SCK__pv_sched_clock", CALL),
            symbol("global_trace", TRACE),
            symbol("trace_clocks", CLOCKS),
        ],
        types={"trace_array.clock_id": (16, 4)},
    )


def test_a_trusted_tsc_tells_the_time_by_itself() -> None:
    assert clock_function(MEMORY, _kernel()) is None


def test_a_tsc_that_the_guest_does_not_trust_is_not_ours_to_trust() -> None:
    assert clock_function(MEMORY, _kernel(is_stable=False)) == LOCAL


def test_under_a_paravirtual_clock_the_guest_is_asked() -> None:
    assert clock_function(MEMORY, _kernel(call=TEXT + 0x900)) == LOCAL


def test_another_clock_of_the_guest_s_trace_is_asked() -> None:
    assert clock_function(MEMORY, _kernel(clock=1)) == GLOBAL


@pytest.mark.parametrize("clock", [2, 3, 99, -1])
def test_a_clock_that_is_no_function_in_nanoseconds_is_not_called(clock: int) -> None:
    assert clock_function(MEMORY, _kernel(clock=clock, is_stable=False)) == LOCAL
