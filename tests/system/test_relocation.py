"""Instructions of real kernels: in place, and in their slots, on an emulated CPU.

No guest is booted, but the kernels come from where guests' kernels come from. The same of an arm64
kernel is in test_arm64_text.
"""

from collections.abc import Mapping

import pytest

from tests.build.relocation import Compared, compare, compare_runs
from tests.system.conftest import SUITES

KERNELS = pytest.mark.parametrize("suite", [SUITES["6.1"], SUITES["6.12"]], ids=["6.1", "6.12"])

BY_SHAPE: Mapping[str, tuple[str, ...]] = {
    "Unicorn 2.1 does not know them": (
        "EVEX_VPERMI2D_YMM_K1Z_YMM_YMMM256B32",
        "EVEX_VPRORD_XMM_K1Z_XMMM128B32_IMM8",
        "INVPCID_R64_M128",
        "LKGS_R32M16",
        "MONITORXQ",
        "MWAITX",
        "PVALIDATEQ",
        "RMPADJUST",
        "SERIALIZE",
        "STGI",
        "VEX_TILERELEASE",
        "VEX_VEXTRACTI128_XMMM128_YMM_IMM8",
        "VEX_VMOVDQA_YMMM256_YMM",
        "VEX_VMOVDQA_YMM_YMMM256",
        "VEX_VMOVDQU_YMM_YMMM256",
        "VMGEXIT",
        "VMMCALL",
        "WRUSSQ_M64_R64",
        "XRSTORS64_MEM",
        "XSAVES64_MEM",
    ),
    "random registers or memory make them fault: no such selector, area, feature or counter": (
        "MONITORQ",
        "MWAIT",
        "RDPKRU",
        "RDPMC",
        "RETFD",
        "RETFQ",
        "WRPKRU",
        "XGETBV",
        "XRSTOR64_MEM",
        "XSETBV",
    ),
    "no two runs are alike": ("RDRAND_R64", "RDSEED_R64", "RDTSC", "RDTSCP"),
    "the emulated CPU would not be the same again": (
        "LGDT_M1664",
        "LIDT_M1664",
        "LLDT_R32M16",
        "LTR_R32M16",
        "MOV_CR_R64",
        "MOV_DR_R64",
    ),
}
"""Forms of which only the slots' bytes are compared: all are copied, at most with a displacement
made anew."""


def check(compared: Compared, *, count: int) -> None:
    allowed = {form for forms in BY_SHAPE.values() for form in forms}
    assert not compared.differences
    assert compared.executed.total() > count * 0.9
    assert set(compared.checked_by_shape) <= allowed


@pytest.mark.guest
@KERNELS
def test_a_sample_of_a_kernels_instructions_does_the_same_in_slots(suite: str) -> None:
    check(compare(suite, count=8_000, per_form=12), count=8_000)


@pytest.mark.guest
@KERNELS
def test_runs_that_one_jump_replaces_do_the_same_in_their_detours(suite: str) -> None:
    compared = compare_runs(suite, functions=200)

    assert not compared.differences
    assert compared.executed.total() > 5_000


@pytest.mark.storm
@KERNELS
def test_a_hundred_thousand_instructions_of_a_kernel_do_the_same_in_slots(suite: str) -> None:
    check(compare(suite, count=110_000, per_form=150, seed=2), count=110_000)
