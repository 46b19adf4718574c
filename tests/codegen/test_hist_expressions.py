"""Expressions in hist triggers as machine code: they are what the kernel's are, of any numbers."""

from random import Random

import pytest

from kprobes.units import U64
from tests.build.hist_expressions import kernels_number, random_expression
from tests.build.overridden import Isa
from tests.codegen.test_hist import EVERY_ISA, PLAIN, counted, counts_of

_NUMBERS = (0, 1, 2, 10, 999, 1000, (1 << 20) - 1, 1 << 20, 1 << 32, 1 << 63, U64)
_SHORTS = (0, 1, -1, 7, 1000, -32768, 32767)


@EVERY_ISA
@pytest.mark.parametrize("seed", range(30))
def test_keys_and_sums_of_expressions_are_the_kernels(isa: Isa, seed: int) -> None:
    chance = Random(seed)
    key, val = (random_expression(chance, ("a", "b")) for _ in range(2))
    found = counted(isa, PLAIN, f"keys={key}:vals={val}")
    wanted: dict[tuple[int, ...], tuple[int, ...]] = {}

    for _ in range(12):
        a, b = chance.choice(_NUMBERS), chance.choice(_SHORTS)
        found.hit(a, b)
        numbers = {"a": a, "b": b}
        hits, total = wanted.get((kernels_number(key, numbers),), (0, 0))
        summed = total + kernels_number(val, numbers) & U64
        wanted[kernels_number(key, numbers),] = hits + 1, summed

    assert counts_of(found) == wanted, (key, val)


@EVERY_ISA
def test_a_negated_sum_and_modified_operands(isa: Isa) -> None:
    found = counted(isa, PLAIN, "keys=-(a+b),a.log2*100+b:vals=a.buckets=10-1")

    found.hit(37, -5)

    assert counts_of(found) == {(-32 & U64, 595): (1, 29)}
