"""Filters as machine code: which hits are recorded, and what the others leave alone."""

from random import Random

import pytest
from msgspec.structs import replace

from kprobes.codegen.filters import quick_steps
from kprobes.lang.filter import FOLLOWED, task_filter
from kprobes.model.resolved import Resolved
from tests.build import reference
from tests.build.cpu import GPRS
from tests.build.filtered import is_accepted, make_filtered
from tests.build.kernel import make_probe
from tests.build.machine import (
    ABI,
    ABI_HIGH,
    COMM,
    DATA_SIZE,
    EXEC_ID,
    HARDIRQ,
    KERNEL,
    NMI,
    NO_RESCHED,
    PID,
    SOFTIRQ,
    TASK,
    TGID,
    USER,
    GuestAbi,
    Loaded,
    Machine,
    random_state,
)
from tests.build.records import records
from tests.codegen.test_record import in_ring

NUMBERS = "p f a=$arg1:u8 b=$arg2:s16 c=$arg3:u32 d=$arg4:s64 e=$arg5:b3@2/8 w=$arg6:symbol"
MEMORY = (
    "p f a=+0($arg1):u8 b=+8($arg2):s64 c=+0($arg3):b5@3/16 d=+0($arg4):x8[4] e=+0($arg1):u8[3] "
    "f=+0(+8($arg1)):s32 g=+0($arg2):b3@1/8[2] h=+u0($arg3):u16 p=this_cpu_read(@data):u8"
)
STRINGS = "p f s=+0($arg1):string u=+0($arg2):ustring v=+0($arg3):string[2] n=$arg4:u8 m=+0($arg1)"
FILTERS = [
    (NUMBERS, "a == 1 || a > 250 || a < 3"),
    (NUMBERS, "a & 0x81 && a != 0x81"),
    (NUMBERS, "b < 0 && b >= -20000"),
    (NUMBERS, "b <= 100 && !(b == 7 || b & 8)"),
    (NUMBERS, "c > 0x7fffffff"),
    (NUMBERS, "d < 0 || d > 0x7fffffffffffff"),
    (NUMBERS, "e == 5 || e <= 1"),
    (NUMBERS, "!(!(a & 1 || b < 0) && !(c & 1 && d < 0)) && e != 2"),
    (NUMBERS, "(a & 1 || b & 1) && (c & 1 || d & 1) || e == 0"),
    (NUMBERS, "w.function == g || a < 128"),
    (NUMBERS, "w.function != 0xffffffff81000010 && a & 1"),
    (NUMBERS, "common_pid & 1 && common_type == 1 && __probe_ip & 0xff00000000000000"),
    (NUMBERS, "tgid == 3 || tgid == 1 && a & 1"),
    (NUMBERS, "common_type != 1 || common_flags & 0x1c"),
    (NUMBERS, "common_preempt_count & 0x11 && common_flags & 0x68"),
    (NUMBERS, "cpu == 1 || a & 1"),
    (NUMBERS, "cpu & CPUS{0-1} && a & CPUS{0-1} || cpu != CPUS{1}"),
    (NUMBERS, "a == CPUS{0} || a != CPUS{0,1} || e & CPUS{1}"),
    (NUMBERS, "stacktrace == 1 || a & 1"),
    (MEMORY, "a & 1"),
    (MEMORY, "a & 1 && b > 0"),
    (MEMORY, "a > 64 && a < 98 || c == 12"),
    (MEMORY, "d != 0 && d & 0x80808080 || e == 1"),
    (MEMORY, "f != 0 && !(f & 2) || h & 1"),
    (MEMORY, "g == 0x101 || g & 0x404"),
    (MEMORY, "common_pid & 1 && h != 0 && p == 0"),
    (STRINGS, 's == "a"'),
    (STRINGS, 's != ""'),
    (STRINGS, 's != "b" && u != ""'),
    (STRINGS, 's ~ "a*"'),
    (STRINGS, 's ~ "*c"'),
    (STRINGS, 's ~ "*bb*"'),
    (STRINGS, 's ~ "?*"'),
    (STRINGS, 's ~ "a*[bc]?[!a]*"'),
    (STRINGS, 's ~ "*a*b*c*" && n & 1'),
    (STRINGS, 's ~ "*" && m & 2'),
    (STRINGS, 'u ~ "!*ab*" && s ~ "?*"'),
    (STRINGS, 'v ~ "[a-b]*" || v == ""'),
    (STRINGS, 'comm ~ "k*" && s ~ "*b*" || comm == "sh"'),
    (STRINGS, 'comm ~ "*r/*" || comm ~ "*h" || comm == "a name that is too long"'),
    (STRINGS, 'comm ~ "s*h"'),
]
COMMS = (b"sh", b"kworker/0:1", b"", b"fifteen letters", b"bash")
_HITS = 50
POINTERS = ("di", "si", "dx", "cx")


def _state(random: Random, probe: Resolved) -> dict[str, int]:
    reads_memory = any(fetch.calls_guest for fetch in probe.fetches)
    pointers = {name: reference.address(random) for name in POINTERS} if reads_memory else {}
    return random_state(random, **pointers)


def _fill(machine: Machine, random: Random) -> None:
    reference.fill(machine, random)
    for start in (KERNEL, USER):
        # A string that ends where memory does: only as much of it is read as tells.
        machine.cpu.write(start + DATA_SIZE - 1, b"\0")
    machine.cpu.write(TASK + COMM, random.choice(COMMS).ljust(16, b"\0"))
    pid = random.randrange(4)
    machine.cpu.set_number(TASK + PID, pid, 4)
    machine.cpu.set_number(TASK + TGID, pid ^ 1, 4)
    context = random.choice([0, 0, 1, SOFTIRQ, HARDIRQ | 3, NMI | HARDIRQ])
    machine.preempt_count = context | random.choice([0, NO_RESCHED])


def _check(machine: Machine, loaded: Loaded, state: dict[str, int]) -> bool:
    """Hit once; whether it was recorded, when it should have been and only then."""
    (probe,) = loaded.probes
    wanted, count = is_accepted(machine, probe, state), machine.preempt_count
    machine.set_position(machine.number, 0)

    after = machine.hit(loaded, state)

    found = records(machine, machine.number)
    assert len(found) == wanted
    assert [record.values for record in found] == [reference.values(machine, probe, state)] * wanted
    assert (machine.guard(), machine.preempt_count) == (0, count)
    assert (machine.missed(1), machine.lost(0), machine.lost(1)) == (0, 0, 0)
    live = [name for name in GPRS if name not in ("ax", "r11")]
    assert {name: after[name] for name in live} == {name: state[name] for name in live}
    return wanted


def _check_many(abi: GuestAbi, text: str, filter_text: str) -> set[bool]:
    machine = Machine(abi)
    loaded = machine.load([make_filtered(text, filter_text)])
    chosen: set[bool] = set()
    for n in range(_HITS):
        random = Random(n)
        if n % 10 == 0:
            _fill(machine, random)
        machine.move_to(n % 2)
        chosen.add(_check(machine, loaded, _state(random, loaded.probes[0])))
    return chosen


@pytest.mark.parametrize(("text", "filter_text"), FILTERS)
def test_the_hits_that_pass_are_recorded_and_no_others(text: str, filter_text: str) -> None:
    assert _check_many(ABI, text, filter_text) == {True, False}


def test_only_what_has_descended_from_a_followed_command_is_recorded() -> None:
    machine = Machine(ABI)
    probe = replace(make_probe("p f"), filter=task_filter(follow=True))
    loaded = machine.load([probe])
    found: list[bool] = []
    for exec_id in (0, 7, FOLLOWED - 1, FOLLOWED, FOLLOWED + 3):
        machine.cpu.set_number(TASK + EXEC_ID, exec_id, 8)
        found.append(_check(machine, loaded, random_state(Random(0))))

    assert found == [False, False, False, True, True]


@pytest.mark.parametrize("filter_text", ["cpu == 0 && n & 1", 's ~ "*b*" || common_pid & 1'])
def test_it_is_so_where_per_cpu_memory_lies_high(filter_text: str) -> None:
    assert _check_many(ABI_HIGH, STRINGS, filter_text) == {True, False}


def test_a_rejected_hit_touches_no_memory() -> None:
    machine = Machine()
    loaded = machine.load([make_filtered("p f a=$arg1 s=+0($arg2):string", "a == 5")])

    machine.hit(loaded, random_state(machine.random, di=4, si=KERNEL))

    assert in_ring(machine) == []
    assert machine.readers.calls == []
    assert records(machine, 0) == []


def test_a_hit_that_is_rejected_by_a_register_runs_three_instructions() -> None:
    machine = Machine(is_watched=True)
    loaded = machine.load([make_filtered("p f a=$arg1 s=+0($arg2):string", "a == 5")])

    assert len(machine.steps(loaded, random_state(machine.random, di=4))) == 3


@pytest.mark.parametrize(
    ("filter_text", "calls"),
    [
        ("n == 1", []),
        ("n == 1 && b == 1", []),
        ("n == 2 && b == 1", [("copy_kernel", USER - 1)]),
        ('n == 2 && s == "x"', [("string_kernel", 3)]),
        ('n == 2 && s ~ "x*"', [("string_kernel", 2)]),
        ('n == 2 && s ~ "x*y"', [("string_kernel", 4096)]),
    ],
)
def test_only_what_the_filter_needs_is_fetched(
    filter_text: str, calls: list[tuple[str, int]]
) -> None:
    machine = Machine()
    text = "p f n=$arg3:u8 b=+0($arg1):u8 s=+0($arg2):string t=+0(+0($arg1)):string"
    loaded = machine.load([make_filtered(text, filter_text)])
    machine.cpu.write(KERNEL, b"\2")
    machine.cpu.write(KERNEL + 8, b"abc\0")

    machine.hit(loaded, random_state(machine.random, di=KERNEL, si=KERNEL + 8, dx=2))

    names = [(name, size) for name, _, size in machine.readers.calls]
    assert [name for name, _ in names] == [name for name, _ in calls]
    assert [size for name, size in names if name.startswith("string")] == [
        size for name, size in calls if name.startswith("string")
    ]
    assert records(machine, 0) == []


def test_a_number_that_was_tested_is_not_read_again() -> None:
    machine = Machine()
    loaded = machine.load([make_filtered("p f a=+0($arg1):u8 b=+4($arg1):u8", "a == 1 && a < 2")])
    machine.cpu.write(KERNEL, bytes([1, 0, 0, 0, 2]))

    machine.hit(loaded, random_state(machine.random, di=KERNEL))

    assert [source for _, source, _ in machine.readers.calls] == [KERNEL, KERNEL + 4]
    assert [record.values for record in records(machine, 0)] == [(1, 2)]


def test_a_number_that_cannot_be_read_is_zero_and_marked_in_the_record() -> None:
    machine = Machine()
    loaded = machine.load([make_filtered("p f a=+0($arg1):u8", "a == 0")])

    machine.hit(loaded, random_state(machine.random, di=8))

    assert [record.values for record in records(machine, 0)] == [(None,)]


@pytest.mark.parametrize(("filter_text", "count"), [('s ~ "*"', 0), ('s != "x"', 1)])
def test_a_string_that_cannot_be_read_looks_like_nothing(filter_text: str, count: int) -> None:
    machine = Machine()
    loaded = machine.load([make_filtered("p f s=+0($arg1):string", filter_text)])

    machine.hit(loaded, random_state(machine.random, di=8))

    assert len(records(machine, 0)) == count


def test_probes_of_one_site_are_chosen_each_on_its_own() -> None:
    machine = Machine()
    probes = [
        make_filtered("p:a f a=$arg1:u8", "a == 1", event_id=1),
        make_probe("p:b f b=$arg1:u8", event_id=2),
        make_filtered("p:c f c=+0($arg2):u8 d=$arg1:u8", "d != 1 && c == 7", event_id=3),
        make_filtered("p:d f d=$arg1:u8", "cpu == 0", event_id=4),
    ]
    loaded = machine.load(probes)
    machine.cpu.write(KERNEL, b"\7")

    for first in (1, 2):
        machine.hit(loaded, random_state(machine.random, di=first, si=KERNEL))

    assert [record.event_id for record in records(machine, 0)] == [1, 2, 4, 2, 3, 4]


def test_a_hit_inside_a_filter_s_reading_is_missed() -> None:
    machine = Machine()
    outer = machine.load([make_filtered("p f s=+0($arg1):string", 's == "abc"')])
    nested = machine.load([make_probe("p f a=$arg1", event_id=2, addr=outer.site + 16)])
    machine.cpu.write(KERNEL, b"abc\0")
    todo = [lambda: machine.interrupt(nested, level=0)]
    machine.readers.inside = lambda: todo.pop()() if todo else None

    machine.hit(outer, random_state(machine.random, di=KERNEL))

    assert [record.event_id for record in records(machine, 0)] == [1]
    assert machine.missed(2) == 1


@pytest.mark.parametrize("level", [SOFTIRQ, HARDIRQ, NMI])
def test_an_interrupt_while_a_string_is_compared_leaves_it_alone(level: int) -> None:
    machine = Machine()
    outer = machine.load([make_filtered("p f s=+0($arg1):string", 's ~ "*b*"', event_id=1)])
    inner = make_filtered("p f s=+0($arg1):string", 's ~ "*b*"', event_id=2, addr=outer.site + 16)
    nested = machine.load([inner])
    machine.cpu.write(KERNEL, b"abc\0")

    def interrupted() -> None:
        machine.readers.inside = lambda: None
        machine.cpu.write(KERNEL, b"xyz\0")
        machine.interrupt(nested, level=level)

    # In the second call: the first was the outer filter's, whose string is compared by now.
    machine.readers.inside = lambda: setattr(machine.readers, "inside", interrupted)

    machine.hit(outer, random_state(machine.random, di=KERNEL))

    assert [record.event_id for record in records(machine, 0)] == [1]


@pytest.mark.parametrize(
    ("filter_text", "quick"),
    [
        ("n == 1", 1),
        ('n == 1 && s == "x"', 1),
        ('s == "x" && n == 1', 0),
        ('n == 1 || s == "x"', 0),
        ("n == 1 || n == 2 || common_pid == 3", 3),
        ('(n == 1 || n == 2) && s == "x"', 2),
        ('n == 1 && (n == 2 || s == "x") && n == 4', 1),
        ("n == 1 && cpu == 0", 1),
        ('comm == "x" && m == 1', 1),
    ],
)
def test_what_needs_no_memory_comes_first(filter_text: str, quick: int) -> None:
    probe = make_filtered("p f n=$arg1 s=+0($arg2):string m=+0($arg1):u8", filter_text)

    assert quick_steps(probe) == quick
