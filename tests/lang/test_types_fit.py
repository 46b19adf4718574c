import pytest

from tests.build.definitions import Wrong, argument, caret_of


def nested(levels: int, base: str = "%di") -> str:
    return "+0(" * levels + base + ")" * levels


@pytest.mark.parametrize(
    "text",
    ["@jiffies:string", "@0:ustring", "+u0(%di):string", "\\5:string", "\\5:ustring"],
)
def test_strings_are_read_from_memory(text: str) -> None:
    assert argument(text).type.endswith("string")


@pytest.mark.parametrize(
    "text", ["buf:string", "$arg2:string", "f->name:string[2]", "$arg2:ustring[4]"]
)
def test_only_the_kernels_types_know_whether_an_argument_is_a_string(text: str) -> None:
    assert argument(text).text == text


@pytest.mark.parametrize(
    "text",
    [
        "+0(%di):u8[4]",
        "@jiffies:x64[64]",
        "+0(%di):b4@2/8[4]",
        "+u0(%di):string[2]",
        "f->m:u8[2]",
        "this_cpu_read(@x):u8[2]",
    ],
)
def test_arrays_are_read_from_memory(text: str) -> None:
    assert argument(text).text == text


@pytest.mark.parametrize(
    ("head", "text"),
    [
        ("p f", "%di:symstr"),
        ("p f", "$stack1:symstr"),
        ("p f", "+0(%di):symstr"),
        ("p f", "@jiffies:symstr"),
        ("p f", "$arg1:symstr"),
        ("p f", "file:symstr"),
        ("p f", "file->f_op:symstr"),
        ("r f", "$retval:symstr"),
    ],
)
def test_symbols_are_named_for_values_of_kernel_code(head: str, text: str) -> None:
    assert argument(text, head=head).type == "symstr"


@pytest.mark.parametrize(
    ("marked", "code"),
    [
        ("p vfs_read %di:^string", "BAD_STRING"),
        ("p vfs_read a=$arg1:^ustring", "BAD_STRING"),
        ("p vfs_read $stack:^string", "BAD_STRING"),
        ("p vfs_read $stack0:^string", "BAD_STRING"),
        ("p vfs_read %di:^u8[4]", "BAD_STRING"),
        ("p vfs_read file:^u8[4]", "BAD_STRING"),
        ("p vfs_read %di:^string[4]", "BAD_STRING"),
        ("p vfs_read ^$current:string", "BAD_TYPE4STR"),
        ("p vfs_read $stack:^symstr", "BAD_SYMSTRING"),
        ("p vfs_read \\5:^symstr", "BAD_SYMSTRING"),
        ("r vfs_read $arg1:^symstr", "BAD_SYMSTRING"),
        ("r vfs_read file:^symstr", "BAD_SYMSTRING"),
        ("p vfs_read %di:^b8@1/8", "BAD_BITFIELD"),
        ("p vfs_read %di:^b0@1/8", "BAD_BITFIELD"),
        ("p vfs_read %di:^b@1/8", "BAD_BITFIELD"),
        ("p vfs_read %di:^b4@/8", "BAD_BITFIELD"),
        ("p vfs_read %di:^b4/8", "BAD_BITFIELD"),
        ("p vfs_read %di:^b08@1/8", "BAD_BITFIELD"),
        ("p vfs_read %di:^b-1@0/8", "BAD_BITFIELD"),
        ("p vfs_read %di:^b18446744073709551615@2/8", "BAD_BITFIELD"),
    ],
)
def test_the_caret_marks_the_type_that_does_not_fit(marked: str, code: str) -> None:
    assert caret_of(Wrong(marked, code)) == (code, marked)


@pytest.mark.parametrize(
    ("marked", "code"),
    [
        ("p vfs_read +u0(%di):u8[^4]", "BAD_STRING"),
        ("p vfs_read +u0(+8(%di)):u16^[4]", "BAD_STRING"),
        ("p vfs_read +0(%di):sym^str[4]", "BAD_STRING"),
        ("p vfs_read this_cpu_ptr(%di):string       ^", "BAD_STRING"),
        ("p vfs_read a=+u0(+8(%di)):sym^str", "BAD_SYMSTRING"),
        ("p vfs_read +0(+8(%di)):b9@^0/8", "BAD_BITFIELD"),
    ],
)
def test_after_braces_the_caret_stands_where_the_kernel_miscounts_it(
    marked: str, code: str
) -> None:
    assert caret_of(Wrong(marked, code)) == (code, marked)


@pytest.mark.parametrize(
    ("levels", "word"),
    [(14, "u8"), (14, "string"), (13, "symstr"), (13, "b1@0/8"), (13, "u8[2]"), (12, "string[2]")],
)
def test_a_type_takes_steps_of_the_kernels_program(levels: int, word: str) -> None:
    assert argument(f"{nested(levels)}:{word}").type == word


@pytest.mark.parametrize(
    ("marked", "code"),
    [
        (f"p f +0(^{nested(13)}):symstr", "TOO_MANY_OPS"),
        (f"p f +0(^{nested(13)}):u8[2]", "TOO_MANY_OPS"),
        (f"p f +0(^{nested(12)}):b1@0/8[2]", "TOO_MANY_OPS"),
        (f"p f +0({nested(13)}):b1@^0/8", "BAD_BITFIELD"),
    ],
)
def test_a_type_may_be_a_step_too_many(marked: str, code: str) -> None:
    assert caret_of(Wrong(marked, code)) == (code, marked)
