"""Columns and counts in words."""

import io
import sys

import pytest

from kprobes.cli.terminal import aligned, counted, print_bytes, print_message, write_text


def test_columns_begin_below_each_other_and_lines_have_no_blanks_at_their_end() -> None:
    rows = [("a", "long word", ""), ("longer", "b", "c")]

    assert aligned(rows, indent=" ") == " a       long word\n longer  b          c\n"


def test_a_name_is_no_row_of_its_own() -> None:
    assert aligned([("a\nb", "c")]) == "a\\nb  c\n"


def test_rows_may_be_of_different_lengths_or_none() -> None:
    assert aligned([("a",), ("bb", "c")]) == "a\nbb  c\n"
    assert aligned([]) == ""


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
