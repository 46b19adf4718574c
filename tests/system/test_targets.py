"""``kprobe targets`` beside guests as users start them, and targets that name a process."""

import json
import socket
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.build.command import WAIT_S, Command, wait_for_words
from tests.build.json_lines import objects
from tests.build.plain_guest import PlainGuest, plain_guest
from tests.build.virsh import FakeVirsh
from tests.build.waiting import becomes_true

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64", matrix="arm64")]

STUB = ("-gdb", "unix:gdb.sock,server=on,wait=off")
QMP = ("-qmp", "unix:qmp.sock,server=on,wait=off")
LIBVIRT = (
    *("-name", "guest=dom,debug-threads=on"),
    *("-chardev", "socket,id=charmonitor,path=virt.sock,server=on,wait=off"),
    *("-mon", "chardev=charmonitor,id=monitor,mode=control"),
)
"""A domain as libvirt starts it, but for the monitor, which has a descriptor there."""
PROBE = "p:reads vfs_write"


@pytest.fixture
def kprobe(tmp_path: Path) -> Iterator[Command]:
    """The command, with journals of this test's own."""
    with Command(tmp_path / "state") as command:
        yield command


def targets(kprobe: Command) -> dict[int, dict[str, Any]]:
    """Return what is told of each guest, by its process."""
    done = kprobe("targets", "--format", "json")
    assert done.returncode == 0, done.stderr.decode()
    rows = objects("targets", done.stdout)
    assert rows[-1]["target"] == "host"
    return {row["pid"]: row for row in rows[:-1]}


@contextmanager
def events(guest: PlainGuest) -> Generator[list[str]]:
    """Collect what its QEMU tells of, such as STOP, while the body runs."""
    told: list[str] = []
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(guest.directory / "qmp.sock"))
        sock.settimeout(WAIT_S)
        sock.sendall(b'{"execute": "qmp_capabilities"}\n')
        yield told
        sock.sendall(b'{"execute": "query-status", "id": "last"}\n')
        said = b""
        while b'"last"' not in said:
            said += sock.recv(65536)
    told += [each["event"] for each in map(json.loads, said.splitlines()) if "event" in each]


def test_guests_are_listed_and_none_stands_still(
    kprobe: Command, tmp_path: Path, arch: str
) -> None:
    with plain_guest(tmp_path, "-name", "one", *STUB, *QMP, arch=arch) as guest:
        with events(guest) as told:
            row = targets(kprobe)[guest.pid]
            text = kprobe("targets").stdout.decode()
        assert not told
        assert guest.is_ticking()
    assert (row["target"], row["name"], row["arch"]) == ("name:one", "one", arch)
    assert (row["cpus"], row["memory"], row["accel"]) == (2, 256 << 20, "tcg")
    assert (row["stub"], row["is_stub_free"]) == (str(tmp_path / "gdb.sock"), True)
    assert row["monitor"] == str(tmp_path / "qmp.sock")
    assert (row["is_paused"], row["memory_by"], row["tracers"]) == (False, "process", [])
    assert row["release"] in Path(row["kernel"]).name
    assert len(bytes.fromhex(row["build_id"])) == 20
    (line,) = (each for each in text.splitlines() if each.startswith("name:one "))
    assert f" {row['release']} " in line


def test_a_guest_is_traced_by_its_name_and_its_tracer_is_told(
    kprobe: Command, tmp_path: Path, arch: str
) -> None:
    with plain_guest(tmp_path, "-name", "two", *STUB, arch=arch) as guest:
        tracer = kprobe.start("trace", "-t", "name:two", PROBE)
        wait_for_words(tracer, b"tracing 1 function")
        row = targets(kprobe)[guest.pid]
        assert row["tracers"] == [{"pid": tracer.pid, "is_at_work": True, "sites": 1}]
        assert not row["is_stub_free"]
        tracer.terminate()
        assert tracer.wait(WAIT_S) == 0
        assert targets(kprobe)[guest.pid]["tracers"] == []
        assert guest.is_ticking()


def test_a_monitor_is_the_way_where_there_is_no_stub(
    kprobe: Command, tmp_path: Path, arch: str
) -> None:
    with plain_guest(tmp_path, *QMP, arch=arch) as guest:
        done = kprobe("trace", "-t", f"pid:{guest.pid}", PROBE, "--max-events", "3")
        assert done.returncode == 0, done.stderr.decode()
        assert done.stdout.count(b"reads: (vfs_write") == 3
        assert guest.is_ticking()


@pytest.fixture
def virsh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeVirsh:
    """The first ``virsh`` that is found; ``kprobe`` must come after it."""
    made = FakeVirsh(tmp_path / "bin", "dom", tmp_path / "virt.sock")
    monkeypatch.setenv("PATH", str(made.directory), prepend=":")
    return made


def test_a_domain_of_libvirt_gets_a_stub_and_is_as_before(
    virsh: FakeVirsh, kprobe: Command, tmp_path: Path, arch: str
) -> None:
    with plain_guest(tmp_path, *LIBVIRT, arch=arch) as guest:
        assert targets(kprobe)[guest.pid]["monitor"] == "libvirt:dom"
        for name in ("libvirt:dom", "name:dom"):
            done = kprobe("trace", "-t", name, PROBE, "--max-events", "3")
            assert done.returncode == 0, done.stderr.decode()
            assert done.stdout.count(b"reads: (vfs_write") == 3
            assert virsh.commands[-1] == "gdbserver none"
        assert guest.is_ticking()
        done = kprobe("trace", "-t", "libvirt:other", PROBE)
    assert done.returncode == 3
    assert b"libvirt:other: virsh: error: failed to get domain" in done.stderr


def test_of_a_killed_tracer_not_even_the_stub_is_left_that_it_has_opened(
    virsh: FakeVirsh, kprobe: Command, tmp_path: Path, arch: str
) -> None:
    with plain_guest(tmp_path, *LIBVIRT, arch=arch) as guest:
        tracer = kprobe.start("trace", "-t", "libvirt:dom", PROBE)
        wait_for_words(tracer, b"tracing 1 function")
        (opened,) = (each for each in virsh.commands if each.startswith("gdbserver unix:"))
        socket_path = Path(opened.removeprefix("gdbserver unix:").partition(",")[0])
        assert socket_path.is_socket()
        tracer.kill()
        assert becomes_true(lambda: virsh.commands[-1] == "gdbserver none", WAIT_S)
        assert becomes_true(lambda: not socket_path.parent.exists(), WAIT_S)
        assert kprobe.is_idle("libvirt:dom")
        assert guest.is_ticking()


def test_a_guest_without_either_is_refused_with_what_to_do(
    kprobe: Command, tmp_path: Path, arch: str
) -> None:
    with plain_guest(tmp_path, arch=arch) as guest:
        row = targets(kprobe)[guest.pid]
        assert (row["stub"], row["monitor"]) == ("", "")
        done = kprobe("trace", "-t", f"pid:{guest.pid}", PROBE)
        assert done.returncode == 3
        assert f"pid:{guest.pid}: {row['advice']}" in done.stderr.decode()
        assert guest.is_ticking()
