"""The code written by hand does what the compiled does, or there is nothing to compare."""

from random import Random

import pytest

from bench.handwritten import registers_record
from kprobes.model.abi import GuestAbi, Template
from kprobes.model.layout import COUNTER, PID
from tests.build.kernel import make_probe
from tests.build.machine import ABI, ABI_HIGH, Machine, random_state

ARGUMENTS = " a=$arg1 b=$arg2 c=$arg3"
DEAD = {"ax", "r10", "r11", "flags"}
"""What no function of the kernel expects to find at its entry."""


def _record(abi: GuestAbi, arguments: int, template: Template | None, seed: int) -> bytes:
    machine = Machine(abi)
    text = "p f" + "".join(f" {word}" for word in ARGUMENTS.split()[:arguments])
    probe = make_probe(text)
    loaded = machine.load([probe], template=template)
    state = random_state(Random(seed))

    after = machine.hit(loaded, state)

    assert {name for name in after if after[name] != state[name]} <= DEAD
    found = machine.cpu.read(machine.place(0, 0), probe.layout.size)
    return found[:COUNTER] + found[PID:]


@pytest.mark.parametrize("abi", [ABI, ABI_HIGH])
@pytest.mark.parametrize("arguments", [1, 3])
def test_both_write_the_same_record(arguments: int, abi: GuestAbi) -> None:
    by_hand = registers_record(abi, arguments)

    for seed in range(10):
        assert _record(abi, arguments, by_hand, seed) == _record(abi, arguments, None, seed)


def test_a_full_ring_is_counted_and_nothing_is_written() -> None:
    machine = Machine(ABI)
    loaded = machine.load([make_probe("p f a=$arg1")], template=registers_record(ABI, 1))
    machine.set_position(0, 64, room=40)

    machine.hit(loaded)

    assert machine.lost(0) == 1
    assert machine.word(0) == 64
