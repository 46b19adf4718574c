import os
import pty
import select
import socket
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kprobes.errors import GuestGoneError, UsageError
from kprobes.transport import console


class Shell:
    """A user's terminal attached to a console socket, with us on the guest's side of it."""

    def __init__(self, path: Path) -> None:
        self.user, self.terminal = pty.openpty()
        self.before = termios.tcgetattr(self.terminal)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            server.listen()
            server.settimeout(10)
            self._thread = threading.Thread(target=self._attach, args=(path,))
            self._thread.start()
            self.guest, _ = server.accept()
        self.guest.settimeout(10)
        assert self.guest.recv(10) == b"\n"

    def _attach(self, path: Path) -> None:
        console.attach(path, source=self.terminal, sink=self.terminal)

    def type(self, data: bytes) -> None:
        os.write(self.user, data)

    def screen(self) -> bytes:
        ready, _, _ = select.select([self.user], [], [], 10)
        assert ready
        return os.read(self.user, 1000)

    def is_over(self) -> bool:
        self._thread.join(10)
        return not self._thread.is_alive()

    def close(self) -> None:
        self.guest.close()
        assert self.is_over()
        os.close(self.user)
        os.close(self.terminal)


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path / "console.sock")
    yield made
    made.close()


def test_keys_reach_the_guest_raw_and_its_output_the_screen(shell: Shell) -> None:
    shell.type(b"ls\r\x03\x1a")
    shell.guest.sendall(b"a\r\nb\xff")

    assert shell.guest.recv(100) == b"ls\r\x03\x1a"
    assert shell.screen() == b"a\r\nb\xff"


def test_ctrl_bracket_leaves_and_the_terminal_is_as_before(shell: Shell) -> None:
    assert termios.tcgetattr(shell.terminal) != shell.before

    shell.type(b"exit" + console.LEAVE + b"never sent")

    assert shell.is_over()
    assert shell.guest.recv(100) == b"exit"
    assert shell.guest.recv(100) == b""
    assert termios.tcgetattr(shell.terminal) == shell.before


def test_the_guests_end_leaves_too(shell: Shell) -> None:
    shell.guest.close()

    assert shell.is_over()


def test_something_that_is_no_terminal_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+") as file, pytest.raises(UsageError, match="terminal"):
        console.attach(tmp_path / "x", source=file.fileno(), sink=file.fileno())


def test_a_guest_that_has_gone_is_told(tmp_path: Path) -> None:
    user, terminal = pty.openpty()

    with pytest.raises(GuestGoneError, match=r"no console at .*/absent"):
        console.attach(tmp_path / "absent", source=terminal, sink=terminal)

    os.close(user)
    os.close(terminal)


def test_a_log_is_read_as_text(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"a\r\nb\xff\r\n")

    assert console.read_log(tmp_path / "log") == "a\nb\ufffd\n"
    assert console.read_log(tmp_path / "absent") == ""


def test_a_log_that_grew_too_long_is_emptied(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:
        file.truncate(console.LONGEST_LOG)
        console.trim_log(log)
        assert log.stat().st_size == console.LONGEST_LOG
        file.truncate(console.LONGEST_LOG + 1)

    console.trim_log(log)

    assert log.stat().st_size == 0
    console.trim_log(tmp_path / "absent")


def test_only_the_last_lines_of_a_log_are_shown() -> None:
    assert console.last_words("a\n\nb  \nc\n", 2) == "  b\n  c"


def test_a_panic_is_shown_from_its_first_line() -> None:
    text = "boot\nKernel panic - not syncing: x\n" + "Call Trace:\n" * 50

    assert console.last_words(text, 2) == "  Kernel panic - not syncing: x\n  Call Trace:"


def test_a_slow_screen_gets_everything(shell: Shell) -> None:
    data = b"0123456789" * 5000

    sender = threading.Thread(target=shell.guest.sendall, args=(data,))
    sender.start()
    time.sleep(0.05)
    seen = b""
    while len(seen) < len(data):
        seen += shell.screen()
    sender.join()

    assert seen == data
