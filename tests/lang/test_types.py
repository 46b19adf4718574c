import pytest

from kprobes.lang.types import TYPES
from kprobes.model.definition import TypeWord
from tests.build.definitions import Wrong, argument, caret_of


@pytest.mark.parametrize("word", TYPES)
def test_memory_may_have_every_type(word: str) -> None:
    arg = argument(f"+8(%di):{word}")

    assert arg.type == word
    assert arg.spec is not None
    assert arg.spec.base == word.removeprefix("%")


@pytest.mark.parametrize(
    ("word", "spec"),
    [
        ("u8", TypeWord(base="u8", size=1)),
        ("s64", TypeWord(base="s64", size=8)),
        ("char", TypeWord(base="char", size=1)),
        ("symbol", TypeWord(base="symbol", size=8)),
        ("symstr", TypeWord(base="symstr", size=4)),
        ("%pD", TypeWord(base="pD", size=4)),
        ("u16[3]", TypeWord(base="u16", size=2, count=3)),
        ("u16[0x40]", TypeWord(base="u16", size=2, count=64)),
        ("string[+2]", TypeWord(base="string", size=4, count=2)),
        ("b4@2/8", TypeWord(base="bits", size=1, bit_width=4, bit_offset=2)),
        ("b64@0/64", TypeWord(base="bits", size=8, bit_width=64)),
        ("b010@0x1/+16", TypeWord(base="bits", size=2, bit_width=8, bit_offset=1)),
        ("b1@7/8[4]", TypeWord(base="bits", size=1, count=4, bit_width=1, bit_offset=7)),
    ],
)
def test_a_type_word_is_read(word: str, spec: TypeWord) -> None:
    assert argument(f"+8(%di):{word}").spec == spec


def test_an_argument_without_type_has_no_spec() -> None:
    assert argument("%di").spec is None


@pytest.mark.parametrize("text", ["$comm", "$comm:string", "$COMM:string", '\\"a":string'])
def test_comm_and_immediate_strings_are_strings(text: str) -> None:
    assert argument(text).text == text


@pytest.mark.parametrize(
    ("marked", "code"),
    [
        ("p vfs_read %di:^", "BAD_TYPE"),
        ("p vfs_read a=%di:^u9", "BAD_TYPE"),
        ("p vfs_read %di:^U8", "BAD_TYPE"),
        ("p vfs_read %di:^u8x", "BAD_TYPE"),
        ("p vfs_read %di:^u8:u8", "BAD_TYPE"),
        ("p vfs_read +8(%di:^u8)", "BAD_TYPE"),
        ("p vfs_read %di:^b1@0", "BAD_TYPE"),
        ("p vfs_read %di:^b1@0/9", "BAD_TYPE"),
        ("p vfs_read %di:^b1@0/8x", "BAD_TYPE"),
        ("p vfs_read %di:^bits", "BAD_TYPE"),
        ("p vfs_read %di:^%pf", "BAD_TYPE"),
        ("p vfs_read %di:^%pd[2]", "BAD_TYPE"),
        ("p vfs_read +0(%di):^[4]", "BAD_TYPE"),
        ("p vfs_read $comm:^u8", "NEED_STRING_TYPE"),
        ("p vfs_read $COMM:^ustring", "NEED_STRING_TYPE"),
        ("p vfs_read $comm:^", "NEED_STRING_TYPE"),
        ("p vfs_read $comm:^string[4]", "NEED_STRING_TYPE"),
        ('p vfs_read \\"a":^u8', "NEED_STRING_TYPE"),
        ('p vfs_read \\"a:^b"', "NEED_STRING_TYPE"),
        ("p vfs_read +0(%di):u8[^", "ARRAY_NO_CLOSE"),
        ("p vfs_read +0(%di):zz[4^", "ARRAY_NO_CLOSE"),
        ("p vfs_read +0(%di):u8[4]^x", "BAD_ARRAY_SUFFIX"),
        ("p vfs_read +0(%di):u8[4]^[4]", "BAD_ARRAY_SUFFIX"),
        ("p vfs_read +0(%di):u8[^]", "BAD_ARRAY_NUM"),
        ("p vfs_read +0(%di):u8[^0]", "BAD_ARRAY_NUM"),
        ("p vfs_read +0(%di):u8[^x]", "BAD_ARRAY_NUM"),
        ("p vfs_read +0(%di):u8[^-4]", "BAD_ARRAY_NUM"),
        ("p vfs_read +0(%di):u8[^[4]", "BAD_ARRAY_NUM"),
        ("p vfs_read +0(%di):u8[^4294967296]", "BAD_ARRAY_NUM"),
        ("p vfs_read +0(%di):u8[^65]", "ARRAY_TOO_BIG"),
        ("p vfs_read +0(%zz):u8[^4294967295]", "ARRAY_TOO_BIG"),
    ],
)
def test_the_caret_marks_the_wrong_type(marked: str, code: str) -> None:
    assert caret_of(Wrong(marked, code)) == (code, marked)
