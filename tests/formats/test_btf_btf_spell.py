"""Types as C writes them."""

from collections.abc import Callable

import pytest

from kprobes.errors import FormatError
from kprobes.formats import btf_index
from kprobes.formats.btf import Btf, parameter_types, type_name
from kprobes.formats.btf_index import Kind
from tests.build.btf import BtfBuilder


def types(builder: BtfBuilder) -> Btf:
    return Btf(btf_index.parse(builder.build()))


def shaped(b: BtfBuilder, number: int, words: str) -> int:
    # "ptr const" is a pointer to a constant: the last word is nearest to the type.
    make: dict[str, Callable[[int], int]] = {
        "ptr": b.ptr,
        "const": b.const,
        "volatile": lambda of: b.add(Kind.VOLATILE, value=of),
        "user": lambda of: b.add(Kind.TYPE_TAG, "user", of),
        "array": lambda of: b.array(of, 4),
        "loff_t": lambda of: b.typedef("loff_t", of),
        "function": lambda of: b.proto(of, [("", b.ptr(0)), ("n", of), ("", 0)]),
    }
    for word in reversed(words.split()):
        number = make[word](number)
    return number


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("", "int"),
        ("ptr", "int *"),
        ("ptr ptr", "int **"),
        ("ptr const", "const int *"),
        ("const ptr", "int *const"),
        ("ptr const ptr", "int *const *"),
        ("volatile", "volatile int"),
        ("ptr user", "int *"),
        ("array", "int[4]"),
        ("array ptr", "int *[4]"),
        ("ptr array", "int (*)[4]"),
        ("array array", "int[4][4]"),
        ("loff_t", "loff_t"),
        ("ptr loff_t", "loff_t *"),
        ("ptr function", "int (*)(void *, int, ...)"),
        ("ptr ptr function", "int (**)(void *, int, ...)"),
        ("array ptr function", "int (*[4])(void *, int, ...)"),
    ],
)
def test_a_type_is_spelled_as_in_c(words: str, text: str) -> None:
    b = BtfBuilder()
    number = shaped(b, b.int_("int", 4), words)

    assert type_name(types(b), number) == text


def test_aggregates_are_spelled_with_their_keyword() -> None:
    b = BtfBuilder()
    numbers = [
        b.ptr(b.struct("file", 0, [])),
        b.ptr(b.union("", 0, [])),
        b.ptr(b.add(Kind.FWD, "hidden")),
        b.enum("pid_type", {}),
        b.add(Kind.FWD, "either", info=1 << 31),
        0,
    ]

    assert [type_name(types(b), number) for number in numbers] == [
        "struct file *",
        "union {...} *",
        "struct hidden *",
        "enum pid_type",
        "union either",
        "void",
    ]


def test_a_function_pointers_own_function_pointers_are_cut_short() -> None:
    b = BtfBuilder()
    int_ = b.int_("int", 4)
    inner = b.ptr(b.proto(0, [("", int_)]))
    outer = b.ptr(b.proto(int_, [("", inner)]))
    nothing = b.ptr(b.proto(0, []))

    assert type_name(types(b), outer) == "int (*)(void (*)(...))"
    assert type_name(types(b), nothing) == "void (*)(void)"


def test_a_pointer_to_itself_is_a_format_error() -> None:
    b = BtfBuilder()
    b.ptr(1)

    with pytest.raises(FormatError, match="refers to itself"):
        type_name(types(b), 1)


def test_more_parameters_than_any_function_has_are_a_format_error() -> None:
    b = BtfBuilder()
    proto = b.proto(0, [("x", b.int_("int", 4))] * 100)
    found = types(b)

    with pytest.raises(FormatError, match="100 parameters"):
        parameter_types(found, found.type(proto))
