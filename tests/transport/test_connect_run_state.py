"""Run state of a QEMU's guest, by its process's memory; with QEMU itself in tests/system."""

import socket
from pathlib import Path

from kprobes.transport.connect import is_running


def test_nothing_tells_of_programs_that_are_not_qemu(tmp_path: Path) -> None:
    path = tmp_path / "gdb.sock"
    with socket.socket(socket.AF_UNIX) as server, socket.create_server(("127.0.0.1", 0)) as port:
        server.bind(str(path))
        server.listen()

        assert is_running(str(path)) is None
        assert is_running(f"localhost:{port.getsockname()[1]}") is None


def test_nothing_tells_of_other_machines_and_of_nobody(tmp_path: Path) -> None:
    assert is_running("192.0.2.1:1234") is None
    assert is_running(str(tmp_path / "none.sock")) is None
