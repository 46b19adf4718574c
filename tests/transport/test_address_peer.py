import os
import socket
import sys
from pathlib import Path

import pytest

from kprobes.transport.address import End, find_end, listener_pid, peer_pid, table_address

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:04D2 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 11 1
   1: 0100007F:04D2 0100007F:C350 01 00000000:00000000 00:00000000 00000000     0        0 77 1
   2: 0100007F:C351 0100007F:04D2 01 00000000:00000000 00:00000000 00000000     0        0 78 1
   3: 0100007F:04D2 0100007F:C351 01 00000000:00000000 00:00000000 00000000     0        0 0 1
   4: cut
"""


@pytest.mark.skipif(sys.byteorder == "big", reason="the table is in this machine's byte order")
@pytest.mark.parametrize(
    ("host", "family", "words"),
    [
        ("127.0.0.1", socket.AF_INET, "0100007F:04D2"),
        ("127.0.0.1", socket.AF_INET6, "0000000000000000FFFF00000100007F:04D2"),
        ("::1", socket.AF_INET6, "00000000000000000000000001000000:04D2"),
    ],
)
def test_addresses_are_spelled_as_the_kernel_does(host: str, family: int, words: str) -> None:
    assert table_address(host, 1234, family) == words


def test_a_connection_is_found_by_both_ends() -> None:
    assert find_end(TABLE, "0100007F:04D2", "0100007F:C350") == End(uid=0, inode=77)


def test_a_connection_that_waits_to_be_accepted_has_no_inode() -> None:
    assert find_end(TABLE, "0100007F:04D2", "0100007F:C351") is None


def test_a_connection_elsewhere_is_not_in_the_table() -> None:
    assert find_end(TABLE, "0100007F:0001", "0100007F:C350") is None
    assert find_end("", "0100007F:04D2", "0100007F:C350") is None


def test_the_process_after_a_unix_socket_is_found() -> None:
    ours, theirs = socket.socketpair()

    with ours, theirs:
        assert peer_pid(ours) == os.getpid()


def test_the_process_after_a_port_is_found() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
    ):
        theirs, _ = server.accept()
        with theirs:
            assert peer_pid(ours) == os.getpid()


def test_who_listens_is_found_without_connecting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server, socket.create_server(("127.0.0.1", 0)) as port:
        server.bind("gdb.sock")
        server.listen()

        assert listener_pid(str(tmp_path / "gdb.sock")) == os.getpid()
        assert listener_pid(f"localhost:{port.getsockname()[1]}") == os.getpid()
        assert listener_pid(str(tmp_path / "other" / "gdb.sock")) is None
