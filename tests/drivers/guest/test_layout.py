"""What moves between kernel releases."""

import pytest

from kprobes.drivers.guest import layout
from tests.build.kernel import make_kernel, symbol


@pytest.mark.parametrize(
    ("version", "mask"),
    [
        ((5, 10), 0b001000),
        ((6, 12), 0b001000),
        ((6, 13), 0b011000),
        ((6, 17), 0b011000),
        ((6, 18), 0b110000),
        ((7, 2), 0b110000),
    ],
)
def test_the_need_resched_flags_move(version: tuple[int, int], mask: int) -> None:
    assert layout.resched_mask(version) == mask


@pytest.mark.parametrize(
    ("name", "is_told_apart"),
    [
        ("kretprobe_trampoline", False),
        ("__kretprobe_trampoline", True),
        ("arch_rethook_trampoline", True),
    ],
)
def test_newer_kernels_tell_their_trampoline_apart(name: str, is_told_apart: bool) -> None:
    kernel = make_kernel([symbol(name, 0x40)])

    assert layout.kretprobe_trampoline(kernel) == (0x40 if is_told_apart else None)
