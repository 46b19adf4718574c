"""The files and make targets that CONTRIBUTING.md and SECURITY.md name."""

import re
from pathlib import Path

import pytest

_TOP = Path(__file__).parents[2]
_FILE = re.compile(r"`([\w/.]+\.(?:py|toml|md|txt))`|\]\(([\w/.]+)\)")
_PLACEHOLDER = re.compile(r"NAME|SUBJECT")
_PLACES = ("src", "tests", "tools", "docs")
_FILES = [
    f"/{path.relative_to(_TOP).as_posix()}"
    for path in (*_TOP.glob("*.*"), *(p for place in _PLACES for p in (_TOP / place).rglob("*.*")))
]


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md"])
def test_every_file_and_target_that_is_named_is_there(name: str) -> None:
    text = (_TOP / name).read_text()
    files = {a or b for a, b in _FILE.findall(text)}
    targets = set(re.findall(r"`make (\w+)`", text))

    named = {each for each in files if not _PLACEHOLDER.search(each)}
    missing = {each for each in named if not any(file.endswith(f"/{each}") for file in _FILES)}
    rules = set(re.findall(r"^(\w+):", (_TOP / "Makefile").read_text(), re.MULTILINE))

    assert named
    assert missing == set()
    assert targets <= rules
