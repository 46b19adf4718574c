"""Probes on arm64: what they record, and that the probed code does not notice."""

import pytest

from kprobes.arch.aarch64.arch import AARCH64
from kprobes.codegen.compile import saved_reads
from kprobes.model.definition import SyntheticFields
from kprobes.model.resolved import CONTEXT_IRQS_ON, CONTEXT_NO_PREEMPT_RESCHED, Resolved
from kprobes.units import Addr
from tests.build.arm64 import (
    COUNT,
    HARDIRQ,
    IRQS_OFF,
    KERNEL,
    SITE,
    TASK,
    TGID,
    USER,
    Arm64Machine,
    Loaded,
    make_probe,
    random_state,
)
from tests.build.cpu import ARM64_GPRS
from tests.build.records import records

KINDS = (
    "p f",
    "p f a=$arg1 b=$arg8 c=%x19 d=%lr e=%pc f=%sp g=$stack0",
    "p f a=+0($arg1):u32 s=+0($arg1):string",
    "p f s=+0($arg2):ustring t=$comm",
    "p f st=$stacktrace s=+0($arg1):string",
)
DEAD = {f"x{n}" for n in range(9, 18)}
ARITHMETIC = 0xF << 28


def changeable(probe: Resolved) -> set[str]:
    """Return the registers that a hit at a function's entry may change."""
    # x18 is dead where guest functions that are called may change it.
    return {*DEAD, "pstate", *(["x18"] if probe.calls_guest else [])}


def fixed(machine: Arm64Machine) -> dict[str, int]:
    machine.cpu.write(KERNEL, b"kernel text\0")
    machine.cpu.write(USER, b"user text\0")
    return random_state(machine.random, x0=KERNEL, x1=USER)


@pytest.mark.parametrize("text", KINDS)
def test_a_function_s_entry_goes_on_as_it_would(text: str) -> None:
    machine = Arm64Machine()
    loaded = machine.load([make_probe(text)])

    for _ in range(20):
        state = fixed(machine)
        after = machine.hit(loaded, state)

        changed = {name for name in state if after[name] != state[name]}
        assert changed <= changeable(loaded.probes[0])
        assert (after["pstate"] ^ state["pstate"]) & ~ARITHMETIC == 0
        assert (machine.guard(), machine.preempt_count) == (0, 0)
    assert len(records(machine, 0)) == 20


@pytest.mark.parametrize("text", KINDS)
def test_an_instruction_goes_on_with_every_register_and_flag(text: str) -> None:
    machine = Arm64Machine()
    # add x3, x3, #1
    loaded = machine.patch([make_probe(text)], bytes.fromhex("63040091"))

    for _ in range(20):
        state = fixed(machine)
        after = machine.hit(loaded, state)

        assert after == {**state, "x3": (state["x3"] + 1) & (1 << 64) - 1}
        assert (machine.guard(), machine.preempt_count) == (0, 0)


@pytest.mark.parametrize(
    ("text", "saved"),
    [
        ("p f", set[str]()),
        ("p f a=$arg1 b=+0($arg2):string", {"x0", "x1"}),
        ("p f a=%x19 b=%lr c=%pstate d=%sp e=$stack1", {"x19", "x30", "pstate"}),
    ],
)
def test_what_is_read_of_the_saved_registers_is_known(text: str, saved: set[str]) -> None:
    assert saved_reads(AARCH64, [make_probe(text)]) == saved


def test_an_entry_saves_fewer_registers_where_fewer_are_read() -> None:
    def entry(reads: frozenset[str] | None) -> bytes:
        return AARCH64.site.entry(Addr(KERNEL), Addr(KERNEL), reads=reads)

    nothing, one = frozenset[str](), frozenset({"x20"})

    assert len(entry(nothing)) < len(entry(one)) < len(entry(None))


def test_a_record_has_what_the_registers_had() -> None:
    machine = Arm64Machine()
    names = [name for name in ARM64_GPRS if name != "x9"]
    texts = [f"p f {' '.join(f'%{name}' for name in half)}" for half in (names[:15], names[15:])]
    loaded = machine.load([make_probe(text, event_id=n) for n, text in enumerate(texts, 1)])
    state = fixed(machine)

    machine.hit(loaded, state)

    found = [value for record in records(machine, 0) for value in record.values]
    assert found == [state[name] for name in names]


def test_a_record_has_stack_place_link_and_state() -> None:
    machine = Arm64Machine()
    text = "p f sp=%sp pc=%pc lr=%lr st=%pstate s0=$stack0 s=$stack a=$arg1"
    loaded = machine.patch([make_probe(text)], bytes.fromhex("1f2003d5"))
    state = fixed(machine)

    machine.hit(loaded, state)

    sp, top = state["sp"], machine.cpu.number(state["sp"])
    expected = (sp, SITE, state["x30"], state["pstate"], top, sp, KERNEL)
    assert records(machine, 0)[0].values == expected


def test_memory_and_strings_are_read_by_the_guest() -> None:
    machine = Arm64Machine()
    loaded = machine.load(
        [make_probe("p f n=+4($arg1):u16 s=+0($arg1):string u=+0($arg2):ustring")]
    )

    machine.hit(loaded, fixed(machine))

    number = int.from_bytes(b"el", "little")
    assert records(machine, 0)[0].values == (number, b"kernel text\0", b"user text\0")


def test_what_cannot_be_read_is_a_fault() -> None:
    machine = Arm64Machine()
    loaded = machine.load([make_probe("p f n=+0($arg1):u16 s=+0($arg2):string")])

    machine.hit(loaded, random_state(machine.random, x0=0xFFFF_0000_0900_0000, x1=1 << 60))

    assert records(machine, 0)[0].values == (None, None)


@pytest.mark.parametrize(("masks", "is_on"), [(0, True), (IRQS_OFF, False), (0x3C0, False)])
def test_a_record_tells_whether_interrupts_are_on(masks: int, is_on: bool) -> None:
    machine = Arm64Machine()
    loaded = machine.load([make_probe("p f")])

    machine.hit(loaded, random_state(machine.random, pstate=masks | 5))

    assert bool(records(machine, 0)[0].context & CONTEXT_IRQS_ON) is is_on


@pytest.mark.parametrize("word", [0, 1])
def test_a_record_tells_whether_the_task_is_to_be_preempted(word: int) -> None:
    machine = Arm64Machine()
    loaded = machine.load([make_probe("p f")])
    machine.cpu.set_number(TASK + COUNT + 4, word, 4)

    machine.hit(loaded, fixed(machine))

    assert bool(records(machine, 0)[0].context & CONTEXT_NO_PREEMPT_RESCHED) is bool(word)


def test_a_record_may_tell_the_tasks_process() -> None:
    machine = Arm64Machine()
    loaded = machine.load([make_probe("p f a=$arg1:u8", extra=SyntheticFields(tgid=True))])
    machine.cpu.set_number(TASK + TGID, 0x7654_3210, 4)

    machine.hit(loaded, fixed(machine))

    assert records(machine, 0)[0].values[1] == 0x7654_3210


def test_a_record_tells_the_task_and_its_depth() -> None:
    machine = Arm64Machine()
    loaded = machine.load([make_probe("p f s=+0($arg1):string")])
    machine.cpu.write(0xFFFF_0000_0200_0000 + 1424, (77).to_bytes(4, "little"))
    machine.cpu.write(0xFFFF_0000_0200_0000 + 2000, b"busybox".ljust(16, b"\0"))
    machine.preempt_count = HARDIRQ | 2

    machine.hit(loaded, fixed(machine))

    (found,) = records(machine, 0)
    assert (found.pid, found.comm.rstrip(b"\0"), found.context & 0xFF_FFFF) == (
        77,
        b"busybox",
        HARDIRQ | 2,
    )


@pytest.mark.parametrize(
    ("text", "filter_text", "argument", "is_recorded"),
    [
        ("p f a=$arg1:s32", "a < 5", 4, True),
        ("p f a=$arg1:s32", "a < 5", 5, False),
        ("p f s=+0($arg1):string", 's ~ "*text"', KERNEL, True),
        ("p f s=+0($arg1):string", 's == "other"', KERNEL, False),
        ("p f", "cpu == 0", 0, True),
        ("p f", "cpu == 1", 0, False),
    ],
)
def test_filters_choose(text: str, filter_text: str, argument: int, is_recorded: bool) -> None:
    machine = Arm64Machine()
    loaded = machine.load([make_probe(text, filter_text)])
    machine.cpu.write(KERNEL, b"kernel text\0")
    state = random_state(machine.random, x0=argument)

    after = machine.hit(loaded, state)

    assert len(records(machine, 0)) == is_recorded
    changed = {name for name in state if after[name] != state[name]}
    assert changed <= changeable(loaded.probes[0])
    assert (machine.guard(), machine.preempt_count) == (0, 0)


def test_a_full_ring_counts_what_it_drops() -> None:
    machine = Arm64Machine()
    loaded = machine.load([make_probe("p f")])
    machine.set_position(0, 0, room=8)

    machine.hit(loaded)

    assert (machine.lost(0), machine.word(0)) == (1, 0)


@pytest.mark.parametrize("text", KINDS)
def test_a_task_may_be_moved_before_any_instruction(text: str) -> None:
    # Records are whole, in one ring or the other, and each ring has only its own CPU's positions.
    machine = Arm64Machine(is_watched=True)
    loaded = machine.load([make_probe(text)])
    machine.hit(loaded, fixed(machine))
    steps, held = len(machine.cpu.trace), 0
    for step in range(steps):
        machine.move_to(0)

        def move() -> None:
            nonlocal held
            if machine.preempt_count:
                held += 1
            else:
                machine.move_to(1)

        machine.hit(loaded, fixed(machine), at={step: move})

        assert (machine.guard(0), machine.guard(1), machine.preempt_count) == (0, 0, 0)
    found = [len(records(machine, number)) for number in (0, 1)]
    assert sum(found) == steps + 1
    assert min(found) > 0
    assert machine.missed(1) == 0
    assert bool(held) is loaded.probes[0].calls_guest


def test_a_moved_task_does_not_take_another_s_guard_for_its_own() -> None:
    machine = Arm64Machine(is_watched=True)
    loaded = machine.load([make_probe("p f")])
    machine.set_guard(1, 1)
    machine.move_to(1)
    machine.hit(loaded)
    steps = len(machine.cpu.trace)
    held: list[int] = []
    counting = {n: lambda: held.append(machine.preempt_count) for n in range(steps)}
    machine.hit(loaded, at=counting)
    looks, missed = next(n for n, count in enumerate(held) if count), machine.missed(1)

    # From CPU 1, where a hit is at work, to CPU 0.
    for step in range(looks):
        machine.move_to(1)
        machine.hit(loaded, at={step: lambda: machine.move_to(0)})

    assert machine.missed(1) == missed == 2
    assert sum(len(records(machine, number)) for number in (0, 1)) == looks


def test_a_hit_inside_of_a_hit_s_own_work_is_missed() -> None:
    machine = Arm64Machine()
    loaded = machine.load([make_probe("p f")])
    machine.set_guard(1, 0)

    machine.hit(loaded)

    assert (records(machine, 0), machine.missed(1)) == ([], 1)
    assert machine.preempt_count == 0


def test_the_reservation_of_an_interrupt_comes_in_between() -> None:
    machine = Arm64Machine(is_watched=True)
    first, second = (
        machine.load([make_probe("p f a=$arg1", event_id=n, addr=SITE + 0x100 * n)]) for n in (1, 2)
    )
    machine.hit(first)
    steps = len(machine.cpu.trace)

    for step in range(steps):
        machine.hit(first, at={step: lambda: _interrupt(machine, second)})

    found = [record.event_id for record in records(machine, 0)]
    assert (found.count(1), found.count(2)) == (steps + 1, steps)


def _interrupt(machine: Arm64Machine, loaded: Loaded) -> None:
    cpu = machine.cpu
    trace, actions = cpu.trace, cpu.actions
    machine.preempt_count += HARDIRQ
    stack = cpu.register("sp") - 512 & -16
    state = random_state(machine.random, sp=stack)

    def hit() -> None:
        machine.hit(loaded, state)

    cpu.aside(hit)
    machine.preempt_count -= HARDIRQ
    cpu.trace, cpu.actions = trace, actions
