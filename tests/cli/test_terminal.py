"""Columns and counts in words."""

import io
import sys

import pytest

from kprobes.cli.terminal import (
    aligned,
    counted,
    json_lines,
    print_bytes,
    print_message,
    write_text,
)


def test_columns_begin_below_each_other_and_lines_have_no_blanks_at_their_end() -> None:
    rows = [("a", "long word", ""), ("longer", "b", "c")]

    assert aligned(rows, indent=" ") == " a       long word\n longer  b          c\n"


def test_a_name_is_no_row_of_its_own() -> None:
    assert aligned([("a\nb", "c")]) == "a\\nb  c\n"


def test_rows_may_be_of_different_lengths_or_none() -> None:
    assert aligned([("a",), ("bb", "c")]) == "a\nbb  c\n"
    assert aligned([]) == ""


def test_rows_that_are_too_many_are_counted() -> None:
    rows = [(str(number),) for number in range(1500)]

    assert (
        aligned(rows, indent=" ", most=1, more="{} rows more") == " 0\n ... and 1,499 rows more\n"
    )
    assert aligned(rows[:1], most=1, more="{} rows more") == "0\n"


def test_json_is_one_line_for_each_value() -> None:
    assert json_lines([{"a": "1\n2"}, None]) == '{"a": "1\\n2"}\nnull\n'


class Screen(io.TextIOWrapper):
    """Standard error that people see."""

    def isatty(self) -> bool:
        return True


class Terminal(io.BytesIO):
    """Standard output that people see."""

    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_guests_words_move_no_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    said, shown = io.BytesIO(), Terminal()
    monkeypatch.setattr(sys, "stderr", Screen(said))

    print_message("6.1\x1b]0;x\x07\nnext")
    print_bytes(b"out\r\xff\n")
    write_text(shown, "\x1bc\tname\n")

    assert said.getvalue() == b"6.1\\x1b]0;x\\x07\nnext\nout\\r\\xff\n"
    assert shown.getvalue() == b"\\x1bc\tname\n"


def test_elsewhere_they_are_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    said, shown = io.BytesIO(), io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(said))

    print_message("6.1\x1b]0;x")
    print_bytes(b"out\r\xff\n")
    write_text(shown, "\x1bc\udcff\n")

    assert said.getvalue() == b"6.1\x1b]0;x\nout\r\xff\n"
    assert shown.getvalue() == b"\x1bc\xff\n"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 events"), (1, "1 event"), (1234567, "1,234,567 events")]
)
def test_a_count_is_one_or_many(count: int, text: str) -> None:
    assert counted(count, "event") == text
