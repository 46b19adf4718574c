"""Tracepoints of real kernels beside what trace-cmd prints of them; the kernel's own ways.

libtraceevent is written apart from the kernel. Where the two differ, the kernel's source decides:
``_OTHERWISE`` has what is left out of the comparison, and the reason.
"""

import random
import re
import shutil
import struct
import subprocess

import numpy as np
import pytest
from msgspec.structs import replace

from kprobes.formats import trace_dat
from kprobes.formats.ring_page import HEADER_EVENT, PAGE, PageData, encode_pages, header_page
from kprobes.formats.trace_dat import CpuData, PartId
from kprobes.native.lines import listed
from kprobes.sinks.print_fmt import PrintedEvent
from kprobes.sinks.print_options import fields_text
from tests.build.printed import NAMES, lines_of, of_values, one, printed
from tests.build.tracepoints import (
    EVENTS,
    STRINGS,
    SYMBOLS,
    SYMBOLS_END,
    Tracepoint,
    batch_of,
    layout_of,
    tracepoint,
)

SEED, COUNT = 20261127, 60
_OTHERWISE = {
    # libtraceevent 1.7.1 reads a & (b | c) as (a & b) | c.
    "timer_start": r"flags=\S*",
    # It counts pages from 0, where the kernel has vmemmap_base, and prints a hash.
    "mm_page_alloc": r"page=\S+",
    # trace_print_symbols_seq() takes an unsigned long: an int that is negative grows by its sign.
    "tlb_flush": r"reason:0x\w+",
}
_ADDRESS = re.compile(r"(?:(?<=timer=)|(?<=ptr=)|(?<=addr=)|(?<=struct ))[0-9a-f]{16}")
"""The kernel's %p has all digits and no 0x."""


def dat_of(events: list[Tracepoint]) -> bytes:
    """Return a file of trace-cmd with all records on one CPU."""
    records = [record for event in events for record in event.records]
    data = PageData(
        words=np.frombuffer(b"".join(records), np.uint32),
        sizes=np.array([len(record) // 4 for record in records]),
        ts=np.arange(len(records), dtype=np.uint64) * np.uint64(1000),
    )
    chunk = struct.pack("<I", 1) + trace_dat.compressed(encode_pages(data).tobytes())
    known = SYMBOLS | {SYMBOLS_END: "_etext"}
    symbols = "".join(f"{addr:016x} T {name}\n" for addr, name in known.items())
    texts = "".join(f'{addr:#x} : "{text.decode()}"\n' for addr, text in STRINGS.items()).encode()
    parts = [
        (PartId.HEADER_INFO, trace_dat.header_info(header_page(is_char_signed=True), HEADER_EVENT)),
        (PartId.FTRACE_EVENTS, trace_dat.NOTHING),
        (PartId.EVENT_FORMATS, trace_dat.event_formats({"events": [e.text for e in events]})),
        (PartId.KALLSYMS, trace_dat.kallsyms(symbols.encode())),
        (PartId.PRINTK, struct.pack("<I", len(texts)) + texts),
        (PartId.CMDLINES, trace_dat.cmdlines(b"1 init\n")),
    ]
    whole = trace_dat.file_header(page_size=PAGE.size, options=0)
    options = [trace_dat.u32_option(PartId.CPU_COUNT, 1)]
    for part, found in parts:
        options.append(trace_dat.u64_option(part, len(whole)))
        whole += trace_dat.section(part, found)
    start = len(whole)
    at = -(-(start + len(trace_dat.buffer_header(0))) // PAGE.size) * PAGE.size
    place = CpuData(cpu=0, offset=at, size=len(chunk))
    options.append(trace_dat.buffer_option(start, clock="local", page_size=PAGE.size, cpus=[place]))
    head = trace_dat.buffer_header(at + len(chunk) - start - len(trace_dat.buffer_header(0)))
    whole += head.ljust(at - start, b"\0") + chunk
    begin = trace_dat.file_header(page_size=PAGE.size, options=len(whole))
    return begin + whole[len(begin) :] + trace_dat.options_section(options)


@pytest.fixture(scope="module")
def events() -> list[Tracepoint]:
    rng = np.random.default_rng(SEED)
    return [tracepoint(name, 100 + at, rng, count=COUNT) for at, name in enumerate(EVENTS)]


@pytest.fixture(scope="module")
def theirs(
    events: list[Tracepoint], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[str]]:
    """By event, what trace-cmd prints of its records."""
    if shutil.which("trace-cmd") is None:
        pytest.skip("trace-cmd is not installed: `make test` does that")
    path = tmp_path_factory.mktemp("print_fmt") / "x.dat"
    path.write_bytes(dat_of(events))
    done = subprocess.run(
        ["trace-cmd", "report", "-i", path], capture_output=True, check=True, text=True
    )
    found: dict[str, list[str]] = {name: [] for name in EVENTS}
    for line in done.stdout.splitlines():
        shown = re.fullmatch(r" *\S+-\d+ +\[000\] +\d+\.\d+: (\w+): +(.*?)", line)
        if shown is not None:
            found[shown[1]].append(shown[2])
    return found


def as_trace_cmd_has_it(line: str) -> str:
    def address(found: re.Match[str]) -> str:
        number = int(found[0], 16)
        return f"{number:#x}" if number else "(nil)"

    # It does not know how large a function is.
    return _ADDRESS.sub(address, line).replace("/0x100", "")


@pytest.mark.parametrize("name", EVENTS)
def test_a_tracepoint_is_printed_as_by_trace_cmd(
    name: str, events: list[Tracepoint], theirs: dict[str, list[str]]
) -> None:
    event = events[list(EVENTS).index(name)]
    left_out = re.compile(_OTHERWISE.get(name, "(?!)"))

    lines = [as_trace_cmd_has_it(line.decode()) for line in printed(event.batch)]

    assert len(lines) == len(theirs[name]) == COUNT
    for mine, its in zip(lines, theirs[name], strict=True):
        # It leaves blanks at the end of a line away.
        assert left_out.sub("", mine).rstrip() == left_out.sub("", its).rstrip()


def test_what_trace_cmd_has_otherwise_is_as_the_kernel_has_it() -> None:
    timers = '"%s", __print_flags(REC->a & (4 | 8), "|", { 4, "M" }, { 8, "D" })'
    pages = '"%p", REC->a != -1UL ? (((struct page *)vmemmap_base) + (REC->a)) : ((void *)0)'
    reasons = '"%s", __print_symbolic(REC->a, { 0, "switch" })'

    assert of_values(timers, "u32 a", np.array([0, 4, 12, 7])) == [b"", b"M", b"M|D", b"M"]
    assert of_values(pages, "u64 a", np.array([5, (1 << 64) - 1], np.uint64)) == [
        b"(____ptrval____)",
        b"0" * 16,
    ]
    assert of_values(reasons, "int a", np.array([0, -2])) == [b"switch", b"0xfffffffffffffffe"]


@pytest.mark.parametrize(
    ("conversion", "declared", "value", "text"),
    [
        # number() of lib/vsprintf.c, and what each length takes of a number.
        ("%d", "u64 a", 0xFFFFFFFF, "-1"),
        ("%lu", "s64 a", -1, "18446744073709551615"),
        ("%hhx", "u32 a", 0x1234, "34"),
        ("%hd", "u32 a", 0x18000, "-32768"),
        ("%#x", "u32 a", 0, "0x0"),
        ("%#08x", "u32 a", 0xAB, "0x0000ab"),
        ("%#.2x", "u32 a", 5, "0x05"),
        ("%#X", "u32 a", 0xAB, "0XAB"),
        ("%-6u|", "u32 a", 42, "42    |"),
        ("%+d % d", "int a", 7, "+7  7"),
        ("%+u", "u32 a", 7, "7"),
        ("%o", "u16 a", 0o1777, "1777"),
        ("%03i%%", "s8 a", -5, "-05%"),
        ("[%3c]", "u8 a", 65, "[  A]"),
        ("%Lx %qx %zx %tx %jx", "u64 a", 1 << 40, " ".join(["10000000000"] * 5)),
        ("%px %pK", "u64 a", 0x1F, " ".join(["000000000000001f"] * 2)),
        ("%#p", "u64 a", 0x1F, "0x000000000000001f"),
        ("%8p|", "u64 a", 0x1F, "      1f|"),
        ("%pS", "u64 a", min(SYMBOLS) + 5, "function_0+0x5/0x100"),
        ("%ps %pf", "u64 a", min(SYMBOLS) + 5, "function_0 function_0"),
        ("%pB", "u64 a", min(SYMBOLS) + 0x100, "function_0+0x100/0x100"),
        ("%pB", "u64 a", 0x1234, "0x1234"),
        ("[%5s]", "const char * a", min(STRINGS), "[string 0]"),
        ("%s", "const char * a", 0, "(null)"),
        ("%s", "const char * a", 0xFFFF0, "0xffff0"),
        ("[%10s] [%-8s] [%.2s]", "char a[16]", b"abcd", "[      abcd] [abcd    ] [ab]"),
        ("[%s]", "__data_loc u8[] a", b"ab\0cd", "[ab]"),
    ],
)
def test_a_conversion_prints_what_the_kernel_does(
    conversion: str, declared: str, value: int | bytes, text: str
) -> None:
    count = conversion.replace("%%", "").count("%")

    assert one(f'"{conversion}", {", ".join(["REC->a"] * count)}', declared, value) == text


def test_widths_and_precisions_may_be_values() -> None:
    numbers = '"[%*d] [%-*d]", REC->w, REC->a, REC->w, REC->a'
    strings = '"[%.*s] [%*.*s]", (int)REC->w, "abcdef", 4, REC->w, "abcdef"'
    columns = np.array([3, -3, 1 << 30]), np.array([7, 7, 7])

    shown = of_values(numbers, "int w; int a", *columns)

    assert shown[:2] == [b"[  7] [7  ]", b"[7  ] [7  ]"]
    assert len(shown[2]) == 2 * 256 + 5
    assert of_values(strings, "int w; int a", *columns)[0] == b"[abc] [ abc]"


def test_what_is_not_known_is_named_and_the_fields_are_shown() -> None:
    fields = (
        "u8 a; u8 letter; u16 b; int c; s64 d; char name[8]; __data_loc char[] path; "
        "__data_loc u8[] raw; u16 ids[3]; const char * why; const char * other"
    )
    layout = layout_of(fields, '"%s", blk_op_str(REC->a)')
    columns = (
        np.array([7], np.uint8),
        np.array([65], np.uint8),
        np.array([0xFFFE], np.uint16),
        np.array([-2], np.int32),
        np.array([-3], np.int64),
        np.array([b"sda"], object),
        np.array([b"/x y"], object),
        np.array([b"\x01\xff"], object),
        np.array([[1, 2, 258]], np.uint16),
        np.array([min(STRINGS)], np.uint64),
        np.array([0x10], np.uint64),
    )
    batch = batch_of(layout, columns)
    event = PrintedEvent(layout)

    assert event.unknown == "the function blk_op_str()"
    assert lines_of(event.shown(batch, NAMES), 1) == lines_of(fields_text(batch, NAMES), 1)
    assert lines_of(event.shown(batch, NAMES), 1)[0] == (
        b"a=(7) letter='A'(65) b=0xfffe (65534) c=0xfffffffe (-2) d=0xfffffffffffffffd (-3) "
        b"name=sda path=/x y raw=01,ff ids=01,00,02,00,02,01 "
        b"why=(0xffffffff82000000:string 0) other=(0x0000000000000010)"
    )


@pytest.mark.parametrize(
    ("print_fmt", "unknown"),
    [
        ('"%pd", REC->a', "the conversion %pd"),
        ('"%pI4", REC->a', "the conversion %pI4 of what is no array of bytes"),
        ('"%d", REC->name', "the conversion %d of what is no number"),
        ('"%#o", REC->a', "the conversion %#o"),
        ('"%s", (((struct page *)vmemmap_base) + (REC->a))', "a string of the kernel's memory"),
        ('"%lx", (unsigned long)(((struct page *)vmemmap_base) + (REC->a))',
         "the conversion %lx of what is no number"),
        ('"%pS", vmemmap_base', "an address that no record has"),
        ('"%d", REC->b', "the field b, which the event does not have"),
        ('"%*phN", REC->a, REC->name', "the conversion %*phN of what is no array of bytes"),
        ('"%d", jiffies - REC->a', "'jiffies' in a print fmt"),
    ],
)  # fmt: skip
def test_each_way_not_to_be_known_has_words(print_fmt: str, unknown: str) -> None:
    assert PrintedEvent(layout_of("u64 a; char name[8]", print_fmt)).unknown == unknown


def test_percent_signs_of_the_file_stay_as_they_are() -> None:
    layout = layout_of("u32 a", '"100%% of %d"')

    assert PrintedEvent(layout).unknown
    assert one('"100%% %d%%", REC->a', "u32 a", 3) == "100% 3%"
    assert of_values('"at 5%%"', "u32 a", np.array([1, 2], np.uint32)) == [b"at 5%"] * 2


def test_a_hostile_file_gives_words_and_takes_little_time() -> None:
    mutate = random.Random(SEED)
    rng = np.random.default_rng(SEED)
    batches = {name: tracepoint(name, 100, rng, count=3).batch for name in EVENTS}
    alphabet = [*"()[]{}\"',?:*&%-+|~!<>.", "REC->", "__print_flags(", "%s", "%*pbl", "9" * 12]
    for _ in range(2000):
        name = mutate.choice(list(EVENTS))
        text = EVENTS[name][1]
        for _ in range(mutate.randrange(1, 4)):
            place = mutate.randrange(len(text))
            text = text[:place] + mutate.choice(alphabet) + text[place + mutate.randrange(4) :]
        layout = replace(batches[name].layout, print_fmt=text)

        form, columns = PrintedEvent(layout).shown(replace(batches[name], layout=layout), NAMES)

        assert all(len(column) == 3 for column in columns)
        assert len(listed(form, columns, 3)) == 3


def test_a_line_longer_than_the_kernels_is_not_made() -> None:
    print_fmt = (
        '"%s%s", __print_hex(__get_dynamic_array(a), 60000), __print_array('
        "__get_dynamic_array(a), 60000, 1)"
    )
    values = np.array([bytes(4000)], object)

    assert of_values(print_fmt, "__data_loc u8[] a", values)[0].startswith(b"a=00,00")


def test_no_events_are_no_lines() -> None:
    for name, (fields, print_fmt) in EVENTS.items():
        batch = tracepoint(name, 100, np.random.default_rng(SEED), count=2).batch.take(slice(0, 0))

        _, columns = PrintedEvent(layout_of(fields, print_fmt)).shown(batch, NAMES)

        assert all(len(column) == 0 for column in columns)
