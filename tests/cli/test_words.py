"""Columns and counts in words."""

import pytest

from kprobes.cli.words import aligned, counted


def test_columns_begin_below_each_other_and_lines_have_no_blanks_at_their_end() -> None:
    rows = [("a", "long word", ""), ("longer", "b", "c")]

    assert aligned(rows, indent=" ") == " a       long word\n longer  b          c\n"


def test_rows_may_be_of_different_lengths_or_none() -> None:
    assert aligned([("a",), ("bb", "c")]) == "a\nbb  c\n"
    assert aligned([]) == ""


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 events"), (1, "1 event"), (1234567, "1,234,567 events")]
)
def test_a_count_is_one_or_many(count: int, text: str) -> None:
    assert counted(count, "event") == text
