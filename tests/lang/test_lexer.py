import pytest

from kprobes.errors import DefinitionError
from kprobes.lang.lexer import lines_of, lines_of_boot


def test_words_are_joined_by_single_blanks_and_keep_their_columns() -> None:
    (found,) = lines_of(" p\t\tvfs_read \v a=%di\r")

    assert found.command == "p vfs_read a=%di"
    assert [(word.start, word.text) for word in found.words] == [
        (0, "p"),
        (2, "vfs_read"),
        (11, "a=%di"),
    ]


def test_a_hash_starts_a_comment_also_inside_a_word() -> None:
    (found,) = lines_of("p vfs_read %d#i")

    assert found.command == "p vfs_read %d"


def test_statements_know_their_lines() -> None:
    found = lines_of("# p a\n\np b\n   \np c")

    assert [(s.number, s.command) for s in found] == [(3, "p b"), (5, "p c")]


@pytest.mark.parametrize("blank", ["\x1c", "\x85", "\u2003", "\u00a0"])
def test_only_ascii_blanks_split_words(blank: str) -> None:
    (found,) = lines_of(f"p a{blank}b")

    assert len(found.words) == 2


def test_a_line_may_have_4093_characters() -> None:
    line = "p vfs_read".ljust(4093)

    assert lines_of(line)[0].command == "p vfs_read"
    with pytest.raises(DefinitionError) as caught:
        lines_of(f"{line} ")
    assert caught.value.code == "LINE_TOO_LONG"


@pytest.mark.parametrize(
    "text", ["p:x,f,%di;r:y,g#", 'kprobe_event="p:x,f,%di;r:y,g#"', "p:x f %di;;r:y,g#"]
)
def test_the_boot_parameter_has_commas_for_blanks_and_no_comments(text: str) -> None:
    found = lines_of_boot(text)

    assert [line.command for line in found] == ["p:x f %di", "r:y g#"]
