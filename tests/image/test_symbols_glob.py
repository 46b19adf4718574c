"""Shell patterns over a blob of names."""

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprobes.formats.strtab import Names
from kprobes.image.symbols import to_regex

NAMES = ["vfs_read", "vfs_write", "xfs_read", "a]b", "a-b", "a[b", "^x", "a\\b", "aaaa", ""]


def matched(pattern: str, names: list[str]) -> list[str]:
    blob = b"\0" + b"".join(name.encode() + b"\0" for name in names)
    return [names[i] for i in Names(blob).matching(to_regex(pattern)).tolist()]


@pytest.mark.parametrize(
    "pattern",
    [
        "vfs_*", "*read", "*", "**", "?fs_*d", "[vx]fs_read", "[!v]fs*", "a[]]b", "a[!]]b", "a[-]b",
        "[", "a[b", "a[[]b", "[z-a]*", "[^x]*", "a\\b", "[\\]*", "*a*a*", "vfs_read", "", "v*s*r*d",
        "*x*", "[a-c]*", "a[&&b]*", "[--]*",
    ],
)  # fmt: skip
def test_a_pattern_matches_what_the_shell_would(pattern: str) -> None:
    assert matched(pattern, NAMES) == [n for n in NAMES if fnmatch.fnmatchcase(n, pattern)]


@given(st.text("ab*?[]!-^\\", max_size=8), st.lists(st.text("ab-]^!\\", max_size=5), max_size=8))
def test_any_pattern_matches_what_the_shell_would(pattern: str, names: list[str]) -> None:
    assert matched(pattern, names) == [n for n in names if fnmatch.fnmatchcase(n, pattern)]


def test_many_stars_do_not_take_for_ever() -> None:
    assert matched("*a" * 30 + "b", ["a" * 500] * 20) == []
