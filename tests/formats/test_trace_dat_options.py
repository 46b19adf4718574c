"""Options of trace-cmd's files: machine, clocks and rings, and refusals of odd ones."""

import io
import re
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from kprobes.errors import FormatError
from kprobes.formats.ring_page import PAGE
from kprobes.formats.trace_dat import PartId
from kprobes.formats.trace_dat_reader import TraceDat
from tests.build.trace_cmd_files import Option, Rings, Written, version_6, version_7


def opened(*options: Option) -> TraceDat:
    """Return a file with these options, which both versions have alike."""
    file = Written(options=options)
    six, seven = (TraceDat(io.BytesIO(write(file))) for write in (version_6, version_7))
    for name in ("offset_ns", "release", "machine", "tsc2nsec", "trace_id"):
        assert getattr(six, name) == getattr(seven, name)
    return seven


OFFSETS: list[tuple[list[Option], int]] = [
    ([(PartId.DATE, b"0x10\0")], 16_000),
    ([(PartId.DATE, b"0X3FFFFFFFFFFFF")], 0x3FFFFFFFFFFFF * 1000),
    ([(PartId.DATE, b"  -20\n\0")], -20_000),
    ([(PartId.OFFSET, b"1234567\0")], 1_234_567),
    ([(PartId.OFFSET, b"-5\0"), (PartId.DATE, b"0x1\0")], 995),
    ([], 0),
]


@pytest.mark.parametrize(("options", "wanted"), OFFSETS)
def test_offsets_are_added(options: Sequence[Option], wanted: int) -> None:
    assert opened(*options).offset_ns == wanted


@pytest.mark.skipif(shutil.which("trace-cmd") is None, reason="trace-cmd is not installed")
@pytest.mark.parametrize(("options", "wanted"), [each for each in OFFSETS if each[1] >= 0])
def test_offsets_are_those_of_trace_cmd(
    options: Sequence[Option], wanted: int, tmp_path: Path
) -> None:
    # One event at 1000 ns.
    page = struct.pack("<QQIHBBiQ", 1000, 20, 4, 70, 0, 0, 1, 7).ljust(PAGE.size, b"\0")
    data = version_7(Written(rings=[Rings(pages={0: page})], options=options))
    (tmp_path / "x.dat").write_bytes(data)

    words = ["trace-cmd", "report", "-t", "-i", str(tmp_path / "x.dat")]
    found = subprocess.run(words, capture_output=True, text=True, check=True)

    time = re.search(r" (\d+)\.(\d{9}): one:", found.stdout)
    assert time is not None, found.stdout
    assert int(time[1] + time[2]) == 1000 + wanted


@pytest.mark.parametrize("text", [b"", b"x", b"0x", b"0x" + b"f" * 17, b"9" * 20, b"1z"])
@pytest.mark.parametrize("part", [PartId.DATE, PartId.OFFSET])
def test_an_offset_that_is_no_number_is_refused(part: PartId, text: bytes) -> None:
    with pytest.raises(FormatError, match="no number"):
        opened((part, text + b"\0"))


@pytest.mark.parametrize(
    ("text", "release", "machine"),
    [
        (b"Linux host 6.1.0-9-amd64 x86_64\0junk", "6.1.0-9-amd64", "x86_64"),
        (b"Linux 6.12.3 aarch64\0", "6.12.3", "aarch64"),
        (b"Linux host 6.1\xff x86_64", "6.1\\xff", "x86_64"),
        (b"Linux", "", ""),
        (b"", "", ""),
    ],
)
def test_the_kernel_is_the_one_of_uname(text: bytes, release: str, machine: str) -> None:
    dat = opened((PartId.UNAME, text))

    assert (dat.release, dat.machine) == (release, machine)


def test_numbers_are_told() -> None:
    dat = opened(
        (PartId.CPU_COUNT, struct.pack("<I", 6)),
        (PartId.TRACE_ID, struct.pack("<Q", (1 << 64) - 1)),
        (PartId.TSC2NSEC, struct.pack("<IIQ", 3, 4, 5)),
    )

    assert (dat.cpu_count, dat.trace_id, dat.tsc2nsec) == (6, (1 << 64) - 1, (3, 4, 5))


def test_what_is_not_told_is_not_known() -> None:
    dat = opened((PartId.CPU_COUNT, struct.pack("<I", 4)))

    assert (dat.trace_id, dat.tsc2nsec, dat.time_shifts, dat.release) == (None, None, (), "")


@pytest.mark.parametrize("has_fractions", [False, True])
def test_a_relation_of_clocks_has_samples_by_cpu(has_fractions: bool) -> None:
    data = struct.pack("<QII", 77, 1, 3)
    data += struct.pack("<I2Q2q2Q", 2, 10, 20, -5, 6, 1 << 48, 3)
    data += struct.pack("<I", 0) + struct.pack("<IQqQ", 1, 30, -(1 << 63), (1 << 64) - 1)
    data += struct.pack("<3Q", 48, 47, 46) if has_fractions else b""

    (shift,) = opened((PartId.TIME_SHIFT, data)).time_shifts

    assert (shift.peer, shift.is_interpolated) == (77, True)
    found = [
        (cpu.times.tolist(), cpu.offsets.tolist(), cpu.scalings.tolist()) for cpu in shift.cpus
    ]
    assert found == [
        ([10, 20], [-5, 6], [1 << 48, 3]),
        ([], [], []),
        ([30], [-(1 << 63)], [(1 << 64) - 1]),
    ]
    fractions = [None if cpu.fractions is None else cpu.fractions.tolist() for cpu in shift.cpus]
    assert fractions == ([[48, 47], [], [46]] if has_fractions else [None] * 3)


def test_relations_are_in_the_order_of_time() -> None:
    data = struct.pack("<QIII", 77, 0, 1, 4) + struct.pack("<4Q", 30, 10, 1 << 63, 10)
    data += struct.pack("<4q", 3, 1, -6, 9) + struct.pack("<4Q", 33, 11, 66, 99)
    data += struct.pack("<4Q", 5, 6, 7, 8)

    ((samples,),) = [shift.cpus for shift in opened((PartId.TIME_SHIFT, data)).time_shifts]

    assert samples.times.tolist() == [10, 30, 1 << 63]
    assert (samples.offsets.tolist(), samples.scalings.tolist()) == ([1, 3, -6], [11, 33, 66])
    assert samples.fractions is not None
    assert samples.fractions.tolist() == [6, 5, 7]


@pytest.mark.parametrize(
    "option",
    [
        (PartId.TIME_SHIFT, struct.pack("<QII", 1, 0, 0xFFFFFFFF)),
        (PartId.TIME_SHIFT, struct.pack("<QIII", 1, 0, 1, 0xFFFFFFFF)),
        (PartId.TIME_SHIFT, struct.pack("<QIII", 1, 0, 1, 2) + bytes(47)),
        (PartId.TIME_SHIFT, struct.pack("<QIII", 1, 0, 1, 2) + bytes(49)),
        (PartId.TIME_SHIFT, bytes(11)),
        (PartId.TRACE_ID, bytes(7)),
        (PartId.TSC2NSEC, bytes(15)),
        (PartId.CPU_COUNT, struct.pack("<I", 1 << 14)),
        (PartId.CPU_COUNT, b"\1"),
    ],
)
def test_an_option_that_is_too_short_or_too_large_is_refused(option: Option) -> None:
    with pytest.raises(FormatError):
        opened(option)


def test_there_are_not_more_options_than_can_be() -> None:
    with pytest.raises(FormatError, match="too many options"):
        opened(*[(99, b"")] * (1 << 16))
    with pytest.raises(FormatError, match="too many options"):
        opened(*[(PartId.VERSION, bytes(9 << 20))] * 2)


def rings_of(*rows: tuple[int, int, int]) -> TraceDat:
    """Return a file whose BUFFER tells of these CPUs, offsets and sizes."""
    file = version_7(Written(rings=[Rings(pages=dict.fromkeys(range(len(rows)), b""))]))
    old = b"".join(struct.pack("<IQQ", cpu, 0, 0) for cpu in range(len(rows)))
    at = file.index(struct.pack("<I", len(rows)) + old[:4], file.index(b"\0local\0")) + 4
    new = b"".join(struct.pack("<IQQ", *row) for row in rows)
    return TraceDat(io.BytesIO(file[:at] + new + file[at + len(new) :]))


def test_cpus_are_in_the_order_of_their_numbers() -> None:
    dat = rings_of((5, 0, 4096), (1, 0, 4096), (3, 0, 0), (4095, 0, 4096))

    assert dat.buffers[0].cpus == (1, 5, 4095)
    assert dat.cpu_count == 4096


@pytest.mark.parametrize("rows", [[(1, 0, 1), (1, 9, 1)], [(1 << 13, 0, 1)], [(0xFFFFFFFF, 0, 1)]])
def test_a_cpu_is_there_once_and_can_be(rows: Sequence[tuple[int, int, int]]) -> None:
    with pytest.raises(FormatError, match="pages of"):
        rings_of(*rows)


@pytest.mark.parametrize("size", [(1 << 64) - 1, 1 << 62])
@pytest.mark.parametrize("at", [0, 4096, (1 << 64) - 1])
def test_pages_beyond_the_file_are_cut(at: int, size: int) -> None:
    dat = rings_of((0, at, size))

    found = sum(len(part) for part in dat.pages(0, 0, at_once=8))

    assert dat.is_cut
    assert found <= 1
