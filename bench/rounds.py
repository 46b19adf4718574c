"""Cost that something armed adds to a hit, measured in rounds: each has a guest of its own.

Where a guest's pages lie, and where QEMU puts what it translated of them, is a good part of what a
hit costs there; so a guest is one sample, however often it is measured in it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from operator import attrgetter
from statistics import median

from msgspec import Struct

from bench.elf_program import Loop
from bench.guest import Rig, boot
from bench.isa import Isa
from bench.spread import Spread

_ROUNDS, _PASSES = 12, 2
_QUICK_ROUNDS, _QUICK_PASSES = 6, 1

Arm = Callable[[], AbstractContextManager[object]]


class Turn(Struct, frozen=True, kw_only=True):
    """A program that is run with something armed."""

    name: str
    program: str
    arm: Arm


Measure = Callable[[Rig, int], Mapping[str, float]]
"""(a guest, how often) to the figures that were found in it, by their names."""


def in_rounds(
    isa: Isa, loops: Mapping[str, Loop], measure: Measure, *, quick: bool
) -> dict[str, Spread]:
    """Boot guests with programs in them and return the figures that were measured in each."""
    rounds, passes = (_QUICK_ROUNDS, _QUICK_PASSES) if quick else (_ROUNDS, _PASSES)
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        with boot(isa, loops) as rig:
            for name, value in measure(rig, passes).items():
                found.setdefault(name, []).append(value)
    return {name: Spread(values) for name, values in found.items()}


def added(rig: Rig, turns: Sequence[Turn], *, passes: int) -> dict[str, float]:
    """Return the nanoseconds that each turn adds to a hit: the median of some passes.

    That is more than the same program takes with nothing armed, right before and right after.
    """
    found = [_pass(rig, turns) for _ in range(passes)]
    return {turn.name: median(each[turn.name] for each in found) for turn in turns}


def _pass(rig: Rig, turns: Sequence[Turn]) -> dict[str, float]:
    found: dict[str, float] = {}
    by_program = attrgetter("program")
    for program, its in groupby(sorted(turns, key=by_program), key=by_program):
        before = figure(rig, program)
        for turn in its:
            with turn.arm():
                loaded = figure(rig, program)
            after = figure(rig, program)
            found[turn.name] = loaded - (before + after) / 2
            before = after
    return found


def figure(rig: Rig, program: str) -> float:
    """Return a program's nanoseconds per hit: the tenth percentile of its loops.

    Other work on this machine hardly touches it: the loops are short.
    """
    values = sorted(rig.run(program))
    return values[len(values) // 10]
