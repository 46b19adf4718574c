"""Patterns of filters: what they match, and what is not a pattern in them."""

import re
from fnmatch import fnmatchcase

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprobes.lang.glob import glob, literal, matches


@pytest.mark.parametrize(
    ("pattern", "wanted", "others"),
    [
        (b"", [b""], [b"a"]),
        (b"abc", [b"abc"], [b"", b"ab", b"abcd", b"xabc"]),
        (b"*", [b"", b"a", b"a*b"], []),
        (b"**", [b"", b"ab"], []),
        (b"a*", [b"a", b"abc"], [b"", b"ba"]),
        (b"*a", [b"a", b"bca"], [b"", b"ab"]),
        (b"*b*", [b"b", b"abc"], [b"", b"ac"]),
        (b"a*c", [b"ac", b"abc", b"acc"], [b"a", b"c", b"acb"]),
        (b"ab*ba", [b"abba", b"abxba"], [b"aba", b"ab"]),
        (b"*ab*bc*", [b"abbc", b"xabybcz"], [b"abc", b"bcab"]),
        (b"*b*ab", [b"bab", b"abaab"], [b"aab"]),
        (b"a?c", [b"abc", b"a*c"], [b"ac", b"abbc"]),
        (b"[ab]c", [b"ac", b"bc"], [b"cc", b"[ab]c"]),
        (b"[a-c]", [b"a", b"b", b"c"], [b"d", b"-"]),
        (b"[!a-c]", [b"d", b"!"], [b"a", b"c", b""]),
        (b"[]a]", [b"]", b"a"], [b"[", b"b"]),
        (b"[!]a]", [b"b"], [b"]", b"a"]),
        (b"[a-]", [b"a", b"-"], [b"b"]),
        (b"[c-a]", [], [b"a", b"b", b"c", b"-"]),
        (b"[abc", [b"[abc"], [b"a"]),
        (b"[a-", [b"[a-"], [b"a"]),
        (b"[!", [b"[!"], [b"a"]),
        (b"\\*", [b"*"], [b"a", b"\\*"]),
        (b"\\[a]", [b"[a]"], [b"a"]),
        (b"a\\", [], [b"a", b"a\\"]),
    ],
)
def test_a_pattern_matches_as_in_the_kernel(
    pattern: bytes, wanted: list[bytes], others: list[bytes]
) -> None:
    found = glob(pattern)

    assert [text for text in wanted if not matches(found, text)] == []
    assert [text for text in others if matches(found, text)] == []


@given(st.text("ab*?[]!-", max_size=12), st.text("ab-!]", max_size=12))
def test_a_pattern_without_escapes_is_the_shell_s(pattern: str, text: str) -> None:
    # Of a range that is upside down, and one without an end, the shell thinks otherwise.
    if re.search(r"\[[^\]]*-|--", pattern):
        return

    found = matches(glob(pattern.encode(), has_escapes=False), text.encode())

    assert found == fnmatchcase(text, pattern)


def test_without_escapes_a_backslash_is_a_character() -> None:
    assert matches(glob(b"a\\*", has_escapes=False), b"a\\bc")


@given(st.binary().filter(lambda data: 0 not in data))
def test_a_literal_matches_itself_only(text: bytes) -> None:
    assert matches(literal(text), text)
    assert not matches(literal(text), text + b"x")
    assert not text or not matches(literal(text), text[:-1])
