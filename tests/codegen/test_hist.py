"""Hist triggers as machine code: what is counted, in which entry, whatever comes in between."""

from collections.abc import Callable, Sequence
from itertools import product
from random import Random

import pytest
from msgspec.structs import replace

from kprobes.model.abi import LOAD_SIZE, PERCPU_GUARD, GuestAbi
from kprobes.model.plan import ReturnMethod
from kprobes.model.resolved import Resolved
from kprobes.units import U64, Addr
from tests.build import arm64, machine
from tests.build.counted import (
    CPUS,
    Counted,
    CountedReturns,
    Model,
    bucket_of,
    entry_size,
    log2,
    make_counted,
    signed,
    site_of,
    words_of,
)
from tests.build.machine import HARDIRQ, NMI, SOFTIRQ
from tests.build.overridden import AMD64, ARM64, Isa
from tests.build.records import records

ISAS = [pytest.param(AMD64, id="amd64"), pytest.param(ARM64, id="arm64")]
EVERY_ISA = pytest.mark.parametrize("isa", ISAS)
SIZE = 128
PLAIN = "p f a=$arg1 b=$arg2:s16"
SUMS = "keys=a:vals=b,b.min,b.max"


def counted(
    isa: Isa, text: str, trigger: str, filter_text: str = "", *, is_watched: bool = False
) -> Counted:
    """Return one function whose probe counts in a table of the least size."""
    probe = make_counted(isa, text, f"{trigger}:size={SIZE}", filter_text)
    return Counted(isa, [probe], is_watched=is_watched)


def counts_of(found: Counted, cpu: int = 0) -> dict[tuple[int, ...], tuple[int, ...]]:
    table = found.tables.read(cpu)
    assert (table.dropped, table.unmeasured) == (0, 0)
    return table.counts


@EVERY_ISA
@pytest.mark.parametrize(
    ("trigger", "slots", "places"),
    [
        ("keys=a:size=128", 256, (24, 24, 24)),
        ("keys=a,b:vals=a,b:size=128", 256, (32, 48, 48)),
        ("keys=comm:vals=a.min:size=256", 512, (32, 40, 40)),
        ("keys=comm,a,common_pid.execname:vals=b,b.max:size=200", 512, (48, 64, 80)),
        ("keys=common_pid.execname:size=131072", 1 << 18, (24, 24, 40)),
        ("keys=a:vals=a.p50,a.p99,a.max,a.avg,a:size=128", 1024, (32, 56, 56)),
        ("keys=comm:vals=b.p99.9:size=32768", 1 << 17, (40, 56, 56)),
        ("keys=a:vals=b.p50:size=131072", 1 << 18, (32, 48, 48)),
    ],
)
def test_an_entry_has_mark_hitcount_keys_values_and_name_in_a_row(
    isa: Isa, trigger: str, slots: int, places: tuple[int, int, int]
) -> None:
    table = make_counted(isa, PLAIN, trigger).hist

    assert table is not None
    assert (table.columns, table.comm, table.entry_size) == places
    assert (table.slots, table.size) == (slots, 64 + slots * places[2])
    assert entry_size(table.trigger) == places[2]


def test_what_is_only_shown_otherwise_is_counted_by_the_same_code() -> None:
    def shape(trigger: str) -> tuple[object, ...]:
        return make_counted(AMD64, PLAIN, trigger).shape

    plain = shape("keys=a:vals=b")

    assert shape("keys=a:vals=b:sort=a.descending:nohitcount") == plain
    others = ("keys=a.log2:vals=b", "keys=b:vals=b", "keys=a", "keys=a:vals=b:size=128")
    assert plain not in [*map(shape, others), shape("")]
    # There is as much room for buckets, but not for strings.
    assert shape("keys=a:vals=b.p50:size=16384") != shape("keys=a:vals=b.p50:size=32768")


@EVERY_ISA
@pytest.mark.parametrize(
    ("type_", "argument", "word"),
    [
        ("u8", 0x1FE, 0xFE),
        ("u16", -1, 0xFFFF),
        ("u32", 1 << 63 | 0xFFFF_FFFF, 0xFFFF_FFFF),
        ("x32", 5 << 32, 0),
        ("u64", -2, U64 - 1),
        ("s8", 0x180, -128),
        ("s8", 0x17F, 127),
        ("s16", 0x8001, -0x7FFF),
        ("s16", 0x1_7FFF, 0x7FFF),
        ("s32", 0xFFFF_FFFE, -2),
        ("s64", -3, -3),
        ("b5@3/16", 0xFFFF_FF58, 0b01011),
        ("symbol", 0xFFFF_FFFF_8123_4567, 0xFFFF_FFFF_8123_4567),
    ],
)
def test_hits_are_counted_by_a_number_and_numbers_are_summed_up(
    isa: Isa, type_: str, argument: int, word: int
) -> None:
    # A number that is a value twice is summed up once.
    found = counted(isa, f"p f a=$arg1:{type_}", "keys=a:vals=a,hitcount,hitcount,a.avg")

    for _ in range(3):
        found.hit(argument)

    assert counts_of(found) == {(word & U64,): (3, 3 * word & U64, 3)}


@EVERY_ISA
def test_numbers_of_memory_are_counted_and_0_where_there_is_none(isa: Isa) -> None:
    found = counted(isa, "p f a=+0($arg1):s16 b=+8($arg1):u32", "keys=a,b:vals=b")
    place = arm64.KERNEL if isa is ARM64 else machine.KERNEL
    found.machine.cpu.set_number(place, 0xFFFE, 2)
    found.machine.cpu.set_number(place + 8, 77, 4)

    for pointer in (place, 8, place, 1 << 62):
        found.hit(pointer)

    assert counts_of(found) == {(U64 - 1, 77): (2, 154), (0, 0): (2, 0)}


@EVERY_ISA
@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("comm", words_of(b"kworker/0:1")),
        ("common_pid", (U64 - 6,)),
        ("tgid", (41,)),
        ("cpu", (1,)),
        ("common_type", (1,)),
        ("hitcount", (1,)),
    ],
)
def test_hits_are_counted_by_what_every_event_has(isa: Isa, key: str, words: Sequence[int]) -> None:
    found = counted(isa, "p f", f"keys={key}")
    found.machine.move_to(1)
    found.set_task(b"kworker/0:1", -7, 41)

    found.hit()
    found.hit()

    assert counts_of(found, 1) == {tuple(words): (2,)}


@EVERY_ISA
@pytest.mark.parametrize("key", ["comm", "t"])
def test_names_of_tasks_differ_in_either_word(isa: Isa, key: str) -> None:
    found = counted(isa, "p f t=$comm", f"keys={key}")
    names = [b"", b"a", b"12345678", b"12345678a", b"12345678b", b"02345678a", b"fifteen letters"]

    for name in names * 2:
        found.set_task(name)
        found.hit()

    assert counts_of(found) == {words_of(name): (2,) for name in names}


@EVERY_ISA
@pytest.mark.parametrize("key", ["function", "__probe_ip"])
def test_functions_count_in_one_table_each_by_its_address(isa: Isa, key: str) -> None:
    trigger = f"keys={key}:size={SIZE}"
    found = Counted(isa, *([make_counted(isa, "p f", trigger, number=n)] for n in range(3)))

    for site in (0, 1, 0, 2, 0):
        found.hit(site=site)

    assert counts_of(found) == {(site_of(isa, n),): (hits,) for n, hits in enumerate((3, 1, 1))}


@EVERY_ISA
@pytest.mark.parametrize("return_method", [ReturnMethod.RETINSN, ReturnMethod.RETHOOK])
def test_returns_are_counted_by_their_callers(isa: Isa, return_method: ReturnMethod) -> None:
    probe = make_counted(isa, "r f", f"keys=__probe_ret_ip:size={SIZE}")
    function = CountedReturns(isa, probe, return_method)

    callers = [function.call(number) for number in (0, 1, 0, 2, 0)]

    expected = {(callers[0],): (3,), (callers[1],): (1,), (callers[3],): (1,)}
    assert function.tables.read().counts == expected


LOG2 = [
    *[(0, 0), (1, 0), (2, 1), (3, 2), (4, 2), (5, 3)],
    *[((1 << 32) - 1, 32), (1 << 32, 32), ((1 << 32) + 1, 33)],
    *[((1 << 63) - 1, 63), (1 << 63, 63), ((1 << 63) + 1, 64), (U64, 64)],
]


@EVERY_ISA
def test_log2_is_the_power_of_two_that_a_number_does_not_exceed(isa: Isa) -> None:
    found = counted(isa, "p f a=$arg1", "keys=a,a.log2")

    for number, _ in LOG2:
        found.hit(number)

    assert counts_of(found) == dict.fromkeys(LOG2, (1,))
    assert [(number, log2(number)) for number, _ in LOG2] == LOG2


@EVERY_ISA
def test_log2_is_taken_of_a_signed_number_with_its_sign(isa: Isa) -> None:
    found = counted(isa, "p f a=$arg1:s16", "keys=a.log2")

    for number in (-1, 0x7FFF, -0x8000, 0x4000):
        found.hit(number)

    assert counts_of(found) == {(64,): (2,), (15,): (1,), (14,): (1,)}


ENDS = [0, 1, 2, 3, 63, 64, 65, 127, 128, 129, 255, 256, 1000, 1 << 32, (1 << 53) - 1, 1 << 53]


@EVERY_ISA
@pytest.mark.parametrize("type_", ["u64", "s64", "s16", "u8"])
def test_percentiles_count_by_64_buckets_of_each_power_of_two(isa: Isa, type_: str) -> None:
    found = counted(isa, f"p f a=$arg1:{type_}", "keys=common_type:vals=a.p50,a.p99")
    numbers = [*ENDS, 1 << 63, (1 << 63) - 1, U64, -2, -63, -64, -65, -129, -1000]

    for number in numbers:
        found.hit(number)
        found.hit(number + 1)

    expected: dict[tuple[int, ...], list[int]] = {}
    bits = int(type_[1:])
    for number in (n + more for n in numbers for more in (0, 1)):
        word = number & (1 << bits) - 1
        value = word - (1 << bits) if type_[0] == "s" and word >> bits - 1 else word
        expected.setdefault((1, bucket_of(value) & U64), []).append(value)
    assert counts_of(found) == {
        key: (len(own), min(own) & U64, max(own) & U64) for key, own in expected.items()
    }


@EVERY_ISA
def test_percentiles_of_two_fields_count_by_both_buckets(isa: Isa) -> None:
    text = "keys=common_type:vals=b.p50,a.p50,b.p99,b"
    found = counted(isa, "p f a=$arg1:u64 b=$arg2:s64", text)
    pairs = [(1, -1), (1, -1), (1, 70), (200, 70), (201, 70), (0, 0)]

    for first, second in pairs:
        found.hit(first, second & U64)

    expected: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for first, second in pairs:
        key = (1, bucket_of(second) & U64, bucket_of(first))
        expected.setdefault(key, []).append((first, second))
    assert counts_of(found) == {
        key: (
            len(own),
            min(second for _, second in own) & U64,
            max(second for _, second in own) & U64,
            min(first for first, _ in own),
            max(first for first, _ in own),
            sum(second for _, second in own) & U64,
        )
        for key, own in expected.items()
    }


@EVERY_ISA
@pytest.mark.parametrize("width", [1, 7, 4096, (1 << 63) + 1])
def test_buckets_begin_at_multiples_of_their_width(isa: Isa, width: int) -> None:
    found = counted(isa, "p f a=$arg1:s64", f"keys=a,a.buckets={width}")
    numbers = [0, 1, width - 1, width, width + 1, 2 * width & U64, U64, 1 << 63, 12345]

    for number in numbers:
        found.hit(number)

    expected = {(n, n - n % width): (numbers.count(n),) for n in numbers}
    assert counts_of(found) == expected


@EVERY_ISA
def test_hits_are_counted_by_three_keys_in_their_order(isa: Isa) -> None:
    found = counted(isa, "p f a=$arg1:u8 b=$arg2:s8", "keys=b,comm,a")
    hits = [(1, 2), (2, 1), (1, 1), (1, -1), (2, 1)]

    for name, (a, b) in product((b"sh", b"ls"), hits):
        found.set_task(name)
        found.hit(a, b)

    assert counts_of(found) == {
        (b & U64, *words_of(name), a): (hits.count((a, b)),)
        for name, (a, b) in product((b"sh", b"ls"), hits)
    }


@EVERY_ISA
def test_sums_begin_again_at_2_to_the_64(isa: Isa) -> None:
    found = counted(isa, "p f a=$arg1 b=$arg2:s16", "keys=common_type:vals=a,b")

    for a, b in ((U64, -1), (2, -2), (1 << 63, 1), (1 << 63, 0)):
        found.hit(a, b)

    assert counts_of(found) == {(1,): (4, 1, U64 - 1)}


EDGES = [5, U64, 7, 1 << 63, (1 << 63) - 1, 0, 1]


@EVERY_ISA
@pytest.mark.parametrize("first", EDGES)
@pytest.mark.parametrize(("type_", "order"), [("s64", signed), ("u64", int)])
def test_least_and_greatest_are_kept_and_an_average_is_a_sum(
    isa: Isa, first: int, type_: str, order: Callable[[int], int]
) -> None:
    found = counted(isa, f"p f a=$arg1:{type_}", "keys=common_type:vals=a.min,a.max,a.avg")
    numbers = [first, *EDGES]

    for n, number in enumerate(numbers, 1):
        found.hit(number)

        seen = numbers[:n]
        least, greatest = min(seen, key=order), max(seen, key=order)
        assert counts_of(found) == {(1,): (n, least, greatest, sum(seen) & U64)}


@EVERY_ISA
def test_the_least_of_a_narrow_signed_number_is_below_0(isa: Isa) -> None:
    found = counted(isa, PLAIN, "keys=a:vals=b.min,b.max")

    for number in (3, 0x8000, 0x7FFF, -1):
        found.hit(0, number)

    assert counts_of(found) == {(0,): (4, -0x8000 & U64, 0x7FFF)}


def timed(isa: Isa, trigger: str, ns_per_count: int = 1 << 32, **abi: Addr) -> CountedReturns:
    probe = make_counted(isa, "r f", f"{trigger}:size={SIZE}")
    base = arm64.ABI if isa is ARM64 else machine.ABI
    return CountedReturns(isa, probe, abi=replace(base, ns_per_count=ns_per_count, **abi))


@EVERY_ISA
@pytest.mark.parametrize("ns_per_count", [1 << 32, 0x6666_6666, 16 << 32 | 1, (1 << 40) + 12345])
def test_a_duration_is_that_of_the_counter_in_nanoseconds(isa: Isa, ns_per_count: int) -> None:
    trigger = "keys=duration,duration.log2:vals=duration,duration.usecs,duration.max"
    function = timed(isa, trigger, ns_per_count)
    times = [(0, 1499), (7, 3007), (1 << 63, (1 << 63) + 5000), (U64, 99), (1, 1 << 62)]

    for entered, left in times:
        function.call_at(entered, left)

    table = function.tables.read()
    took = [((left - entered & U64) * ns_per_count >> 32) & U64 for entered, left in times]
    assert table.counts == {(ns, log2(ns)): (1, ns, (ns + 500) // 1000, ns) for ns in took}
    assert (table.dropped, table.unmeasured) == (0, 0)


@EVERY_ISA
def test_a_duration_by_the_guests_clock_is_in_nanoseconds_already(isa: Isa) -> None:
    clock = Addr(arm64.CLOCK if isa is ARM64 else machine.CLOCK)
    function = timed(isa, "keys=common_type:vals=duration,duration.usecs", 5 << 32, clock=clock)

    for entered, left in ((1000, 2499), (50, 51), (5, 5), (6, 5)):
        function.call_at(entered, left)

    table = function.tables.read()
    assert table.counts == {(1,): (2, 1500, 1)}
    assert table.unmeasured == 2


@EVERY_ISA
@pytest.mark.parametrize(
    "trigger", ["keys=duration:vals=duration.max", "keys=common_type:vals=duration,duration.usecs"]
)
def test_a_call_whose_counter_does_not_go_on_is_unmeasured_and_nothing_else(
    isa: Isa, trigger: str
) -> None:
    function = timed(isa, trigger)
    function.call_at(10, 20)
    before = function.tables.copy()

    for entered, left in ((5, 5), (6, 5), (0, U64), (0, 1 << 63), (U64, U64 - 1)):
        function.call_at(entered, left)

    after = function.tables.copy()
    assert function.tables.read().unmeasured == 5
    assert (after[:16], after[24:]) == (before[:16], before[24:])
    function.call_at(0, (1 << 63) - 1)
    assert function.tables.read().unmeasured == 5


@EVERY_ISA
@pytest.mark.parametrize(
    "filter_text", ["a == 5", "cpu == 0 && a == 5", "m == 5", 'a == 5 && s ~ "?*"']
)
def test_a_hit_that_the_filter_rejects_changes_no_table(isa: Isa, filter_text: str) -> None:
    text = "p f a=$arg1 m=+0($arg2):u8 s=+8($arg2):string"
    found = counted(isa, text, "keys=a:vals=m", filter_text)
    place = arm64.KERNEL if isa is ARM64 else machine.KERNEL
    cpu, empty = found.machine.cpu, found.tables.copy()

    for number in (4, 6, 0, U64):
        cpu.write(place, bytes([number & 0xFF]).ljust(8, b"\0") + b"text\0")
        found.hit(number, place)
    assert found.tables.copy() == empty
    cpu.write(place, b"\5")
    found.hit(5, place)

    assert counts_of(found) == {(5,): (1, 5)}
    assert found.machine.missed(1) == 0


@EVERY_ISA
def test_a_number_that_the_filter_has_read_is_not_read_again(isa: Isa) -> None:
    text = "p f a=+0($arg1):s8 b=+8($arg1):u8"
    found = counted(isa, text, "keys=a:vals=a,b", "a < 0")
    place = arm64.KERNEL if isa is ARM64 else machine.KERNEL
    found.machine.cpu.write(place, b"\xfe".ljust(8, b"\0") + b"\7")

    found.hit(place)

    assert [source for _, source, _ in found.machine.readers.calls] == [place, place + 8]
    assert counts_of(found) == {(U64 - 1,): (1, U64 - 1, 7)}


@EVERY_ISA
def test_a_number_of_memory_that_is_key_and_value_is_read_once(isa: Isa) -> None:
    found = counted(isa, "p f a=+0($arg1):u8", "keys=a:vals=a")
    place = arm64.KERNEL if isa is ARM64 else machine.KERNEL
    numbers = [6, 5]
    found.machine.readers.inside = lambda: found.machine.cpu.write(place, bytes([numbers.pop()]))

    found.hit(place)

    ((key, (_, total)),) = counts_of(found).items()
    assert key == (total,)
    assert numbers == [6]


@EVERY_ISA
def test_a_counted_hit_writes_no_record(isa: Isa) -> None:
    found = counted(isa, PLAIN, SUMS)
    ring, guest = (arm64.RINGS if isa is ARM64 else machine.RINGS), found.machine
    guest.set_position(0, 0, room=0)
    before = guest.cpu.read(ring, guest.abi.ring_size)

    found.hit(1, 2)

    assert guest.cpu.read(ring, guest.abi.ring_size) == before
    assert (guest.word(0), guest.lost(0)) == (0, 0)
    assert counts_of(found) == {(1,): (1, 2, 2, 2)}


def numbered(probe: Resolved, event_id: int) -> Resolved:
    return replace(probe, layout=replace(probe.layout, event_id=event_id))


@EVERY_ISA
def test_probes_of_one_function_count_and_record_each_on_its_own(isa: Isa) -> None:
    trigger = f"keys=common_type:vals=a:size={SIZE}"
    found = Counted(
        isa,
        [
            make_counted(isa, "p f a=$arg1", trigger),
            numbered(make_counted(isa, "p f b=$arg2", ""), 2),
            numbered(make_counted(isa, "p f a=$arg2", trigger, "a > 7"), 3),
        ],
    )

    found.hit(1, 7)
    found.hit(2, 8)

    assert counts_of(found) == {(1,): (2, 3), (3,): (1, 8)}
    assert [(each.event_id, each.values) for each in records(found.machine, 0)] == [
        (2, (7,)),
        (2, (8,)),
    ]


def abis(isa: Isa) -> dict[str, GuestAbi]:
    base, module = (arm64.ABI, arm64) if isa is ARM64 else (machine.ABI, machine)
    clock, loads = Addr(module.CLOCK), Addr(module.DATA + 0x8000)
    return {
        "unguarded": replace(base, is_guarded=False),
        "clock": replace(base, clock=clock),
        "loads": replace(base, loads=loads),
        "clock and loads": replace(base, clock=clock, loads=loads),
    }


HIGH = {"high": machine.ABI_HIGH, "far": machine.ABI_FAR}
ABIS = [
    pytest.param(isa.values[0], abi, id=f"{isa.id}-{name}")
    for isa in ISAS
    for name, abi in (abis(AMD64) | HIGH if isa.id == "amd64" else abis(ARM64)).items()
]


@pytest.mark.parametrize(("isa", "abi"), ABIS)
def test_it_is_so_wherever_the_sessions_memory_is_and_with_any_clock(
    isa: Isa, abi: GuestAbi
) -> None:
    probe = make_counted(isa, PLAIN, f"keys=comm,a,cpu:vals=b.min:size={SIZE}", "a < 9")
    found = Counted(isa, [probe], abi=abi)
    found.set_task(b"sh")
    time = found.machine.readers.time

    for cpu, a in ((0, 1), (1, 1), (1, 2), (1, 9), (1, 1)):
        found.machine.move_to(cpu)
        found.hit(a, -a)

    assert counts_of(found) == {(*words_of(b"sh"), 1, 0): (1, U64)}
    assert counts_of(found, 1) == {
        (*words_of(b"sh"), 1, 1): (2, U64),
        (*words_of(b"sh"), 2, 1): (1, U64 - 1),
    }
    if abi.loads is not None:
        assert found.machine.cpu.number(abi.loads + LOAD_SIZE) == 5
    else:
        assert found.machine.readers.time == time


@EVERY_ISA
def test_a_full_table_drops_what_is_new_and_counts_what_it_has(isa: Isa) -> None:
    found = counted(isa, PLAIN, SUMS)
    for key in range(SIZE):
        found.hit(key, key)
    assert counts_of(found) == {(key,): (1, key, key, key) for key in range(SIZE)}
    full = found.tables.copy()

    for key in (SIZE, SIZE + 1, SIZE, U64):
        found.hit(key, 1)

    table = found.tables.read()
    assert (table.dropped, table.used) == (4, SIZE)
    assert found.tables.copy()[64:] == full[64:]
    for key in range(SIZE):
        found.hit(key, -1)
    assert found.tables.read().counts == {
        (key,): (2, key - 1 & U64, U64, key) for key in range(SIZE)
    }


SPREAD = 0x9E37_79B9_7F4A_7C15


def mixed_of(*words: int) -> int:
    """Return what a further key word, and then the hash's last step, are applied to."""
    mixed = 0
    for word in words:
        product = (mixed ^ word) * SPREAD & U64
        mixed = product + (product >> 32) & U64
    return mixed


def key_of(mark: int) -> int:
    """Return the key of one word whose hash is a mark, but for the bit that all marks have."""
    return mark * pow(SPREAD, -1, 1 << 64) & U64


@EVERY_ISA
def test_no_key_has_the_mark_of_an_entry_that_is_free_or_written(isa: Isa) -> None:
    found = counted(isa, "p f a=$arg1", "keys=a")
    keys = [key_of(mark) for mark in range(4)]

    for key in keys * 2:
        found.hit(key)

    # Of each two the marks are the same: such keys have entries of their own all the same.
    assert counts_of(found) == {(key,): (2,) for key in keys}
    assert sorted(each.mark for each in found.tables.read().entries) == [2, 2, 3, 3]


@EVERY_ISA
def test_keys_of_one_mark_have_entries_of_their_own_whichever_words_differ(isa: Isa) -> None:
    found = counted(isa, "p f a=$arg1 b=$arg2 c=$arg3", "keys=a,b,c")
    keys = [
        (1, 2, 3),
        (1, 4, mixed_of(1, 2) ^ mixed_of(1, 4) ^ 3),
        (4, 2, mixed_of(1, 2) ^ mixed_of(4, 2) ^ 3),
        (4, mixed_of(1) ^ mixed_of(4) ^ 2, 3),
    ]

    for key in keys * 2:
        found.hit(*key)

    assert counts_of(found) == dict.fromkeys(keys, (2,))
    assert len({each.mark for each in found.tables.read().entries}) == 1


@EVERY_ISA
def test_keys_that_begin_at_the_last_slot_go_on_at_the_first(isa: Isa) -> None:
    found = counted(isa, "p f a=$arg1", "keys=a")
    keys = [key_of((2 * SIZE - 1) << 56 | n << 8 | 2) for n in range(4)]

    for key in keys * 2:
        found.hit(key)

    assert counts_of(found) == {(key,): (2,) for key in keys}
    assert [each.slot for each in found.tables.read().entries] == [0, 1, 2, 2 * SIZE - 1]


@EVERY_ISA
def test_an_entry_keeps_the_name_of_the_task_that_made_it(isa: Isa) -> None:
    found = counted(isa, PLAIN, "keys=common_pid.execname:vals=b")

    for name, pid in ((b"sh", 5), (b"fifteen letters", 6), (b"ls", 5), (b"ls", 7)):
        found.set_task(name, pid)
        found.hit(0, pid)

    names = {each.keys: each.comm.rstrip(b"\0") for each in found.tables.read().entries}
    assert names == {(5,): b"sh", (6,): b"fifteen letters", (7,): b"ls"}
    assert counts_of(found) == {(5,): (2, 10), (6,): (1, 6), (7,): (1, 7)}


@EVERY_ISA
def test_each_cpu_has_a_table_of_its_own(isa: Isa) -> None:
    found = counted(isa, PLAIN, SUMS)

    for cpu, key in ((0, 1), (1, 1), (1, 2), (0, 3), (1, 1)):
        found.machine.move_to(cpu)
        found.hit(key, 10 * cpu)

    assert counts_of(found, 0) == {(1,): (1, 0, 0, 0), (3,): (1, 0, 0, 0)}
    assert counts_of(found, 1) == {(1,): (2, 20, 10, 10), (2,): (1, 10, 10, 10)}


TYPES = ("u8", "s16", "u64", "s8", "u32")
TYPED = "p f " + " ".join(f"{'abcde'[n]}=$arg{n + 1}:{type_}" for n, type_ in enumerate(TYPES))
MODELLED = [
    ("keys=a:vals=b,b.min,b.max,b.avg", ""),
    ("keys=d,cpu:vals=c,hitcount,c.min,c.max,d.min,d.max", "a & 1"),
    ("keys=comm,b.log2,e.buckets=3:vals=e,d", ""),
    ("keys=common_pid.execname,c.log2:vals=b.max,b.avg", "cpu == 0 || a & 1"),
    ("keys=c:vals=b.p50,b,b.max,b.p99", ""),
    ("keys=comm:vals=c.max,c.p99.9", "a & 1"),
]


@EVERY_ISA
@pytest.mark.parametrize(("trigger", "filter_text"), MODELLED)
def test_thousands_of_hits_leave_what_a_slow_model_has(
    isa: Isa, trigger: str, filter_text: str
) -> None:
    random, found = Random(trigger), counted(isa, TYPED, trigger, filter_text)
    model, guest = Model(found, TYPES), found.machine
    for n in range(3000):
        if not n % 8:
            guest.move_to(random.randrange(CPUS))
            name = random.choice([b"sh", b"fifteen letters", b"kworker/0:1"])
            found.set_task(name, random.randrange(-2, 20))
        words = random.getrandbits(64), random.randrange(4), -random.randrange(1, 4)
        arguments = random.choices(words, k=len(TYPES))
        is_wanted = not filter_text or arguments[0] & 1
        is_wanted |= "cpu" in filter_text and guest.number == 0
        if is_wanted:
            model.hit(arguments)

        found.hit(*arguments)

        if not n % 500:
            model.check()
    model.check()
    assert model.dropped > 50 or "comm" in trigger


def take_context(found: Counted, bits: int) -> None:
    guest = found.machine
    place = guest.percpu(PERCPU_GUARD if found.isa is ARM64 else guest.abi.percpu + PERCPU_GUARD)
    guest.cpu.set_number(place, bits, 4)


@EVERY_ISA
@pytest.mark.parametrize("text", [PLAIN, "p f a=+0($arg1):u8 b=$arg2:s16"])
@pytest.mark.parametrize(
    ("outside", "bit"),
    [(0, 1), (SOFTIRQ, 2), (HARDIRQ, 4), (HARDIRQ | SOFTIRQ, 4), (NMI | HARDIRQ, 8)],
)
def test_a_hit_whose_context_is_taken_is_missed_and_changes_no_table(
    isa: Isa, text: str, outside: int, bit: int
) -> None:
    found = counted(isa, text, SUMS)
    found.machine.preempt_count += outside
    empty = found.tables.copy()

    take_context(found, bit)
    found.hit(0, 1)
    found.hit(0, 2)
    assert found.tables.copy() == empty
    assert found.machine.missed(1) == 2
    take_context(found, 15 & ~bit)
    found.hit(0, 3)

    assert counts_of(found) == {(0,): (1, 3, 3, 3)}
    assert found.machine.missed(1) == 2


@EVERY_ISA
def test_a_counted_hit_inside_of_what_a_hit_has_called_is_missed(isa: Isa) -> None:
    trigger = f"keys=common_type:size={SIZE}"
    outer = make_counted(isa, "p f a=+0($arg1):u8", trigger, "a == 0")
    found = Counted(isa, [outer], [make_counted(isa, "p f", trigger, number=1)])
    place = arm64.KERNEL if isa is ARM64 else machine.KERNEL
    levels = [0, HARDIRQ]

    def nest() -> None:
        while levels:
            found.interrupt(site=1, level=levels.pop())

    found.machine.readers.inside = nest

    found.hit(place)

    assert counts_of(found) == {(1,): (1,), (2,): (1,)}
    assert (found.machine.missed(1), found.machine.missed(2)) == (0, 1)
