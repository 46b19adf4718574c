"""The table for those who know other tools: what it says of kprobe is understood by kprobe."""

import re
import shlex
from pathlib import Path

import pytest

from kprobes.cli.main import make_parsers

_PAGE = Path(__file__).parents[2] / "docs" / "howto" / "other-tools.md"
_ROW = re.compile(r"^\| (.+) \| `kprobe (.+)` \|$", re.MULTILINE)
_LINES = [found[2] for found in _ROW.finditer(_PAGE.read_text())]


@pytest.mark.parametrize("line", _LINES)
def test_every_line_of_ours_is_understood(line: str) -> None:
    words = shlex.split(line.partition(" -- ")[0])

    args = make_parsers()[0].parse_args(words)

    assert args.name == words[0]


def test_every_row_has_all_columns_and_one_line_of_ours() -> None:
    rows = [line for line in _PAGE.read_text().splitlines() if line.startswith("|")][2:]

    assert {row.count("|") for row in rows} == {6}
    assert len(_LINES) == len(rows) - 1 > 20
