"""Records and formats as the kernel has them of its own probes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kprobes.errors import FormatError
from kprobes.export.kernel_records import KernelEvent, common_flags
from kprobes.formats.ring_page import LONGEST
from kprobes.model.resolved import RecordLayout
from kprobes.ring.ftrace import Contexts
from kprobes.sinks.names import Names, TraceSource, flags
from tests.build.events import Row, make_batch
from tests.build.ring import make_layout

VERSIONS = [(5, 10), (5, 15), (5, 18), (6, 12), (6, 13)]
SOURCE = TraceSource(version=(6, 1), cpus=1, symbol_at=lambda addr: f"f+{addr:#x}/0x99 [mod]")
PARTS = st.tuples(
    st.integers(0, 0xF),
    st.sampled_from([0, 1, 2, 3]),
    st.sampled_from([0, 1, 0x10, 0x11]),
    st.integers(0, 0xFF),
)
"""Of a context: depth, what of soft interrupts, what of others, and the bits of the top byte."""


def event_of(layout: RecordLayout) -> KernelEvent:
    return KernelEvent(layout, number=1234, names=Names(SOURCE), version=(6, 1))


@given(PARTS, st.sampled_from(VERSIONS))
def test_flags_are_those_that_a_trace_of_the_release_shows(
    parts: tuple[int, int, int, int], version: tuple[int, int]
) -> None:
    context = sum(part << shift for part, shift in zip(parts, (0, 8, 16, 24), strict=True))
    found = common_flags(np.array([context], np.uint32), version)

    word = int(Contexts(version).of(*found)[0])
    assert flags(word, version) == flags(context, version)


@pytest.mark.parametrize(
    ("version", "context", "expected"),
    [
        ((5, 10), 0x0500_0003, (0x20, 3)),
        ((5, 10), 0x8000_0212, (0x01, 0x12)),
        ((5, 15), 0x9800_0012, (0x01, 0x3F)),
        ((5, 18), 0x8000_0212, (0x81, 0x0F)),
        ((6, 12), 0x8711_0100, (0x5C, 0)),
        ((6, 13), 0x8711_0100, (0x5E, 0)),
    ],
)
def test_the_bits_of_each_release(
    version: tuple[int, int], context: int, expected: tuple[int, int]
) -> None:
    bits, counts = common_flags(np.array([context], np.uint32), version)

    assert (int(bits[0]), int(counts[0])) == expected


def test_the_format_is_the_kernels_but_for_arrays() -> None:
    layout = make_layout(
        7, ("s32", "string", "string[2]", "x64[2]", "duration"), event="open", has_caller=True
    )

    text = event_of(layout).text

    assert text == (
        "name: open\nID: 1234\nformat:\n"
        "\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n"
        "\tfield:unsigned char common_flags;\toffset:2;\tsize:1;\tsigned:0;\n"
        "\tfield:unsigned char common_preempt_count;\toffset:3;\tsize:1;\tsigned:0;\n"
        "\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n\n"
        "\tfield:unsigned long __probe_func;\toffset:8;\tsize:8;\tsigned:0;\n"
        "\tfield:unsigned long __probe_ret_ip;\toffset:16;\tsize:8;\tsigned:0;\n"
        "\tfield:s32 a0;\toffset:24;\tsize:4;\tsigned:1;\n"
        "\tfield:__data_loc char[] a1;\toffset:28;\tsize:4;\tsigned:1;\n"
        "\tfield:__data_loc char[] a2_0;\toffset:32;\tsize:4;\tsigned:1;\n"
        "\tfield:__data_loc char[] a2_1;\toffset:36;\tsize:4;\tsigned:1;\n"
        "\tfield:u64 a3[2];\toffset:40;\tsize:16;\tsigned:0;\n"
        "\tfield:u64 a4;\toffset:56;\tsize:8;\tsigned:0;\n\n"
        'print fmt: "(%lx <- %lx) a0=%d a1=\\"%s\\" a2={\\"%s\\",\\"%s\\"} a3={0x%Lx,0x%Lx} '
        'a4=%Lu", '
        "REC->__probe_func, REC->__probe_ret_ip, REC->a0, __get_str(a1), __get_str(a2_0), "
        "__get_str(a2_1), REC->a3[0], REC->a3[1], REC->a4\n"
    )


def test_a_record_lies_as_its_format_says() -> None:
    layout = make_layout(7, ("s16", "u8[3]", "string"), can_fault=True)
    rows = [Row(pid=5, values=(-2, (1, 2, 3), b"ab")), Row(pid=-1, values=(None, None, None))]

    records = event_of(layout).records(make_batch(layout, rows))

    ip = int(layout.ip).to_bytes(8, "little")
    # A string is length << 16 | offset, and stands after the fixed part, which is whole words.
    one = b"\xd2\x04\0\0\5\0\0\0" + ip + b"\xfe\xff\1\2\3" + b"\x1c\0\3\0" + b"\0\0\0" + b"ab\0\0"
    two = b"\xd2\x04\0\0" + b"\xff" * 4 + ip + bytes(5) + b"\x1c\0\x08\0" + bytes(3) + b"(fault)\0"
    assert records.sizes.tolist() == [8, 9]
    assert records.words.tobytes() == one + two


def test_addresses_that_are_strings_are_named() -> None:
    layout = make_layout(7, ("symstr", "symstr[2]", "comm", "text=hi"), can_fault=True)
    rows = [Row(comm=b"\xff", values=(1, (2, 3), None, None)), Row(values=(None, None, None, None))]

    found = event_of(layout).records(make_batch(layout, rows))

    data = found.words.tobytes()
    named = b"f+0x1/0x99 [mod]\0f+0x2/0x99 [mod]\0f+0x3/0x99 [mod]\0\xff\0hi\0"
    assert data[: 4 * int(found.sizes[0])].rstrip(b"\0").endswith(named.rstrip(b"\0"))
    assert data.rstrip(b"\0").endswith(b"(fault)\0" * 3 + b"sh\0hi")


def test_strings_that_no_page_has_room_for_are_cut() -> None:
    layout = make_layout(7, ("string[3]", "string"))
    rows = [
        Row(values=((b"a" * 100, b"b" * 4000, b"c"), b"d")),
        Row(values=((b"a", None, b"c"), b"d" * 9)),
    ]

    found = event_of(layout).records(make_batch(layout, rows))

    size = int(found.sizes[0])
    strings = found.words[:size].tobytes()[32:]
    assert size == LONGEST
    room = 4 * LONGEST - 32
    assert strings == b"a" * 100 + b"\0" + b"b" * (room - 101 - 3) + b"\0" * 3
    assert found.words[size:].tobytes()[32:] == b"a\0(fault)\0c\0ddddddddd\0".ljust(24, b"\0")


@pytest.mark.parametrize("name", ["", "a b", "a\nID: 9", "9", "a;", "é"])
def test_a_name_that_no_definition_gives_is_refused(name: str) -> None:
    layout = make_layout(7, ("u8",))
    fields = (replace(layout.fields[0], name=name),)

    for wrong in (
        replace(layout, event=name),
        replace(layout, group=name),
        replace(layout, fields=fields),
    ):
        with pytest.raises(FormatError, match="an event with the name"):
            event_of(wrong)


def test_an_event_that_no_page_has_room_for_is_refused() -> None:
    with pytest.raises(FormatError, match="in the kernel's ring"):
        event_of(make_layout(7, ("u64[255]",) * 2 + ("string",)))
