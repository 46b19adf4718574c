"""A guest that is put back to a snapshot, or rebooted, while it is traced or afterwards."""

import os
import random
import re
import subprocess
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

import kprobes
from kprobes.errors import KprobesError
from kprobes.transport.connection import Wire
from kprobes.transport.monitor import Monitor
from tests.build.command import WAIT_S, Command
from tests.build.json_lines import objects
from tests.build.plain_guest import PlainGuest, plain_guest
from tests.build.qcow2 import write_qcow2

pytestmark = [pytest.mark.guest, pytest.mark.arches("amd64", "arm64", matrix="arm64")]

_COMPLAINTS = re.compile(r"BUG|WARNING|Oops|cut here|Call Trace|vfree|bad page|panic")
_PROBES = ("p vfs_write", "r:done vfs_write n=$retval", "p:inside ksys_write+{offset}")
_OFFSETS = {"amd64": 5, "arm64": 16}
_WAITING = "waiting for a task of the guest"
_WORDS = "nosoftlockup rcupdate.rcu_cpu_stall_suppress=1"
"""QEMU's emulated TSC never goes back: what is restored has been off for as long as that."""
_ROUNDS = int(os.environ.get("KPROBES_ROUNDS", "4"))
"""Of what is tried at moments drawn by lot."""


@pytest.fixture(scope="module")
def victim(tmp_path_factory: pytest.TempPathFactory, arch: str) -> Generator[PlainGuest]:
    """A guest with a disk for snapshots, one of which was made before anything was probed."""
    directory = tmp_path_factory.mktemp("snapshots")
    write_qcow2(directory / "disk")
    options = (
        *("-gdb", "unix:gdb.sock,server=on,wait=off", "-qmp", "unix:qmp.sock,server=on,wait=off"),
        *("-drive", "file=disk,format=qcow2,if=none,id=disk", "-device", "virtio-blk,drive=disk"),
        *("-action", "reboot=reset"),
    )
    with plain_guest(directory, *options, arch=arch, words=_WORDS) as guest:
        _monitor(guest, "savevm before")
        yield guest


@pytest.fixture
def kprobe(tmp_path: Path) -> Iterator[Command]:
    with Command(tmp_path / "state") as command:
        yield command


@pytest.fixture
def target(victim: PlainGuest) -> str:
    return f"qemu:{victim.directory / 'gdb.sock'}"


def _monitor(victim: PlainGuest, command: str) -> None:
    with Monitor.open(str(victim.directory / "qmp.sock"), timeout_s=180) as monitor:
        assert "rror" not in monitor.command(command)


def _traced(kprobe: Command, target: str, arch: str) -> subprocess.Popen[bytes]:
    definitions = [each.format(offset=_OFFSETS[arch]) for each in _PROBES]
    process = kprobe.start("trace", "--target", target, *definitions)
    deadline = time.monotonic() + WAIT_S
    # The header comes before anything is armed.
    while b": (vfs_write" not in _line(process):
        assert time.monotonic() < deadline
    return process


def _line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def _trouble(victim: PlainGuest) -> str:
    # What is wrong with it: "" where it goes on and has not complained.
    if not victim.is_ticking(WAIT_S):
        return "it stands still"
    said = (victim.directory / "console").read_text(errors="replace")
    # An assertion shows the first lines of what differs.
    said = re.sub(r"(?m)^tick\s+", "", said)
    found = _COMPLAINTS.search(said)
    return "" if found is None else said[max(found.start() - 200, 0) : found.start() + 4000]


def test_what_was_restored_to_a_moment_before_it_was_traced_is_not_touched(
    victim: PlainGuest, kprobe: Command, target: str, arch: str
) -> None:
    process = _traced(kprobe, target, arch)

    _monitor(victim, "loadvm before")

    _, words = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert words.decode().splitlines()[-1] == ("kprobe: the guest was restored to an earlier state")
    assert kprobe("status").stdout.startswith(b"no journal")
    assert kprobe.is_idle(target)
    assert _trouble(victim) == ""


@pytest.mark.arches("amd64", matrix="amd64")
def test_whenever_it_is_restored_while_a_tracer_comes_and_goes_it_is_well(
    victim: PlainGuest, kprobe: Command, target: str
) -> None:
    words = ("trace", "--target", target, *(each.format(offset=5) for each in _PROBES[:2]))
    start = time.monotonic()
    assert kprobe(*words, "--duration", "1ms").returncode == 0
    longest = time.monotonic() - start
    chance = random.Random()
    for number in range(_ROUNDS):
        process = kprobe.start(*words, "--duration", "1ms")
        time.sleep(delay := chance.uniform(0, longest))

        _monitor(victim, "loadvm before")

        _, said = process.communicate(timeout=WAIT_S)
        told = f"round {number}, after {delay:.3f} s: {said.decode()}"
        assert process.returncode in (0, 1), told
        assert kprobe("status").stdout.startswith(b"no journal"), told
        assert kprobe.is_idle(target), told
        assert _trouble(victim) == "", told


@pytest.mark.arches("amd64", "arm64", matrix="arm64")
def test_restored_right_before_any_request_to_its_stub_it_is_well(
    victim: PlainGuest,
    target: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    requests: list[object] = []
    due: int | None = None
    for name in ("ask", "exchange", "send"):
        monkeypatch.setattr(
            Wire, name, _counted(getattr(Wire, name), requests, lambda: due, victim)
        )
    assert _probe_once(target) is None
    # The first task that is caught is let go of and made to call before memory has a mark.
    first = next(n for n, each in enumerate(requests) if "b'z0" in str(each))
    # And there the guest runs on in that call; and when its text is as it was.
    resumed = requests.index(b"vCont;c", first)
    patched = max(n for n, each in enumerate(requests) if "b'M" in str(each))
    restored = requests.index(b"vCont;c", patched)
    drawn = random.Random().sample(range(len(requests)), min(_ROUNDS, len(requests)))
    for due in (first, resumed, restored, *drawn):
        requests.clear()
        # Time that has gone back is seen only until it has come here again.
        assert victim.wait_for_ticks(victim.ticks() + 20, WAIT_S)

        error = _probe_once(target)

        told = f"before request {due}, {requests[-1]!r}: {error}"
        assert _trouble(victim) == "", told
        assert not [*tmp_path.rglob("*.jsonl")], told
        assert error is None or str(error) == "the guest was restored to an earlier state", told
    # A busy machine's guest may be waited for, which is told after a while.
    assert [text for text in caplog.messages if _WAITING not in text] == []


def _counted(
    method: Callable[..., object],
    requests: list[object],
    due: Callable[[], int | None],
    victim: PlainGuest,
) -> Callable[..., object]:
    me = threading.get_ident()

    def counted(wire: Wire, request: object, **more: object) -> object:
        # The session's other threads look at the guest whenever they like.
        if threading.get_ident() == me:
            requests.append(request)
            if len(requests) - 1 == due():
                _monitor(victim, "loadvm before")
        return method(wire, request, **more)

    return counted


def _probe_once(target: str) -> KprobesError | None:
    try:
        with kprobes.attach(target) as kernel:
            kernel.probe("p vfs_write")
            with kernel.record():
                pass
    except KprobesError as error:
        return error
    return None


def test_a_snapshot_with_probes_is_put_right_without_their_journal(
    victim: PlainGuest, kprobe: Command, target: str, arch: str
) -> None:
    process = _traced(kprobe, target, arch)
    _monitor(victim, "savevm armed")
    process.terminate()
    process.communicate(timeout=WAIT_S)
    assert kprobe.is_idle(target)
    _monitor(victim, "loadvm armed")

    shown = kprobe("status", "--target", target, "--format", "json").stdout
    restored = kprobe("restore", "--target", target)

    (status,) = objects("status", shown)
    armed = status["armed"]
    assert {site["owner"] for site in armed} == {"tracer"}
    places = {site["where"].split("+")[0] for site in armed}
    assert places == {"vfs_write", "ksys_write"}
    assert restored.returncode == 0, restored.stderr.decode()
    assert re.search(rb"\d+ places put back as before, [\d,]+ KiB given back", restored.stdout)
    assert kprobe.is_idle(target)
    assert b"nothing to restore" in kprobe("restore", "--target", target).stdout
    assert _trouble(victim) == ""


def test_a_reboot_ends_the_trace_and_nothing_is_written(
    victim: PlainGuest, kprobe: Command, target: str, arch: str
) -> None:
    process = _traced(kprobe, target, arch)

    _monitor(victim, "system_reset")

    _, words = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert words.decode().splitlines()[-1] == "kprobe: the guest was rebooted"
    assert kprobe("status").stdout.startswith(b"no journal")
    assert _trouble(victim) == ""
