"""Run state of a QEMU's guest, by its process's memory; with QEMU itself in tests/system."""

import mmap
import os
import socket
import sys
from pathlib import Path

import pytest

from kprobes.errors import FormatError
from kprobes.transport.connect import find_function, is_paused, runs


def test_nothing_tells_of_programs_that_are_not_qemu(tmp_path: Path) -> None:
    path = tmp_path / "gdb.sock"
    with socket.socket(socket.AF_UNIX) as server, socket.create_server(("127.0.0.1", 0)) as port:
        server.bind(str(path))
        server.listen()

        assert not is_paused(str(path))
        assert not is_paused(f"localhost:{port.getsockname()[1]}")
    assert runs(os.getpid()) is None


def test_a_program_that_exports_other_things_is_not_qemu() -> None:
    # What is at its base would be taken for code else, and what that names for the state.
    with (
        Path(sys.executable).resolve().open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as program,
        pytest.raises(FormatError),
    ):
        find_function(program)


def test_nothing_tells_of_other_machines_and_of_nobody(tmp_path: Path) -> None:
    assert not is_paused("192.0.2.1:1234")
    assert not is_paused(str(tmp_path / "none.sock"))
    assert runs(1 << 30) is None
