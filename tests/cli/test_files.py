"""Files that take every byte: slow readers, full disks, readers that leave, and little time."""

import fcntl
import os
import pty
import signal
import socket
import termios
import threading
import time
import tty
from collections.abc import Callable, Generator
from contextlib import contextmanager
from fcntl import F_GETPIPE_SZ
from pathlib import Path
from types import FrameType

import pytest

from kprobes.cli.files import UnwrittenError, WholeFile
from tests.build.waiting import becomes_true

LINES = [b"%06d\n" % number for number in range(100_000)]
DATA = b"".join(LINES)


def pipe() -> tuple[int, int]:
    return os.pipe()


def sockets() -> tuple[int, int]:
    reader, writer = socket.socketpair()
    return reader.detach(), writer.detach()


def terminal() -> tuple[int, int]:
    reader, writer = pty.openpty()
    tty.setraw(writer)
    return reader, writer


ENDS = [pipe, sockets, terminal]


def nothing(number: int, frame: FrameType | None) -> None:
    """Handle a signal by nothing."""


@contextmanager
def opened(make: Callable[[], tuple[int, int]]) -> Generator[tuple[int, WholeFile]]:
    reader, writer = make()
    try:
        with WholeFile(writer) as file:
            yield reader, file
    finally:
        os.close(reader)
        os.close(writer)


def read_slowly(reader: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += os.read(reader, 50_000)
    return data


@pytest.mark.parametrize("is_blocking", [True, False])
@pytest.mark.parametrize("make", ENDS)
def test_every_byte_reaches_a_slow_reader(
    make: Callable[[], tuple[int, int]], is_blocking: bool
) -> None:
    found: list[bytes] = []
    with opened(make) as (reader, file):
        os.set_blocking(file.fileno(), is_blocking)
        reading = threading.Thread(target=lambda: found.append(read_slowly(reader, len(DATA))))
        reading.start()

        file.writelines(LINES)
        reading.join()

        assert file.lines == len(LINES)
        assert os.get_blocking(file.fileno()) == is_blocking
    assert found == [DATA]


def test_signals_in_the_middle_of_a_write_lose_nothing() -> None:
    found: list[bytes] = []
    before = signal.signal(signal.SIGUSR1, nothing)
    main = threading.get_ident()

    def read() -> None:
        data = b""
        while len(data) < len(DATA):
            signal.pthread_kill(main, signal.SIGUSR1)
            data += os.read(reader, 5000)
        found.append(data)

    try:
        with opened(pipe) as (reader, file):
            reading = threading.Thread(target=read)
            reading.start()
            assert file.write(DATA) == len(DATA)
            reading.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert found == [DATA]


@pytest.mark.parametrize("make", ENDS)
def test_who_is_in_a_hurry_knows_what_was_taken(make: Callable[[], tuple[int, int]]) -> None:
    with opened(make) as (reader, file):
        file.hurry(time.monotonic() + 0.05)
        with pytest.raises(UnwrittenError, match="nobody reads it"):
            file.writelines(LINES)
        file.rest()

        os.set_blocking(reader, False)
        taken = b""
        while part := read_some(reader):
            taken += part
        assert 0 < file.lines == len(taken) // 7 < len(LINES)
        assert taken == DATA[: len(taken)]
        assert os.get_blocking(file.fileno())


def read_some(reader: int) -> bytes:
    try:
        return os.read(reader, 50_000)
    except BlockingIOError:
        return b""


@pytest.mark.parametrize("make", ENDS)
def test_a_hurry_ends_a_write_that_waits(make: Callable[[], tuple[int, int]]) -> None:
    with opened(make) as (_, file):

        def hurry(number: int, frame: FrameType | None) -> None:
            del number, frame
            file.hurry(time.monotonic() + 0.05)

        before = signal.signal(signal.SIGUSR1, hurry)
        main = threading.get_ident()
        asking = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGUSR1))
        asking.start()
        try:
            with pytest.raises(UnwrittenError):
                file.write(DATA)
        finally:
            signal.signal(signal.SIGUSR1, before)
            file.rest()
            asking.join()


def write_in_vain(file: WholeFile) -> None:
    with pytest.raises(UnwrittenError):
        file.write(DATA)


def test_who_waits_for_another_writer_is_in_a_hurry_too() -> None:
    with opened(pipe) as (reader, file):
        stuck = threading.Thread(target=write_in_vain, args=(file,))
        stuck.start()
        # Its first bytes are there: it has its turn; and it waits when no page is left.
        os.read(reader, 1)
        assert becomes_true(lambda: _queued(reader) > fcntl.fcntl(reader, F_GETPIPE_SZ) - 4096, 20)
        file.hurry(0)

        with pytest.raises(UnwrittenError):
            file.write(b"x")
        os.set_blocking(reader, False)
        while stuck.is_alive():
            read_some(reader)


def _queued(reader: int) -> int:
    return int.from_bytes(fcntl.ioctl(reader, termios.FIONREAD, bytes(4)), "little")


def test_a_full_disk_is_told_with_what_was_taken(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(_write_beyond_a_limit(tmp_path / "out"))

    assert os.waitpid(pid, 0)[1] == 0
    assert (tmp_path / "out").read_bytes() == DATA[:20_000]


def _write_beyond_a_limit(path: Path) -> int:
    # A limit of a process is as good as a full disk: part of a write is taken, then none.
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    file = WholeFile(path)
    try:
        file.writelines(LINES)
    except UnwrittenError:
        return 0 if file.lines == 20_000 // 7 else 2
    return 3


def test_nothing_is_taken_by_a_full_device() -> None:
    with WholeFile(Path("/dev/full")) as file:
        with pytest.raises(UnwrittenError, match="No space left on device"):
            file.writelines(LINES)
        assert file.lines == 0


@pytest.mark.parametrize("make", [pipe, sockets])
def test_a_reader_that_leaves_in_the_middle_is_told_as_such(
    make: Callable[[], tuple[int, int]],
) -> None:
    reader, writer = make()
    with WholeFile(writer) as file:
        leaving = threading.Thread(target=lambda: (os.read(reader, 100), os.close(reader)))
        leaving.start()

        with pytest.raises(BrokenPipeError):
            file.write(DATA * 10)
        leaving.join()
    os.close(writer)


def test_a_descriptor_stays_open_and_a_path_does_not() -> None:
    with opened(pipe) as (_, file):
        file.close()

        assert fcntl.fcntl(file_of(file), fcntl.F_GETFD) >= 0


def file_of(file: WholeFile) -> int:
    # A closed file tells its descriptor no more.
    return int(file.name)
