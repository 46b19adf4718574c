"""Kernel memory out of a core file."""

import struct
from pathlib import Path

import pytest

from kprobes.errors import MemoryFault, UnreachableError
from kprobes.transport.kcore import Kcore

TEXT = 0xFFFF_FFFF_8100_0000


def core(tmp_path: Path) -> Path:
    programs = [(4, 0, 0x400, 5), (1, TEXT, 0x300, 16), (1, TEXT + 0x1000, 0x310, 8)]
    header = b"\x7fELF\x02\x01".ljust(32, b"\0") + struct.pack("<Q", 64)
    header = header.ljust(54, b"\0") + struct.pack("<HH", 56, len(programs))
    table = b"".join(
        struct.pack("<IIQQQQQQ", kind, 0, offset, addr, 0, size, size, 0)
        for kind, addr, offset, size in programs
    )
    data = (header.ljust(64, b"\0") + table).ljust(0x300, b"\0") + bytes(range(24))
    path = tmp_path / "kcore"
    path.write_bytes(data.ljust(0x400, b"\0") + b"notes")
    return path


def test_memory_is_read_by_its_address(tmp_path: Path) -> None:
    with Kcore(core(tmp_path)) as memory:
        assert memory.read(TEXT + 3, 4) == bytes([3, 4, 5, 6])
        assert memory.read(TEXT + 0x1000, 8) == bytes(range(16, 24))
        assert memory.notes == b"notes"


@pytest.mark.parametrize(("at", "size"), [(TEXT - 1, 2), (TEXT + 8, 9), (TEXT + 0x2000, 1), (0, 1)])
def test_what_is_not_there_is_a_fault(tmp_path: Path, at: int, size: int) -> None:
    with Kcore(core(tmp_path)) as memory, pytest.raises(MemoryFault):
        memory.read(at, size)


def test_a_machine_without_kcore_is_told_why(tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="CONFIG_PROC_KCORE"):
        Kcore(tmp_path / "absent")


def test_what_is_no_core_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no core")

    with pytest.raises(UnreachableError, match="no core file"):
        Kcore(tmp_path / "text")
