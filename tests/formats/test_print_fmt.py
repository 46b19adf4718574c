"""Print fmts: where the format ends, its conversions, and what is refused."""

import pytest

from kprobes.errors import FormatError
from kprobes.formats.print_c import Integer, PrintType, RecordField, UnknownPrint
from kprobes.formats.print_fmt import Conversion, PrintFmt, parse_print
from tests.build.tracepoints import EVENTS

A = RecordField(name="a")
THREE = Integer(value=3, type=PrintType(bits=32, is_signed=True))


def conversion(
    text: str,
    letter: str,
    *,
    flags: str = "",
    width: int | Integer | None = None,
    precision: int | Integer | None = None,
    bits: int = 32,
    suffix: str = "",
) -> Conversion:
    return Conversion(
        text=text,
        flags=flags,
        width=width,
        precision=precision,
        bits=bits,
        letter=letter,
        suffix=suffix,
        value=A,
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("%d", conversion("%d", "d")),
        ("%-08.3llx", conversion("%-08.3llx", "x", flags="-0", width=8, precision=3, bits=64)),
        ("%hhu", conversion("%hhu", "u", bits=8)),
        ("%hi", conversion("%hi", "i", bits=16)),
        ("%zu", conversion("%zu", "u", bits=64)),
        ("%.s", conversion("%.s", "s", precision=0)),
        ("%pISpc", conversion("%pISpc", "p", suffix="ISpc")),
        ("%# +X", conversion("%# +X", "X", flags="# +")),
    ],
)
def test_a_conversion_is_read(text: str, found: Conversion) -> None:
    assert parse_print(f'"a {text} b", REC->a').pieces == (b"a ", found, b" b")


def test_values_of_widths_come_first() -> None:
    found = parse_print('"%*.*s%*ph", 3, 3, REC->a, 3, REC->a').pieces

    assert found == (
        conversion("%*.*s", "s", width=THREE, precision=THREE),
        conversion("%*ph", "p", width=THREE, suffix="h"),
    )


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        ('"x=%d;", REC->a', b"x=", b";"),
        ('"x" "=%d" ";", REC->a', b"x=", b";"),
        (r'"x=\"%d\"\n", REC->a', b'x="', b'"\n'),
        # The kernel writes a format as it is, not as it stands in C.
        ('"x="%d"", REC->a', b'x="', b'"'),
        ('""x", "%d" ", REC->a', b'"x", "', b'" '),
        ('"x=%d\nend", REC->a\n', b"x=", b"\nend"),
        ('"%%%d%%", REC->a', b"%", b"%"),
    ],
)
def test_the_format_ends_where_its_values_begin(text: str, before: bytes, after: bytes) -> None:
    pieces = parse_print(text).pieces

    assert pieces == (before, conversion("%d", "d"), after)


def test_a_format_may_be_all_there_is() -> None:
    assert parse_print('""') == PrintFmt(pieces=())
    assert parse_print('"all"') == PrintFmt(pieces=(b"all",))


@pytest.mark.parametrize("name", EVENTS)
def test_those_of_kernels_are_read(name: str) -> None:
    assert parse_print(EVENTS[name][1]).pieces


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        '"%d"',
        '"%d", ',
        '"", REC->a',
        '"%d %d", REC->a',
        '"%d", REC->a, REC->a',
        '"%*d", 1',
    ],
)
def test_what_does_not_fit_is_an_error(text: str) -> None:
    with pytest.raises(FormatError):
        parse_print(text)


@pytest.mark.parametrize(
    "text",
    [
        '"%n", REC->a',
        '"%5$d", REC->a',
        '"%", REC->a',
        '"%9999d", REC->a',
        '"%.999999999999d", REC->a',
        '"' + "x" * 9000 + '"',
        '"' + "%d" * 65 + '"' + ", REC->a" * 65,
        '"' + "x" * 70000 + '"',
        "cond ? \"%d\" : \"%x\", REC->a",
    ],
)  # fmt: skip
def test_what_is_not_known_or_too_long_is_refused(text: str) -> None:
    with pytest.raises(FormatError):
        parse_print(text)


def test_the_error_is_that_of_the_format_as_c_has_it() -> None:
    with pytest.raises(UnknownPrint, match=r"the function of_my_own\(\)"):
        parse_print('"a=%d", of_my_own(REC->a)')
