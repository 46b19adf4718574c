"""Raw counters to nanoseconds, exactly as the kernel computes them."""

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kprobes.errors import TargetError, UsageError
from kprobes.guest.clock import GuestClock, TscClock, check_clock, current_clock, open_clock
from kprobes.guest.guest import GuestMemory
from kprobes.guest.rings import MappedRange
from kprobes.model.kernel import Kernel
from kprobes.units import U64, Addr
from tests.build import timekeeping
from tests.build.guest import DATA, PERCPU, make_memory
from tests.build.kernel import TEXT, FakeTypes, make_kernel, symbol

CYC2NS, TICKS = 0x40, 0x80
NATIVE, LOCAL, GLOBAL = TEXT + 0x100, TEXT + 0x200, TEXT + 0x300
READ_TSC, READ_HPET = TEXT + 0x400, TEXT + 0x440
KEYS, CALL, TRACE, CLOCKS = DATA, DATA + 0x100, DATA + 0x200, DATA + 0x300
AHEAD, OFFSET, MONO, RAW, SOURCE = (DATA + 0x400 + 0x100 * n for n in range(5))
ADDRESSES = {
    "cyc2ns": CYC2NS,
    "sched_clock_data": TICKS,
    "native_sched_clock": NATIVE,
    "trace_clock_local": LOCAL,
    "trace_clock_global": GLOBAL,
    "trace_clock": TEXT + 0x500,
    "ktime_get_mono_fast_ns": TEXT + 0x540,
    "ktime_get_raw_fast_ns": TEXT + 0x580,
    "ktime_get_boot_fast_ns": TEXT + 0x5C0,
    "trace_clock_x86_tsc": TEXT + 0x600,
    "read_tsc": READ_TSC,
    "read_hpet": READ_HPET,
    "__use_tsc": KEYS,
    "__sched_clock_stable": KEYS + 4,
    "__SCK__pv_sched_clock": CALL,
    "global_trace": TRACE,
    "trace_clocks": CLOCKS,
    "__gtod_offset": AHEAD,
    "__sched_clock_offset": OFFSET,
    "tk_fast_mono": MONO,
    "tk_fast_raw": RAW,
}
words = st.integers(0, U64)


def write_scale(
    memory: GuestMemory, cpu: int, lines: list[tuple[int, int, int]], latch: int = 0
) -> None:
    data = b"".join(struct.pack("<IIQ", *line) for line in lines)
    memory.write(PERCPU[cpu] + CYC2NS, data + struct.pack("<I", latch))


def _clock(memory: GuestMemory) -> TscClock:
    return TscClock([MappedRange(memory, base + CYC2NS, 36) for base in PERCPU])


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


def test_nanoseconds_of_the_guest_s_own_are_taken_as_they_are() -> None:
    counter = np.array([1, 2, 3], np.uint64)

    assert GuestClock("f", Addr(1)).ns(counter, 0) is counter


# Which clock stamps are of, and how it is had.


def _kernel(
    *,
    is_trusted: bool = True,
    has_tsc: bool = True,
    call: int = NATIVE,
    current: int = 0,
    read: int = READ_HPET,
) -> Kernel:
    memory = MEMORY
    for cpu in (0, 1):
        write_scale(memory, cpu, [(1, 0, 0), (1, 0, 0)])
        tick = struct.pack("<QQQ", 1000 + cpu, 500 + cpu, 0)
        memory.write(PERCPU[cpu] + TICKS, tick)
    memory.write(KEYS, struct.pack("<II", has_tsc, is_trusted))
    memory.set_u64(CALL, call)
    memory.write(TRACE + 16, struct.pack("<i", current))
    for n, function in enumerate((LOCAL, GLOBAL, 0x1234)):
        memory.write(CLOCKS + 24 * n, struct.pack("<QQi4x", function, 0, 1))
    memory.write(CLOCKS + 24 * 3, struct.pack("<QQi4x", GLOBAL, 0, 0))
    memory.set_u64(AHEAD, 40)
    memory.set_u64(OFFSET, 7)
    for keeper in (MONO, RAW):
        memory.write(keeper, struct.pack("<Q", 0) + bytes(112))
        # clock, cycle_last, shift, base
        memory.write(keeper + 8, struct.pack("<QQQIIQQQ", SOURCE, 0, 900, 1, 0, 0, 300, 0))
    memory.set_u64(SOURCE, read)
    return make_kernel(
        [symbol(name, addr) for name, addr in ADDRESSES.items()],
        types={
            "trace_array.clock_id": (16, 4),
            **timekeeping.TICKS,
            **timekeeping.TIMEKEEPER,
        },
    )


def _told(kernel: Kernel, name: str | None = None) -> tuple[int | None, list[int]]:
    """Return the function that is called, and what the count 2000 is on the first CPU."""
    clock = open_clock(MEMORY, kernel, PERCPU, name)
    return clock.function, clock.ns(np.array([2000], np.uint64), 0).tolist()


@pytest.mark.parametrize(
    ("name", "time"),
    [("local", 2000), ("global", 2007), ("perf", 2007), ("x86-tsc", 2000)],
)
def test_a_trusted_tsc_tells_the_time_by_itself(name: str, time: int) -> None:
    assert _told(_kernel(), name) == (None, [time])


@pytest.mark.parametrize(
    ("name", "time"),
    # Of the newest tick 1001 was 501, and the clock is 40 ahead of timekeeping.
    [("local", 2000), ("global", 1540), ("perf", 1540), ("mono", 1500), ("x86-tsc", 2000)],
)
def test_one_that_is_not_trusted_does_with_what_was_said_at_ticks(name: str, time: int) -> None:
    assert _told(_kernel(is_trusted=False), name) == (None, [time])


@pytest.mark.parametrize("is_trusted", [True, False])
@pytest.mark.parametrize("name", ["mono", "mono_raw"])
def test_where_timekeeping_reads_the_counter_its_last_tick_tells(
    name: str, *, is_trusted: bool
) -> None:
    kernel = _kernel(is_trusted=is_trusted, read=READ_TSC)

    assert _told(kernel, name) == (None, [2000 - 900 + 300])


@pytest.mark.parametrize(
    ("name", "function"),
    [("mono", "ktime_get_mono_fast_ns"), ("mono_raw", "ktime_get_raw_fast_ns")],
)
def test_where_it_reads_another_one_its_function_is_called(name: str, function: str) -> None:
    assert _told(_kernel(), name)[0] == ADDRESSES[function]


@pytest.mark.parametrize("is_trusted", [True, False])
def test_a_clock_that_no_counter_tells_is_called(*, is_trusted: bool) -> None:
    kernel = _kernel(is_trusted=is_trusted)

    assert _told(kernel, "boot") == (ADDRESSES["ktime_get_boot_fast_ns"], [2000])


@pytest.mark.parametrize(("call", "has_tsc"), [(TEXT + 0x900, True), (NATIVE, False)])
def test_without_a_tsc_of_its_own_the_guest_is_asked(call: int, *, has_tsc: bool) -> None:
    made = _kernel(is_trusted=False, call=call, has_tsc=has_tsc)

    assert _told(made, "local")[0] == LOCAL
    assert _told(made, "global")[0] == GLOBAL
    with pytest.raises(UsageError, match="the TSC of this guest is not what its kernel"):
        _told(made, "x86-tsc")


@pytest.mark.parametrize("missing", ["sched_clock_data.tick_gtod", "tk_read_base.clock"])
@pytest.mark.parametrize("name", ["global", "mono"])
def test_a_kernel_that_is_laid_out_otherwise_is_asked(name: str, missing: str) -> None:
    kernel = _kernel(is_trusted=False)
    assert isinstance(kernel.types, FakeTypes)
    members = {path: place for path, place in kernel.types.members.items() if path != missing}

    function, _ = _told(replace(kernel, types=FakeTypes(members)), name)

    is_asked = missing.startswith("sched") or name == "mono"
    assert (function is not None) == is_asked


def test_cpus_whose_counters_differ_are_asked() -> None:
    kernel = _kernel(is_trusted=False)
    MEMORY.write(PERCPU[1] + TICKS, struct.pack("<QQQ", 1001, 5_000_000, 0))

    assert _told(kernel, "global")[0] == GLOBAL


@pytest.mark.parametrize(
    ("current", "name"), [(0, "local"), (1, "global"), (2, "local"), (3, "local"), (-1, "local")]
)
def test_by_default_it_is_the_clock_of_the_guest_s_own_trace(current: int, name: str) -> None:
    kernel = _kernel(current=current)

    assert current_clock(MEMORY, kernel) == name
    assert _told(kernel) == _told(kernel, name)


@pytest.mark.parametrize("name", ["uptime", "", "Local", "tai"])
def test_a_clock_that_there_is_not_is_told_with_those_that_there_are(name: str) -> None:
    words = f"no clock {name!r} in kernel 6.1.0-56-cloud-amd64; there are: local, global, perf, "

    for told in (lambda: check_clock(_kernel(), name), lambda: _told(_kernel(), name)):
        with pytest.raises(UsageError, match=words):
            told()


def test_a_kernel_that_tells_no_time_is_told() -> None:
    with pytest.raises(TargetError, match="has no trace_clock_local or sched_clock"):
        open_clock(make_memory(), make_kernel([]), PERCPU)


@pytest.mark.parametrize("name", ["local", "global", "x86-tsc"])
def test_a_count_takes_as_long_as_the_kernel_says(name: str) -> None:
    kernel = _kernel()
    write_scale(MEMORY, 0, [(3, 0, 0), (1, 0, 0)])

    assert open_clock(MEMORY, kernel, PERCPU, name).tick_s == pytest.approx(3e-9)
