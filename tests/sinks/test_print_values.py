"""Arrays, strings, names and functions of print fmts, as the kernel's trace_output.c has them."""

import numpy as np
import pytest

from kprobes.sinks.print_fmt import PrintedEvent
from tests.build.printed import NAMES as NAMES_OF_KERNEL
from tests.build.printed import lines_of, of_values
from tests.build.tracepoints import batch_of, layout_of

BYTES = "__data_loc u8[] a"
NAMES = '{ 1, "A" }, { 6, "BC" }, { 4, "C" }'


def unknown(
    text: str, fields: str = "u32 a; u32 list[4]; char name[8]; __data_loc u8[] raw"
) -> str:
    return PrintedEvent(layout_of(fields, text)).unknown


def test_flags_are_taken_one_after_the_other_and_the_rest_is_a_number() -> None:
    flags = f'"%s", __print_flags(REC->a, "|", {NAMES})'

    shown = of_values(flags, "u32 a", np.array([0, 1, 4, 6, 7, 2, 0x11, 0x80000000]))

    assert shown == [b"", b"A", b"C", b"BC", b"A|BC", b"0x2", b"A|0x10", b"0x80000000"]


def test_a_symbol_is_the_first_of_its_number_or_the_number() -> None:
    symbols = '"%s", __print_symbolic(REC->a, { 1, "A" }, { 1, "B" }, { 2, "" })'

    assert of_values(symbols, "u64 a", np.array([1, 2, 9])) == [b"A", b"0x2", b"0x9"]


@pytest.mark.parametrize(
    ("text", "declared", "value", "shown"),
    [
        ("__print_hex(__get_dynamic_array(a), 3)", BYTES, b"\1\xab\3\4", "01 ab 03"),
        ("__print_hex_str(__get_dynamic_array(a), __get_dynamic_array_len(a))", BYTES,
         b"\1\xab", "01ab"),
        ("__print_hex(__get_dynamic_array(a), -1)", BYTES, b"\1", ""),
        ("__print_array(__get_dynamic_array(a), 2, 2)", BYTES, b"\1\0\2\1", "{0x1,0x102}"),
        ("__print_array(__get_dynamic_array(a), 9, 8)", BYTES, b"\1" + bytes(7), "{0x1}"),
        ("__print_dynamic_array(a, sizeof(u32))", BYTES, b"\1\0\0\0\2\0\0\0", "{0x1,0x2}"),
        ("__get_bitmask(a)", "__data_loc unsigned long[] a", b"\x0f" + bytes(7),
         "00000000,0000000f"),
        ('REC->a ? "yes" : "no"', "u8 a", 3, "yes"),
        ('REC->a ? "yes" : ((void *)0)', "u8 a", 0, "(null)"),
        ('1 ? "yes" : "no"', "u8 a", 0, "yes"),
        ('__get_str(a)[0] ? __get_str(a) : "none"', "__data_loc char[] a", b"", "none"),
        ("REC->a", "char a[4]", None, "(null)"),
    ],
)  # fmt: skip
def test_a_string_is_made_of_what_the_record_has(
    text: str, declared: str, value: int | bytes | None, shown: str
) -> None:
    column = np.array([value], None if isinstance(value, int) else object)

    assert of_values(f'"%s", {text}', declared, column) == [shown.encode()]


@pytest.mark.parametrize(
    ("text", "declared", "value", "number"),
    [
        ("REC->a[2]", "u32 a[4]", [5, 6, 7, 8], 7),
        ("REC->a[REC->a[0]]", "u8 a[4]", [3, 6, 7, 8], 8),
        ("REC->a[9]", "u8 a[4]", [3, 6, 7, 8], 0),
        ("REC->a[REC->a[3]]", "u8 a[4]", [3, 6, 7, 200], 0),
        ("((u16 *)REC->a)[1]", "u8 a[4]", [1, 2, 3, 4], 0x403),
        ("*(u16 *)__get_dynamic_array(a)", BYTES, b"\1\2\3", 0x201),
        ("((u64 *)__get_dynamic_array(a))[0]", BYTES, b"\1\2", 0x201),
        ("((s8 *)__get_dynamic_array(a))[1]", BYTES, b"\0\xff", -1),
        ("*(u8 *)(__get_dynamic_array(a) + 2)", BYTES, b"\1\2\3", 3),
        ("*(u8 *)&REC->a[1]", "u32 a[2]", [1, 0x203], 3),
        ("__get_dynamic_array_len(a)", BYTES, b"\1\2\3", 3),
        ("sizeof(REC->a)", "u32 a[4]", [1, 2, 3, 4], 16),
        ("__builtin_expect(REC->a[0], 1)", "u32 a[1]", [5], 5),
        ("__builtin_constant_p(REC->a[0]) ? 1 : 2", "u32 a[1]", [5], 2),
        ("__fswab16(REC->a[0])", "u16 a[1]", [0x102], 0x201),
        ("__builtin_bswap32(REC->a[0])", "u32 a[1]", [1], 1 << 24),
        ("__print_ns_to_secs(REC->a[0])", "u64 a[1]", [1_999_999_999], 1),
        ("__print_ns_without_secs(REC->a[0])", "u64 a[1]", [1_999_999_999], 999_999_999),
        ("(bool)REC->a[0]", "u32 a[1]", [256], 1),
    ],
)
def test_a_number_is_taken_out_of_what_the_record_has(
    text: str, declared: str, value: bytes | list[int], number: int
) -> None:
    is_bytes = isinstance(value, bytes)
    column = np.array([value], object) if is_bytes else np.array([value])
    if not is_bytes:
        column = column.astype(f"u{int(declared.partition(' ')[0][1:]) // 8}")

    assert of_values(f'"%lld", (long long){text}', declared, column) == [b"%d" % number]


@pytest.mark.parametrize(
    "text",
    [
        '"%s", __print_hex(REC->name, 8)',
        '"%d", REC->name[1]',
        '"%d", REC->a[0]',
        '"%d", __get_dynamic_array_len(name)',
        '"%d", __get_dynamic_array(raw)[0]',
        '"%lx", (unsigned long)REC->list',
        '"%lx", &REC->list',
        '"%p", ((u64 *)REC->a) + 1',
        '"%s", REC->a ? REC->name : REC->a',
        '"%s", __print_symbolic(REC->a, { REC->a, "x" })',
        '"%d", *(int *)REC->a',
        '"%d", (struct x)REC->a',
    ],
)
def test_what_the_record_does_not_have_is_not_guessed(text: str) -> None:
    assert unknown(text)


def test_more_numbers_are_named_than_are_remembered() -> None:
    # Twice: what was remembered is forgotten in between.
    numbers = np.arange(1 << 15, dtype=np.uint64)
    batch = batch_of(layout_of("u64 a", f'"%s", __print_flags(REC->a, "", {NAMES})'), (numbers,))
    event = PrintedEvent(batch.layout)

    for _ in range(2):
        shown = lines_of(event.shown(batch, NAMES_OF_KERNEL), len(batch))
        assert shown[:4] == [b"", b"A", b"0x2", b"A0x2"]
        assert shown[-1] == b"ABC0x7ff8"
