import os
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from kprobes.formats.ftrace import read_pages
from kprobes.transport.tracefs_map import MappedRing, RingMap, map_ring
from tests.build.ftrace_page import PAGE, Record, page

_ID, _READ = 6, 7
_DATA = b"\x01\x00\x00\x00"
_RECORD = len(Record(1, _DATA).packed())


def written(count: int) -> list[Record]:
    return [Record(1, _DATA)] * count


class Kernel:
    """A ring of four pages, and what each call for its reader does."""

    def __init__(self) -> None:
        self.meta = memoryview(bytearray(80)).cast("I")
        self.subbufs = memoryview(bytearray(4 * PAGE.size))
        self.next: list[tuple[int, int, int]] = []
        self.is_unmapped = False

    def show(self, number: int, stamp: int, count: int, more: int = 0) -> None:
        """Have the reader on a page, told of some records, after which ``more`` are written."""
        start = number * PAGE.size
        self.subbufs[start : start + PAGE.size] = page(stamp, written(count + more))
        self.meta[_ID], self.meta[_READ] = number, count * _RECORD

    def advance(self) -> None:
        if self.next:
            self.show(*self.next.pop(0))

    def ring(self) -> MappedRing:
        ring = RingMap(meta=self.meta, subbufs=self.subbufs, advance=self.advance)
        closing = ExitStack()
        closing.callback(setattr, self, "is_unmapped", True)
        return MappedRing(ring, PAGE, closing)


def taken(ring: MappedRing, room: int = 8) -> list[list[int]]:
    """Return the times of what each page brought that is new."""
    pages, skips = np.empty((room, PAGE.size), np.uint8), np.zeros(room, np.int64)
    count = ring.take(pages, skips)
    records = read_pages(pages[:count], PAGE, skips[:count])
    return [records.ts[records.page == n].tolist() for n in range(count)]


def test_a_page_that_grows_brings_what_is_new_with_its_times() -> None:
    kernel = Kernel()
    ring = kernel.ring()

    kernel.next = [(1, 100, 3)]
    first = taken(ring)
    kernel.next = [(1, 100, 5), (2, 200, 2)]
    second = taken(ring)

    assert first == [[101, 102, 103]]
    assert second == [[104, 105], [201, 202]]
    assert taken(ring) == []


def test_what_is_written_while_it_is_copied_comes_the_next_time() -> None:
    kernel = Kernel()
    ring = kernel.ring()

    kernel.next = [(1, 100, 3)]
    kernel.advance()
    kernel.show(1, 100, 3, 4)

    assert taken(ring) == [[101, 102, 103]]
    kernel.next = [(1, 100, 7)]
    assert taken(ring) == [[104, 105, 106, 107]]


def test_a_page_that_comes_again_is_another_one() -> None:
    kernel = Kernel()
    ring = kernel.ring()

    kernel.next = [(1, 100, 3), (1, 900, 2)]

    assert taken(ring) == [[101, 102, 103], [901, 902]]


def test_what_was_read_before_it_was_mapped_is_not_ours() -> None:
    kernel = Kernel()
    kernel.show(2, 100, 3)
    ring = kernel.ring()

    kernel.next = [(2, 100, 4)]

    assert taken(ring) == [[104]]


def test_what_there_is_no_room_for_remains() -> None:
    kernel = Kernel()
    ring = kernel.ring()
    kernel.next = [(n, 100 * n, 1) for n in range(1, 4)]

    assert taken(ring, room=2) == [[101], [201]]
    assert taken(ring, room=2) == [[301]]


def test_nobody_looks_at_memory_that_is_unmapped() -> None:
    kernel = Kernel()
    ring = kernel.ring()

    ring.close()

    assert kernel.is_unmapped
    with pytest.raises(ValueError, match="released"):
        taken(ring)


def test_what_is_no_ring_of_a_kernel_is_not_mapped(tmp_path: Path) -> None:
    path = tmp_path / "trace_pipe_raw"
    path.write_bytes(bytes(PAGE.size))
    file = os.open(path, os.O_RDONLY)

    try:
        assert map_ring(file, PAGE) is None
    finally:
        os.close(file)
