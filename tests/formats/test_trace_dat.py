"""Sections and options of trace-cmd's files, read by the letter of the specification."""

import struct

import numpy as np
import pytest

from kprobes.formats import trace_dat
from kprobes.formats.ring_page import HEADER_EVENT, PAGE, header_page
from kprobes.formats.trace_dat import CpuData, PartId
from tests.build.trace_dat import clock_of, read_dat

FORMAT = """name: {0}
ID: {1}
format:
\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;

\tfield:u64 a;\toffset:8;\tsize:8;\tsigned:0;

print fmt: "%Lu", REC->a
"""


def file_of(*, cpu: int = 3, pages: bytes = bytes(8192)) -> bytes:
    chunks = trace_dat.compressed(pages[:4096]) + trace_dat.compressed(pages[4096:])
    body = struct.pack("<I", 2) + chunks
    formats = {"kprobes": [FORMAT.format("one", 70)], "mine": [FORMAT.format("two", 71)]}
    parts = [
        (PartId.HEADER_INFO, trace_dat.header_info(header_page(is_char_signed=True), HEADER_EVENT)),
        (PartId.EVENT_FORMATS, trace_dat.event_formats(formats)),
        (PartId.KALLSYMS, trace_dat.kallsyms(b"ffff t x\n")),
        (PartId.CMDLINES, trace_dat.cmdlines(b"1 \xff\n")),
        (PartId.PRINTK, trace_dat.NOTHING),
    ]
    data = trace_dat.file_header(page_size=PAGE.size, options=0)
    options = [
        trace_dat.text_option(PartId.UNAME, "Linux\udcff"),
        trace_dat.u32_option(PartId.CPU_COUNT, 4),
    ]
    for part, found in parts:
        options.append(trace_dat.u64_option(part, len(data)))
        data += trace_dat.section(part, found)
    at = len(data) + 16
    place = CpuData(cpu=cpu, offset=at, size=len(body))
    options.append(
        trace_dat.buffer_option(len(data), clock="local", page_size=PAGE.size, cpus=[place])
    )
    data += trace_dat.buffer_header(len(body)) + body
    begin = trace_dat.file_header(page_size=PAGE.size, options=len(data))
    return begin + data[len(begin) :] + trace_dat.options_section(options)


def test_each_section_and_option_is_found() -> None:
    dat = read_dat(file_of())

    assert (dat.page_size, dat.compressor) == (4096, b"zstd")
    assert dat.options[PartId.UNAME] == [b"Linux\xff\0"]
    assert dat.options[PartId.CPU_COUNT] == [b"\4\0\0\0"]
    assert dat.kallsyms == ["ffff t x"]
    assert dat.cmdlines == b"1 \xff\n"
    assert dat.sections[PartId.PRINTK] == bytes(4)
    assert dat.texts == [("kprobes", FORMAT.format("one", 70)), ("mine", FORMAT.format("two", 71))]


def test_a_cpus_pages_are_found_by_its_number() -> None:
    pages = bytes(range(256)) * 32

    dat = read_dat(file_of(cpu=3, pages=pages))

    assert list(dat.pages) == [3]
    assert np.array_equal(dat.pages[3].reshape(-1), np.frombuffer(pages, np.uint8))
    assert clock_of(dat.options[PartId.BUFFER][0]) == (b"", b"local")


@pytest.mark.parametrize("options", [0, 1, (1 << 64) - 1])
def test_the_header_is_as_long_wherever_the_options_are(options: int) -> None:
    found = trace_dat.file_header(page_size=4096, options=options)

    assert len(found) == len(trace_dat.file_header(page_size=4096, options=0))
    assert found[-8:] == options.to_bytes(8, "little")
