from pathlib import Path

import pytest

from kprobes.errors import TargetError, UnreachableError
from kprobes.transport.tracefs_pages import open_rings
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


def test_a_count_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    rings = open_rings(make_instance(tmp_path, b""), PAGE, is_mapped=True)
    (tmp_path / "per_cpu/cpu0/stats").unlink()

    with pytest.raises(TargetError, match="stats"):
        _ = rings.lost
    rings.close()
