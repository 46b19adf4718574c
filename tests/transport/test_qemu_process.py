"""The keeper with a harmless program in QEMU's place."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kprobes.errors import UnreachableError
from kprobes.transport.qemu_command import Places
from kprobes.transport.qemu_process import QemuSupervisor, make_places
from tests.build.waiting import becomes_true

SLEEP = ["sleep", "100"]
PARENT = """
import sys, time
from pathlib import Path
from kprobes.transport.qemu_process import QemuSupervisor
from kprobes.transport.qemu_command import Places
places = Places(directory=Path(sys.argv[1]), ram_directory=Path(sys.argv[2]))
keeper = QemuSupervisor(["sleep", "100"], places)
print(keeper.pid, flush=True)
time.sleep(100)
"""


@pytest.fixture
def places(tmp_path: Path) -> Places:
    made = Places(directory=tmp_path / "private", ram_directory=tmp_path / "ram")
    made.directory.mkdir()
    made.ram_directory.mkdir()
    made.ram.touch()
    return made


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def is_gone(places: Places) -> bool:
    return not places.directory.exists() and not places.ram_directory.exists()


def test_qemu_stands_where_nobody_can_leave_it_a_firmware(
    places: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with QemuSupervisor(SLEEP, places) as supervisor:
        assert Path(f"/proc/{supervisor.pid}/cwd").readlink() == Path("/")


def test_close_ends_the_process_and_its_directories(places: Places) -> None:
    supervisor = QemuSupervisor(SLEEP, places)
    assert supervisor.is_alive
    assert is_running(supervisor.pid)

    supervisor.close()

    assert not is_running(supervisor.pid)
    assert not supervisor.is_alive
    assert is_gone(places)
    supervisor.close()


def test_a_process_that_is_killed_is_seen_and_its_directories_stay_to_be_read(
    places: Places,
) -> None:
    with QemuSupervisor(SLEEP, places) as supervisor:
        os.kill(supervisor.pid, signal.SIGKILL)

        assert becomes_true(lambda: not supervisor.is_alive)
        assert places.ram.exists()

    assert is_gone(places)


def test_what_the_process_says_is_kept(places: Places) -> None:
    with QemuSupervisor(["sh", "-c", "echo out; echo error >&2"], places) as supervisor:
        assert becomes_true(lambda: not supervisor.is_alive)

        assert places.qemu_log.read_text() == "out\nerror\n"


def test_nothing_is_left_when_our_python_is_killed(places: Places) -> None:
    directories = [str(places.directory), str(places.ram_directory)]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, *directories], stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)

        parent.kill()

    assert becomes_true(lambda: not is_running(pid))
    assert becomes_true(lambda: is_gone(places))


def test_the_directories_go_also_when_the_keeper_itself_is_killed(places: Places) -> None:
    with QemuSupervisor(SLEEP, places) as supervisor:
        parent = Path(f"/proc/{supervisor.pid}/stat").read_text().rpartition(")")[2].split()[1]
        os.kill(int(parent), signal.SIGKILL)

        assert becomes_true(lambda: not supervisor.is_alive)

    assert becomes_true(lambda: not is_running(supervisor.pid))
    assert is_gone(places)


def test_the_end_of_the_thread_that_started_it_changes_nothing(places: Places) -> None:
    kept: list[QemuSupervisor] = []
    thread = threading.Thread(target=lambda: kept.append(QemuSupervisor(SLEEP, places)))
    thread.start()
    thread.join()
    time.sleep(0.1)

    with kept[0] as supervisor:
        assert supervisor.is_alive


def test_a_fork_that_ends_takes_nothing_along(places: Places) -> None:
    with QemuSupervisor(SLEEP, places) as supervisor:
        child = os.fork()
        if child == 0:
            supervisor.close()
            os._exit(0)
        os.waitpid(child, 0)

        assert supervisor.is_alive
        assert places.ram.exists()


def test_a_forgotten_guest_is_closed(places: Places) -> None:
    supervisor = QemuSupervisor(SLEEP, places)
    pid = supervisor.pid

    del supervisor

    assert not is_running(pid)
    assert is_gone(places)


def test_places_are_private_and_never_the_same() -> None:
    first, second = make_places(64), make_places(64)
    paths = [first.directory, first.ram_directory, second.directory, second.ram_directory]

    try:
        assert len({*paths}) >= 2
        assert first.directory != second.directory
        assert all(path.stat().st_mode & 0o777 == 0o700 for path in paths)
    finally:
        for path in {*paths}:
            path.rmdir()


def test_a_long_directory_name_does_not_break_the_sockets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))

    made = make_places(64)

    try:
        assert len(os.fsencode(made.console)) < 108
    finally:
        for path in {made.directory, made.ram_directory}:
            path.rmdir()


def test_a_guest_larger_than_this_machine_is_refused() -> None:
    with pytest.raises(UnreachableError, match="1048576 MiB does not fit"):
        make_places(1 << 20)


def test_a_runtime_directory_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    made = make_places(64)

    try:
        assert tmp_path not in made.directory.parents
    finally:
        for path in {made.directory, made.ram_directory}:
            path.rmdir()
