"""Characters that a terminal would act on, written out."""

import pytest

from kprobes.model.visible import visible, visible_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain \u00e9\u4e2d", "plain \u00e9\u4e2d"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("a\rb\x7f\x9bm", r"a\rb\x7f\x9bm"),
        ("left\u202eright", r"left\u202eright"),
        ("not UTF-8: \udc9b", r"not UTF-8: \x9b"),
        ("a\nb", r"a\nb"),
    ],
)
def test_only_pictures_are_left(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_what_is_kept_stays() -> None:
    assert visible("a\n\tb\x1b", keep="\n\t") == "a\n\tb\\x1b"


def test_a_line_has_one_end() -> None:
    assert visible_line(b'x="a\n\xff\x1b[2J"\n') == b'x="a\\n\\xff\\x1b[2J"\n'
