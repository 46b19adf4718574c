"""The code written by hand does what the compiled does, or there is nothing to compare."""

from random import Random

import pytest

from bench.amd64 import AMD64
from bench.arm64 import ARM64
from bench.handwritten import registers_record
from kprobes.model.abi import GuestAbi, Template
from kprobes.model.resolved import COUNTER, PID
from tests.build import arm64
from tests.build.arm64 import Arm64Machine
from tests.build.kernel import make_probe
from tests.build.machine import ABI, ABI_HIGH, Machine, random_state

ARGUMENTS = " a=$arg1 b=$arg2 c=$arg3"
DEAD = {"ax", "r10", "r11", "flags"}
"""What no function of the kernel expects to find at its entry."""
DEAD_OF_ARM64 = {*(f"x{n}" for n in range(9, 18)), "pstate"}


def _text(arguments: int) -> str:
    return "p f" + "".join(f" {word}" for word in ARGUMENTS.split()[:arguments])


def _record(abi: GuestAbi, arguments: int, template: Template | None, seed: int) -> bytes:
    machine = Machine(abi)
    probe = make_probe(_text(arguments))
    loaded = machine.load([probe], template=template)
    state = random_state(Random(seed))

    after = machine.hit(loaded, state)

    assert {name for name in after if after[name] != state[name]} <= DEAD
    found = machine.cpu.read(machine.place(0, 0), probe.layout.size)
    return found[:COUNTER] + found[PID:]


def _arm64_record(arguments: int, template: Template | None, seed: int) -> bytes:
    machine, random = Arm64Machine(), Random(seed)
    probe = arm64.make_probe(_text(arguments))
    machine.preempt_count = random.getrandbits(20)
    machine.cpu.set_number(arm64.TASK + arm64.COUNT + 4, random.getrandbits(1), 4)
    machine.cpu.set_number(arm64.TASK + arm64.FLAGS, random.getrandbits(32), 4)
    machine.cpu.write(arm64.TASK + arm64.COMM, random.randbytes(16))
    loaded = machine.load_written([probe], template) if template else machine.load([probe])
    state = arm64.random_state(random)

    after = machine.hit(loaded, state)

    assert {name for name in after if after[name] != state[name]} <= DEAD_OF_ARM64
    found = machine.cpu.read(machine.place(0, 0), probe.layout.size)
    return found[:COUNTER] + found[PID:]


@pytest.mark.parametrize("abi", [ABI, ABI_HIGH])
@pytest.mark.parametrize("arguments", [1, 3])
def test_both_write_the_same_record(arguments: int, abi: GuestAbi) -> None:
    by_hand = registers_record(AMD64, abi, arguments)

    for seed in range(10):
        assert _record(abi, arguments, by_hand, seed) == _record(abi, arguments, None, seed)


@pytest.mark.parametrize("arguments", [1, 3])
def test_both_write_the_same_record_on_arm64(arguments: int) -> None:
    by_hand = registers_record(ARM64, arm64.ABI, arguments)

    for seed in range(10):
        found = _arm64_record(arguments, by_hand, seed)
        assert found == _arm64_record(arguments, None, seed)


def test_a_full_ring_is_counted_and_nothing_is_written() -> None:
    machine = Machine(ABI)
    loaded = machine.load([make_probe("p f a=$arg1")], template=registers_record(AMD64, ABI, 1))
    machine.set_position(0, 64, room=40)

    machine.hit(loaded)

    assert machine.lost(0) == 1
    assert machine.word(0) == 64


def test_a_full_ring_is_counted_on_arm64_too() -> None:
    machine = Arm64Machine()
    probes = [arm64.make_probe("p f a=$arg1")]
    loaded = machine.load_written(probes, registers_record(ARM64, arm64.ABI, 1))
    machine.set_position(0, 64, room=40)

    machine.hit(loaded)

    assert machine.lost(0) == 1
    assert machine.word(0) == 64
