"""Lines that C makes of columns are those that Python's own %-format makes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kprobes.native.lines import Cells, Packed, Texts, as_list, formatted, in_order, listed
from tests.build.native import count_as_few, count_as_many

_TYPES = ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8")
_CONVERSIONS = ("d", "x", "5d", "06d", "016x", "3x", "08x", "#x", "-7d", "+d", ".5d", "X", "o")
_TEXTS = st.lists(st.binary(max_size=20), min_size=1, max_size=8)


@pytest.fixture(autouse=True)
def _many(monkeypatch: pytest.MonkeyPatch) -> None:
    count_as_many(monkeypatch)


def by_c(form: bytes, columns: Sequence[Cells], rows: int) -> list[bytes]:
    lines = formatted(form, columns, rows)
    assert isinstance(lines, Packed)
    assert len(lines) == rows
    return as_list(lines)


def numbers_of(type_: str) -> NDArray[Any]:
    low, high = np.iinfo(type_).min, np.iinfo(type_).max
    rng = np.random.default_rng(7)
    drawn = rng.integers(low, high, 200, dtype=type_, endpoint=True)
    small = np.array([0, 1, 9, 10, 15, 16, 99, 100, 127, low, high, high - 1], type_)
    return np.concatenate([small, drawn, drawn >> np.array(4, type_)])


@pytest.mark.parametrize("type_", _TYPES)
@pytest.mark.parametrize("conversion", _CONVERSIONS)
def test_numbers(type_: str, conversion: str) -> None:
    numbers, form = numbers_of(type_), f"100%% <%{conversion}>\n".encode()

    assert by_c(form, [numbers], len(numbers)) == listed(form, [numbers], len(numbers))


def test_numbers_of_records_are_wherever_they_stand() -> None:
    rows = np.zeros(50, np.dtype([("a", "u1"), ("b", "<i4"), ("c", "<u2", (3,))]))
    rows["b"], rows["c"] = np.arange(50) - 25, np.arange(150).reshape(50, 3)
    columns = [rows["b"], rows["c"][:, 2], np.broadcast_to(np.int32(-7), 50), rows["b"][::-1]]

    found = by_c(b"%d %d %d %d\n", columns, 50)

    assert found == listed(b"%d %d %d %d\n", columns, 50)
    assert found[1] == b"-24 5 -7 23\n"


@given(texts=_TEXTS, data=st.data())
def test_texts_of_rows_and_of_codes(texts: list[bytes], data: st.DataObject) -> None:
    codes = data.draw(st.lists(st.integers(0, len(texts) - 1), max_size=40))
    column = Texts(codes=np.array(codes, np.int32), table=texts)
    columns, rows = [column, column.tolist(), column], len(codes)

    # A width is left to Python.
    assert by_c(b"%b|%b|%12b\n", columns, rows) == listed(b"%b|%b|%12b\n", columns, rows)


def test_whatever_else_a_column_has_is_left_to_python() -> None:
    columns = [[1, None, b"x"], np.array([True, False, True]), [1 << 70, -(1 << 70), 0]]

    found = by_c(b"%r %d %d\n", columns, 3)

    assert found == listed(b"%r %d %d\n", columns, 3)


def test_a_width_of_each_row_is_left_to_python() -> None:
    columns = [np.array([3, 5]), np.array([1, 2])]

    assert formatted(b"%*d\n", columns, 2) == [b"  1\n", b"    2\n"]


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_lines_without_columns_and_columns_without_rows(rows: int) -> None:
    assert by_c(b"same\n", [], rows) == [b"same\n"] * rows
    assert by_c(b"", [], rows) == [b""] * rows
    assert by_c(b"%d\n", [np.arange(rows)], rows) == [b"%d\n" % n for n in range(rows)]


def test_a_column_too_few_or_too_many_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        formatted(b"%d %d\n", [np.arange(2)], 2)
    with pytest.raises(ValueError, match="zip"):
        formatted(b"%d\n", [np.arange(2), np.arange(2)], 2)
    with pytest.raises(ValueError, match="rows"):
        formatted(b"%d\n", [np.arange(1)], 2)


@given(data=st.data())
def test_lines_of_several_are_put_into_an_order(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=4))
    which = data.draw(st.permutations([n for n, count in enumerate(counts) for _ in range(count)]))
    made = [formatted(f"{n}:%d\n".encode(), [np.arange(c)], c) for n, c in enumerate(counts)]
    order, taken = np.array(which, np.uint16), [0] * len(counts)
    expected = b""
    for n in which:
        expected += b"%d:%d\n" % (n, taken[n])
        taken[n] += 1

    assert b"".join(in_order(made, order)) == expected
    assert b"".join(in_order([as_list(made[0]), *made[1:]], order)) == expected


def test_few_are_made_by_python_and_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    count_as_few(monkeypatch)

    assert formatted(b"%d\n", [np.arange(3)], 3) == [b"0\n", b"1\n", b"2\n"]
