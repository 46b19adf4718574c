"""Reserve, header, commit: the record and the ring around the fields."""

from collections.abc import Sequence
from random import Random

import pytest
from msgspec.structs import replace

from kprobes import llvm
from kprobes.arch.x86_64.arch import X86_64
from kprobes.codegen.compile import Form, module_text
from kprobes.codegen.object import read_template
from kprobes.model.abi import CPU_SHIFT, MAX_DEPTH, MAX_STRING, PERCPU_SIZE, SLACK, GuestAbi
from kprobes.model.definition import SyntheticFields
from kprobes.model.resolved import COMMIT, COUNTER, HEADER, Storage
from kprobes.units import Addr
from tests.build import reference
from tests.build.cpu import Write
from tests.build.filtered import make_filtered
from tests.build.kernel import make_extra, make_probe
from tests.build.machine import (
    ABI,
    ABI_FAR,
    ABI_HIGH,
    CLOCK,
    HARDIRQ,
    KERNEL,
    NMI,
    NO_RESCHED,
    SOFTIRQ,
    TASK,
    TGID,
    Loaded,
    Machine,
    random_state,
)
from tests.build.records import records

KINDS = [
    "p f a=$arg1 b=$arg2:u8",
    "p f a=%bx s=+0($arg1):string",
    "p f a=+0($arg1) b=+0(%bp):u8",
    "p f s=+0($arg1):string st=$stacktrace",
]
COUNTS = [0, 1, 0xFE, SOFTIRQ, 0x200, HARDIRQ, HARDIRQ | SOFTIRQ, NMI | HARDIRQ, 0x12303]


def in_ring(machine: Machine, number: int = 0) -> list[Write]:
    """The last hit's writes to a CPU's ring."""
    start, stop = machine.ring(number), machine.ring(number) + machine.abi.ring_size + SLACK
    return [write for write in machine.cpu.writes if start <= write.addr < stop]


def commits_last(machine: Machine, loaded: Loaded, position: int = 0) -> bool:
    """Hit once; whether the commit word is the last thing that is written into the record."""
    machine.hit(loaded, random_state(machine.random, di=KERNEL))

    place = machine.place(0, position)
    commit = position << 16 | loaded.probes[-1].layout.event_id
    *before, last = in_ring(machine)
    return last == Write(place + COMMIT, 8, commit) and not any(w.addr == place for w in before)


@pytest.mark.parametrize("abi", [ABI, ABI_HIGH, ABI_FAR])
@pytest.mark.parametrize("text", KINDS)
def test_the_header_says_who_and_in_which_context(text: str, abi: GuestAbi) -> None:
    machine = Machine(abi)
    loaded = machine.load([make_probe(text)])
    for n, count in enumerate(COUNTS * 2):
        reference.fill(machine, Random(n))
        machine.set_position(0, 0)
        machine.preempt_count = count | NO_RESCHED * (n % 2)
        state = random_state(machine.random, di=KERNEL)

        machine.hit(loaded, state)

        (found,) = records(machine, 0)
        expected = reference.header(machine, state, preempt_count=machine.preempt_count)
        assert (found.pid, found.context, found.comm) == expected


@pytest.mark.parametrize("abi", [ABI, ABI_HIGH, ABI_FAR])
@pytest.mark.parametrize("text", ["p f", "p f b=$arg2:u8 s=+0($arg1):string"])
def test_the_process_of_the_task_is_a_field_that_nothing_is_called_for(
    text: str, abi: GuestAbi
) -> None:
    machine = Machine(abi)
    probe = make_extra(text, SyntheticFields(tgid=True))
    loaded = machine.load([probe])
    machine.cpu.set_number(TASK + TGID, 0x7654_3210, 4)

    machine.hit(loaded, random_state(machine.random, di=KERNEL))

    (found,) = records(machine, 0)
    assert found.values[[field.name for field in probe.layout.fields].index("common_tgid")] == (
        0x7654_3210
    )
    assert probe.calls_guest is ("string" in text)


@pytest.mark.parametrize("text", KINDS)
def test_the_commit_word_is_written_last(text: str) -> None:
    machine = Machine()
    loaded = machine.load([make_probe(text)])

    assert commits_last(machine, loaded)


def test_a_record_that_is_committed_first_does_not_pass_for_right() -> None:
    probe = make_probe(KINDS[0])
    lines = module_text(X86_64, ABI, Form(probes=(probe,), is_framed=False)).splitlines()
    last = next(n for n, line in enumerate(lines) if "store atomic" in line)
    first = max(n for n in range(last) if "= shl i64" in lines[n] and lines[n].endswith(" 16"))
    start = next(n for n, line in enumerate(lines) if "rdtsc()" in line and "call" in line)
    commit = lines[first : last + 1]
    mutant = [*lines[:start], *commit, *lines[start:first], *lines[last + 1 :]]
    code = X86_64.code
    found = llvm.compile_object("\n".join(mutant), code)
    machine = Machine()
    loaded = machine.load([probe], template=read_template(found, code))

    assert not commits_last(machine, loaded)
    assert records(machine, 0)


@pytest.mark.parametrize("text", KINDS)
def test_the_counter_is_read_after_the_room_was_reserved(text: str) -> None:
    machine = Machine(is_watched=True)
    loaded = machine.load([make_probe(text)])

    steps = [machine.cpu.read(pc, 4) for pc in machine.steps(loaded)]

    exchange = next(n for n, code in enumerate(steps) if b"\x0f\xb1" in code)
    assert steps.index(next(code for code in steps if code[:2] == b"\x0f\x31")) > exchange


def test_counters_go_up_and_are_the_cpu_s_own() -> None:
    machine = Machine()
    loaded = machine.load([make_probe("p f")])

    for _ in range(5):
        machine.hit(loaded)

    found = [record.counter for record in records(machine, 0)]
    assert found == sorted(set(found))
    assert found[0] > 0


def test_where_the_counter_does_not_tell_the_time_the_guest_s_clock_is_asked() -> None:
    machine = Machine(replace(ABI, clock=Addr(CLOCK)))
    loaded = machine.load([make_probe("p f a=$arg1 b=$arg6")])
    state = random_state(machine.random)

    after = machine.hit(loaded, state)

    (found,) = records(machine, 0)
    assert found.counter == machine.readers.time
    assert found.values == (state["di"], state["r9"])
    assert {name for name in after if after[name] != state[name]} <= {"ax", "r11", "flags"}


@pytest.mark.parametrize("text", ["p f a=$arg1", "p f a=+0($arg1)"])
def test_limits_have_hits_counted_and_timed_also_those_that_are_rejected(text: str) -> None:
    at = KERNEL + 0x2000
    machine = Machine(replace(ABI, loads=Addr(at)))
    loaded = machine.load([make_filtered(text, "a == 0x55", event_id=n) for n in (3, 7)])

    for n in range(5):
        machine.cpu.write(KERNEL, (0x55 if n % 2 else 1).to_bytes(8, "little"))
        first = 0x55 if n % 2 else 1
        machine.hit(loaded, random_state(machine.random, di=KERNEL if "+0" in text else first))

    found = [int.from_bytes(machine.cpu.read(at + 8 * n, 8), "little") for n in range(20)]
    assert len(records(machine, 0)) == 4
    assert (found[6], found[14]) == (5, 5)
    assert min(found[7], found[15]) > 0
    assert not any(found[n] for n in range(20) if n not in (6, 7, 14, 15))


@pytest.mark.parametrize("text", KINDS)
def test_a_full_ring_counts_what_it_drops_and_writes_nothing(text: str) -> None:
    machine = Machine()
    loaded = machine.load([make_probe(text)])
    size = reserved(loaded)
    machine.set_position(0, 4096, room=size - 1)
    word = machine.word(0)

    for _ in range(3):
        machine.hit(loaded, random_state(machine.random, di=KERNEL))

    assert (machine.lost(0), machine.word(0)) == (3, word)
    assert not in_ring(machine)
    assert_at_rest(machine)


@pytest.mark.parametrize("text", KINDS)
def test_a_record_that_just_fits_is_written(text: str) -> None:
    machine = Machine()
    loaded = machine.load([make_probe(text)])
    machine.set_position(0, 4096, room=reserved(loaded))

    machine.hit(loaded, random_state(machine.random, di=KERNEL))

    assert machine.lost(0) == 0
    assert len(records(machine, 0, start=4096)) == 1


@pytest.mark.parametrize("text", KINDS)
def test_a_record_at_the_end_of_the_ring_runs_on_into_the_slack(text: str) -> None:
    machine = Machine()
    loaded = machine.load([make_probe(text)])
    start = 5 * machine.abi.ring_size - 8
    machine.cpu.write(KERNEL, b"x" * 200 + b"\0")
    machine.set_position(0, start)

    machine.hit(loaded, random_state(machine.random, di=KERNEL))
    machine.hit(loaded, random_state(machine.random, di=KERNEL))

    first, second = records(machine, 0, start=start)
    assert machine.place(0, second.position) == machine.ring(0) + first.size - 8
    end = machine.ring(0) + machine.abi.ring_size
    assert machine.cpu.number(end - 8) == start << 16 | 1


def test_positions_use_all_of_their_48_bits() -> None:
    machine = Machine()
    loaded = machine.load([make_probe("p f a=$arg1", event_id=65535)])
    start = (1 << CPU_SHIFT) - machine.abi.ring_size
    machine.move_to(1)
    machine.set_position(1, start, room=machine.abi.ring_size - 8)

    machine.hit(loaded, random_state(machine.random, di=7))

    commit = machine.cpu.number(machine.place(1, start))
    assert commit == start << 16 | 65535


@pytest.mark.parametrize("length", [0, 1, 6, 7, 8, 100, MAX_STRING])
def test_what_strings_did_not_need_is_given_back(length: int) -> None:
    machine = Machine()
    loaded = machine.load([make_probe("p f s=+0($arg1):string t=+0($arg2):string")])
    machine.cpu.write(KERNEL, b"x" * length + b"\0")
    fixed = loaded.probes[0].layout.size

    machine.hit(loaded, random_state(machine.random, di=KERNEL, si=KERNEL))

    used = fixed + 2 * min(length + 1, MAX_STRING)
    assert machine.word(0) == used + -used % 8
    assert records(machine, 0)[0].size == used + -used % 8


def test_room_stays_reserved_when_somebody_has_reserved_behind_it() -> None:
    machine = Machine()
    loaded = machine.load([make_probe("p f s=+0($arg1):string", event_id=1)])
    other = machine.load([make_probe("p f a=$arg1", event_id=2, addr=loaded.site + 16)])
    machine.cpu.write(KERNEL, b"abc\0")
    machine.readers.inside = lambda: machine.interrupt(other)

    machine.hit(loaded, random_state(machine.random, di=KERNEL))

    first, second = records(machine, 0)
    assert (first.size, first.values) == (reserved(loaded), (b"abc\0",))
    assert second.event_id == 2


def test_every_probe_of_a_site_makes_its_own_record() -> None:
    machine = Machine()
    texts = ["p f a=$arg1", "p f s=+0($arg2):string b=%bx", "p f", "p f c=+0($arg2):u8"]
    loaded = machine.load([make_probe(text, event_id=n) for n, text in enumerate(texts, 1)])
    machine.cpu.write(KERNEL, b"abc\0")
    state = random_state(machine.random, si=KERNEL)

    machine.hit(loaded, state)

    found = [(record.event_id, record.values) for record in records(machine, 0)]
    assert found == [(1, (state["di"],)), (2, (b"abc\0", state["bx"])), (3, ()), (4, (0x61,))]


def test_a_probe_that_finds_no_room_does_not_keep_its_neighbours_from_recording() -> None:
    machine = Machine()
    texts = ["p f s=+0($arg2):string", "p f a=$arg1"]
    loaded = machine.load([make_probe(text, event_id=n) for n, text in enumerate(texts, 1)])
    machine.set_position(0, 0, room=HEADER + 8)

    machine.hit(loaded, random_state(machine.random, di=7))

    assert [(record.event_id, record.values) for record in records(machine, 0)] == [(2, (7,))]
    assert machine.lost(0) == 1


@pytest.mark.parametrize("text", KINDS)
def test_each_cpu_writes_to_its_own_ring(text: str) -> None:
    machine = Machine()
    loaded = machine.load([make_probe(text)])
    machine.move_to(1)

    machine.hit(loaded, random_state(machine.random, di=KERNEL))

    assert (len(records(machine, 0)), len(records(machine, 1))) == (0, 1)
    assert machine.word(1) >> CPU_SHIFT == 1
    assert not in_ring(machine, 0)


def test_nothing_is_written_but_what_the_record_needs() -> None:
    machine = Machine()
    loaded = machine.load([make_probe("p f a=%bx s=+0($arg1):string b=+0(+0($arg1)):u8")])
    reference.fill(machine, Random(1))
    state = random_state(machine.random, di=KERNEL)

    machine.hit(loaded, state)

    assert {w.addr for w in machine.cpu.writes if not _is_allowed(machine, w, state["sp"])} == set()


def reserved(loaded: Loaded) -> int:
    """Bytes that a hit reserves."""
    layout = loaded.probes[0].layout
    kinds = [field.storage for field in layout.fields]
    strings, stacks = kinds.count(Storage.STRING), kinds.count(Storage.STACK)
    return layout.size + MAX_STRING * strings + 8 * MAX_DEPTH * stacks


def assert_at_rest(machine: Machine) -> None:
    """Neither guard nor preemption is held."""
    assert machine.guard() == 0
    assert machine.preempt_count == NO_RESCHED


def _is_allowed(machine: Machine, write: Write, stack: int) -> bool:
    percpu = machine.percpu(machine.abi.percpu)
    count = machine.percpu(machine.abi.task.preempt_count)
    places: Sequence[tuple[int, int]] = [
        (stack - 1024, stack),
        (machine.ring(0) + COUNTER - 8, machine.ring(0) + MAX_STRING + 256),
        (percpu, percpu + PERCPU_SIZE),
        (count, count + 4),
    ]
    return any(start <= write.addr < stop for start, stop in places)
