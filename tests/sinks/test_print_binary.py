"""Texts of trace_printk(): values as the kernel packs them, printed as by trace-cmd."""

import io
import re
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kprobes.formats.trace_dat_reader import TraceDat
from kprobes.kernel_trace import KernelTrace
from kprobes.sinks.print_binary import binary_text
from kprobes.sinks.text import TextSink
from tests.build.printed import NAMES
from tests.build.trace_cmd_files import FORMAT, Rings, Written, version_7
from tests.build.tracepoints import SYMBOLS
from tests.test_kernel_trace import SYMBOLS as TEXT_SYMBOLS
from tests.test_kernel_trace import TEXT, pages_of

BPRINT = (
    FORMAT.partition("\tfield:u64 a")[0]
    + """\
\tfield:unsigned long ip;\toffset:8;\tsize:8;\tsigned:0;
\tfield:const char * fmt;\toffset:16;\tsize:8;\tsigned:0;
\tfield:u32 buf[];\toffset:24;\tsize:0;\tsigned:0;

print fmt: "%s: %s", (char *)REC->ip, REC->fmt
"""
).format("bprint", 6)
Value = tuple[int, int] | bytes
"""A number's size and the number; or a string."""
FUNCTION = next(iter(SYMBOLS))
CASES: list[tuple[bytes, list[Value], bytes]] = [
    (b"hello", [], b"hello"),
    (b"a=%d b=%u c=%x", [(4, -5), (4, 7), (4, 0xBEEF)], b"a=-5 b=7 c=beef"),
    (b"%d then %ld", [(4, 1), (8, -(1 << 40))], b"1 then -1099511627776"),
    (b"%lld %llu %zx", [(8, -1), (8, 1 << 63), (8, 255)], b"-1 9223372036854775808 ff"),
    (b"%s and %s.", [b"one", b""], b"one and ."),
    (b"%d%% of %s: %d", [(4, 50), b"abc", (4, 8)], b"50% of abc: 8"),
    (b"mac %pM at %d", [b"00:11:22:33:44:55", (4, 3)], b"mac 00:11:22:33:44:55 at 3"),
]  # fmt: skip
MORE: list[tuple[bytes, list[Value], bytes]] = [
    (b"%5d|%-5d|%05d|%+d|%#x", [(4, 42)] * 5, b"   42|42   |00042|+42|0x2a"),
    (b"%hd %hhd %c%c|", [(2, -2), (1, -1), (1, 65), (1, 66)], b"-2 -1 AB|"),
    (b"[%8s] [%-8s] [%.2s]", [b"right", b"left", b"cut"], b"[   right] [left    ] [cu]"),
    (b"%*d|%-*d|", [(4, 6), (4, 1), (4, 3), (4, 2)], b"     1|2  |"),
    (b"%*d|%.*s|%.*d", [(4, -3), (4, 1), (4, -1), b"abc", (4, -9), (4, 5)], b"1  |abc|5"),
]
"""What libtraceevent 1.7.1 does not know there, and only the kernel's source says."""


def packed(values: Sequence[Value]) -> bytes:
    """Return values as vbin_printf() packs them."""
    data = b""
    for value in values:
        if isinstance(value, bytes):
            data += value + b"\0"
            continue
        size, number = value
        data += bytes(-len(data) % min(size, 4)) + (number % (1 << 8 * size)).to_bytes(
            size, "little"
        )
    return data


def written(cases: Sequence[tuple[bytes, Sequence[Value], bytes]]) -> bytes:
    formats = {0xFFFFFFFF82000000 + 64 * at: form for at, (form, _, _) in enumerate(cases)}
    records = [
        (1000 * at, struct.pack("<HBBiQQ", 6, 0, 0, 7, TEXT, addr) + packed(values))
        for at, (addr, (_, values, _)) in enumerate(zip(formats, cases, strict=True), 1)
    ]
    lines = [b'%#x : "%b"\n' % (addr, form) for addr, form in formats.items()]
    return version_7(
        Written(
            cpus=1,
            ftrace=[BPRINT],
            events={},
            kallsyms=TEXT_SYMBOLS,
            printk=b"".join(lines),
            rings=[Rings(pages={0: pages_of(records)})],
        )
    )


def texts(lines: str) -> list[str]:
    """Return what stands behind the function's name."""
    return re.findall(r"_text: (.*)$", lines, re.MULTILINE)


def ours(data: bytes) -> list[str]:
    (boot,) = KernelTrace(TraceDat(io.BytesIO(data)), "x.dat").boots()
    out = io.BytesIO()
    sink = TextSink(out, boot.source)
    for events in boot.rounds:
        sink.write(events)
    sink.close()
    return texts(out.getvalue().decode())


@pytest.mark.parametrize(("form", "values", "text"), [*CASES, *MORE])
def test_values_are_where_the_kernel_has_put_them(
    form: bytes, values: Sequence[Value], text: bytes
) -> None:
    assert binary_text(form, packed(values), NAMES) == text


def test_they_are_printed_as_by_trace_cmd(tmp_path: Path) -> None:
    if shutil.which("trace-cmd") is None:
        pytest.skip("trace-cmd is not installed: `make test` does that")
    path = tmp_path / "x.dat"
    path.write_bytes(written(CASES))

    done = subprocess.run(
        ["trace-cmd", "report", "-i", path], capture_output=True, check=True, text=True
    )

    assert ours(path.read_bytes()) == [text.decode() for _, _, text in CASES]
    assert ours(path.read_bytes()) == texts(done.stdout)


def test_functions_are_named_and_other_addresses_are_numbers() -> None:
    values: list[Value] = [(8, FUNCTION + 5), (8, FUNCTION + 5), (8, 0xAB), (4, 1)]

    text = binary_text(b"%ps %pS %p %d", packed(values), NAMES)

    name = SYMBOLS[FUNCTION].encode()
    assert text == name + b" " + name + b"+0x5/0x100 00000000000000ab 1"


def test_a_format_that_the_file_does_not_have_is_an_address_and_bytes() -> None:
    data = written([(b"x", [(4, 0x11223344)], b"")]).replace(b'82000000 : "x"', b'82000001 : "x"')

    assert ours(data) == ["0xffffffff82000000 44332211"]


@given(st.binary(max_size=40), st.binary(max_size=30))
def test_any_values_of_any_format_are_printed(form: bytes, data: bytes) -> None:
    binary_text(form, data, NAMES)
    binary_text(b"%s %*d %c %p %pS %-*s %.*s " + form, data, NAMES)
    binary_text(b"%.*d %*.*s %-*.*x " + form, data, NAMES)
