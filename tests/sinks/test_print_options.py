"""Trace options that print no names: lines of Linux 7.2 (Debian's 7.2.13+deb14-cloud-amd64)."""

import numpy as np
import pytest
from msgspec.structs import replace

from kprobes.model.text_options import TextOptions, text_options
from kprobes.native.lines import listed
from kprobes.sinks.names import Names, TraceSource
from kprobes.sinks.print_options import fields_text, is_raw, probe_text, raw_lines, zeroed
from tests.build.events import Row, make_batch
from tests.build.reference import packed
from tests.build.ring import Value, make_layout

PLACES = {
    0xFFFF_FFFF_A160_AC94: "vfs_read+0x4/0x490",
    0xFFFF_FFFF_A160_BD1F: "ksys_read+0xcf/0x110",
    0xFFFF_FFFF_A113_CD10: "arch_rethook_trampoline+0x0/0x60",
}
READ, CALLER, TRAMPOLINE = PLACES
NAMES = Names(
    TraceSource(version=(7, 2), cpus=2, symbol_at=lambda addr: PLACES.get(addr, f"{addr:#x}"))
)


def test_a_probes_event_is_as_the_kernel_has_it() -> None:
    types = ("u8", "u16", "u32", "u64", "s64", "s8", "x32", "char", "symbol", "string", "string")
    types += ("u8[4]", "u16[2]", "comm", "text=abc", "u32", "symstr")
    names = ("a", "b", "c", "d", "e", "f", "x", "ch", "sy", "s", "bad")
    names += ("arr", "arr3", "com", "im", "bf", "ss")
    layout = replace(make_layout(1, types, names=names, can_fault=True), ip=READ)
    texts = (TRAMPOLINE, b"\x0c\x8a\x03", None)
    others = ((0, 0, 0, 0), (0, 0), b"", b"", 0, TRAMPOLINE)
    row = Row(comm=b"kprobes-agent", values=(1, 1, 1, 1, 1, 1, 1, 1, *texts, *others))

    form, columns = probe_text(make_batch(layout, [row]), NAMES)

    (found,) = listed(form, columns, 1)
    assert found == (
        b" __probe_ip=vfs_read+0x4/0x490 (-1587499884) a=(1) b=0x1 (1) c=0x1 (1) d=0x1 (1)"
        b" e=0x1 (1) f=(1) x=0x1 (1) ch=(1) sy=arch_rethook_trampoline+0x0/0x60 (-1592537840)"
        b" s=.... (0c:8a:03:00) bad= arr=0x0 (0) arr3=0x0 (0) com=kprobes-agent im=abc bf=0x0 (0)"
        b" ss=arch_rethook_trampoline+0x0/0x60"
    )


def test_a_returns_event_is_as_the_kernel_has_it() -> None:
    layout = replace(make_layout(1, ("s64",), names=("got",), has_caller=True), ip=READ)
    batch = make_batch(layout, [Row(caller=CALLER, values=(1,))])

    form, columns = probe_text(batch, NAMES)

    (found,) = listed(form, columns, 1)
    assert found == (
        b" __probe_func=vfs_read+0x4/0x490 (-1587499884)"
        b" __probe_ret_ip=ksys_read+0xcf/0x110 (-1587495649) got=0x1 (1)"
    )


def test_an_event_without_fields_ends_with_its_place() -> None:
    layout = replace(make_layout(1), ip=READ)

    form, columns = probe_text(make_batch(layout, [Row()]), NAMES)

    assert (form, columns) == (b" __probe_ip=vfs_read+0x4/0x490 (-1587499884)", [])


@pytest.mark.parametrize(
    ("kind", "value", "text"),
    [
        ("s8", -128, b"(128)"),
        ("char", 99, b"'c'(99)"),
        ("s64", -14, b"0xfffffffffffffff2 (-14)"),
        ("u64", 5_000_000_000, b"0x12a05f200 (5000000000)"),
        ("s32", -2, b"0xfffffffe (-2)"),
        ("u16", 0xFFFF, b"0xffff (65535)"),
        ("u16[2]", (1, 2), b"0x20001 (131073)"),
        ("u32[3]", (1, 2, 3), b"01,00,00,00,02,00,00,00,03,00,00,00"),
        ("string", b"50% off", b"50% off"),
        ("text=50%", b"", b"50%"),
        ("u32", None, b"0x0 (0)"),
    ],
)
def test_a_field_is_printed_by_its_size(kind: str, value: Value, text: bytes) -> None:
    layout = make_layout(1, (kind,), names=("a",), can_fault=True)

    form, columns = fields_text(make_batch(layout, [Row(values=(value,))]), NAMES)

    assert listed(form, columns, 1) == [b"a=" + text]


def test_what_could_not_be_read_is_0() -> None:
    values, pairs = np.array([1, 2], np.uint8), np.array([[1, 2], [3, 4]], np.uint8)
    bad = np.array([True, False])

    assert zeroed(values, None) is values
    assert zeroed(values, ~bad & bad) is values
    assert zeroed(values, bad).tolist() == [0, 2]
    assert zeroed(pairs, bad).tolist() == [[0, 0], [3, 4]]


LAYOUT = make_layout(1651, ("stacktrace",), names=("common_stacktrace",))
ROWS = [
    Row(ts=6966751792, cpu=1, pid=137, values=(packed([1]),)),
    Row(ts=6966751793, cpu=0, pid=7, values=(b"",)),
]


def lines_of(*options: str, is_terminal: bool = False) -> list[bytes]:
    batch = make_batch(LAYOUT, ROWS)
    return raw_lines(batch, text_options(options), (6, 1), is_terminal=is_terminal)


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        (
            ["raw"],
            [
                b"137 1 6966751792 type: 1651\n137 1 6966751792 type: 4\n",
                b"7 0 6966751793 type: 1651\n",
            ],
        ),
        (
            ["hex", "raw"],
            [
                (
                    b"00000089 00000001 000000019f403230 type: 1651\n\n"
                    b"00000089 00000001 000000019f403230 type: 4\n\n"
                ),
                b"00000007 00000000 000000019f403231 type: 1651\n\n",
            ],
        ),
        (
            ["bin", "hex"],
            [
                (
                    b"\x89\0\0\0\1\0\0\0\x30\x32\x40\x9f\1\0\0\0type: 1651\n"
                    b"\x89\0\0\0\1\0\0\0\x30\x32\x40\x9f\1\0\0\0type: 4\n"
                ),
                b"\7\0\0\0\0\0\0\0\x31\x32\x40\x9f\1\0\0\0type: 1651\n",
            ],
        ),
        (["raw", "nocontext-info"], [b"type: 1651\ntype: 4\n", b"type: 1651\n"]),
        (["hex", "nocontext-info"], [b"type: 1651\n\ntype: 4\n\n", b"type: 1651\n\n"]),
    ],
)
def test_lines_are_the_kernels(options: list[str], lines: list[bytes]) -> None:
    assert lines_of(*options) == lines


@pytest.mark.parametrize(
    ("version", "number"), [((6, 1), 12), ((6, 12), 12), ((6, 13), 13), ((7, 2), 13)]
)
def test_a_programs_stack_has_the_number_that_the_release_has(
    version: tuple[int, int], number: int
) -> None:
    names = ("common_userstacktrace", "common_stacktrace")
    layout = make_layout(5, ("userstacktrace", "stacktrace"), names=names)
    batch = make_batch(layout, [Row(values=(packed([7]), packed([1])))])

    lines = raw_lines(batch, text_options(["raw", "nocontext-info"]), version, is_terminal=False)

    assert lines == [b"type: 5\ntype: %d\ntype: 4\n" % number]


def test_a_terminal_gets_escapes_of_bytes_and_other_lines_as_they_are() -> None:
    assert lines_of("bin", is_terminal=True)[1] == (
        rb"\x07\x00\x00\x00\x00\x00\x00\x0012@\x9f\x01\x00\x00\x00type: 1651" + b"\n"
    )
    assert lines_of("hex", is_terminal=True) == lines_of("hex")


@pytest.mark.parametrize("name", ["raw", "hex", "bin"])
def test_each_of_three_options_prints_numbers(name: str) -> None:
    assert is_raw(text_options([name]))
    assert not is_raw(replace(TextOptions(), fields=True, verbose=True))
