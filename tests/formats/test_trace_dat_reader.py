"""Files of trace-cmd, read: ours, those that trace-cmd makes of them, and damaged ones."""

import io
import re
import shutil
import struct
import subprocess
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

import numpy as np
import pytest
import zstandard

from kprobes.cli.main import main
from kprobes.errors import FormatError
from kprobes.formats.ftrace import read_pages
from kprobes.formats.ring_page import PAGE, PageData, encode_pages
from kprobes.formats.trace_dat import PartId
from kprobes.formats.trace_dat_reader import MAGIC, TraceDat, comms_of, printk_formats_of
from tests.build.recorded import recorded
from tests.build.trace_cmd_files import (
    COMPRESSORS,
    Rings,
    Written,
    beginning,
    options_of,
    version_6,
    version_7,
)
from tests.build.trace_dat import read_dat

needs_trace_cmd = pytest.mark.skipif(
    shutil.which("trace-cmd") is None, reason="trace-cmd is not installed"
)


def pages_of(count: int, *, seed: int = 1, lost: int = 0) -> bytes:
    """Return pages of so many records."""
    random = np.random.default_rng(seed)
    sizes = random.integers(4, 40, count)
    words = random.integers(0, 1 << 32, int(sizes.sum()), np.uint32)
    # An event that is described, of a task that has a name.
    words[np.cumsum(sizes) - sizes] = 70
    ts = np.cumsum(random.integers(0, 1 << 29, count)).astype(np.uint64)
    return encode_pages(PageData(words=words, sizes=sizes, ts=ts), lost=lost).tobytes()


PAGES = {0: pages_of(2000), 2: pages_of(300, seed=2, lost=5), 3: pages_of(1, seed=3)}
OTHERS = {1: pages_of(700, seed=4)}
FILE = Written(
    rings=[Rings(pages=PAGES), Rings(name="mine", pages=OTHERS)],
    options=[
        (PartId.UNAME, b"Linux host 6.1.0-9-amd64 x86_64\0"),
        (PartId.CPU_COUNT, struct.pack("<I", 4)),
        (PartId.TRACE_ID, struct.pack("<Q", 1 << 63)),
        (99, b"of a later version"),
    ],
)


def opened(data: bytes) -> TraceDat:
    return TraceDat(io.BytesIO(data))


def all_pages(dat: TraceDat, buffer: int, cpu: int, at_once: int = 1024) -> bytes:
    return b"".join(part.tobytes() for part in dat.pages(buffer, cpu, at_once=at_once))


def converted(path: Path, *words: str) -> bytes:
    """Return what trace-cmd makes of a file."""
    out = path.with_name("converted.dat")
    args = ["trace-cmd", "convert", "-i", str(path), "-o", str(out), *words]
    done = subprocess.run(args, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out.read_bytes()


CONVERSIONS = (
    ("--file-version", "6"),
    ("--file-version", "7", "--compression", "none"),
    ("--file-version", "7", "--compression", "zstd"),
    ("--file-version", "7", "--compression", "any"),
)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file that `kprobe convert` wrote."""
    path = tmp_path_factory.mktemp("dat") / "x.rec"
    path.write_bytes(recorded(4000))
    assert main(["convert", str(path), str(path.with_suffix(".dat"))]) == 0
    return path.with_suffix(".dat")


def check_exported(data: bytes, exported: Path) -> TraceDat:
    """Compare what is found with what a reader of our own files only finds."""
    dat, wanted = opened(data), read_dat(exported.read_bytes())
    assert list(dat.events) == wanted.texts
    assert dat.kallsyms.decode().splitlines() == wanted.kallsyms
    assert b"".join(b"%d %b\n" % item for item in dat.comms.items()) == wanted.cmdlines
    assert dat.buffers[0].cpus == tuple(wanted.pages)
    for cpu, pages in wanted.pages.items():
        assert all_pages(dat, 0, cpu) == pages.tobytes()
    assert (dat.release, dat.machine) == ("6.1.0", "x86_64")
    assert (dat.buffers[0].clock, dat.page, dat.cpu_count) == ("local", PAGE, 2)
    assert not dat.is_cut
    return dat


def test_our_own_file_is_read(exported: Path) -> None:
    dat = check_exported(exported.read_bytes(), exported)

    assert dat.version == 7


@needs_trace_cmd
@pytest.mark.parametrize("words", CONVERSIONS, ids=" ".join)
def test_what_trace_cmd_makes_of_it_is_the_same(words: Sequence[str], exported: Path) -> None:
    dat = check_exported(converted(exported, *words), exported)

    assert dat.version == int(words[1])


def versions() -> Iterator[tuple[str, bytes]]:
    yield "6", version_6(FILE)
    for compressor in COMPRESSORS:
        yield f"7, {compressor}", version_7(FILE, compressor)


VERSIONS = dict(versions())


def check_all(dat: TraceDat) -> None:
    """Compare what is found with ``FILE``."""
    assert [(each.name, each.clock, each.cpus) for each in dat.buffers] == [
        ("", "local", (0, 2, 3)),
        ("mine", "local", (1,)),
    ]
    assert {cpu: all_pages(dat, 0, cpu) for cpu in dat.buffers[0].cpus} == PAGES
    assert {cpu: all_pages(dat, 1, cpu) for cpu in dat.buffers[1].cpus} == OTHERS
    assert [(group, text.split()[1]) for group, text in dat.events] == [
        ("ftrace", "print"),
        ("sched", "one"),
        ("sched", "two"),
        ("mine", "three"),
    ]
    assert dat.kallsyms == FILE.kallsyms
    assert dat.comms == {7: b"a task", 8: b"other"}
    assert dat.printk_formats == {0xFFFFFFFF81000200: b"one\n"}
    assert (dat.release, dat.machine, dat.cpu_count) == ("6.1.0-9-amd64", "x86_64", 4)
    assert dat.trace_id == 1 << 63
    assert not dat.is_cut


@pytest.mark.parametrize("name", VERSIONS)
def test_all_that_a_file_has_is_found(name: str) -> None:
    check_all(opened(VERSIONS[name]))


@needs_trace_cmd
@pytest.mark.parametrize("words", CONVERSIONS, ids=" ".join)
def test_what_trace_cmd_makes_of_two_instances_is_the_same(
    words: Sequence[str], tmp_path: Path
) -> None:
    # Of files of version 7 it loses CPU 0 in what it writes, where there is no CPU 1.
    (tmp_path / "x.dat").write_bytes(VERSIONS["6"])

    check_all(opened(converted(tmp_path / "x.dat", *words)))


@needs_trace_cmd
@pytest.mark.parametrize("name", ["6", "7, none", "7, zstd"])
def test_trace_cmd_reads_the_same_files(name: str, tmp_path: Path) -> None:
    (tmp_path / "x.dat").write_bytes(VERSIONS[name])
    words = ["trace-cmd", "report", "-t", "-i", str(tmp_path / "x.dat")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)

    # A line begins with the instance, if it is not the main one.
    lines = re.findall(r"^(?:(\w+): )? *\S+ +\[(\d+)\] +(\d+)\.(\d+): ", done.stdout, re.MULTILINE)
    found = {("", cpu): pages for cpu, pages in PAGES.items()}
    found |= {("mine", cpu): pages for cpu, pages in OTHERS.items()}
    for (instance, cpu), pages in found.items():
        rows = np.frombuffer(pages, np.uint8).reshape(-1, 4096)
        times = [int(s + ns) for by, number, s, ns in lines if (by, int(number)) == (instance, cpu)]
        assert times == read_pages(rows, PAGE).ts.tolist()


@pytest.mark.parametrize("part", [PartId.OPTIONS, PartId.BUFFER, *FILE.parts()])
@pytest.mark.parametrize("compressor", ["zlib", "zstd"])
def test_each_section_says_whether_it_is_compressed(part: PartId, compressor: str) -> None:
    check_all(opened(version_7(FILE, compressor, plain=[part])))


@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize("at_once", [1, 2, 9, 10, 11, 1000])
def test_pages_come_as_many_at_once_as_wanted(name: str, at_once: int) -> None:
    dat = opened(VERSIONS[name])

    parts = list(dat.pages(0, 0, at_once=at_once))

    assert b"".join(part.tobytes() for part in parts) == PAGES[0]
    assert {part.shape for part in parts[:-1]} <= {(at_once, 4096)}
    assert 0 < len(parts[-1]) <= at_once
    # As their reader wants them, and as who cuts records away from them does.
    assert all(part.flags.c_contiguous and part.flags.writeable for part in parts)
    assert sum(len(read_pages(part, dat.page)) for part in parts) == 2000


@pytest.mark.parametrize("name", VERSIONS)
def test_cpus_are_read_by_turns(name: str) -> None:
    dat = opened(VERSIONS[name])
    readers = {cpu: dat.pages(0, cpu, at_once=3) for cpu in dat.buffers[0].cpus}
    found = dict.fromkeys(readers, b"")

    while readers:
        for cpu, pages in list(readers.items()):
            part = next(pages, None)
            if part is None:
                del readers[cpu]
            else:
                found[cpu] += part.tobytes()

    assert found == PAGES


@pytest.mark.parametrize("version", [6, 7])
def test_a_page_may_be_larger(version: int) -> None:
    pages = {0: bytes(range(256)) * 16 * 16}
    file = Written(cpus=1, rings=[Rings(pages=pages, page_size=1 << 14)])
    data = version_6(file) if version == 6 else version_7(file, "zstd")
    # Of version 6 all have the size that the file begins with.
    data = data.replace(beginning(version), beginning(version)[:-4] + struct.pack("<I", 1 << 14), 1)

    dat = opened(data)

    assert dat.page.size == dat.buffers[0].page_size == 1 << 14
    assert (dat.page.data, dat.page.commit) == (PAGE.data, PAGE.commit)
    assert [part.shape for part in dat.pages(0, 0, at_once=3)] == [(3, 1 << 14), (1, 1 << 14)]
    assert all_pages(dat, 0, 0) == pages[0]


def test_a_file_without_pages_has_an_empty_main_instance() -> None:
    for data in (version_6(Written()), version_7(Written(rings=[]), "zstd")):
        dat = opened(data)

        assert [(each.name, each.cpus, each.page_size) for each in dat.buffers] == [("", (), 4096)]
        assert (dat.comms, dat.lost) == ({7: b"a task", 8: b"other"}, {})


def test_where_only_an_instance_was_recorded_the_main_one_is_empty() -> None:
    dat = opened(version_7(Written(rings=[Rings(name="mine", pages=OTHERS)])))

    assert [(each.name, each.cpus) for each in dat.buffers] == [("", ()), ("mine", (1,))]
    assert dat.cpu_count == 2
    assert all_pages(dat, 1, 1) == OTHERS[1]


def test_statistics_are_of_the_instance_that_has_pages() -> None:
    options = [
        (PartId.CPU_STATISTICS, text.encode() + b"\0")
        for text in (
            "CPU: 0\nentries: 5\noverrun: 10\ncommit overrun: 2\ndropped events: 1\n",
            "CPU: 1\nentries: 5\noverrun: 0\nread events: 4\n",
            "\nBuffer: mine\n\n",
            "CPU: 0\noverrun: 77\n",
        )
    ]
    main, mine = Rings(pages={0: PAGES[3]}), Rings(name="mine", pages=OTHERS)

    both = opened(version_7(Written(options=options, rings=[main, mine])))
    only = opened(version_7(Written(options=options, rings=[mine])))

    assert both.lost == {0: 13, 1: 0}
    assert only.lost == {0: 77}


CLOCKS = [
    (b"local global [x86-tsc] mono\0", "[boot]", "boot"),
    (b"local [mono] global\0", "", "mono"),
    (b"", "", "local"),
    (b"", "[global]", "global"),
]


@pytest.mark.parametrize(("option", "after", "wanted"), CLOCKS)
def test_the_clock_of_version_6_may_stand_in_two_places(
    option: bytes, after: str, wanted: str
) -> None:
    data = version_6(Written(rings=[Rings(pages=PAGES, clock="12345")]))
    told = options_of([(PartId.TRACE_CLOCK, b"")]) + bytes(2) + b"flyrecord\0"
    data = data.replace(told, options_of([(PartId.TRACE_CLOCK, option)]) + told[6:], 1)
    text = after.encode()
    old = struct.pack("<Q", 7) + b"[12345]"
    data = data.replace(old, (struct.pack("<Q", len(text)) + text).ljust(len(old), b"\0"), 1)

    assert opened(data).buffers[0].clock == wanted


REFUSED = {
    "not a file of trace-cmd": b"\x17\x08\x44tracinG6\0" + bytes(100),
    "version '8': 6 and 7": beginning(8) + bytes(100),
    "big-endian": beginning(6, endian=1) + bytes(100),
    "kernel of 32 bits": version_6(
        Written(
            page="\tfield: u64 timestamp;\toffset:0;\tsize:8;\tsigned:0;\n"
            "\tfield: local_t commit;\toffset:8;\tsize:4;\tsigned:1;\n"
            "\tfield: char data;\toffset:12;\tsize:4084;\tsigned:1;\n"
        )
    ),
    "header_page has no timestamp": version_6(Written(page="")),
    "latency report of trace-cmd": VERSIONS["6"].replace(b"flyrecord\0", b"latency  \0", 1),
    "no rings": VERSIONS["6"].replace(b"flyrecord\0", b"flypecord\0", 1),
    "compressed by 'lzma'": VERSIONS["7, zlib"].replace(b"zlib", b"lzma", 1),
    "without its header_page": VERSIONS["7, none"].replace(
        options_of([(PartId.HEADER_INFO, b"")])[:2] + b"\x08\0\0\0",
        struct.pack("<H", 99) + b"\x08\0\0\0",
        1,
    ),
    "pages of 4097 bytes": version_7(Written(rings=[Rings(pages=PAGES, page_size=4097)])),
    "CPUs": version_7(Written(options=[(PartId.CPU_COUNT, b"\xff\xff\xff\x7f")])),
    "more than the kernel has numbers for": version_6(Written()).replace(
        b"mine\0\1\0", b"mine\0\xff\xff", 1
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_read_is_said_in_words(message: str) -> None:
    with pytest.raises(FormatError, match=message):
        opened(REFUSED[message])


def test_a_latency_report_of_version_7_is_refused() -> None:
    with pytest.raises(FormatError, match="latency report"):
        opened(version_7(Written(rings=[], options=[(PartId.BUFFER_TEXT, bytes(10))])))


def test_a_program_of_32_bits_may_have_recorded_a_kernel_of_64() -> None:
    data = VERSIONS["6"].replace(beginning(6), beginning(6, long_size=4), 1)

    check_all(opened(data))


@pytest.mark.parametrize("name", VERSIONS)
def test_of_a_file_that_is_cut_what_is_whole_is_read(name: str) -> None:
    data = VERSIONS[name]
    random = Random(name)
    read = 0

    for end in [*(random.randrange(len(data)) for _ in range(200)), len(data) - 1]:
        try:
            dat = opened(data[:end])
        except FormatError:
            continue
        for buffer, wanted in enumerate((PAGES, OTHERS)[: len(dat.buffers)]):
            for cpu in dat.buffers[buffer].cpus:
                found = all_pages(dat, buffer, cpu)
                read += 1
                assert wanted[cpu].startswith(found)
                assert dat.is_cut or found == wanted[cpu]
    assert name != "6" or read > 50


@pytest.mark.parametrize("compressor", COMPRESSORS)
def test_a_file_that_is_cut_within_its_rings_has_the_pages_in_front(compressor: str) -> None:
    data = version_7(Written(rings=[Rings(pages={0: PAGES[0]})]), compressor)
    lengths: set[int] = set()

    for end in range(len(data) - 150_000, len(data), 1500):
        dat = opened(data[:end])
        found = all_pages(dat, 0, 0)
        assert dat.is_cut
        assert PAGES[0].startswith(found)
        lengths.add(len(found))

    # One chunk after the other, or each page.
    assert len(lengths) >= 4


@pytest.mark.parametrize("write", [version_6, version_7])
def test_memory_is_not_taken_for_all_pages(
    write: Callable[[Written], bytes], tmp_path: Path
) -> None:
    pages = {0: bytes(1 << 24), 1: bytes(1 << 24)}
    (tmp_path / "x.dat").write_bytes(write(Written(rings=[Rings(pages=pages)])))

    with (tmp_path / "x.dat").open("rb") as file:
        tracemalloc.start()
        count = sum(len(part) for part in TraceDat(file).pages(0, 1, at_once=64))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()

    assert count == 1 << 12
    assert peak < 1 << 21


def error_of(data: bytes) -> str:
    """Read all that a file has; return the message of what is wrong with it, or ""."""
    try:
        dat = opened(data)
        for number, buffer in enumerate(dat.buffers):
            for cpu in buffer.cpus:
                for part in dat.pages(number, cpu, at_once=64):
                    assert part.shape[1] == buffer.page_size
    except FormatError as error:
        return str(error)
    return ""


# Without pages that are compressed, so that most changes are in what describes them.
SMALL = Written(
    rings=[Rings(pages={0: PAGES[3]}), Rings(name="mine", pages={1: PAGES[3]})],
    options=[
        *FILE.options,
        (PartId.DATE, b"0x5\0"),
        (PartId.TIME_SHIFT, struct.pack("<QII", 1, 1, 1) + struct.pack("<I", 1) + bytes(32)),
        (PartId.CPU_STATISTICS, b"CPU: 0\noverrun: 2\n\0"),
    ],
)


@pytest.mark.parametrize("name", ["6", *COMPRESSORS])
def test_damage_is_one_error_or_harmless(name: str) -> None:
    data = version_6(SMALL) if name == "6" else version_7(SMALL, name)
    random = Random(name)
    # Not the pages, which are most of it.
    places = [at for at in range(len(data)) if data[max(at - 32, 0) : at + 32].strip(b"\0")]
    outcomes: Counter[bool] = Counter()

    for _ in range(500):
        changed = bytearray(data)
        for _ in range(random.choice([1, 1, 2, 8])):
            at = random.choice(places)
            size = random.choice([1, 1, 2, 4, 8])
            value = random.choice([bytes(8), b"\xff" * 8, random.randbytes(8), b"\x7f" + bytes(7)])
            changed[at : at + size] = value[:size]
        error = error_of(bytes(changed))
        assert "\n" not in error
        outcomes[not error] += 1

    assert min(outcomes[True], outcomes[False]) > 20


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Fail where much memory was taken. What zstd and zlib take by themselves is not counted."""
    tracemalloc.start()
    yield
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 160 << 20


def bomb(*, is_told: bool) -> bytes:
    """Return zeros, 512 MB of them, in a frame that says so or not."""
    compressor = zstandard.ZstdCompressor(write_content_size=is_told)
    parts = compressor.compressobj(size=512 << 20) if is_told else compressor.compressobj()
    data = b"".join(parts.compress(bytes(1 << 20)) for _ in range(512))
    return data + parts.flush()


def block(stored: bytes, size: int) -> bytes:
    return struct.pack("<II", len(stored), size) + stored


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("size", [0, 100, 1 << 20, 64 << 20, 512 << 20, 0xFFFFFFFF])
def test_a_section_cannot_become_more_than_it_says_or_than_is_bearable(
    size: int, is_told: bool
) -> None:
    begin = beginning(7) + b"zstd\0\0"
    body = block(bomb(is_told=is_told), size)
    section = struct.pack("<HHIQ", PartId.OPTIONS, 1, 0, len(body)) + body

    with pytest.raises(FormatError, match=r"decompressed|that become|two sizes"):
        opened(begin + struct.pack("<Q", len(begin) + 8) + section)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("size", [0, 4096, 64 << 20, 512 << 20, 0xFFFFF000])
def test_a_chunk_cannot_either(size: int, is_told: bool) -> None:
    data = version_7(Written(rings=[Rings(pages={0: b"?" * 4096})]), "zstd")
    at = (len(data) - 1) // 4096 * 4096
    dat = opened(data[:at] + struct.pack("<I", 0xFFFFFFFF) + block(bomb(is_told=is_told), size))

    with pytest.raises(FormatError, match=r"decompressed|that becomes|two sizes"):
        all_pages(dat, 0, 0)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("name", ["6", "7, none"])
def test_memory_is_not_taken_for_what_a_size_says(name: str) -> None:
    data, begin = VERSIONS[name], len(beginning(6))

    for at in Random(name).sample(range(begin, begin + 3000), 300):
        with suppress(FormatError):
            opened(data[:at] + b"\xff" * 8 + data[at + 8 :])


def test_chunks_may_be_larger_where_few_cpus_have_them() -> None:
    pages = {0: bytes(4 << 20)} | {cpu: bytes(4096) for cpu in range(1, 300)}
    few, many = (
        opened(version_7(Written(cpus=300, rings=[Rings(pages=each, chunk_pages=1024)]), "zstd"))
        for each in ({0: pages[0]}, pages)
    )

    assert all_pages(few, 0, 0) == pages[0]
    assert all_pages(many, 0, 1) == pages[1]
    with pytest.raises(FormatError, match="becomes 4194304 bytes"):
        all_pages(many, 0, 0)


def test_descriptions_of_events_have_an_end() -> None:
    events = {"mine": ["x" * (40 << 20)] * 2}

    for write in (version_6, version_7):
        with pytest.raises(FormatError, match="descriptions of events"):
            opened(write(Written(events=events)))


def test_a_machine_without_cpus_has_no_pages() -> None:
    assert opened(version_6(Written(cpus=0))).buffers[0].cpus == ()


def test_options_that_lead_back_to_themselves_are_refused() -> None:
    data = VERSIONS["7, none"]
    begin = len(beginning(7)) + len("none") + 3
    first = struct.unpack_from("<Q", data, begin)[0]
    last = options_of([(PartId.OPTIONS, bytes(8))])
    at = data.rindex(last, 0, first)

    with pytest.raises(FormatError, match="without an end"):
        opened(data[:at] + options_of([(0, struct.pack("<Q", first))]) + data[at + len(last) :])


def test_names_of_tasks_are_bytes() -> None:
    text = b"1 init\n  22 a b \nno\n-5 x\n 333 \xff<...>\n99999999999 x\n4 last"

    assert comms_of(text) == {1: b"init", 22: b"a b ", 333: b"\xff<...>", 4: b"last"}


def test_strings_of_trace_printk_are_as_in_memory() -> None:
    text = (
        b'0xffffffff81000010 : "a\\tb\\n"\n0x20 : "say \\"hi\\""\n0x30 : "100%\\x"\n'
        b'junk\n0x40 : unquoted\n0x50 : ""\n'
    )

    assert printk_formats_of(text) == {
        0xFFFFFFFF81000010: b"a\tb\n",
        0x20: b'say "hi"',
        0x30: b"100%\\x",
        0x50: b"",
    }


@pytest.mark.parametrize("read", [comms_of, printk_formats_of])
def test_more_names_than_there_can_be_are_refused(read: Callable[[bytes], object]) -> None:
    with pytest.raises(FormatError, match="names of"):
        read(b"1 a\n" * (5 << 20))


def test_the_magic_is_what_files_begin_with(exported: Path) -> None:
    assert exported.read_bytes().startswith(MAGIC)


def test_no_pages_at_once_are_none() -> None:
    with pytest.raises(ValueError, match="0 pages"):
        list(opened(VERSIONS["6"]).pages(0, 0, at_once=0))
