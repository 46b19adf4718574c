import pytest

from kprobes.model.definition import Span, TypeWord
from tests.build.definitions import Wrong, caret_of, read


def test_an_argument_knows_where_its_parts_are() -> None:
    (arg,) = read("p vfs_read path=+0($arg2):ustring").args

    assert (arg.name, arg.type, arg.text) == ("path", "ustring", "+0($arg2):ustring")
    assert (arg.span, arg.body, arg.type_span) == (Span(11, 33), Span(16, 25), Span(26, 33))


def test_an_argument_without_type_has_an_empty_type_at_its_end() -> None:
    (arg,) = read("p vfs_read %di").args

    assert (arg.name, arg.type, arg.text) == ("arg1", "", "%di")
    assert (arg.span, arg.body, arg.type_span) == (Span(11, 14), Span(11, 14), Span(14, 14))


def test_there_may_be_128_arguments() -> None:
    assert len(read("p vfs_read" + " %di" * 128).args) == 128

    marked = "p vfs_read ^%zz" + " %di" * 128
    assert caret_of(Wrong(marked, "TOO_MANY_ARGS")) == ("TOO_MANY_ARGS", marked)


def test_a_body_may_have_255_characters() -> None:
    assert read(f"p vfs_read \\{'1'.zfill(254)}").args[0].name == "arg1"

    marked = f"p vfs_read a=^\\{'1'.zfill(255)}"
    assert caret_of(Wrong(marked, "ARG_TOO_LONG")) == ("ARG_TOO_LONG", marked)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("%di $comm a=%si", ["arg1", "arg2", "a"]),
        ("file count:u32 file2=file", ["file", "count", "file2"]),
        ("file->f_mode +0(file)", ["arg1", "arg2"]),
        ("file:%pD", ["arg1"]),
        ("$arg* %di", ["", "arg2"]),
        ("$arg* arg3=%di %si", ["", "arg3", "arg3"]),
    ],
)
def test_arguments_have_the_kernels_names(text: str, names: list[str]) -> None:
    assert [arg.name for arg in read(f"p vfs_read {text}").args] == names


def test_an_argument_knows_whether_it_was_named() -> None:
    assert [arg.is_named for arg in read("p vfs_read a=%di file").args] == [True, False]


def test_a_path_is_read_from_its_dentry_or_file() -> None:
    (arg,) = read("p vfs_read a=+8(%di):%pD").args

    assert (arg.type, arg.text) == ("%pD", "+8(%di):%pD")
    assert arg.spec == TypeWord(base="pD", size=4)
    assert (arg.body, arg.type_span) == (Span(13, 20), Span(21, 24))


def test_a_path_is_as_long_as_what_the_kernel_makes_of_it() -> None:
    assert read(f"p vfs_read \\{'1'.zfill(234)}:%pd").args[0].type == "%pd"

    marked = f"p vfs_read ^\\{'1'.zfill(235)}:%pd"
    assert caret_of(Wrong(marked, "ARG_TOO_LONG")) == ("ARG_TOO_LONG", marked)


def test_fields_have_3072_bytes() -> None:
    big = " +0(%di):x64[64]" * 5
    assert len(read(f"p vfs_read{big} +0(%di):x64[62] %di:u64 $comm a=file").args) == 9

    for marked in (
        f"p vfs_read{big} +0(%di):x64[63] %di:u64 a=^%si:string",
        f"p vfs_read{big} +0(%di):x64[63] %di:u32 a=+0(^%si):u64",
        f"p vfs_read{big} +0(%di):x64[63] %di:u64 a=^%si:%pd",
    ):
        assert caret_of(Wrong(marked, "EVENT_TOO_BIG")) == ("EVENT_TOO_BIG", marked)


@pytest.mark.parametrize(
    ("marked", "code"),
    [
        ("p vfs_read a=^", "NO_ARG_BODY"),
        ("p vfs_read a=^ b=", "NO_ARG_BODY"),
        ("p vfs_read ^:u8", "BAD_FETCH_ARG"),
        ("p vfs_read a=^:u8", "BAD_FETCH_ARG"),
        ("p vfs_read a=%zz:^u9", "BAD_TYPE"),
        ("p vfs_read $retval:^u9", "BAD_TYPE"),
        ("p vfs_read a=^%zz:string", "BAD_REG_NAME"),
        ("p vfs_read a=%di:^u9 %zz", "BAD_TYPE"),
        ("p vfs_read ^:%pd", "BAD_FETCH_ARG"),
        ("p vfs_read a=^%zz:%pD", "BAD_REG_NAME"),
        ("p vfs_read a:^b:%pd", "BAD_TYPE"),
        ("p vfs_read a=^$comm:%pd", "COMM_CANT_DEREF"),
        ('p vfs_read a=^\\"x":%pD', "COMM_CANT_DEREF"),
        ("p vfs_read %zz ^$argx", "BAD_VAR"),
    ],
)
def test_parts_are_checked_in_the_kernels_order(marked: str, code: str) -> None:
    assert caret_of(Wrong(marked, code)) == (code, marked)
