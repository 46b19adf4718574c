import errno
import os
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kprobes.errors import TargetError, UnreachableError
from kprobes.transport.tracefs_rings import CpuRing, Rings, open_rings
from tests.build.ftrace_page import PAGE

SIZE = PAGE.size
STATS = "entries: 3\noverrun: 5\ncommit overrun: 1\nbytes: 9\ndropped events: 2\nread events: 0\n"


def make_instance(root: Path, *rings: bytes) -> Path:
    for cpu, pages in enumerate(rings):
        directory = root / "per_cpu" / f"cpu{cpu}"
        directory.mkdir(parents=True)
        (directory / "trace_pipe_raw").write_bytes(pages)
        (directory / "stats").write_text(STATS)
        (directory / "buffer_size_kb").write_text("8192\n")
    return root


def test_all_pages_come_with_their_cpus_in_order(tmp_path: Path) -> None:
    many = 1030
    ring = b"".join(bytes([n % 251]) * SIZE for n in range(many))
    rings = open_rings(make_instance(tmp_path, ring, b"\xff" * SIZE), PAGE, is_mapped=True)

    found = [(pages.data[:, 0].tolist(), pages.cpu.tolist()) for pages in rings.read()]
    rings.close()

    firsts = [first for pages, _ in found for first in pages]
    cpus = [cpu for _, own in found for cpu in own]
    assert firsts == [*(n % 251 for n in range(many)), 0xFF]
    assert cpus == [0] * many + [1]


class Growing:
    """A ring whose pages bring so many bytes that were taken before."""

    def __init__(self, *skips: int) -> None:
        self._skips = list(skips)
        self._taken = 0

    def take(self, pages: NDArray[np.uint8], skips: NDArray[np.int64]) -> int:
        count = min(len(pages), len(self._skips) - self._taken)
        for index in range(count):
            skips[index] = self._skips[self._taken + index]
        self._taken += count
        return count

    def close(self) -> None:
        pass


def test_what_pages_bring_again_is_told_of_each(tmp_path: Path) -> None:
    instance = make_instance(tmp_path, b"", b"")
    sources = (Growing(*range(1, 1022)), Growing(0, 7, 8, 9, 10))
    rings = [
        CpuRing(cpu=cpu, directory=instance / f"per_cpu/cpu{cpu}", page_size=SIZE, source=source)
        for cpu, source in enumerate(sources)
    ]
    found = list(Rings(rings, page_size=SIZE, closing=ExitStack()).read())

    skips = [skip for pages in found for skip in pages.skips.tolist()]
    cpus = [cpu for pages in found for cpu in pages.cpu.tolist()]
    assert [len(pages.data) for pages in found] == [1024, 2]
    assert skips == [*range(1, 1022), 0, 7, 8, 9, 10]
    assert cpus == [0] * 1021 + [1] * 5


def test_no_more_is_read_of_a_ring_than_it_held(tmp_path: Path) -> None:
    instance = make_instance(tmp_path, bytes(SIZE) * 100)
    (instance / "per_cpu/cpu0/buffer_size_kb").write_text("40 (expanded: 1408)\n")
    rings = open_rings(instance, PAGE, is_mapped=True)

    assert sum(len(pages.data) for pages in rings.read()) == 12
    rings.close()


def test_what_was_lost_is_summed_over_all_causes(tmp_path: Path) -> None:
    rings = open_rings(make_instance(tmp_path, b"", b""), PAGE, is_mapped=True)

    assert rings.lost == 16
    rings.close()


def test_no_instance_is_unreachable(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="per_cpu"):
        open_rings(tmp_path / "gone", PAGE, is_mapped=True)


def test_part_of_a_page_is_no_kernels(tmp_path: Path) -> None:
    rings = open_rings(make_instance(tmp_path, bytes(100)), PAGE, is_mapped=True)

    with pytest.raises(TargetError, match="100 bytes"):
        list(rings.read())
    rings.close()


def test_a_text_that_grows_while_it_is_read_is_read_once(tmp_path: Path) -> None:
    rings = open_rings(make_instance(tmp_path, b""), PAGE, is_mapped=True)
    stats, was_read = tmp_path / "per_cpu/cpu0/stats", threading.Event()
    stats.unlink()
    os.mkfifo(stats)

    def grow() -> None:
        with suppress(BrokenPipeError), stats.open("wb", buffering=0) as file:
            file.write(STATS.encode())
            was_read.wait(1)
            file.write(b"0\n")

    writer = threading.Thread(target=grow)
    writer.start()
    try:
        assert rings.lost == 5 + 1 + 2
    finally:
        was_read.set()
        writer.join()
        rings.close()


def test_a_count_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    rings = open_rings(make_instance(tmp_path, b""), PAGE, is_mapped=True)
    (tmp_path / "per_cpu/cpu0/stats").unlink()

    with pytest.raises(TargetError, match="stats"):
        _ = rings.lost
    rings.close()


def test_a_cpu_that_was_never_online_has_an_empty_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = make_instance(tmp_path, b"", bytes(SIZE))
    rings, read = open_rings(instance, PAGE, is_mapped=False), os.readv
    absent = (instance / "per_cpu/cpu0/trace_pipe_raw").stat().st_ino

    def readv(file: int, room: list[memoryview]) -> int:
        # ring_buffer_alloc_read_page() of a CPU that is possible and was never there.
        if os.fstat(file).st_ino == absent:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return read(file, room)

    monkeypatch.setattr(os, "readv", readv)
    found = [pages.cpu.tolist() for pages in rings.read()]
    rings.close()

    assert found == [[1]]
