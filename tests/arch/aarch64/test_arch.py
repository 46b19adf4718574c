"""Code that one guest's CPUs run."""

import pytest

from kprobes.arch.aarch64.arch import AARCH64

EL0, EL1, EL2 = 0b0000, 0b0101, 0b1001
LSE = 0x2 << 20


@pytest.mark.parametrize(
    ("vcpus", "has_lse"),
    [
        ([LSE, LSE], True),
        ([LSE, 0x1 << 20], False),
        ([LSE, None], False),
        ([0x3 << 20], True),
    ],
)
def test_atomics_are_used_where_all_cpus_are_known_to_have_them(
    vcpus: list[int | None], has_lse: bool
) -> None:
    known = [{"ID_AA64ISAR0_EL1": each} if each is not None else {} for each in vcpus]

    found = AARCH64.code_for([{"cpsr": EL1, **each} for each in known])

    assert found.features.endswith(",+lse") == has_lse


@pytest.mark.parametrize(
    ("registers", "base"),
    [
        ({"cpsr": EL1}, "tpidr_el1"),
        ({"cpsr": 0x6040_0000 | EL2}, "tpidr_el2"),
        ({"cpsr": EL0, "HCR_EL2": 1 << 34 | 1 << 27}, "tpidr_el2"),
        ({"cpsr": EL0, "HCR_EL2": 1 << 34}, "tpidr_el1"),
        ({"cpsr": EL1, "HCR_EL2": 1 << 34}, "tpidr_el1"),
        ({"cpsr": EL0, "HCR_EL2": 1 << 31}, "tpidr_el1"),
    ],
)
def test_per_cpu_memory_is_where_the_kernels_exception_level_has_it(
    registers: dict[str, int], base: str
) -> None:
    found = AARCH64.code_for([{"cpsr": EL1}, registers])

    assert base in str(found.per_cpu)
