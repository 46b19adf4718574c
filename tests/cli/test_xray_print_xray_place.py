"""Places and ranges as users write them."""

import pytest

from kprobes.cli.xray_print import Chosen, read_place
from kprobes.errors import TargetError, UsageError
from kprobes.units import Addr
from tests.build.kernel import TEXT, FakeSymbols, symbol

SYMBOLS = FakeSymbols(
    [symbol("f.cold", TEXT), symbol("g", TEXT + 0x40), symbol("h", TEXT + 0x80, module="ext4")]
)


@pytest.mark.parametrize(
    ("text", "start", "stop"),
    [
        ("g", 0x40, None),
        ("g+0x4", 0x44, None),
        ("g+16", 0x50, None),
        ("f.cold", 0, None),
        ("ext4:h+2", 0x82, None),
        (f"{TEXT:#x}", 0, None),
        (f"{TEXT:x}", 0, None),
        ("g-h", 0x40, 0x80),
        (f"{TEXT:#x}-{TEXT + 0x20:#x}", 0, 0x20),
        (f"{TEXT:x}-{TEXT + 0x20:x}", 0, 0x20),
        (f"{TEXT:#x}:64", 0, 64),
        ("g+4:0x10", 0x44, 0x54),
    ],
)
def test_a_place_or_a_range_is_read(text: str, start: int, stop: int | None) -> None:
    expected = Chosen(start=Addr(TEXT + start), stop=Addr(TEXT + stop) if stop else None)

    assert read_place(text, SYMBOLS) == expected


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "invalid place"),
        ("g+", "invalid place"),
        ("g+x", "invalid place"),
        ("g h", "invalid place"),
        ("g:0", "ends before it begins"),
        ("h-g", "ends before it begins"),
        ("g:0x10001", "64 KiB at most"),
    ],
)
def test_what_is_none_is_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read_place(text, SYMBOLS)


@pytest.mark.parametrize("text", ["nosuch", "ext5:h"])
def test_a_name_that_nothing_has_is_told(text: str) -> None:
    with pytest.raises(TargetError, match="no symbol"):
        read_place(text, SYMBOLS)
