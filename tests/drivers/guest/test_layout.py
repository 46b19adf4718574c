"""What moves between kernel releases."""

import pytest

from kprobes.drivers.guest import layout


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
