"""Stacks in records: what the guest's unwinder is given, and what becomes of what it finds."""

from collections.abc import Sequence
from random import Random

import pytest

from kprobes.arch.aarch64.arch import AARCH64
from kprobes.arch.arch import Arch
from kprobes.arch.x86_64.arch import X86_64
from kprobes.errors import DefinitionError
from kprobes.model.abi import MAX_DEPTH, MAX_DYNAMIC
from kprobes.model.definition import SyntheticFields
from kprobes.resolve.resolve import resolve
from tests.build import arm64
from tests.build.arm64 import Arm64Machine
from tests.build.kernel import SITE, make_extra, make_kernel, make_probe, read, symbol
from tests.build.machine import KERNEL, NMI, Machine, random_state
from tests.build.overridden import AMD64, ARM64, Isa
from tests.build.records import records
from tests.build.reference import packed

ISAS = [pytest.param(AMD64, id="amd64"), pytest.param(ARM64, id="arm64")]
EVERY_ISA = pytest.mark.parametrize("isa", ISAS)
PROGRAM = [0x40_1000 + 5 * n for n in range(200)]
CALLERS = [0xFFFF_FFFF_8100_0000 + 16 * n for n in range(200)]


def _word(arch: Arch, words: Sequence[int], name: str) -> int:
    return words[arch.registers.index(name)]


@pytest.mark.parametrize("depth", [0, 1, 30, MAX_DEPTH - 1, MAX_DEPTH, 199])
def test_the_unwinder_writes_into_the_record(depth: int) -> None:
    machine = Machine()
    machine.readers.stack = CALLERS[:depth]
    loaded = machine.load([make_probe("p f a=$arg1 st=$stacktrace b=$arg2:u8")])
    state = random_state(Random(depth))

    machine.hit(loaded, state)

    (found,) = records(machine, 0)
    stack = [loaded.site, *CALLERS[:depth]][:MAX_DEPTH]
    assert found.values == (state["di"], packed(stack), state["si"] & 0xFF)
    # The rest of the room was given back.
    assert found.size == loaded.probes[0].layout.size + 8 * len(stack)
    assert machine.word(0) == found.size


def test_the_unwinder_begins_with_the_registers_of_the_hit() -> None:
    machine = Machine()
    loaded = machine.load([make_probe("p f st=$stacktrace")])
    state = random_state(Random(1))

    machine.hit(loaded, state)

    ((words, size, skipped),) = machine.readers.walks
    assert (size, skipped) == (MAX_DEPTH, 0)
    given = {name: _word(X86_64, words, name) for name in X86_64.unwound}
    saved = {name: state[name] for name in ("sp", "bp", "r10", "r13")}
    # Where the probe is, and not a byte after it; a user's code segment would end the walk.
    assert given == {**saved, "ip": loaded.site, "cs": 0x10}


def test_strings_take_no_room_from_a_stack() -> None:
    machine = Machine()
    machine.readers.stack = CALLERS
    machine.cpu.write(KERNEL, b"x" * 5000 + b"\0")
    words = " ".join(f"s{n}=+0($arg1):string" for n in range(6))
    loaded = machine.load([make_probe(f"p f {words} st=$stacktrace")])

    machine.hit(loaded, random_state(Random(2), di=KERNEL))

    (found,) = records(machine, 0)
    stack = found.values[-1]
    assert isinstance(stack, bytes)
    assert stack == packed([loaded.site, *CALLERS][:MAX_DEPTH])
    strings = sum(len(value) for value in found.values[:-1] if isinstance(value, bytes))
    assert MAX_DYNAMIC - 8 < strings <= MAX_DYNAMIC


def test_two_stacks_of_one_record_are_alike() -> None:
    machine = Machine()
    machine.readers.stack = CALLERS[:9]
    probe = make_extra("p f st=$stacktrace", SyntheticFields(stacktrace=True))
    loaded = machine.load([probe])

    machine.hit(loaded)

    (found,) = records(machine, 0)
    assert [field.name for field in probe.layout.fields] == ["st", "common_stacktrace"]
    assert found.values == (packed([SITE, *CALLERS[:9]]),) * 2


def test_on_arm64_the_caller_that_a_register_has_comes_second() -> None:
    machine = Arm64Machine()
    machine.readers.stack = CALLERS[:5]
    loaded = machine.load([arm64.make_probe("p f st=$stacktrace")])
    state = machine.random_state()

    machine.hit(loaded, state)

    (found,) = records(machine, 0)
    assert found.values == (packed([arm64.SITE, state["x30"], *CALLERS[:5]]),)
    ((words, size, skipped),) = machine.readers.walks
    assert (size, skipped) == (MAX_DEPTH - 2, 1)
    given = (_word(AARCH64, words, "pc"), _word(AARCH64, words, "x29"))
    assert given == (arm64.SITE, state["x29"])


@EVERY_ISA
@pytest.mark.parametrize("depth", [0, 1, 30, MAX_DEPTH, 199])
def test_the_programs_stack_is_in_the_record(isa: Isa, depth: int) -> None:
    machine = Arm64Machine() if isa is ARM64 else Machine()
    machine.readers.user_stack = PROGRAM[:depth]
    make = arm64.make_probe if isa is ARM64 else make_probe
    loaded = machine.load([make("p f a=$arg1 st=$ustack b=$arg2:u8")])  # pyright: ignore[reportArgumentType] - of its kind

    machine.hit(loaded)  # pyright: ignore[reportArgumentType] - of its kind

    (found,) = records(machine, 0)  # pyright: ignore[reportArgumentType] - either is read alike
    assert found.values[1] == packed(PROGRAM[:depth][:MAX_DEPTH])
    assert found.size == loaded.probes[0].layout.size + 8 * min(depth, MAX_DEPTH)
    assert machine.readers.walks == []


@EVERY_ISA
def test_a_programs_stack_is_not_walked_in_an_nmi(isa: Isa) -> None:
    machine = Arm64Machine() if isa is ARM64 else Machine()
    make = arm64.make_probe if isa is ARM64 else make_probe
    loaded = machine.load([make("p f st=$ustack")])  # pyright: ignore[reportArgumentType] - of its kind
    machine.preempt_count += NMI

    machine.hit(loaded)  # pyright: ignore[reportArgumentType] - of its kind

    (found,) = records(machine, 0)  # pyright: ignore[reportArgumentType] - either is read alike
    assert found.values == (b"",)


def test_both_stacks_are_beside_each_other() -> None:
    machine = Machine()
    machine.readers.stack, machine.readers.user_stack = CALLERS[:9], PROGRAM[:3]
    probe = make_extra("p f", SyntheticFields(stacktrace=True, userstacktrace=True))
    loaded = machine.load([probe])

    machine.hit(loaded)

    (found,) = records(machine, 0)
    names = [field.name for field in probe.layout.fields]
    assert names == ["common_stacktrace", "common_userstacktrace"]
    assert found.values == (packed([SITE, *CALLERS[:9]]), packed(PROGRAM[:3]))


def test_a_kernel_that_cannot_walk_a_programs_stack_is_told_apart() -> None:
    definition, kernel = read("p f st=$ustack"), make_kernel([symbol("f", SITE)])

    with pytest.raises(DefinitionError, match="CONFIG_USER_STACKTRACE_SUPPORT"):
        resolve(definition, kernel, X86_64, event_id=1, locate=lambda found: found.addr)


def test_a_kernel_that_cannot_walk_stacks_is_told_apart() -> None:
    definition, kernel = read("p f a=$arg1 st=$stacktrace"), make_kernel([symbol("f", SITE)])

    with pytest.raises(DefinitionError, match="CONFIG_STACKTRACE") as raised:
        resolve(definition, kernel, X86_64, event_id=1, locate=lambda found: found.addr)

    assert raised.value.column == len("p f a=$arg1 st=")
