"""A kernel's image by the places of its pages."""

import pytest

from kprobes.errors import MemoryFault
from kprobes.image.find import ImageWindow
from kprobes.ports import MappedRun
from kprobes.units import Addr, Phys
from tests.build.pages import FakeRam

_TEXT = 0xFFFF_FFFF_8100_0000


def _run(virt: int, phys: int, size: int) -> MappedRun:
    return MappedRun(
        virt=Addr(virt), phys=Phys(phys), size=size, is_writable=False, is_executable=True
    )


@pytest.fixture
def window() -> ImageWindow:
    ram = FakeRam(0x8000)
    ram.write(0x1000, b"a" * 0x1000)
    ram.write(0x5000, b"b" * 0x1000)
    runs = [_run(_TEXT, 0x1000, 0x1000), _run(_TEXT + 0x1000, 0x5000, 0x1000)]
    return ImageWindow(ram, runs)


def test_a_read_goes_on_where_the_next_run_lies(window: ImageWindow) -> None:
    assert window.read(_TEXT + 0xFFE, 4) == b"aabb"


def test_an_address_is_translated_by_its_own_run(window: ImageWindow) -> None:
    assert window.physical(_TEXT + 0x1234) == 0x5234


@pytest.mark.parametrize("addr", [_TEXT - 1, _TEXT + 0x1FFE, _TEXT + 0x2000])
def test_nothing_outside_the_runs_can_be_read(window: ImageWindow, addr: int) -> None:
    with pytest.raises(MemoryFault):
        window.read(addr, 4)
