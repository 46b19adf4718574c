"""The words in which option values are written."""

from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from pathlib import Path

import pytest

from kprobes.cli import options
from kprobes.model.plan import ReturnMethod


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10s", 10), ("500ms", 0.5), ("2m", 120), ("1h", 3600), ("1.5s", 1.5), ("7", 7)],
)
def test_a_duration_has_a_unit_or_is_in_seconds(text: str, seconds: float) -> None:
    assert options.duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(("text", "seconds"), [("5", 0.005), ("0.5ms", 0.0005), ("1s", 1)])
def test_a_pause_has_a_unit_or_is_in_milliseconds(text: str, seconds: float) -> None:
    assert options.pause(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["0", "0ms", "-1", "soon"])
def test_a_wrong_pause_is_told_as_it_was_typed(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=rf"'{text}' \(use 50, 50ms or 1s\)"):
        options.pause(text)


@pytest.mark.parametrize(("text", "share"), [("5", 0.05), ("0.5%", 0.005), ("100%", 1)])
def test_a_percentage_is_a_share(text: str, share: float) -> None:
    assert options.percent(text) == pytest.approx(share)


@pytest.mark.parametrize(
    ("text", "size"),
    [("8M", 8 << 20), ("512K", 512 << 10), ("1g", 1 << 30), ("4096", 4096), ("64KiB", 64 << 10)],
)
def test_a_size_has_a_unit_or_is_in_bytes(text: str, size: int) -> None:
    assert options.size(text) == size


@pytest.mark.parametrize(
    ("text", "size"), [("8M", 8 << 20), ("5M", 8 << 20), ("65537", 1 << 17), ("64K", 1 << 16)]
)
def test_a_ring_is_rounded_up_to_a_power_of_two(text: str, size: int) -> None:
    assert options.ring_size(text) == size


@pytest.mark.parametrize(("text", "mib"), [("512M", 512), ("2G", 2048), ("768", 768)])
def test_memory_is_in_mib_unless_it_has_a_unit(text: str, mib: int) -> None:
    assert options.memory_mib(text) == mib


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (options.duration, "soon"),
        (options.duration, "-1s"),
        (options.duration, "1s2"),
        (options.pause, "soon"),
        (options.pause, "0"),
        (options.percent, "0"),
        (options.percent, "101"),
        (options.percent, "-5"),
        (options.size, "8X"),
        (options.size, ""),
        (options.ring_size, "1K"),
        (options.ring_size, "2G"),
        (options.count, "0"),
        (options.count, "-3"),
        (options.count, "\u0661"),
        (options.guest_file, "relative=/x"),
        (options.guest_file, "/x"),
        (options.guest_file, "/x="),
    ],
)
def test_a_wrong_value_is_refused(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(ArgumentTypeError):
        parse(text)


def test_a_guest_file_may_have_an_equals_sign_in_its_name_here() -> None:
    assert options.guest_file("/bin/a=out/b=c") == ("/bin/a", Path("out/b=c"))


def test_a_way_to_probe_returns_can_be_forced() -> None:
    parser = ArgumentParser()
    options.add_returns(parser)

    assert options.return_method(parser.parse_args([])) is None
    assert options.return_method(parser.parse_args(["--returns", "tail"])) is ReturnMethod.TAIL


def test_guests_of_known_architectures_can_be_booted() -> None:
    assert options.arch("arm64") == "arm64"
    with pytest.raises(ArgumentTypeError, match="must be amd64 or arm64"):
        options.arch("mips")
