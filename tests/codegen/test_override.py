"""Overrides as machine code: which calls are skipped, what they return, and what is counted."""

import pytest
from msgspec.structs import replace

from kprobes.codegen.override import GAMMA, LAST_SHIFT, MIX
from kprobes.model.override import ALWAYS, Override, OverrideCounts
from kprobes.units import U64
from tests.build import arm64, machine
from tests.build.overridden import (
    AMD64,
    ARM64,
    Isa,
    Overridden,
    expect_run,
    expect_skipped,
    make_tested,
)
from tests.build.records import records

ISAS = [pytest.param(AMD64, id="amd64"), pytest.param(ARM64, id="arm64")]
EVERY_ISA = pytest.mark.parametrize("isa", ISAS)
EVERY_SITE = pytest.mark.parametrize("is_patched", [False, True], ids=["ftrace", "jump"])


def make_override(
    isa: Isa, filter_text: str = "", *, text: str = "p f", value: int = -12, **options: int
) -> Override:
    probe = make_tested(isa, text, filter_text)
    return Override(number=0, probe=probe, value=value & U64, **options)


def drawn(seed: int, n: int) -> int:
    """Return the n-th number of an override, in plain Python."""
    number = (n * GAMMA + seed) & U64
    for shift, factor in MIX:
        number = (number ^ number >> shift) * factor & U64
    return number ^ number >> LAST_SHIFT


@EVERY_ISA
@EVERY_SITE
@pytest.mark.parametrize("value", [-12, 0, 1, -1 << 63, 0x1234_5678_9ABC_DEF0])
def test_a_skipped_call_returns_the_value_to_its_caller(
    isa: Isa, is_patched: bool, value: int
) -> None:
    function = Overridden(isa, [make_override(isa, value=value)], is_patched=is_patched)

    for _ in range(20):
        expect_skipped(isa, function.call(), value)

    assert function.counts() == OverrideCounts(hits=20, skipped=20)
    assert (function.machine.guard(), function.machine.preempt_count & 0xFF) == (0, 0)


@EVERY_ISA
@EVERY_SITE
def test_a_call_that_is_not_skipped_goes_on_as_it_would(isa: Isa, is_patched: bool) -> None:
    function = Overridden(isa, [make_override(isa, times=0)], is_patched=is_patched)

    for _ in range(20):
        expect_run(isa, function.call())

    assert function.counts() == OverrideCounts(hits=20)


@EVERY_ISA
@EVERY_SITE
def test_a_filter_chooses_calls_by_arguments(isa: Isa, is_patched: bool) -> None:
    text = "p f a=$arg1:s32 b=$arg2:u8"
    override = make_override(isa, "a < 0 && b == 7", text=text)
    function = Overridden(isa, [override], is_patched=is_patched)
    first, second = isa.arch.arguments[:2]

    chosen = [
        function.call(**{first: a & U64, second: b}).is_skipped
        for a, b in [(-1, 7), (1, 7), (-5, 8), (-5, 0x107), (0xFFFF_FFFF, 7)]
    ]

    assert chosen == [True, False, False, True, True]
    assert function.counts() == OverrideCounts(hits=5, skipped=3)


@EVERY_ISA
def test_a_filter_reads_memory_and_the_task_s_name(isa: Isa) -> None:
    text = "p f name=+0($arg1):string n=+8($arg2):u32"
    override = make_override(isa, 'name ~ "/etc/*" && n > 4 && comm == "stress"', text=text)
    function = Overridden(isa, [override])
    kernel = arm64.KERNEL if isa is ARM64 else machine.KERNEL
    task = (arm64.TASK, arm64.COMM) if isa is ARM64 else (machine.TASK, machine.COMM)
    cpu, (first, second) = function.machine.cpu, isa.arch.arguments[:2]
    cpu.write(kernel, b"/etc/passwd\0")
    cpu.set_number(kernel + 0x108, 5, 4)
    arguments = {first: kernel, second: kernel + 0x100}
    cpu.write(sum(task), b"stress\0".ljust(16, b"\0"))

    expect_skipped(isa, function.call(**arguments), -12)
    expect_run(isa, function.call(**{**arguments, second: 0}))
    cpu.write(sum(task), b"strest\0")
    expect_run(isa, function.call(**arguments))
    assert function.counts() == OverrideCounts(hits=3, skipped=1)
    assert (function.machine.guard(), function.machine.preempt_count & 0xFF) == (0, 0)


@EVERY_ISA
def test_what_our_own_code_calls_is_never_skipped(isa: Isa) -> None:
    for text, filter_text in [("p f", ""), ("p f n=+0($arg1):u8", "n == 0")]:
        function = Overridden(isa, [make_override(isa, filter_text, text=text)])
        word = function.machine
        place = word.percpu(24, 0) if isa is ARM64 else word.percpu(word.abi.percpu + 24)
        # A hit of a task's context is reading memory on this CPU.
        word.cpu.set_number(place, 1, 4)

        expect_run(isa, function.call())

        assert function.counts() == OverrideCounts(hits=1, missed=1)


@EVERY_ISA
def test_every_so_manieth_call_that_passes_is_skipped(isa: Isa) -> None:
    override = make_override(isa, "a & 1", text="p f a=$arg1:u8", every=3)
    function = Overridden(isa, [override])
    first = isa.arch.arguments[0]

    skipped = [n for n in range(24) if function.call(**{first: n}).is_skipped]

    # Of 1, 3, 5, 7, ... the third, the sixth, ...
    assert skipped == [5, 11, 17, 23]
    assert function.counts() == OverrideCounts(hits=24, skipped=4)


@EVERY_ISA
def test_no_more_calls_are_skipped_than_wanted(isa: Isa) -> None:
    function = Overridden(isa, [make_override(isa, times=3, every=2)])

    skipped = [n for n in range(20) if function.call().is_skipped]

    assert skipped == [1, 3, 5]
    assert function.counts() == OverrideCounts(hits=20, skipped=3)


@EVERY_ISA
@pytest.mark.parametrize("percent", [0, 30, 99])
def test_chance_is_drawn_anew_for_each_call(isa: Isa, percent: int) -> None:
    chance = ALWAYS * percent // 100
    function = Overridden(isa, [make_override(isa, chance=chance, seed=7)])

    skipped = [n for n in range(400) if function.call().is_skipped]

    assert skipped == [n for n in range(400) if drawn(7, n) < chance]
    assert function.counts() == OverrideCounts(hits=400, skipped=len(skipped))
    assert abs(len(skipped) - 4 * percent) <= 40


@EVERY_ISA
@EVERY_SITE
def test_the_first_override_that_wants_to_skips_the_call(isa: Isa, is_patched: bool) -> None:
    first = make_override(isa, every=2)
    second = replace(make_override(isa, value=-5, times=2), number=1)
    function = Overridden(isa, [first, second], is_patched=is_patched)

    values = [called.after[isa.result] for called in (function.call() for _ in range(4))]

    assert values == [number & U64 for number in (-5, -12, -5, -12)]
    assert function.counts(0) == OverrideCounts(hits=4, skipped=2)
    assert function.counts(1) == OverrideCounts(hits=2, skipped=2)


@EVERY_ISA
@EVERY_SITE
def test_probes_at_the_entry_record_calls_that_are_skipped(isa: Isa, is_patched: bool) -> None:
    probe = make_tested(isa, "p f a=$arg1")
    override = make_override(isa, every=2)
    function = Overridden(isa, [override], probes=[probe], is_patched=is_patched)

    for n in range(4):
        function.call(**{isa.arch.arguments[0]: n})

    assert [record.values for record in records(function.machine, 0)] == [(0,), (1,), (2,), (3,)]
    assert function.counts() == OverrideCounts(hits=4, skipped=2)
