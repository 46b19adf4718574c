"""A guest as a user starts it by hand, with a shell on its serial console and nothing of ours."""

import re
import select
import socket
import subprocess
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kprobes.transport import initramfs
from kprobes.transport.debian import busybox, kernel_image
from kprobes.transport.qemu_command import MACHINE_TYPES, Accel
from tests.build.waiting import becomes_true

_BOOT_S = 180.0
_PROMPT = b"guest# "


class ConsoleGuest:
    """A running guest and a shell in it.

    Attributes:
        target: the stub's address.
        pid: of QEMU.
    """

    def __init__(self, target: str, pid: int, console: socket.socket) -> None:
        self.target = target
        self.pid = pid
        self._console = console
        self._count = 0
        self._seen = b""

    def run(self, command: str, timeout_s: float = 60.0) -> str:
        """Run a command line in the shell and return what it printed; it must succeed."""
        self._count += 1
        mark = f"end{self._count}"
        # The shell echoes what is typed: the quotes keep that from looking like the mark.
        self._console.sendall(f'{command}\necho "{mark}:""$?:"\n'.encode())
        end = re.compile(rf"{mark}:(\d+):".encode())
        printed = self._until(end, timeout_s)
        found = end.search(printed)
        assert found is not None
        lines = printed[: found.start()].decode("utf-8", "replace").replace("\r", "").split("\n")
        shown = [line for line in lines if _PROMPT.decode() not in line]
        output = "\n".join(shown)
        assert found[1] == b"0", f"{command}: status {found[1].decode()}\n{output}"
        return output

    def send(self, command: str) -> None:
        """Have the shell begin a command line that may never end.

        QEMU stands still on arm64 as soon as nobody reads what the guest prints.
        """
        self._console.sendall(f"{command}\n".encode())

    def wait_ready(self) -> None:
        """Return when the shell answers, after a boot."""
        printed = self._until(re.compile(_PROMPT + rb"|---\[ end trace"), _BOOT_S)
        if not printed.endswith(_PROMPT):
            raise CrashedError
        self.run("stty -echo cols 4000")
        self.run("PS1=; dmesg -n 1")

    def _until(self, end: re.Pattern[bytes], timeout_s: float) -> bytes:
        deadline = time.monotonic() + timeout_s
        while not (found := end.search(self._seen)):
            left = max(deadline - time.monotonic(), 0)
            is_ready = select.select([self._console], [], [], left)[0]
            assert is_ready, f"the guest does not answer; it printed {self._seen[-2000:]!r}"
            data = self._console.recv(1 << 16)
            assert data, f"the guest is gone; it printed {self._seen[-2000:]!r}"
            self._seen += data
        printed, self._seen = self._seen[: found.end()], self._seen[found.end() :]
        return printed


@contextmanager
def console_guest(
    directory: Path, *options: str, suite: str, arch: str = "amd64"
) -> Generator[ConsoleGuest]:
    """Boot a Debian suite's kernel with a gdb stub on a port, as ``-s`` does, and a shell.

    It ends when it reboots; options of QEMU come after all others (``-action reboot=reset``).
    """
    with ExitStack() as undo:
        try:
            guest = undo.enter_context(_booted(directory, suite, arch, options))
        except CrashedError:
            # QEMU before 8.1: see kprobes.transport.qemu. A second time would be another fault.
            guest = undo.enter_context(_booted(directory, suite, arch, options))
        yield guest


class CrashedError(Exception):
    """The kernel crashed while it booted, with nothing of ours in it."""


@contextmanager
def _booted(
    directory: Path, suite: str, arch: str, options: Sequence[str]
) -> Generator[ConsoleGuest]:
    board, kernel, port = MACHINE_TYPES[arch], kernel_image(suite=suite, arch=arch), _free_port()
    # There is no port for the agent, and without it init starts a shell only.
    archive = initramfs.build(busybox(arch=arch), {}, agent=board.agent)
    (directory / "initramfs").write_bytes(archive)
    command = [
        *(board.program, "-machine", board.machine, "-kernel", str(kernel), "-m", "512M"),
        *("-initrd", "initramfs", "-append", f"console={board.console} quiet", "-no-reboot"),
        *("-cpu", board.cpu[Accel.TCG], "-smp", "2", "-display", "none", "-monitor", "none"),
        *("-serial", "unix:console,server=on,wait=off", "-gdb", f"tcp::{port}"),
        *options,
    ]
    with (directory / "qemu.log").open("wb") as log:
        qemu = subprocess.Popen(
            command, cwd=directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        with _connected(directory / "console") as console:
            guest = ConsoleGuest(f"localhost:{port}", qemu.pid, console)
            guest.wait_ready()
            yield guest
    finally:
        qemu.kill()
        qemu.wait()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _connected(path: Path) -> socket.socket:
    console = socket.socket(socket.AF_UNIX)
    assert becomes_true(lambda: console.connect_ex(str(path)) == 0)
    return console
