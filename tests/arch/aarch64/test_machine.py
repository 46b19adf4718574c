"""Places of arm64's tasks."""

import pytest

from kprobes.arch.aarch64.machine import PAGING, TASK
from tests.build.a64_pages import tcr
from tests.build.pages import FakeRam


@pytest.mark.parametrize(
    ("version", "mask"), [((5, 10), 0b010), ((6, 15), 0b010), ((6, 16), 0b110), ((6, 18), 0b110)]
)
def test_the_lazy_flag_came_with_lazy_preemption(version: tuple[int, int], mask: int) -> None:
    assert TASK.resched_mask(version) == mask


@pytest.mark.parametrize(
    ("pstate", "is_kernel_s"),
    [
        (0x0040_0005, True),
        (0x6040_20C9, True),
        (0x8000_1000, False),
        (0xFFFF_8000_0812_3405, False),
    ],
)
def test_what_was_interrupted_in_the_kernel_is_known_by_its_mode(
    pstate: int, is_kernel_s: bool
) -> None:
    mask, modes = TASK.interrupted

    assert (pstate & mask in modes) == is_kernel_s


@pytest.mark.parametrize(
    ("mode", "hcr", "root"),
    [
        (0b0101, 0, 0x4100_0000),
        (0b1001, 1 << 34 | 1 << 27, 0x4200_0000),
        (0b0000, 1 << 34 | 1 << 27, 0x4200_0000),
        # A hypervisor that protects its guests from the kernel keeps EL2 to itself.
        (0b0101, 1 << 34, 0x4100_0000),
        (0b0000, 1 << 34, 0x4100_0000),
    ],
)
def test_a_kernel_at_el2_has_its_tables_in_that_level_s_registers(
    mode: int, hcr: int, root: int
) -> None:
    """What boot left in the others may be anything."""
    registers = {"cpsr": mode, "HCR_EL2": hcr, "TTBR1_EL1": 0x4100_0000, "TTBR1_EL2": 0x4200_0000}
    registers |= {"TCR_EL1": tcr(12, 48), "TCR_EL2": tcr(12, 48)}

    assert PAGING.tables(FakeRam(16), registers)[0].root == root
    PAGING.check(registers)
