"""``kprobe open``: what Perfetto's page, and nobody else, gets of a recording."""

import argparse
import io
import os
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from subprocess import run as run_process
from typing import TypeVar
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from msgspec.structs import replace
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace

from kprobes.cli import main, open
from kprobes.cli.open import FileServer
from tests.build.recorded import KERNEL, SYMBOLS, hits, record, recorded
from tests.build.waiting import PATIENCE_S, becomes_true

PAGE = "https://ui.perfetto.dev"
_T = TypeVar("_T")
_EXAMPLES = open.EPILOG.removeprefix("examples:\n").partition("\n\n")[0].splitlines()


@pytest.fixture(autouse=True)
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A port that is free, as 9001 may be another test's; and no display."""
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        found: int = probe.getsockname()[1]
    monkeypatch.setattr("kprobes.cli.open._PORT", found)
    return found


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "x.rec"
    found.write_bytes(recorded(200))
    monkeypatch.chdir(tmp_path)
    return found


def run(*words: str, out: io.BytesIO | None = None) -> int:
    """Return what the command ends with."""
    parser = argparse.ArgumentParser()
    open.add_arguments(parser)
    args = parser.parse_args(words)
    return main.guarded(lambda: open.run(args, out or io.BytesIO()))


def visited(visit: Callable[[str], _T], *words: str) -> tuple[int, _T]:
    """Return what it ends with, and what is got by who has the address that it prints."""
    out, got = io.BytesIO(), list[_T]()

    def act() -> None:
        assert becomes_true(lambda: out.getvalue().endswith(b"\n"))
        got.append(visit(out.getvalue().decode().strip()))

    visitor = threading.Thread(target=act, daemon=True)
    visitor.start()
    code = run(*words, out=out)
    visitor.join(PATIENCE_S)
    return code, got[0]


def url_of(address: str) -> str:
    begin, end = f"{PAGE}/#!/?url=", "&referrer=kprobe"
    assert address.startswith(begin)
    assert address.endswith(end)
    return address.removeprefix(begin).removesuffix(end)


def fetch(url: str, **headers: str) -> tuple[bytes, str | None]:
    """Return what there is, and which pages may read it."""
    with urlopen(Request(url, headers=headers), timeout=PATIENCE_S) as response:
        return response.read(), response.headers["Access-Control-Allow-Origin"]


def events_in(data: bytes) -> int:
    return sum(packet.HasField("track_event") for packet in Trace.FromString(data).packet)


@contextmanager
def serving(data: bytes, tmp_path: Path) -> Generator[tuple[FileServer, str]]:
    file = tmp_path / "a b.pftrace"
    file.write_bytes(data)
    with FileServer(0) as server, server.serving(file) as address:
        yield server, url_of(address)


def refused(url: str, **headers: str) -> int:
    with pytest.raises(HTTPError) as caught:
        fetch(url, **headers)
    caught.value.close()
    assert "Access-Control-Allow-Origin" not in caught.value.headers
    return caught.value.code


def test_the_page_gets_the_recordings_timeline(path: Path, port: int) -> None:
    code, (address, (data, allowed)) = visited(lambda a: (a, fetch(url_of(a))), str(path))

    url = url_of(address)
    assert code == 0
    assert url.startswith(f"http://127.0.0.1:{port}/")
    assert url.endswith("/x.pftrace")
    assert allowed == PAGE
    assert events_in(data) >= 200


@pytest.mark.parametrize("example", _EXAMPLES)
def test_the_examples_show_what_they_say(path: Path, example: str) -> None:
    for name in ("kprobe.rec", "reads.rec", "reads.pftrace"):
        path.with_name(name).write_bytes(path.read_bytes())

    code, (data, _) = visited(lambda a: fetch(url_of(a)), *shlex.split(example)[2:])

    assert code == 0
    if example.endswith(".pftrace"):
        assert data == path.read_bytes()
    else:
        assert 0 < events_in(data) < 400


def test_a_file_is_given_once_and_to_no_other_path_or_name(tmp_path: Path) -> None:
    data = bytes(range(256)) * 4096
    with serving(data, tmp_path) as (server, url):
        place, _, name = url.rpartition("/")
        host = place.split("/")[2]
        statuses = [
            refused(f"http://{host}/{name}"),
            refused(f"{place}/other"),
            refused(f"{url}?x"),
            refused(url, Host="evil.example:9001"),
            refused(url, Host=host.replace("127.0.0.1", "localhost")),
        ]
        assert not server.is_fetched(0)

        found = fetch(url)

        assert found == (data, PAGE)
        assert server.is_fetched(PATIENCE_S)
        assert refused(url) == 404
    assert name == "a_b.pftrace"
    assert statuses == [404, 404, 404, 403, 403]


def test_who_hangs_up_has_not_fetched_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = bytes(1 << 24)
    with serving(data, tmp_path) as (server, url):
        host, port = url.split("/")[2].split(":")
        with socket.create_connection((host, int(port))) as client:
            client.sendall(f"GET {url[url.index('/', 7) :]} HTTP/1.0\r\n".encode())
            client.sendall(f"Host: {host}:{port}\r\n\r\n".encode())
            assert client.recv(20).startswith(b"HTTP/1.0 200")
        assert not server.is_fetched(0)

        assert fetch(url) == (data, PAGE)

        assert server.is_fetched(PATIENCE_S)
    assert capsys.readouterr().err == ""


def test_one_that_says_nothing_keeps_no_other_from_it(tmp_path: Path) -> None:
    with serving(b"abc", tmp_path) as (server, url):
        host, port = url.split("/")[2].split(":")
        with socket.create_connection((host, int(port))):
            found = fetch(url)

        assert found == (b"abc", PAGE)
        assert server.is_fetched(PATIENCE_S)


def test_it_gives_up_after_the_time_limit(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run(str(path), "--timeout", "50ms")

    assert code == 1
    assert "kprobe: no page has fetched it within 0.05 s: https://ui" in capsys.readouterr().err


def test_a_port_in_use_is_said_in_a_line(
    path: Path, port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with FileServer(port):
        code = run(str(path))

    err = capsys.readouterr().err
    assert code == 1
    assert err.startswith(f"kprobe: port {port} is in use")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["none.rec"], 2, "cannot read none.rec"),
        (["none.pftrace"], 2, "cannot read none.pftrace"),
        (["x.pftrace", "--event", "read"], 2, "x.pftrace is shown as it is"),
        (["bad.rec"], 1, "bad.rec"),
        (["x.rec", "--filter", "1 +"], 4, ""),
    ],
)
def test_what_cannot_be_shown_is_refused(
    path: Path, capsys: pytest.CaptureFixture[str], words: list[str], status: int, message: str
) -> None:
    path.with_name("x.pftrace").touch()
    path.with_name("bad.rec").write_bytes(b"no recording at all")

    code = run(*words)

    assert code == status
    assert message in capsys.readouterr().err


def test_ctrl_c_ends_it_and_leaves_nothing(
    path: Path, port: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(path.parent))

    code, _ = visited(lambda _: os.kill(os.getpid(), signal.SIGINT), str(path))

    assert code == 130
    assert capsys.readouterr().err == "kprobe: interrupted\n"
    assert [each.name for each in path.parent.iterdir()] == ["x.rec"]
    FileServer(port).close()


def test_of_a_guest_that_was_rebooted_the_first_boot_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = record(30)
    found.writer.begin(replace(KERNEL, release="6.2"), SYMBOLS)
    found.begin_anew()
    for cpu, hit in hits(90):
        found.rings[cpu].write(hit)
    found.look()
    (tmp_path / "x.rec").write_bytes(found.end())

    code, (data, _) = visited(lambda a: fetch(url_of(a)), str(tmp_path / "x.rec"))

    assert code == 0
    assert 30 <= events_in(data) <= 60
    assert "the guest was rebooted, and its first boot is shown" in capsys.readouterr().err


def test_where_there_is_a_display_the_browser_is_opened(path: Path, port: int) -> None:
    browser, seen = path.with_name("browser"), path.with_name("seen")
    browser.write_text(
        f"#!{sys.executable}\n"
        "import pathlib, sys, urllib.request\n"
        "url = sys.argv[1].partition('url=')[2].partition('&')[0]\n"
        f"pathlib.Path({str(seen)!r}).write_bytes(urllib.request.urlopen(url).read())\n"
    )
    browser.chmod(0o755)
    code = (
        "import argparse, sys\n"
        "from kprobes.cli import open\n"
        f"open._PORT = {port}\n"
        "parser = argparse.ArgumentParser()\n"
        "open.add_arguments(parser)\n"
        "sys.exit(open.run(parser.parse_args(sys.argv[1:]), sys.stdout.buffer))"
    )

    done = run_process(
        [sys.executable, "-c", code, str(path)],
        env={**os.environ, "DISPLAY": ":0", "BROWSER": f"{browser} %s"},
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert events_in(seen.read_bytes()) >= 200
