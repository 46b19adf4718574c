import os
import socket
import subprocess
from pathlib import Path

import pytest

from kprobes.errors import UsageError
from kprobes.transport.address import dial, is_path, open_files, parse_host_port


@pytest.mark.parametrize(
    ("address", "host_port"),
    [
        ("localhost:1234", ("localhost", 1234)),
        (":1234", ("localhost", 1234)),
        ("[::1]:1234", ("::1", 1234)),
        ("127.0.0.1:65535", ("127.0.0.1", 65535)),
        ("localhost", None),
        ("localhost:0", None),
        ("localhost:65536", None),
        ("::1:1234", None),
        ("a:b:1", None),
    ],
)
def test_hosts_and_ports_are_read(address: str, host_port: tuple[str, int] | None) -> None:
    assert parse_host_port(address) == host_port


def test_a_slash_makes_a_path() -> None:
    assert is_path("/run/gdb.sock")
    assert is_path("./gdb.sock")
    assert not is_path("localhost:1234")


def test_what_is_neither_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="neither HOST:PORT"):
        dial("localhost", timeout_s=1)


def test_a_path_may_be_longer_than_a_sockets_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.chdir(deep)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("gdb.sock")
        server.listen()

        dial(str(deep / "gdb.sock"), timeout_s=1).close()


def test_a_process_that_ends_while_it_is_looked_at_has_no_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scandir = os.scandir
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:

        def ended(place: int) -> object:
            other.kill()
            other.wait()
            return scandir(place)

        monkeypatch.setattr(os, "scandir", ended)

        assert list(open_files(Path(f"/proc/{other.pid}/fd"))) == []
