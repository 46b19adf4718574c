import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprobes.lang.lexer import read_decimal, read_signed, read_unsigned


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("00", 0),
        ("10", 10),
        ("+3", 3),
        ("010", 8),
        ("0x1F", 31),
        ("0XfF", 255),
        ("18446744073709551615", 2**64 - 1),
        ("0x0000000000000000000000000000000001", 1),
    ],
)
def test_unsigned_numbers(text: str, value: int) -> None:
    assert read_unsigned(text) == value


@pytest.mark.parametrize(
    "text",
    ["", "+", "-1", "++3", "08", "0x", "0xg", "1_0", " 1", "1 ", "٣", "18446744073709551616"],
)
def test_these_are_no_unsigned_numbers(text: str) -> None:
    assert read_unsigned(text) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("-1", -1),
        ("+3", 3),
        ("-0x10", -16),
        ("9223372036854775807", 2**63 - 1),
        ("-9223372036854775808", -(2**63)),
    ],
)
def test_signed_numbers(text: str, value: int) -> None:
    assert read_signed(text) == value


@pytest.mark.parametrize(
    "text", ["", "-", "-+3", "+-3", "--3", "9223372036854775808", "-9223372036854775809"]
)
def test_these_are_no_signed_numbers(text: str) -> None:
    assert read_signed(text) is None


def test_decimal_numbers_may_begin_with_zeros() -> None:
    assert read_decimal("08") == 8


@pytest.mark.parametrize("text", ["", "+3", "0x3", "5x", "18446744073709551616"])
def test_these_are_no_decimal_numbers(text: str) -> None:
    assert read_decimal(text) is None


def test_thousands_of_digits_are_only_too_big() -> None:
    assert read_unsigned("9" * 5000) is None


@given(st.integers(0, 2**64 - 1))
def test_every_number_is_read_in_every_base(value: int) -> None:
    texts = (str(value), hex(value), f"0{value:o}")

    assert {read_unsigned(text) for text in texts} == {value}
